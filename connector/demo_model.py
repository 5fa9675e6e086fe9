"""Small models with fixed random weights, for machines that can download none.

Three kinds: `gqa` (a Llama with 8 query heads on 4 KV heads), `mqa` (the same with a single KV head, so that
tensor-parallel ranks hold copies of it) and `mla` (a dense DeepSeek-V2 whose latent is 512 wide and rotary
part 64). They say nothing sensible. What counts: greedy output varies, repeats exactly in
float32, and depends on every token before it, so that a KV block that arrived wrong changes the answer. The
tokenizer maps each byte to one token, so a prompt of n ASCII characters has n tokens.

Weights, configuration and tokenizer are written with numpy, safetensors and tokenizers alone: no torch.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Kind = Literal["gqa", "mqa", "mla"]

# Raise it whenever what `make_model` writes changes: directories of an older version are then rewritten.
VERSION = 2
STAMP = "dfirst-model.json"

SEED = 20
# Standard deviations. At the usual 0.02 throughout, greedy output is constant; with these, 24 tokens hold
# about 20 different ones, and changing one character of a long prompt changes them. Wide embeddings keep the
# current token from drowning in what attention brings; wide queries make attention choose, not average.
WEIGHT_STD = 0.08
EMBEDDING_STD = 1.0
QUERY_STD = 0.32
# Rows of the output layer for tokens that do not print are shrunk by this, so that answers are readable.
UNPRINTABLE_SCALE = 0.1

BYTES = 256
BOS, EOS, PAD = BYTES, BYTES + 1, BYTES + 2
VOCABULARY = BYTES + 3
MAX_POSITIONS = 16384

Array = NDArray[np.float32]

_COMMON: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "gqa": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "mla": {
        **_COMMON,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": 3,
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        # Every layer is dense: the experts are named only because the configuration asks for a number.
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
    },
}

CONFIGS["mqa"] = {**CONFIGS["gqa"], "num_key_value_heads": 1}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(path: Path | str, kind: Kind) -> Path:
    """Writes the model of this kind to the directory `path` unless it is there; returns the directory."""
    if kind not in get_args(Kind):
        known = ", ".join(get_args(Kind))
        raise ValueError(f"there is no demo model of kind {kind!r}: choose one of {known}")
    directory = Path(path)
    stamp = directory / STAMP
    made = {"kind": kind, "version": VERSION}
    if _read_stamp(stamp) == made:
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    # The stamp goes first and comes last, so that an interrupted run is not taken for a whole one.
    stamp.unlink(missing_ok=True)
    _write_weights(directory, kind)
    _write_json(directory / "config.json", CONFIGS[kind])
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "do_sample": False},
    )
    _write_tokenizer(directory)
    _write_json(stamp, made)
    return directory


def _read_stamp(stamp: Path) -> Any:
    try:
        return json.loads(stamp.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError:
        # Half written by a run that was killed: as good as absent.
        return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(directory: Path, kind: Kind) -> None:
    from safetensors.numpy import save_file

    random = np.random.default_rng(SEED)
    config = CONFIGS[kind]
    shapes = dict(_tensor_shapes(kind, config))
    weights: dict[str, Array] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, np.float32)
        else:
            weights[name] = random.standard_normal(shape, np.float32) * np.float32(_std(name))
    _favour_printable(weights["lm_head.weight"])
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


def _std(name: str) -> float:
    if "embed_tokens" in name:
        return EMBEDDING_STD
    return QUERY_STD if "q_proj" in name else WEIGHT_STD


def _favour_printable(output_rows: Array) -> None:
    printable = [byte for byte in range(BYTES) if chr(byte).isascii() and chr(byte).isprintable()]
    others = np.setdiff1d(np.arange(VOCABULARY), printable)
    output_rows[others] *= np.float32(UNPRINTABLE_SCALE)


def _tensor_shapes(kind: Kind, config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names as the checkpoints of these two families have them, each with its shape (out, in)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield "model.embed_tokens.weight", (VOCABULARY, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        attention = _mla_attention(config) if kind == "mla" else _gqa_attention(config)
        for name, shape in attention:
            yield f"{prefix}self_attn.{name}.weight", shape
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (VOCABULARY, hidden)


def _gqa_attention(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return [
        ("q_proj", (queries, hidden)),
        ("k_proj", (keys, hidden)),
        ("v_proj", (keys, hidden)),
        ("o_proj", (hidden, queries)),
    ]


def _mla_attention(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    rope, plain, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    return [
        ("q_proj", (heads * (plain + rope), hidden)),
        ("kv_a_proj_with_mqa", (latent + rope, hidden)),
        ("kv_a_layernorm", (latent,)),
        ("kv_b_proj", (heads * (plain + value), latent)),
        ("o_proj", (hidden, heads * value)),
    ]


def _write_tokenizer(directory: Path) -> None:
    """One token a byte, in the byte's own order, then the three special tokens; no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _byte_alphabet()
    special = {"<bos>": BOS, "<eos>": EOS, "<pad>": PAD}
    vocabulary = {character: byte for byte, character in enumerate(alphabet)} | special
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _byte_alphabet() -> list[str]:
    """The character for each byte: itself where it prints, else the next free one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, free = [], 256
    for byte in range(BYTES):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(free))
            free += 1
    return alphabet
