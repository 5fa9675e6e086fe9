"""Makes the connector known to vLLM by its name: the ``vllm.general_plugins`` entry point."""

NAME = "DFirstConnector"


def register() -> None:
    """Register the connector; vLLM calls this once in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "dfirst.connector.vllm_connector", NAME)
