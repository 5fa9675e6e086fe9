"""A process with registered memory that tests stop and kill. It prints its data and memory addresses."""

import sys

import numpy as np
from dfirst.connector.mooncake_engine import MooncakeEngine

size = int(sys.argv[1])
memory = np.full(size, 7, dtype=np.uint8)
engine = MooncakeEngine("127.0.0.1", "tcp", copy_timeout_seconds=5)
engine.register([(memory.ctypes.data, size)])
print(engine.data_address, memory.ctypes.data, flush=True)
sys.stdin.read()
