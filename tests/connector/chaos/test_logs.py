"""What engines and the router log as an error of this package is found, and nothing else."""

from pathlib import Path

from dfirst.connector.chaos.logs import errors_logged

OTHERS = """\
(APIServer pid=1) ERROR 11-30 00:27:04 [async_llm.py:906] AsyncLLM output_handler failed.
(Worker pid=2) WARNING 11-30 00:27:04 [rank_loop.py:342] t: failed: it was refused
2026-11-30 01:24:20,144 WARNING dfirst.connector.router.flows: transfer t: prefill failed
2026-11-30 01:24:20,144 ERROR uvicorn.error: what
"""
OURS = """\
(Worker_TP0 pid=2) ERROR 11-30 00:27:04 [rank_loop.py:170] the control thread goes on after an error
"""
ROUTERS = """\
2026-11-30 01:24:20,144 ERROR dfirst.connector.router.relay: transfer t: the router failed
"""


def test_only_errors_of_this_package_are_found(tmp_path: Path) -> None:
    (tmp_path / "decode.log").write_text(OTHERS + OURS)
    (tmp_path / "router.log").write_text(OTHERS + ROUTERS)
    assert errors_logged(tmp_path) == [
        "decode.log: the control thread goes on after an error",
        "router.log: transfer t: the router failed",
    ]
