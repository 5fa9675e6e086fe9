"""Each of the rules R1 to R10 given up in turn, in each of the ways that its text excludes, and the mistakes
that were made in the field.
"""

from collections.abc import Iterator

from . import copy_mistakes, lease_mistakes, word_mistakes
from .alterations import Mutant


def mistakes() -> Iterator[Mutant]:
    """Yield them all."""
    yield from lease_mistakes.mistakes()
    yield from copy_mistakes.mistakes()
    yield from word_mistakes.mistakes()
