"""A rule that was broken, and by what."""


class Violation(Exception):
    """A state that the rules forbid."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule
        self.text = text
