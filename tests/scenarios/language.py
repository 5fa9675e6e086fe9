"""The form of a scenario file: prose, then blocks of commands, four dashes, and what must come out.

    # Two or three lines of prose.

    world prefill=1 decode=1
    ----

    P offer
    deliver
    ----
    P0 transfer        NEW -> METADATA_QUERY         PB1 offer

A command is a line of words; words with an equals sign are options. What comes out ends at the next empty
line.
"""

from dataclasses import dataclass, field
from pathlib import Path

DASHES = "----"


@dataclass(frozen=True)
class Command:
    """One line: its words and its options."""

    text: str
    words: tuple[str, ...]
    options: dict[str, str]

    def number(self, name: str, default: float) -> float:
        """Return an option that is a number."""
        return float(self.options.get(name, default))


@dataclass
class Block:
    """Commands, and what must come out of them."""

    commands: list[Command] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


@dataclass
class Scenario:
    """A whole file."""

    prose: list[str]
    blocks: list[Block]

    def text(self) -> str:
        """Return the file's text."""
        parts = ["\n".join(self.prose)]
        for block in self.blocks:
            commands = [command.text for command in block.commands]
            parts.append("\n".join([*commands, DASHES, *block.output]))
        return "\n\n".join(parts) + "\n"


def read(path: Path) -> Scenario:
    """Read a scenario; raise ``ValueError`` with the line that is wrong."""
    prose: list[str] = []
    blocks: list[Block] = []
    block, answering = Block(), False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            if answering:
                blocks.append(block)
                block, answering = Block(), False
        elif answering:
            block.output.append(line)
        elif line.startswith("#"):
            if blocks or block.commands:
                raise ValueError(f"{path}:{number}: prose stands at the top")
            prose.append(line)
        elif line == DASHES:
            if not block.commands:
                raise ValueError(f"{path}:{number}: no command before the dashes")
            answering = True
        else:
            block.commands.append(parse(line))
    if answering:
        blocks.append(block)
    elif block.commands:
        raise ValueError(f"{path}: the last commands have no dashes")
    return Scenario(prose, blocks)


def parse(line: str) -> Command:
    """Read a command."""
    words = line.split()
    options = dict(word.split("=", 1) for word in words if "=" in word)
    return Command(line, tuple(word for word in words if "=" not in word), options)
