"""How a command ends where vLLM is missing; any other ending is the programs' of the spec too."""

from dfirst.spec.endings import fail

__all__ = ["fail", "need_vllm"]


def need_vllm() -> None:
    """End the command where vLLM is not installed."""
    from .host import vllm_is_installed

    if not vllm_is_installed():
        fail("vLLM is not installed here; install dfirst with the extra for this host: cpu, cuda or ascend")
