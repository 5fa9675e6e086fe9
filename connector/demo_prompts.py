"""The prompts of the demo, each made for one way in which a hand-over can go wrong.

They come in rounds: what is in one round is sent at once, and the next round waits for it. Every prompt
begins with its mode and name, and differs from all others in its first block, so that no KV cache of an
earlier one answers where a transfer is wanted; only the two that share a prefix share it. In the demo's
models a character is a token.
"""

import random

import msgspec

from .engine_spec import Mode

OUTPUT_TOKENS = 24
AT_ONCE = 8
# The second of the two that share a prefix; the report checks that the prefix was not moved again.
SHARED_FIRST, SHARED_SECOND = "shared prefix, first", "shared prefix, second"

WORDS = (
    *("lease", "block", "query", "prompt", "decode", "prefill", "copy", "layer", "head", "token", "mover"),
    *("owner", "leg", "rank", "shard", "answer", "step", "table", "cache", "router", "engine", "border"),
    *("winter", "river", "copper", "signal", "harbour", "lantern", "meadow", "orbit", "pencil", "quartz"),
)


class DemoRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, in no particular HTTP form yet."""

    mode: Mode
    name: str
    prompt: str
    chat: bool = False
    stream: bool = False
    output_tokens: int = OUTPUT_TOKENS


Round = tuple[DemoRequest, ...]


def demo_rounds(mode: Mode, block_tokens: int, chunk_tokens: int) -> list[Round]:
    """All requests of one mode, for engines with these block and prefill chunk sizes."""

    def alone(name: str, tokens: int, *, stream: bool = False, chat: bool = False) -> Round:
        prompt = text(f"{mode} {name}", tokens)
        return (DemoRequest(mode=mode, name=name, prompt=prompt, stream=stream, chat=chat),)

    prefix = text(f"{mode} shared prefix", 10 * block_tokens)
    shared = [
        (DemoRequest(mode=mode, name=name, prompt=prefix + text(f" {end}", tokens)),)
        for name, end, tokens in (
            (SHARED_FIRST, "first end", block_tokens + 5),
            (SHARED_SECOND, "second end", block_tokens + 9),
        )
    ]
    at_once = tuple(
        DemoRequest(mode=mode, name=name, prompt=text(f"{mode} {name}", number * block_tokens + 3 * number))
        for number, name in ((number, f"{number} of {AT_ONCE} at once") for number in range(1, AT_ONCE + 1))
    )
    return [
        alone("shorter than a block", block_tokens - 5),
        alone("whole blocks", 4 * block_tokens),
        alone("ends inside a block", 4 * block_tokens + block_tokens // 2 - 1),
        alone("several chunks", 3 * chunk_tokens + 37),
        *shared,
        at_once,
        alone("streaming", 3 * block_tokens + 7, stream=True),
        alone("chat", 2 * block_tokens + 1, chat=True),
    ]


def text(title: str, characters: int) -> str:
    """Words that follow from the title alone, as many characters as asked for, the title first."""
    random_words = random.Random(title)
    words = f"{title}:"
    while len(words) < characters:
        words += f" {random_words.choice(WORDS)}"
    return words[:characters]
