"""An OpenAI-compatible router for prefill and decode engines.

``create_app`` builds it, ``run_router`` serves it; ``RouterSettings`` holds everything that can be set.
How a request travels: ``endpoint`` reads it, ``body`` checks and splits it, ``flows`` brings each piece
through its engines, ``relay`` and ``merge`` write the answer.
"""

from .cancel import NullCanceller, RankAddress, TransferCanceller
from .server import create_app, run_router
from .settings import Mode, RouterSettings

__all__ = [
    "Mode",
    "NullCanceller",
    "RankAddress",
    "RouterSettings",
    "TransferCanceller",
    "create_app",
    "run_router",
]
