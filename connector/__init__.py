"""Everything that touches the world: vLLM, sockets, the Mooncake engine, the router, the command line.

``DFirstConnector`` is looked up lazily, so that the command line starts without importing torch and vLLM.
"""

from typing import Any

__all__ = ["DFirstConnector"]


def __getattr__(name: str) -> Any:
    if name == "DFirstConnector":
        from .vllm_connector import DFirstConnector

        return DFirstConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
