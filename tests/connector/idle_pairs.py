"""What two pairs of ranks cost while nothing happens, measured in a process that holds nothing else.

One pair copies directly, the other stages. `python -m tests.connector.idle_pairs` prints the share of a core.
"""

import resource
import time

from dfirst.protocol.timing import Timing

from .ranks import start_rank

SETTLE_SECONDS, IDLE_SECONDS = 0.5, 3.0


def cpu_seconds() -> float:
    """Of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    ranks = [
        start_rank(f"{name} {staged}", Timing(), staged=staged)
        for name in ("P", "D")
        for staged in (False, True)
    ]
    time.sleep(SETTLE_SECONDS)
    before = cpu_seconds()
    time.sleep(IDLE_SECONDS)
    print((cpu_seconds() - before) / IDLE_SECONDS)
    for rank in ranks:
        rank.stop()


if __name__ == "__main__":
    main()
