"""The switch by which a test lets a worker go wrong; off unless `DFIRST_FAULTS` is in the environment."""

import logging
import os
from pathlib import Path

from ..side_channel import SideChannel
from .channel import FaultyChannel
from .engine import CopyEngine, FaultyEngine
from .orders import OrderBook

logger = logging.getLogger(__name__)

VARIABLE = "DFIRST_FAULTS"


class Faults:
    """What a worker under test uses instead of the plain ones."""

    def __init__(self, book: OrderBook) -> None:
        self._book = book

    def channel(self, *arguments: object) -> SideChannel:
        """Open a side channel with these arguments that carries out orders."""
        return FaultyChannel(self._book, *arguments)

    def engine(self, engine: CopyEngine) -> FaultyEngine:
        """Return an engine that carries out orders."""
        return FaultyEngine(engine, self._book)


def ordered_faults(engine_id: str, rank: int) -> Faults | None:
    """Return the faults that the environment asks for; None in ordinary use.

    Raises `ValueError` with one sentence if it asks for them and nobody has prepared any: a variable that
    was left behind does not make an engine go wrong.
    """
    directory = os.environ.get(VARIABLE, "")
    if not directory:
        return None
    try:
        book = OrderBook(Path(directory), engine_id, rank)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={directory}: {error}") from error
    logger.warning(
        "THIS ENGINE GOES WRONG ON PURPOSE: rank %d of %s takes orders for faults from %s (%s); "
        "for tests only, never for users",
        rank,
        engine_id,
        directory,
        VARIABLE,
    )
    return Faults(book)
