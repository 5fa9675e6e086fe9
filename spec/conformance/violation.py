"""A rule that a trace breaks, and where."""

import msgspec

from .table import table


class BrokenRule(Exception):
    """Raised where a line breaks a rule; ``line`` and ``time`` where it is another one than the present."""

    def __init__(self, rule: str, text: str, transfer: str = "", line: int = 0, time: float = 0.0) -> None:
        super().__init__(text)
        self.rule = rule
        self.text = text
        self.transfer = transfer
        self.line = line
        self.time = time


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """The line that broke a rule."""

    file: str
    line: int
    time: float
    rule: str
    transfer: str
    """Empty where it is about no transfer."""
    text: str

    @property
    def sentence(self) -> str:
        """Say it to people."""
        whose = f" (transfer {self.transfer})" if self.transfer else ""
        return (
            f"{self.file}, line {self.line}: {self.text}{whose}. Rule {self.rule}: {table().text(self.rule)}."
        )
