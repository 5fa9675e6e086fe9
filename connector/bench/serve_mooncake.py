"""vLLM's own ``MooncakeConnector`` on a CPU, to be measured beside dfirst. Named to vLLM by its module path.

The connector asks ``torch.accelerator`` which device it is on and tells the platform to use it. A host
without an accelerator has neither answer; nothing else in it needs one.
"""

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig


class MooncakeConnectorOnCpu(MooncakeConnector):
    """The same connector; in this process "the current device" is number 0 and choosing it does nothing."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if current_platform.is_cpu():
            torch.accelerator.current_device_index = lambda: 0
            type(current_platform).set_device = classmethod(lambda platform, device: None)
        super().__init__(vllm_config, role, kv_cache_config)
