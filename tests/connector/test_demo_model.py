"""The demo models: the same bytes on every run, in a form that vLLM's loaders take."""

import json
from pathlib import Path

import pytest
from dfirst.connector.demo_model import BYTES, EOS, STAMP, VOCABULARY, Kind, make_model
from dfirst.connector.engine_spec import block_tokens, uses_mla

KINDS: tuple[Kind, ...] = ("gqa", "mqa", "mla")


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_write_the_same_weights(kind: Kind, tmp_path: Path) -> None:
    first = make_model(tmp_path / "one", kind) / "model.safetensors"
    second = make_model(tmp_path / "two", kind) / "model.safetensors"
    assert first.read_bytes() == second.read_bytes()


def test_a_model_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    weights = make_model(tmp_path, "gqa") / "model.safetensors"
    written = weights.stat().st_mtime_ns
    make_model(tmp_path, "gqa")
    assert weights.stat().st_mtime_ns == written


@pytest.mark.parametrize("stamp", ['{"kind": "gqa", "version": 0}', '{"kind": "mla"', "null"])
def test_an_old_or_broken_stamp_means_writing_again(tmp_path: Path, stamp: str) -> None:
    weights = make_model(tmp_path, "gqa") / "model.safetensors"
    weights.write_bytes(b"half a file")
    (tmp_path / STAMP).write_text(stamp)
    make_model(tmp_path, "gqa")
    assert weights.stat().st_size > 1_000_000


def test_another_kind_in_the_same_directory_replaces_the_first(tmp_path: Path) -> None:
    assert not uses_mla(str(make_model(tmp_path, "gqa")))
    assert uses_mla(str(make_model(tmp_path, "mla")))


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no demo model of kind 'moe': choose one of gqa, mqa, mla"):
        make_model(tmp_path, "moe")  # type: ignore[arg-type]


def test_configurations_are_what_the_transfers_are_tested_with(tmp_path: Path) -> None:
    gqa = json.loads((make_model(tmp_path / "gqa", "gqa") / "config.json").read_text())
    mla = json.loads((make_model(tmp_path / "mla", "mla") / "config.json").read_text())
    assert (gqa["num_attention_heads"], gqa["num_key_value_heads"]) == (8, 4)
    assert (mla["kv_lora_rank"], mla["qk_rope_head_dim"]) == (512, 64)
    assert mla["first_k_dense_replace"] == mla["num_hidden_layers"]
    assert gqa["max_position_embeddings"] >= 8192
    assert (block_tokens(str(tmp_path / "gqa")), block_tokens(str(tmp_path / "mla"))) == (32, 16)


def test_a_byte_is_a_token_and_comes_back_as_itself(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(make_model(tmp_path, "gqa") / "tokenizer.json"))
    sentence = "Two  words,\nand an é."
    ids = tokenizer.encode(sentence).ids
    assert ids == list(sentence.encode())
    assert tokenizer.decode(ids) == sentence
    assert tokenizer.get_vocab_size() == VOCABULARY == BYTES + 3
    assert tokenizer.token_to_id("<eos>") == EOS
