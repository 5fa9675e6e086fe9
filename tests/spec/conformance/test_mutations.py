"""A good trace conforms; the same trace with one thing wrong is refused, with the rule that is broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dfirst.spec.conform import conform

from .recordings import RECORDINGS

Line = dict[str, Any]
Lines = list[Line]


class Recording:
    """A recorded trace whose files can be read, changed and held against the spec."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory / name
        if not self.directory.exists():
            RECORDINGS[name](self.directory)

    @property
    def files(self) -> list[Path]:
        return sorted(self.directory.glob("*.jsonl"))

    def lines(self, file: Path) -> Lines:
        return [json.loads(line) for line in file.read_text().splitlines()]

    def of(self, rank: str) -> Path:
        return next(self.directory.glob(f"{rank[0]}-rank{rank[1]}-*.jsonl"))

    def broken(self, file: Path, lines: Lines) -> str:
        """Return the rule that the trace breaks with these lines in place of the file's; "" if none."""
        kept = file.read_text()
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            violation = conform([self.directory]).violation
            return violation.rule if violation else ""
        finally:
            file.write_text(kept)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


def named(line: Line) -> str:
    """Say a line in short."""
    if line["line"] == "step":
        return str(line["row"])
    if line["line"] == "message":
        return f"{line['way']} {line['message']}"
    return f"{line['line']} {line.get('phase') or line.get('outcome') or ''}".strip()


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_conforms(place: Path, name: str) -> None:
    found = conform([Recording(place, name).directory])
    assert found.violation is None, found.violation
    assert found.transfers == 1
    assert not found.running
    assert not found.unfinished


@pytest.mark.parametrize("name", RECORDINGS)
def test_two_lines_of_a_transfer_swapped_are_always_refused(place: Path, name: str) -> None:
    recording = Recording(place, name)
    for file in recording.files:
        lines = recording.lines(file)
        for first in range(1, len(lines) - 1):
            one, other = lines[first : first + 2]
            if one.get("transfer") and one.get("transfer") == other.get("transfer"):
                swapped = [*lines[:first], other, one, *lines[first + 2 :]]
                assert recording.broken(file, swapped), (
                    f"{file.name} {first + 1}: {named(one)}, {named(other)}"
                )


ASKED = ("copy started", "sent DONE", "sent STOPPED", "sent METADATA", "sent QUERY", "sent ACK")
HARMLESS = {
    "what a step asks for does not wait for the next step of the same moment": (
        ("DB13", "DB16", "DB20", "PL13", "PL18", "PL24", "PB21", "DL22", "DL33", "ML1", "ML15", "OL1"),
        ASKED,
    ),
    "two questions that were parked are lent to in any order": (("OL1",), ("PB16", "DL17")),
    "two legs are opened in any order": (("ML1",), ("ML1",)),
    "what is sent in one moment has no order": (
        ("sent METADATA", "sent CANCEL", "sent QUERY", "sent STAGE", "copy started"),
        ("sent METADATA", "sent CANCEL", "sent QUERY", "sent STAGE", "sent RENEW"),
    ),
    "vLLM takes a report when it likes, and may have done so before a word left": (
        ("sent DONE", "sent STOPPED", "sent ACK"),
        ("report received", "report failed", "report sent"),
    ),
    "a report that was taken has nothing to do with an acknowledgement": (
        ("DB21", "DB22"),
        ("received ACK",),
    ),
    "a request that is finished has nothing to do with one either": (("ML20",), ("PL26", "PL27")),
    "a command of the scheduler side comes at any moment": (
        ("DL1", "PB1", "sent WAIT", "sent METADATA"),
        ("received QUERY", "PB6", "DL29"),
    ),
    "the data path wants a part at any moment": (("DB13", "copy started", "sent STAGE"), ("ML23",)),
    "a part is through at any moment": (("OL19",), ("OL22",)),
    "a timer rings at any moment": (("ML14",), ("sent RENEW",)),
    "whom an owner expects does not depend on what it has heard": (("OL6", "OL9"), ("expect",)),
    "two ranks' acknowledgements have no order": (("received ACK",), ("received ACK",)),
}


def harmless(one: Line, other: Line) -> bool:
    pair = named(one), named(other)
    return any(pair[0] in firsts and pair[1] in seconds for firsts, seconds in HARMLESS.values())


@pytest.mark.parametrize("name", RECORDINGS)
def test_swapped_lines_that_keep_the_times_in_order_are_refused_or_harmless(place: Path, name: str) -> None:
    recording = Recording(place, name)
    for file in recording.files:
        lines = recording.lines(file)
        for first in range(1, len(lines) - 1):
            one, other = lines[first : first + 2]
            if not one.get("transfer") or one.get("transfer") != other.get("transfer"):
                continue
            early, late = {**other, "time": one["time"]}, {**one, "time": other["time"]}
            rule = recording.broken(file, [*lines[:first], early, late, *lines[first + 2 :]])
            where = f"{file.name} {first + 1}: {named(one)}, {named(other)}"
            assert rule or harmless(one, other), where


LAYOUTS = ("received LAYOUT", "received LAYOUT_QUERY", "sent LAYOUT", "sent LAYOUT_QUERY")
"""What no other line depends on: layouts are not of a transfer."""


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_line_that_is_missing_is_refused(place: Path, name: str) -> None:
    recording = Recording(place, name)
    for file in recording.files:
        lines = recording.lines(file)
        for number in range(len(lines) - 1):
            line = lines[number]
            rule = recording.broken(file, lines[:number] + lines[number + 1 :])
            cancelled = (
                named(line) == "received ACK" and name == "push_cancelled" and file.name.startswith("D")
            )
            at_work = named(line) == "received STAGE" and named(lines[number + 1]) not in ("OL19", "OL21")
            harmless = named(line) in LAYOUTS or cancelled or at_work
            assert rule or harmless, f"{file.name} {number + 1}: {named(line)}"


def without(what: str, count: int = 1) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        places = [number for number, line in enumerate(lines) if named(line) == what][:count]
        assert len(places) == count
        return [line for number, line in enumerate(lines) if number not in places]

    return change


def twice(what: str) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        place = next(number for number, line in enumerate(lines) if named(line) == what)
        return [*lines[: place + 1], *lines[place:]]

    return change


def twice_with(what: str, **fields: Any) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        place = next(number for number, line in enumerate(lines) if named(line) == what)
        return [*lines[: place + 1], {**lines[place], **fields}, *lines[place + 1 :]]

    return change


def with_fields(what: str, **fields: Any) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        place = next(number for number, line in enumerate(lines) if named(line) == what)
        return [*lines[:place], {**lines[place], **fields}, *lines[place + 1 :]]

    return change


def moved(what: str, before: str) -> Callable[[Lines], Lines]:
    def change(lines: Lines) -> Lines:
        line = next(line for line in lines if named(line) == what)
        rest = [other for other in lines if other is not line]
        place = next(number for number, other in enumerate(rest) if named(other) == before)
        return [*rest[:place], {**line, "time": rest[place]["time"]}, *rest[place:]]

    return change


def first_reader_frees(lines: Lines) -> Lines:
    """A prefill rank that releases at the first of two DONEs: the field's mistake."""
    second = max(number for number, line in enumerate(lines) if named(line) == "received DONE")
    return [line for number, line in enumerate(lines) if not second <= number <= second + 1]


def without_staged(lines: Lines) -> Lines:
    """The second part is never through, and never answered."""
    last = max(number for number, line in enumerate(lines) if named(line) == "OL22")
    return [*lines[:last], *lines[last + 2 :]]


MUTATIONS = {
    "a DONE that was never sent": ("pull", "D0", without("sent DONE"), "R9"),
    "a DONE that never came": ("pull", "P0", without("received DONE"), "S4"),
    "a DONE that nobody heard": ("pull", "P0", without("OL6"), "R9"),
    "a release that is repeated, by vLLM": ("pull", "P0", twice("report sent"), "S3"),
    "a release that is repeated, by the rank": ("pull", "P0", twice("PB29"), "S3"),
    "a release that is decided twice": ("pull", "P0", twice("PB21"), "S3"),
    "a release at the first of two readers": ("pull", "P0", first_reader_frees, "S4"),
    "a reader that was left out of the plan": ("pull", "P0", with_fields("expect", peers=["D/0/D0.1"]), "S4"),
    "a plan without any reader": ("pull", "P0", with_fields("expect", peers=[]), "S4"),
    "a release without a word of whom it waits for": ("pull", "P0", without("expect"), "S4"),
    "a release that vLLM never took": ("pull", "P0", without("report sent"), "S3"),
    "a received release on decode that is repeated": ("push", "D0", twice("report received"), "S3"),
    "another outcome than the rank's": ("pull", "D0", with_fields("report received", outcome="failed"), "S6"),
    "a step that is missing": ("pull", "D0", without("ML4"), "F2"),
    "a row that the spec does not have": ("pull", "D0", with_fields("ML4", row="ML99"), "F2"),
    "another row's id": ("pull", "D0", with_fields("ML4", row="ML5"), "F2"),
    "a target that is not the row's": ("pull", "D0", with_fields("DB16", target="FAILED"), "F2"),
    "a copy started before METADATA": ("pull", "D0", moved("copy started", "received METADATA"), "R10"),
    "a copy started after DONE": ("pull", "D0", twice("copy started"), "R10"),
    "a copy that never ended": ("pull", "D0", without("copy ended"), "R4"),
    "a copy that failed and counts": ("pull", "D0", with_fields("copy ended", ok=False), "R4"),
    "a METADATA that was not sent": ("pull", "D0", with_fields("received METADATA", sequence=77), "S5"),
    "a METADATA before its question": ("pull", "D0", moved("received METADATA", "received LAYOUT"), "R10"),
    "a METADATA that never came": ("pull", "D0", without("received METADATA"), "R10"),
    "a METADATA that was granted and not sent": ("pull", "P0", without("sent METADATA"), "R9"),
    "a DONE that was recorded and not acknowledged": ("pull", "P0", without("sent ACK"), "R9"),
    "a DONE of another incarnation of this rank": (
        "pull",
        "P0",
        with_fields("received DONE", receiver="P/0/old"),
        "S5",
    ),
    "a DONE that its rank did not send": (
        "pull",
        "P0",
        with_fields("received DONE", sender="D/1/D1.1"),
        "S4",
    ),
    "a DONE for what was not lent": ("pull", "D0", with_fields("sent DONE", grant=77), "R8"),
    "a DONE that is taken for another grant": ("pull", "P0", with_fields("received DONE", grant=77), "R8"),
    "a grant that changes": ("parked_and_renewed", "P0", twice_with("sent METADATA", grant=77), "R8"),
    "a part that is gathered twice": ("staged", "P0", with_fields("OL21", row="OL19"), "R8"),
    "a part that is gathered without a STAGE": ("staged", "P0", without("received STAGE"), "R10"),
    "a part that is through and was never begun": ("staged", "P0", without("OL19", 2), "F2"),
    "a part of which the mover hears nothing": ("staged", "P0", without("sent STAGED"), "R9"),
    "a grant that has run out": ("pull", "D0", with_fields("received METADATA", lease_seconds=0.5), "S1"),
    "a renewal of what nobody extended": ("parked_and_renewed", "P0", without("PB20"), "F2"),
    "a renewal that was not asked for": ("parked_and_renewed", "D0", without("sent RENEW"), "S5"),
    "a renewal that was refused": (
        "parked_and_renewed",
        "D0",
        with_fields("received RENEWED", answer="gone"),
        "S5",
    ),
    "a renewal that was granted and not taken": ("parked_and_renewed", "D0", without("ML14"), "F2"),
    "a renewal that is taken twice": ("parked_and_renewed", "D0", twice("ML14"), "R1"),
    "a question that goes unanswered": ("parked_and_renewed", "P0", without("sent WAIT"), "R9"),
    "a hand-back under a writer": ("push_cancelled", "D0", without("received STOPPED"), "S4"),
    "a STOPPED that was not said": ("push_cancelled", "P0", without("sent STOPPED"), "R9"),
    "a CANCEL that one writer was not sent": ("push_cancelled", "D0", without("sent CANCEL"), "R9"),
    "a failed read of which the owner hears nothing": ("copy_failed", "D0", without("sent STOPPED"), "R9"),
    "a transfer that was never over": ("pull", "P0", without("PB29"), "L1"),
    "a line that is none": ("pull", "P0", with_fields("PB21", attempt="none"), "T1"),
    "a line of another rank": ("pull", "P0", with_fields("PB21", rank=7), "T3"),
    "a file without a beginning": ("pull", "P0", lambda lines: lines[1:], "T3"),
    "a file of another version": ("pull", "P0", with_fields("start", version=2), "T3"),
    "a line after the end": ("pull", "P0", lambda lines: [*lines, lines[-2]], "T3"),
    "time that goes back": ("pull", "P0", with_fields("sent LAYOUT", time=1.0), "T2"),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_what_is_wrong_is_refused_with_its_rule(place: Path, what: str) -> None:
    name, rank, change, rule = MUTATIONS[what]
    recording = Recording(place, name)
    file = recording.of(rank)
    assert recording.broken(file, change(recording.lines(file))) == rule


ALONE = {
    "a STOPPED that is older than the grant": (
        "push_cancelled",
        "D0",
        with_fields("received STOPPED", sequence=0),
        "R8",
    ),
    "a part that nobody asked for": ("staged", "D0", with_fields("received STAGED", sequence=77), "R8"),
    "a part that was asked for before an earlier one": ("staged", "D0", without("sent STAGE"), "R8"),
    "a hand-back with a part at work": ("staged", "P0", without_staged, "S4"),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_is_wrong_is_refused_without_the_other_rank_s_file(tmp_path: Path, what: str) -> None:
    name, rank, change, rule = ALONE[what]
    recording = Recording(tmp_path, name)
    file = recording.of(rank)
    file.write_text("".join(json.dumps(line) + "\n" for line in change(recording.lines(file))))
    violation = conform([file]).violation
    assert violation is not None
    assert violation.rule == rule


def test_a_file_alone_is_held_against_itself(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "pull")
    file = recording.of("D0")
    asked = with_fields("sent QUERY", sequence=77)(recording.lines(file))
    file.write_text("".join(json.dumps(line) + "\n" for line in asked))
    violation = conform([file]).violation
    assert violation is not None
    assert violation.rule == "R8"
    assert f"{file}, line {violation.line}: ML6 asks for 'outstanding'" in violation.sentence


def test_a_process_that_was_killed_leaves_unfinished_transfers_and_no_violation(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "pull")
    file = recording.of("P0")
    lines = recording.lines(file)
    place = next(number for number, line in enumerate(lines) if named(line) == "received DONE")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:place]) + '{"line": "st')
    found = conform([file])
    assert found.violation is None
    assert found.running == [str(file)]
    assert [one.state for one in found.unfinished if one.machine == "prefill_blockwise"] == ["PULLS_PENDING"]


def test_running_engines_may_be_in_the_middle_of_it(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "pull")
    file = recording.of("P0")
    lines = without("PB29")(recording.lines(file))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert conform([tmp_path / "pull"], running=True).violation is None
    assert [one.machine for one in conform([tmp_path / "pull"], running=True).unfinished] == [
        "prefill_blockwise"
    ]


def test_a_trace_without_ends_may_be_told_that_all_was_over(tmp_path: Path) -> None:
    recording = Recording(tmp_path, "pull")
    file = recording.of("P0")
    lines = recording.lines(file)[:-1]
    assert recording.broken(file, lines) == ""
    cut = without("PB29")(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in cut))
    assert conform([tmp_path / "pull"]).violation is None
    violation = conform([tmp_path / "pull"], ended=True).violation
    assert violation is not None
    assert (violation.rule, violation.line) == ("L1", len(cut))
