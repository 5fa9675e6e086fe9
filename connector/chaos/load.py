"""What the clients of a run ask: prompts from a small pool, so that one engine can answer them all once.

The same prompt asked again would be found in both engines' caches, and nothing would move: a salt tells the
caches that it is another one. Prompts with a common beginning share their salt for a while.
"""

import random

import msgspec

from ..demo_prompts import DemoRequest, text
from ..engine_spec import Mode
from .plan import MODES

MIXED, SHARED, LONG_ANSWERS = 20, 12, 8
SHARED_PREFIXES = 3
MOST_PROMPT_TOKENS = 900
LONG_PROMPT_TOKENS = 400
"""From here on, a prompt takes several of P's chunks, and long enough for something to happen to it."""
LONG_ANSWER_TOKENS = 72
SALT_LASTS = 12
"""Requests for which prompts with a common beginning find it cached."""


class Question(msgspec.Struct, frozen=True):
    """One request of a run."""

    number: int
    mode: Mode
    prompt: int
    """Its place in the pool."""
    stream: bool
    salt: str

    @property
    def client_id(self) -> str:
        """Sent as X-Request-Id, and so in the engines' names for the request."""
        return f"chaos-{self.number}"


class Pool:
    """All prompts of a run."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"pool {seed}")
        self.prompts: list[DemoRequest] = []
        for number in range(MIXED):
            tokens = round(3 * (MOST_PROMPT_TOKENS / 3) ** chance.random())
            self._add(f"{number} of {seed}", "", tokens, chance.randint(1, 24))
        for number in range(SHARED):
            which = number % SHARED_PREFIXES
            prefix = text(f"prefix {which} of {seed}", 32 * chance.randint(1, 6) + chance.randint(0, 31))
            self._add(f"{number} shares {which} of {seed}", prefix, chance.randint(8, 120), 12)
        for number in range(LONG_ANSWERS):
            self._add(f"{number} long of {seed}", "", chance.randint(90, 190), LONG_ANSWER_TOKENS)
        self.long = [
            number for number, one in enumerate(self.prompts) if len(one.prompt) >= LONG_PROMPT_TOKENS
        ]
        """Places of long prompts; never none."""
        if not self.long:
            self._add(f"long of {seed}", "", MOST_PROMPT_TOKENS, 16)
            self.long = [len(self.prompts) - 1]

    @property
    def long_answers(self) -> range:
        """Places of the prompts whose answers fill a cache."""
        return range(MIXED + SHARED, MIXED + SHARED + LONG_ANSWERS)

    def _add(self, title: str, prefix: str, tokens: int, output_tokens: int) -> None:
        self.prompts.append(
            DemoRequest(
                mode="blockwise",
                name=title,
                prompt=prefix + text(title, tokens),
                output_tokens=output_tokens,
            )
        )


def question(
    pool: Pool,
    seed: int,
    number: int,
    *,
    mode: Mode | None = None,
    long: bool = False,
    crowd: bool = False,
) -> Question:
    """Return the request with this number; a mode, a long prompt or a long answer may be asked for."""
    chance = random.Random(f"question {seed} {number}")
    drawn = chance.choice(MODES), chance.randrange(len(pool.prompts)), chance.random() < 0.4
    prompt = drawn[1]
    if long:
        prompt = chance.choice(pool.long)
    elif crowd:
        prompt = chance.choice(pool.long_answers)
    shares = MIXED <= prompt < MIXED + SHARED
    salt = f"shared {seed} {number // SALT_LASTS}" if shares else f"own {seed} {number}"
    return Question(number, mode or drawn[0], prompt, drawn[2], salt)
