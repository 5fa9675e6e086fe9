"""Lets atheris lead half-right messages through the core of a rank: a program, as atheris ends its process.

Arguments are libFuzzer's. An exception that the decoder does not promise, or one out of the core, ends it
with an error.
"""

import sys
from typing import Any, cast

import atheris

with atheris.instrument_imports(include=["dfirst"]):
    from dfirst.protocol.commands import MessageReceived, OfferBlocks
    from dfirst.protocol.messages import Message, Sender, TransferKey
    from dfirst.protocol.rank import RankCore
    from dfirst.protocol.specification import load_wire
    from dfirst.protocol.timing import Timing

import msgspec

DECODER = msgspec.msgpack.Decoder(cast(Any, Message))
WIRE = load_wire()
NAMES = ["P", "D", "p", "d", "", "t", "blockwise", "layerwise", "owner", "mover"]
OWN = TransferKey("a transfer that no stranger knows", 0)


class Silent:
    """An observer that notes nothing."""

    def stepped(self, *step: object) -> None:
        """Nothing."""

    def unheard(self, *event: object) -> None:
        """Nothing."""


def fresh() -> RankCore:
    core = RankCore(Timing(), Sender("P", 0, "p"), Silent())
    core.handle(OfferBlocks(key=OWN, request_id="r", block_ids=(1, 2), prompt_tokens=8), 1.0)
    return core


class Target:
    """A core that hears messages whose kinds and fields are read from the bytes."""

    def __init__(self) -> None:
        self.core = fresh()
        self.heard = 0
        self.records = {record.name: record.fields for record in WIRE.records}

    def __call__(self, data: bytes) -> None:
        source = atheris.FuzzedDataProvider(data)
        while source.remaining_bytes():
            kind = WIRE.messages[source.ConsumeIntInRange(0, len(WIRE.messages) - 1)]
            self._hear({"type": kind.tag, **{one.name: self._value(source, one.type) for one in kind.fields}})

    def _hear(self, message: dict[str, Any]) -> None:
        try:
            decoded = DECODER.decode(msgspec.msgpack.encode(message))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return
        self.core.handle(MessageReceived(decoded, b"Rx"), 2.0)
        assert self.core.owners[OWN].state == "METADATA_QUERY"
        self.heard += 1
        if self.heard % 1000 == 0:
            self.core = fresh()

    def _value(self, source: Any, kind: str) -> Any:
        if kind.startswith("list["):
            inner = kind.removeprefix("list[").removesuffix("]")
            return [self._value(source, inner) for _ in range(source.ConsumeIntInRange(0, 3))]
        if kind in self.records:
            return {one.name: self._value(source, one.type) for one in self.records[kind]}
        if kind == "str":
            return source.PickValueInList(NAMES)
        if kind == "float":
            return source.ConsumeFloat()
        if kind == "bytes":
            return source.ConsumeBytes(16)
        if kind == "Directory":
            return {"engine_id": source.PickValueInList(NAMES), "model": "m", "layout": "", "ranks": []}
        return source.ConsumeIntInRange(-1, 20)


def main() -> None:
    atheris.Setup(sys.argv, Target())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
