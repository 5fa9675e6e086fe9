"""The two ways to move a cache, and who plays which part in each."""

from typing import Final

BLOCKWISE: Final = "blockwise"
"""The decode side reads when the prompt is computed: it is the mover, the prefill side the owner."""
LAYERWISE: Final = "layerwise"
"""The prefill side writes each layer as it is computed: it is the mover, the decode side the owner."""
MODES: Final = (BLOCKWISE, LAYERWISE)

OWNER: Final = "owner"
MOVER: Final = "mover"
