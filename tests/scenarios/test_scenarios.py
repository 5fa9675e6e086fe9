"""Every scenario comes out as it is written down, and what its ranks wrote of it conforms to the spec."""

from pathlib import Path

import pytest
from dfirst.spec.conform import conform

from .language import Scenario, read
from .stage import Stage
from .transcript import Transcript

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*/*.txt"))
MIN_PROSE_LINES, MAX_PROSE_LINES = 2, 4


def play(scenario: Scenario, directory: Path) -> tuple[list[list[str]], Stage]:
    """Return what comes out of each block, and the world at the end."""
    transcript = Transcript()
    outputs: list[list[str]] = []
    stage: Stage | None = None
    for block in scenario.blocks:
        for command in block.commands:
            if stage is None:
                assert command.words[0] == "world", "a scenario begins with its world"
                stage = Stage(directory, command, transcript)
            else:
                stage.play(command)
        outputs.append(transcript.take())
    assert stage is not None
    return outputs, stage


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_comes_out_as_written(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    scenario = read(path)
    outputs, stage = play(scenario, tmp_path)
    if request.config.getoption("--rewrite", default=False):
        for block, output in zip(scenario.blocks, outputs, strict=True):
            block.output = output
        path.write_text(scenario.text())
    for block, output in zip(scenario.blocks, outputs, strict=True):
        assert output == block.output, f"after {block.commands[-1].text!r}"
    for trace in stage.traces.values():
        trace.close()
    found = conform([tmp_path])
    if not stage.forged:
        assert found.violation is None, found.violation.sentence


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_it_begins_with_a_few_lines_of_prose(path: Path) -> None:
    assert MIN_PROSE_LINES <= len(read(path).prose) <= MAX_PROSE_LINES


def test_there_are_enough() -> None:
    assert len(FILES) >= 30


@pytest.mark.parametrize("path", FILES[:3], ids=lambda path: path.stem)
def test_a_file_is_written_as_it_was_read(path: Path) -> None:
    assert read(path).text() == path.read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("world\n----\n\n# late\n----\n", "prose stands at the top"),
        ("----\n", "no command before the dashes"),
        ("world\n----\n\nP offer\n", "the last commands have no dashes"),
        ("world\n----\n\nP0 offer\n----\n", "no command 'P0 offer'"),
        ("world\n----\n\nlose QUERY\n----\n", "no such message waits, only none"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "wrong.txt").write_text(text)
    with pytest.raises(ValueError, match=problem):
        play(read(tmp_path / "wrong.txt"), tmp_path)
