"""The classes of the core that the machines of the spec move."""

from typing import Any

from dfirst.protocol.decode_blockwise import DecodeBlockwise
from dfirst.protocol.decode_layerwise import DecodeLayerwise
from dfirst.protocol.mover_leg import MoverLeg
from dfirst.protocol.owner_leg import OwnerLeg
from dfirst.protocol.prefill_blockwise import PrefillBlockwise
from dfirst.protocol.prefill_layerwise import PrefillLayerwise
from dfirst.protocol.scheduler import DecodeRequest, PrefillRequest

MODELS: dict[str, Any] = {
    "decode_blockwise": DecodeBlockwise,
    "prefill_blockwise": PrefillBlockwise,
    "decode_layerwise": DecodeLayerwise,
    "prefill_layerwise": PrefillLayerwise,
    "mover_leg": MoverLeg,
    "owner_leg": OwnerLeg,
    "decode_request": DecodeRequest,
    "prefill_request": PrefillRequest,
}
"""By the name of the machine, in the order in which the machines are best read."""
