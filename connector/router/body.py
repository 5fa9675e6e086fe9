"""The client's body: what it must be, into how many transfers it splits, and what each engine gets of it.

The body stays the dictionary that the client sent. The router owns ``kv_transfer_params``, and of a prefill
engine's copy also the fields that say how much to generate and how to answer.
"""

import enum
from typing import Any

import msgspec

from .errors import BadRequest


class Kind(enum.Enum):
    """An API of OpenAI's: its path, and how the ids of its answers begin."""

    COMPLETION = ("/v1/completions", "cmpl-")
    CHAT = ("/v1/chat/completions", "chatcmpl-")

    @property
    def path(self) -> str:
        return self.value[0]

    @property
    def id_prefix(self) -> str:
        return self.value[1]


class Piece(msgspec.Struct, frozen=True):
    """What becomes one transfer: one sample of one prompt."""

    index: int
    """Of the choice in the client's answer."""
    prompt_index: int
    body: dict[str, Any]


class Work(msgspec.Struct, frozen=True):
    """A checked request."""

    kind: Kind
    pieces: tuple[Piece, ...]
    split: bool
    decode_only: bool
    """No transfer could give the right answer: one decode engine computes everything."""


def read_work(kind: Kind, content: bytes, max_pieces: int) -> Work:
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The error tells the place, not the text.
        raise BadRequest(f"the request body is no JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the request body must be a JSON object")
    refuse_what_cannot_work(body)
    if needs_one_engine(body):
        return Work(kind, (Piece(0, 0, body),), split=False, decode_only=True)
    pieces = split(kind, body, max_pieces)
    return Work(kind, pieces, split=len(pieces) > 1, decode_only=False)


def refuse_what_cannot_work(body: dict[str, Any]) -> None:
    """Each refusal is a sentence that says what and why."""
    samples = body.get("n")
    if samples is not None and not is_count(samples):
        raise BadRequest("n must be a whole number of at least 1", param="n")
    if not isinstance(body.get("stream"), bool | None):
        raise BadRequest("stream must be true or false", param="stream")
    best_of = body.get("best_of")
    if best_of is not None and best_of != (samples or 1):
        raise BadRequest(
            "best_of must equal n: each sample may run on another engine, and nothing ranks them",
            param="best_of",
        )
    embeds = body.get("prompt_embeds")
    if embeds is not None and (isinstance(embeds, list) or body.get("prompt") is not None):
        raise BadRequest(
            "prompt_embeds must be one prompt by itself: the engines decide how it is ordered among several, "
            "so the router cannot number the choices",
            param="prompt_embeds",
        )
    xargs = body.get("vllm_xargs")
    if isinstance(xargs, dict) and "kv_transfer_params" in xargs:
        raise BadRequest(
            "vllm_xargs may not name kv_transfer_params: the router alone says where KV moves",
            param="vllm_xargs",
        )


def needs_one_engine(body: dict[str, Any]) -> bool:
    """True for what comes out wrong if another engine computes the prompt.

    Prompt logprobs (asked for outright, or by ``echo`` with ``logprobs``) exist only where the prompt is
    computed. Beam search runs as requests of the engine's own making, without transfer parameters. A prompt
    cut to "what fits" (-1) may be cut elsewhere by an engine that is to generate one token only.
    """
    return (
        body.get("prompt_logprobs") is not None
        or (bool(body.get("echo")) and body.get("logprobs") is not None)
        or bool(body.get("use_beam_search"))
        or body.get("truncate_prompt_tokens") == -1
    )


def split(kind: Kind, body: dict[str, Any], max_pieces: int) -> tuple[Piece, ...]:
    """One piece for each sample of each prompt; a body that is one piece already stays as it is."""
    samples = body.get("n") or 1
    prompts = separate_prompts(body.get("prompt")) if kind is Kind.COMPLETION else None
    count = samples * (1 if prompts is None else len(prompts))
    if count > max_pieces:
        raise BadRequest(
            f"n times the number of prompts is {count}, this router takes at most {max_pieces}: send fewer",
            param="n",
        )
    if count == 1:
        return (Piece(0, 0, body),)
    if not isinstance(body.get("seed", 0), int | None):
        raise BadRequest(
            "seed must be a whole number: each sample gets its own, counted up from it", param="seed"
        )
    pieces = []
    for prompt_index, prompt in enumerate([None] if prompts is None else prompts):
        for sample in range(samples):
            own = {**body, "n": 1}
            own.pop("best_of", None)
            if prompts is not None:
                own["prompt"] = prompt
            if body.get("seed") is not None:
                # As the engine itself numbers the samples of one request.
                own["seed"] = body["seed"] + sample
            pieces.append(Piece(prompt_index * samples + sample, prompt_index, own))
    return tuple(pieces)


def separate_prompts(prompt: Any) -> list[Any] | None:
    """The prompts of a list of strings or of token lists; None where ``prompt`` is a single one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return None
    if len({type(each) for each in prompt}) > 1:
        raise BadRequest("prompt must hold strings only, or token lists only", param="prompt")
    return prompt


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def engine_body(body: dict[str, Any], params: msgspec.Struct | msgspec.Raw | None) -> bytes:
    """The client's body with the router's transfer parameters instead of any that the client wrote."""
    own = dict(body)
    own.pop("kv_transfer_params", None)
    if params is not None:
        own["kv_transfer_params"] = params
    return msgspec.json.encode(own)


def prefill_body(body: dict[str, Any], params: msgspec.Struct | msgspec.Raw) -> bytes:
    """The body by which an engine computes the prompt, one token and no more, and answers in one JSON."""
    short = {**body, "max_tokens": 1, "n": 1, "stream": False}
    short.pop("stream_options", None)
    short.pop("best_of", None)
    if "max_completion_tokens" in short:
        short["max_completion_tokens"] = 1
    if is_count(short.get("min_tokens")):
        short["min_tokens"] = 1
    return engine_body(short, params)
