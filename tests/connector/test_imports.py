"""What a rank is made of loads without vLLM, which takes ten seconds."""

import subprocess
import sys

from dfirst.connector.step import StepMetadata


def test_a_rank_loads_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, dfirst.connector.rank_loop\n"
        "sys.exit(', '.join({'vllm', 'torch'} & sys.modules.keys()) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_to_vllm_a_steps_metadata_is_a_connectors() -> None:
    # Here and not above: only this test needs vLLM.
    from dfirst.connector import vllm_connector

    assert isinstance(StepMetadata(), vllm_connector.KVConnectorMetadata)
