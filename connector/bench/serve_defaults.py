"""What `bench serve` does unless told otherwise; the command line shows it without loading the rest."""

from ..engine_spec import Executor

ROUNDS = 5
EXECUTOR: Executor = "uni"
"""As vLLM runs one rank on an accelerator."""
