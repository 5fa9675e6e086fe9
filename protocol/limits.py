# Generated from spec/wire.toml by `python -m dfirst.spec.generate`. Do not edit.
"""What may stand in the fields of messages."""

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(max_length=256)]
"""A name, an id, an address, a digest."""

Sentence = Annotated[str, msgspec.Meta(max_length=8192)]
"""A sentence for people; a longer one is cut before it is sent."""

Number = Annotated[int, msgspec.Meta(ge=0, le=9223372036854775807)]
"""A count, an id of a block, an address, a length: never negative, and 64 bits hold it."""

Rank = Annotated[int, msgspec.Meta(ge=-1, le=65535)]
"""A place in an engine; -1 for a router."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=604800)]
"""A time, a week at most: a lease that a peer names must end."""

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
"""A TCP port."""

Extent = Annotated[int, msgspec.Meta(ge=1, le=1048576)]
"""How many heads, tokens or ranks a layout counts with: it is divided by them, and goes through them one by
one."""

Ranks = msgspec.Meta(max_length=16384)
"""The ranks of an engine; each is compared with each of the other engine's."""

Many = msgspec.Meta(max_length=1048576)
"""Entries of a list."""

Place = Annotated[int, msgspec.Meta(ge=0, le=64)]
"""A place in a slot, or how many it has: what became of each is remembered."""

Runs = Annotated[bytes, msgspec.Meta(max_length=524288)]
"""65,536 numbers of 8 bytes each."""
