"""A report of chaos that found nothing, to be changed where a test needs it."""

from dfirst.connector.chaos.accounts import BlocksHeld, ChaosReport

CLEAN = ChaosReport(
    seed=3,
    minutes=2.0,
    requests=40,
    modes={"layerwise": 40},
    verdicts={"right": 40},
    faults=12,
    faults_by_kind={"message lost": 12},
    never_injected=["copy stalls"],
    wrong_answers=0,
    without_answer=0,
    unexcused_errors=0,
    excused_errors=0,
    blocks_held=[BlocksHeld(engine="prefill", blocks=0, seconds=0.2)],
    traces="4 files",
    traces_refused=0,
    transfers_unfinished=0,
    errors_logged=0,
    findings=[],
)
