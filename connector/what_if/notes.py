"""Where running engines would differ from what was asked: said beside the plan, never instead of it."""

from collections.abc import Iterator

from dfirst.protocol.parallel import CONVENTION_A

from .question import Question


def notes(question: Question, *, convention_given: bool) -> Iterator[str]:
    """Yield sentences; ``convention_given`` is whether the user chose it."""
    sides = {"prefill": question.prefill, "decode": question.decode}
    splits = any(side.sizes.cp_size > 1 or side.sizes.pcp > 1 for side in sides.values())
    if splits and not convention_given and question.prefill.sizes.convention == CONVENTION_A:
        yield (
            "engines of vLLM 0.30 and later share the tokens out by convention b: give --convention b for "
            "them, and as --interleave their --cp-kv-cache-interleave-size"
        )
    for name, side in sides.items():
        sizes = side.sizes
        if sizes.pcp > 1 and sizes.dcp == 1:
            yield (
                f"an engine refuses PCP {sizes.pcp} without DCP at its start: give dcp={sizes.pcp} in "
                f"--{name} as well"
            )
