"""The committed diagrams and the README say what the spec says."""

import html
import re

import pytest
from dfirst.protocol.specification import load_machine, load_timers, load_trace, load_wire, machine_names
from dfirst.spec import diagrams, dot, mermaid, readme
from dfirst.spec.models import MODELS


def test_the_committed_diagrams_are_current():
    assert diagrams.check(diagrams.own_folder()) == []


def test_the_readme_is_current():
    text = readme.readme_path().read_text()
    assert readme.rendered(text) == text


def test_the_readme_shows_every_machine_row_message_timer_and_line_of_a_trace():
    text = readme.generated()
    assert sorted(MODELS) == sorted(machine_names())
    rows = [row.id for name in machine_names() for row in load_machine(name).transitions]
    messages = [message.tag for message in load_wire().messages]
    timers = [timer.name for timer in load_timers().timers]
    missing = [row for row in rows if f"| {row} |" not in text]
    missing += [tag for tag in messages if f"**{tag}**" not in text]
    missing += [name for name in timers if f"`{name}`" not in text]
    traces = text.partition("## The traces")[2]
    for line in load_trace().lines:
        missing += [tag for tag in [line.tag] if f"| `{tag}` | {line.about} |" not in traces]
        missing += [field.name for field in line.fields if f"| `{field.name}` |" not in traces]
    assert missing == []


def test_the_readme_says_what_upholds_each_rule():
    prose = readme.readme_path().read_text().partition(readme.BEGIN)[0]
    rules = re.findall(r"^\* \*\*([SL]\d+)\*\* ", prose, re.MULTILINE)
    upheld = dict(re.findall(r"^\| ([SL]\d+) \| (.*) \|$", prose, re.MULTILINE))
    assert list(upheld) == rules == ["S1", "S2", "S3", "S4", "S5", "S6", "L1", "L2"]
    assert all("`" in text for text in upheld.values())


def test_the_readme_links_only_to_its_own_headings_and_files():
    text = readme.readme_path().read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", text)
    assert links
    assert set(links) <= anchors
    folder = readme.readme_path().parent
    table = re.findall(r"^\| `([\w*./]+)` \| ", text.partition("## ")[0], re.MULTILINE)
    assert table
    assert [name for name in table if not list(folder.glob(name))] == []


def test_the_readmes_prose_names_only_rows_that_exist():
    prose = readme.readme_path().read_text().partition(readme.BEGIN)[0]
    known = {row.id for name in machine_names() for row in load_machine(name).transitions}
    named = set(re.findall(r"\b(?:DB|DL|PB|PL|ML|OL|DR|PR)\d+\b", prose))
    assert named
    assert named <= known


def test_a_readme_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="needs the lines"):
        readme.rendered("# The protocol\n")


def test_drawing_writes_two_files_a_machine_and_checking_finds_what_is_stale(tmp_path):
    assert len(diagrams.check(tmp_path)) == 2 * len(machine_names())
    written = diagrams.write(tmp_path)
    assert len(written) == 2 * len(machine_names())
    assert diagrams.check(tmp_path) == []
    (tmp_path / "mover_leg.mmd").write_text("old")
    (tmp_path / "owner_leg.svg").unlink()
    picture = tmp_path / "prefill_request.svg"
    reason = next(row.reason for row in load_machine("prefill_request").transitions if row.target != "=")
    picture.write_text(html.unescape(picture.read_text()).replace(reason, "as it was said before"))
    assert diagrams.check(tmp_path) == ["mover_leg.mmd", "owner_leg.svg", "prefill_request.svg"]


def test_without_graphviz_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(dot.shutil, "which", lambda program: None)
    with pytest.raises(dot.DotMissing, match="install the Debian package graphviz"):
        diagrams.write(tmp_path)
    assert len(list(tmp_path.glob("*.mmd"))) == len(machine_names())


@pytest.mark.parametrize("name", machine_names())
def test_a_diagram_shows_every_row_its_beginning_and_its_end(name):
    machine = load_machine(name)
    text, picture = mermaid.state_diagram(machine), dot.dot_text(machine)
    for row in machine.transitions:
        assert mermaid.row_label(row) in text
        assert f">{row.id} <" in picture
    assert f"[*] --> {machine.initial}" in text
    assert "--> [*]" in text
    assert "peripheries=2" in picture
