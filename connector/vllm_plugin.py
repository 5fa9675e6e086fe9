"""Makes the connector known to vLLM by its name: the ``vllm.general_plugins`` entry point."""

import logging

NAME = "DFirstConnector"


def register() -> None:
    """Register the connector; vLLM calls this once in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    log_as_vllm_does()
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "dfirst.connector.vllm_connector", NAME)


def log_as_vllm_does() -> None:
    """Show what dfirst logs where vLLM's own lines go, in the same form: vLLM sets up only its own logger.

    A logger that the user has set up (``VLLM_LOGGING_CONFIG_PATH``) stays as it is.
    """
    ours, theirs = logging.getLogger("dfirst"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
