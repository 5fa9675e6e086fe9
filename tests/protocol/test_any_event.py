"""No event, from whomever and whenever, raises: it moves a machine along a row or is counted (rule F3)."""

from dfirst.protocol import commands, messages
from dfirst.protocol.commands import LegKey, RemoteEngine, remote_of
from dfirst.protocol.messages import Sender, TransferKey
from dfirst.protocol.shards import layout_digest
from hypothesis import given, settings
from hypothesis import strategies as st

from .world import ALL_CACHED, BLOCKS, PROMPT, World, directory

P, D, OTHER = directory("P", 2), directory("D", 2), directory("D", 2, model="other")
KEYS = st.sampled_from([TransferKey("t-1", 0), TransferKey("t-1", 1), TransferKey("t-2", 0)])
SENDERS = st.sampled_from(
    [Sender(engine.engine_id, entry.rank, entry.incarnation) for engine in (P, D) for entry in engine.ranks]
    + [Sender("D", 0, "D0.earlier"), Sender("router", -1, "r"), Sender("", 99, "")]
)
INCARNATIONS = st.sampled_from([entry.incarnation for engine in (P, D) for entry in engine.ranks] + ["x"])
DIGESTS = st.sampled_from([layout_digest(engine) for engine in (P, D, OTHER)] + ["", "unknown"])
MODES = st.sampled_from(["blockwise", "layerwise", "sideways", ""])
PARTS = st.sampled_from(["owner", "mover", "neither"])
REMOTES = st.sampled_from([remote_of(P), remote_of(D), RemoteEngine("P", "unknown", ())])
NUMBERS = st.integers(-1, 12)
SECONDS = st.sampled_from([-1.0, 0.0, 20.0, float("inf"), float("nan")])
BLOCK_IDS = st.sampled_from([BLOCKS, (), (-1, 10**9)])
TOKENS = st.sampled_from([0, PROMPT, 3, -4])
CACHED = st.sampled_from([0, 4, ALL_CACHED, 3, -4])

FIELDS = {
    "sender": SENDERS,
    "key": KEYS,
    "sequence": NUMBERS,
    "grant": NUMBERS,
    "target_incarnation": INCARNATIONS,
    "mode": MODES,
    "target": PARTS,
    "layout_digest": DIGESTS,
    "digest": DIGESTS,
    "directory": st.sampled_from([P, D, OTHER]),
    "prompt_tokens": TOKENS,
    "cached_tokens": CACHED,
    "tail_seconds": st.sampled_from([0.0, 1.0, -1.0, 1e9, float("nan")]),
    "lease_seconds": SECONDS,
    "block_ids": BLOCK_IDS,
    "keys": st.lists(KEYS, max_size=3),
    "extended": st.lists(KEYS, max_size=3),
    "gone": st.lists(KEYS, max_size=3),
    "reason": st.sampled_from(["", "because"]),
    "place": st.integers(-1, 3),
    "starts": st.sampled_from([b"", bytes(8), b"odd", (1 << 20).to_bytes(16, "little")]),
    "lengths": st.sampled_from([b"", (64).to_bytes(8, "little"), bytes(8), b"odd"]),
    "slot_address": NUMBERS,
    "slot_places": NUMBERS,
    "place_bytes": NUMBERS,
    "mover": SENDERS,
    "request_id": st.sampled_from(["", "r-1", "r-2"]),
    "remote": REMOTES,
    "leg": st.builds(LegKey, KEYS, st.sampled_from("PD"), st.integers(0, 2), INCARNATIONS),
    "ok": st.booleans(),
    "route": st.sampled_from([b"P0", b"D0", b"nobody"]),
}


def any_of(*records: type) -> st.SearchStrategy:
    return st.one_of(
        [st.builds(record, **{name: FIELDS[name] for name in record.__struct_fields__}) for record in records]
    )


MESSAGES = any_of(*messages.Message.__args__)
COMMANDS = any_of(
    *commands.Command.__args__,
    commands.CopyEnded,
    commands.Collected,
    commands.PartWanted,
    commands.PartStaged,
)
STEPS = st.one_of(
    st.tuples(st.just("hear"), MESSAGES),
    st.tuples(st.just("give"), COMMANDS),
    st.tuples(st.just("deliver"), st.none()),
    st.tuples(st.just("copies"), st.booleans()),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 7.0, 30.0])),
)
RANKS = st.sampled_from(["P0", "P1", "D0", "D1"])


def take(world: World, rank: str, step: str, what) -> None:
    if step == "hear":
        core = world.cores[rank]
        before = core.counters[f"received_{type(what).__name__}"]
        world.hear(rank, what, "D0")
        assert core.counters[f"received_{type(what).__name__}"] == before + 1
    elif step == "give":
        world.give(rank, what)
    elif step == "deliver":
        world.deliver(rounds=5)
    elif step == "copies":
        world.finish_copies(rank, ok=what)
    else:
        world.advance(what, step=what)


@settings(max_examples=250)
@given(st.lists(st.tuples(RANKS, STEPS), max_size=40), st.booleans())
def test_no_event_raises_or_leads_to_a_state_that_the_spec_does_not_name(steps, met):
    world = World(prefill_tp=2, decode_tp=2, met=met)
    for rank, (step, what) in steps:
        take(world, rank, step, what)
        for core in world.cores.values():
            for entity in (*core.movers.values(), *core.owners.values()):
                assert entity.state in {state.name for state in entity.machine.spec.states}


@settings(max_examples=100)
@given(st.lists(st.tuples(RANKS, MESSAGES), max_size=20))
def test_messages_alone_start_no_copy_and_report_nothing(heard):
    world = World(prefill_tp=2, decode_tp=2, met=True)
    for rank, message in heard:
        world.hear(rank, message, "D0")
    assert world.reports == []
    assert not any(world.copies.values())
