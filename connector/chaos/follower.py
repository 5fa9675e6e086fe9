"""Follows the traces that engines write while they write them: which state has a request's transfer entered,
and is a push under way.
"""

import os
import re
from collections import defaultdict
from pathlib import Path

import msgspec

from ...protocol.trace_lines import StepLine
from ..trace_reader import FREED, is_request_machine, side_of

_CLIENT = re.compile(r"chaos-\d+(?=-)")
_PROCESS = re.compile(r"-(\d+)\.jsonl$")
_STEP = b'{"line":"step"'
LAYERWISE = ("prefill_layerwise", "decode_layerwise")


class _File:
    def __init__(self, path: Path) -> None:
        self.path = path
        found = _PROCESS.search(path.name)
        self.process = int(found.group(1)) if found else 0
        self.position = 0
        self.pushes: set[str] = set()
        """Transfers, layer-wise, that have not come to their end here."""

    @property
    def alive(self) -> bool:
        return Path(f"/proc/{self.process}").exists()


class TraceFollower:
    """All traces of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, _File] = {}
        self._client_of: dict[str, str] = {}
        self._entered: dict[str, set[tuple[str, str]]] = defaultdict(set)
        """By transfer."""
        self._transfer_of: dict[str, str] = {}
        self._request_ids: dict[tuple[str, str], str] = {}

    def poll(self) -> None:
        """Read what is new."""
        for name in os.listdir(self._directory):
            if name.endswith(".jsonl"):
                file = self._files.get(name)
                if file is None:
                    file = self._files[name] = _File(self._directory / name)
                self._read(file)

    def entered(self, client_id: str, machine: str, state: str) -> bool:
        """Return whether the transfer of a client's request has been in this state."""
        transfer = self._transfer_of.get(client_id)
        return transfer is not None and (machine, state) in self._entered[transfer]

    def engine_request(self, client_id: str, engine: str) -> str | None:
        """Return what an engine calls a client's request; None if it has not heard of it."""
        return self._request_ids.get((client_id, engine))

    def pushes(self) -> set[str]:
        """Return the transfers that living ranks have not ended, layer-wise."""
        return {name for file in self._files.values() if file.pushes and file.alive for name in file.pushes}

    def workers(self, engine: str) -> list[int]:
        """Return the process numbers of an engine's living workers."""
        pattern = re.compile(rf"{re.escape(engine)}(_dp\d+)?-rank\d+-\d+\.jsonl$")
        return [file.process for name, file in self._files.items() if pattern.match(name) and file.alive]

    def living(self) -> set[str]:
        """Return the names of the files whose writers live."""
        return {name for name, file in self._files.items() if file.alive}

    def _read(self, file: _File) -> None:
        with file.path.open("rb") as opened:
            opened.seek(file.position)
            found = opened.read()
        lines = found[: found.rfind(b"\n") + 1]
        file.position += len(lines)
        for line in lines.splitlines():
            if line.startswith(_STEP):
                self._take(file, _steps.decode(line))

    def _take(self, file: _File, step: StepLine) -> None:
        self._entered[step.transfer].add((step.machine, step.target))
        if is_request_machine(step.machine):
            found = _CLIENT.search(step.peer)
            if found:
                client_id = found.group()
                self._transfer_of[client_id] = step.transfer
                self._request_ids[client_id, side_of(step.machine) or ""] = step.peer
        elif step.machine in LAYERWISE:
            if step.target == FREED:
                file.pushes.discard(step.transfer)
            else:
                file.pushes.add(step.transfer)


_steps = msgspec.json.Decoder(StepLine)
