"""Many answers made one: choices numbered, usage summed, one id. Pure functions over decoded JSON.

A prompt's tokens count once however many samples were taken of it, as an engine counts when it takes the
samples itself.
"""

from typing import Any

import msgspec

from .body import Piece


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, int | None] | None = None
    completion_tokens_details: dict[str, int | None] | None = None


class UsageSum:
    """The usage of a whole request, from that of its pieces in any order."""

    def __init__(self) -> None:
        self.total = Usage()
        self.seen = False
        self._prompts: set[int] = set()

    def add(self, piece: Piece, usage: Usage) -> None:
        self.seen = True
        total = self.total
        if piece.prompt_index not in self._prompts:
            self._prompts.add(piece.prompt_index)
            total.prompt_tokens += usage.prompt_tokens
            total.prompt_tokens_details = add_counts(total.prompt_tokens_details, usage.prompt_tokens_details)
        total.completion_tokens = (total.completion_tokens or 0) + (usage.completion_tokens or 0)
        total.completion_tokens_details = add_counts(
            total.completion_tokens_details, usage.completion_tokens_details
        )
        total.total_tokens = total.prompt_tokens + total.completion_tokens


def add_counts(
    left: dict[str, int | None] | None, right: dict[str, int | None] | None
) -> dict[str, int | None] | None:
    if left is None or right is None:
        return right if left is None else left
    names = list(left) + [name for name in right if name not in left]
    return {name: add_optional(left.get(name), right.get(name)) for name in names}


def add_optional(left: int | None, right: int | None) -> int | None:
    return None if left is None and right is None else (left or 0) + (right or 0)


def renumber(message: dict[str, Any], piece: Piece) -> None:
    """Give the choices of one piece's answer or chunk their place in the whole."""
    for choice in message.get("choices") or ():
        choice["index"] = piece.index


def merge_answers(pieces: tuple[Piece, ...], answers: list[dict[str, Any]], merged_id: str) -> dict[str, Any]:
    """The first answer, with everybody's choices; what belongs to one engine's request alone is left out."""
    usage = UsageSum()
    choices: list[Any] = []
    for piece, answer in zip(pieces, answers, strict=True):
        renumber(answer, piece)
        choices += answer.get("choices") or ()
        if answer.get("usage") is not None:
            usage.add(piece, msgspec.convert(answer["usage"], Usage))
    merged = {**answers[0], "id": merged_id, "choices": choices}
    for name in ("kv_transfer_params", "metrics"):
        merged.pop(name, None)
    if usage.seen:
        merged["usage"] = msgspec.to_builtins(usage.total)
    return merged


class ChunkMerger:
    """The chunks of many streams, rewritten one by one as they come to read as one stream."""

    def __init__(self, merged_id: str) -> None:
        self.usage = UsageSum()
        self._id = merged_id
        self._created: Any = None
        self._usage_frame: dict[str, Any] = {}

    def take(self, piece: Piece, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """The chunk to pass on; None for a closing usage chunk, which is kept for the sum."""
        if self._created is None:
            self._created = chunk.get("created")
        chunk["id"] = self._id
        chunk["created"] = self._created
        if not chunk.get("choices") and chunk.get("usage") is not None:
            self.usage.add(piece, msgspec.convert(chunk["usage"], Usage))
            self._usage_frame = chunk
            return None
        renumber(chunk, piece)
        return chunk

    def closing_chunk(self) -> dict[str, Any] | None:
        if not self.usage.seen:
            return None
        counts = msgspec.to_builtins(self.usage.total)
        # Engines leave out of this chunk what has no value, unlike in a whole answer.
        counts = {name: count for name, count in counts.items() if count is not None}
        frame = {**self._usage_frame, "choices": [], "usage": counts}
        frame.pop("metrics", None)
        return frame
