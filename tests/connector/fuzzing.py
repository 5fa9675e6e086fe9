"""Messages that no rank would send: malformed ones, and half-right ones from the fields of spec/wire.toml.

A half-right message names real ranks, incarnations, layouts and numbers; the one thing that it never names is
a transfer under way, since whoever knows its id may end it.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from dfirst.connector.side_channel import HEADER
from dfirst.protocol.messages import Sender
from dfirst.protocol.shards import Directory, layout_digest
from dfirst.protocol.specification import FieldSpec, load_wire
from hypothesis import strategies as st

Frames = list[bytes]

ODD_TEXTS = ("", "x", "x" * 256, "x" * 257, "\0", "é" * 100, "NEW", "../..", "%s%n")
ODD_NUMBERS = (-(1 << 63), -2, -1, 0, 1, 2, 7, 1 << 16, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
ODD_TIMES = (float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 1e-300, 1e300, 604_800.0, 604_801.0)
ODD_VALUES = (None, True, [], {}, b"\xff", 1.5, "text", -1, [[[]]])


def messages(directories: Sequence[Directory]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for messages of every kind, of and to the ranks of these engines."""
    senders = [
        Sender(directory.engine_id, entry.rank, entry.incarnation)
        for directory in directories
        for entry in directory.ranks
    ]
    names = [
        *(sender.engine_id for sender in senders),
        *(sender.incarnation for sender in senders),
        *(layout_digest(directory) for directory in directories),
        *("blockwise", "layerwise", "owner", "mover"),
    ]
    builders = Builders(names, senders, [msgspec.to_builtins(directory) for directory in directories])
    return st.one_of([builders.message(one.tag, one.fields) for one in load_wire().messages])


class Builders:
    """Strategies for the parts of messages."""

    def __init__(
        self, names: Sequence[str], senders: Sequence[Sender], directories: Sequence[dict[str, Any]]
    ) -> None:
        self._texts = st.one_of(st.sampled_from([*names, *ODD_TEXTS]), st.text(max_size=20))
        small = st.integers(0, 40)
        self._numbers = st.one_of(small, small, small, st.sampled_from(ODD_NUMBERS))
        right = st.floats(0, 100)
        self._times = st.one_of(right, right, st.sampled_from(ODD_TIMES))
        self._right: dict[str, st.SearchStrategy[Any]] = {
            "sender": st.sampled_from([msgspec.to_builtins(sender) for sender in senders]),
            "target_incarnation": st.sampled_from([sender.incarnation for sender in senders]),
            "mode": st.sampled_from(["blockwise", "layerwise"]),
            "target": st.sampled_from(["owner", "mover"]),
        }
        self._records = {record.name: record.fields for record in load_wire().records}
        self._directories = st.one_of(
            st.sampled_from(directories),
            st.builds(_changed, st.sampled_from(directories), st.randoms(use_true_random=False)),
        )

    def message(self, tag: str, fields: Sequence[FieldSpec]) -> st.SearchStrategy[dict[str, Any]]:
        """Return messages of one kind; some lack a field or have one too many."""
        whole = st.fixed_dictionaries({"type": st.just(tag), **self._of(fields)})
        return st.one_of(whole, whole, st.builds(_changed, whole, st.randoms(use_true_random=False)))

    def _of(self, fields: Sequence[FieldSpec]) -> dict[str, st.SearchStrategy[Any]]:
        return {field.name: self._field(field) for field in fields}

    def _field(self, field: FieldSpec) -> st.SearchStrategy[Any]:
        any_value, right = self._value(field.type), self._right.get(field.name)
        return any_value if right is None else st.one_of(right, right, right, any_value)

    def _value(self, kind: str) -> st.SearchStrategy[Any]:
        if kind.startswith("list["):
            return st.lists(self._value(kind.removeprefix("list[").removesuffix("]")), max_size=5)
        if kind in self._records:
            return st.fixed_dictionaries(self._of(self._records[kind]))
        return {
            "str": self._texts,
            "int": self._numbers,
            "float": self._times,
            "bool": st.booleans(),
            "bytes": st.binary(max_size=64),
            "Directory": self._directories,
        }[kind]


def variant(message: dict[str, Any], chance: random.Random) -> Frames:
    """Return a message as it is, changed in a field, under a fresh id, or with its bytes damaged."""
    how = chance.randrange(8)
    if how < 3:
        if isinstance(message.get("key"), dict):
            message = {**message, "key": {"transfer_id": f"{chance.getrandbits(64):x}", "attempt": 0}}
        return [HEADER, msgspec.msgpack.encode(message)]
    if how < 5:
        return [HEADER, msgspec.msgpack.encode(_changed(message, chance))]
    encoded = bytearray(msgspec.msgpack.encode(message))
    if how == 5:
        for _ in range(chance.randint(1, 4)):
            encoded[chance.randrange(len(encoded))] = chance.randrange(256)
    elif how == 6:
        del encoded[chance.randrange(len(encoded)) :]
    else:
        return chance.choice(
            (
                [bytes(encoded)],
                [b"dfirst/2", bytes(encoded)],
                [HEADER, bytes(encoded), b""],
                [HEADER] * 5,
                [b""],
            )
        )
    return [HEADER, bytes(encoded)]


def _changed(value: Any, chance: random.Random) -> Any:
    """Return a copy with one value somewhere inside replaced, removed or added."""
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    place = copy
    while True:
        steps = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not steps:
            return copy
        step = chance.choice(steps)
        if isinstance(place[step], dict | list) and chance.random() < 0.8:
            place = place[step]
            continue
        if chance.random() < 0.2:
            del place[step]
        else:
            place[step] = chance.choice((*ODD_VALUES, *ODD_NUMBERS, *ODD_TEXTS, *ODD_TIMES))
        return copy
