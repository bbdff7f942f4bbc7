"""GGUF files: the numbers that the reference package reads, or one line that says why not."""

from __future__ import annotations

import contextlib
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import CorruptFile, ModelError, ShapeMismatch, SlipstreamError, UnsupportedModel
from slipstream.models.config import LinearScaling
from slipstream.models.formats import gguf_blocks
from slipstream.models.formats.gguf_file import GGUFCheckpoint
from slipstream.models.formats.gguf_metadata import read_head
from slipstream.models.formats.resolve import open_checkpoint
from slipstream.models.shapes import weight_names
from tests.checkpoints import refused
from tests.gguf_files import (
    HEAD_DIM,
    MIDDLE,
    VOCABULARY,
    WIDTH,
    Q,
    Writer,
    add_attention,
    assert_same_numbers,
    write_dense,
)

KINDS = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_gguf_llama_in_every_common_format(kind: Q, tmp_path: Path) -> None:
    file = write_dense(tmp_path / "tiny.gguf", kind=kind, **{"rope.dimension_count": HEAD_DIM, "vocab_size": 32})
    checkpoint = open_checkpoint(file.close())
    config = checkpoint.config
    assert (config.family, config.head_dim, config.context, config.rope_theta) == ("llama", HEAD_DIM, 128, 5e5)
    assert not config.tied_head
    plain = {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}
    assert checkpoint.weight("layers.0.q").dtype == plain.get(kind, torch.float32)
    assert checkpoint.tokenizer() is None
    assert_same_numbers(checkpoint, file.expected)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is resident")
def test_what_was_read_of_a_gguf_takes_no_memory(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "read.gguf", kind=Q.F32).close()
    checkpoint = open_checkpoint(path)
    again = [torch.equal(checkpoint.weight(name), checkpoint.weight(name)) for name in ("embed", "layers.0.down")]
    assert all(again)
    for name in weight_names(checkpoint.config):
        checkpoint.weight(name)
    of_file = Path("/proc/self/smaps").read_text().partition(str(path))[2]
    resident = next(line for line in of_file.splitlines() if line.startswith("Rss:"))
    assert int(resident.split()[1]) * 1024 < path.stat().st_size // 2


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_gguf_biases_and_norms(architecture: str, tmp_path: Path) -> None:
    qwen3 = architecture == "qwen3"
    keys = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.bos_token_id": 1}
    file = write_dense(
        tmp_path / "x.gguf", bias=not qwen3, norms=qwen3, head=False, architecture=architecture, kind=Q.Q8_0, **keys
    )
    config = open_checkpoint(file.close()).config
    assert (config.family, config.qkv_bias, config.qk_norm, config.tied_head) == (architecture, not qwen3, qwen3, True)
    assert (config.bos_id, config.eos_ids, config.vocab_size) == (1, (3, 5), VOCABULARY)
    assert_same_numbers(GGUFCheckpoint(file.path), file.expected)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "alone"])
def test_gguf_experts(stacked: bool, tmp_path: Path) -> None:
    file = Writer(tmp_path / "moe.gguf", kind=Q.Q4_0, expert_count=2, expert_used_count=1)
    file.add("token_embd.weight", "embed", VOCABULARY, WIDTH)
    add_attention(file)
    file.add("blk.0.ffn_gate_inp.weight", "layers.0.router", 2, WIDTH)
    for part, shape in (("gate", (MIDDLE, WIDTH)), ("up", (MIDDLE, WIDTH)), ("down", (WIDTH, MIDDLE))):
        if stacked:
            file.add(f"blk.0.ffn_{part}_exps.weight", part, 2, *shape)
            whole = file.expected.pop(part)
            file.expected |= {f"layers.0.experts.{expert}.{part}": whole[expert] for expert in (0, 1)}
        else:
            for expert in (0, 1):
                file.add(f"blk.0.ffn_{part}.{expert}.weight", f"layers.0.experts.{expert}.{part}", *shape)
    file.add("output_norm.weight", "norm", WIDTH)
    checkpoint = GGUFCheckpoint(file.close())
    assert (checkpoint.config.family, checkpoint.config.experts, checkpoint.config.experts_per_token) == (
        "mixtral",
        2,
        1,
    )
    assert_same_numbers(checkpoint, file.expected)


def test_gguf_rope(tmp_path: Path) -> None:
    file = write_dense(tmp_path / "a.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert GGUFCheckpoint(file.close()).config.rope_scaling == LinearScaling(4.0)
    file = write_dense(tmp_path / "b.gguf")
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    file.writer.add_tensor("rope_freqs.weight", factors)
    config = GGUFCheckpoint(file.close()).config
    assert (config.rope_scaling, config.rope_factors) == (None, tuple(factors.tolist()))
    file = write_dense(tmp_path / "c.gguf")
    file.writer.add_tensor("rope_freqs.weight", factors[:-1])
    with refused(ShapeMismatch, "rope_freqs.weight", "(31,)", "(32,)"):
        GGUFCheckpoint(file.close())
    file = write_dense(tmp_path / "d.gguf", **{"attention.sliding_window": 16})
    assert GGUFCheckpoint(file.close()).config.windows == (16,)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.dimension_count": 32}, "rope.dimension_count"),
        ({"attention.value_length": 32}, "attention.value_length"),
        ({"attention.head_count": [4, 8]}, "attention.head_count"),
        ({"attention.causal": False}, "attention.causal"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"expert_shared_count": 1}, "expert_shared_count"),
        ({"split.count": 3}, "3 pieces"),
        ({"architecture": "mamba"}, "mamba"),
    ],
    ids=str,
)
def test_gguf_options_we_do_not_compute_are_refused(metadata: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf", **metadata).close()
    with refused(UnsupportedModel, str(path), word):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "word"),
    [
        ({"context_length": None}, "llama.context_length"),
        ({"block_count": 2_000_000_000}, "llama.block_count"),
        ({"embedding_length": "wide"}, "wide"),
        ({"attention.head_count_kv": 3}, "3 KV heads"),
        ({"rope.freq_base": float("nan")}, "rope.freq_base"),
        ({"block_count": 2}, "blk.1.attn_norm.weight"),
    ],
    ids=str,
)
def test_a_gguf_that_makes_no_sense(metadata: dict[str, Any], word: str, tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf", **metadata).close()
    with refused(CorruptFile, str(path), word):
        open_checkpoint(path)


def test_gguf_tensors_that_do_not_fit(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "a.gguf", feed_forward_length=500).close()
    with refused(ShapeMismatch, "blk.0.ffn_gate.weight", "(512, 256)", "(500, 256)"):
        open_checkpoint(path)
    file = write_dense(tmp_path / "b.gguf")
    file.add("blk.0.attn_output.bias", None, WIDTH)
    with refused(UnsupportedModel, "blk.0.attn_output.bias"):
        open_checkpoint(file.close())


@pytest.mark.parametrize(("kind", "word"), [(24, "I8"), (99, "99"), (9, "Q8_1")])
def test_a_gguf_quantisation_that_is_not_supported(kind: int, word: str, tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf").close()
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", raw, at) == (Q.F32,)
    struct.pack_into("<I", raw, at, kind)
    path.write_bytes(raw)
    with refused(UnsupportedModel, "blk.0.ffn_up.weight", word):
        open_checkpoint(path)


def test_a_gguf_that_needs_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_dense(tmp_path / "x.gguf", kind=Q.Q3_K).close()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with refused(UnsupportedModel, "gguf package", "pip install 'slipstream[gguf]'"):
        open_checkpoint(path)


def test_damaged_gguf_files(tmp_path: Path) -> None:
    path = write_dense(tmp_path / "x.gguf", kind=Q.Q8_0).close()
    whole = path.read_bytes()
    for size in (4, 10, 24, 60, 500, 1500, 5000, len(whole) - 1000):
        path.write_bytes(whole[:size])
        with refused(CorruptFile, str(path), "truncated"):
            open_checkpoint(path)
    path.write_bytes(b"a note\n")
    with refused(CorruptFile, str(path), "not a GGUF file"):
        open_checkpoint(path)
    path.write_bytes(b"")
    with refused(CorruptFile, str(path), "not a GGUF file"):
        open_checkpoint(path)
    for version in (struct.pack(">I", 3), struct.pack("<I", 1)):
        path.write_bytes(whole[:4] + version + whole[8:])
        with refused(UnsupportedModel, str(path)):
            open_checkpoint(path)


def test_a_gguf_that_is_cut_short_anywhere(small_gguf: Path, tmp_path: Path) -> None:
    whole, path = small_gguf.read_bytes(), tmp_path / "cut.gguf"
    head = read_head(small_gguf)
    last = min(tensor.start for tensor in head.tensors.values())
    for length in [*range(0, last, 3), *range(last, len(whole) - 32, 997)]:
        path.write_bytes(whole[:length])
        with pytest.raises(SlipstreamError) as caught:
            GGUFCheckpoint(path)
        assert str(path) in caught.value.message and "\n" not in caught.value.message
        assert "unpack" not in caught.value.message, length


def test_head_of_a_gguf_equals_the_reference_reader(small_gguf: Path) -> None:
    head, reader = read_head(small_gguf), gguf.GGUFReader(small_gguf)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert head.metadata == theirs
    assert head.metadata["tokenizer.ggml.tokens"] == ["a", "é", ""]
    for tensor in reader.tensors:
        info = head.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.kind, info.start) == (tensor.tensor_type, tensor.data_offset)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_garbled_gguf_never_surprises(small_gguf: Path, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(small_gguf.read_bytes())
    start = data.draw(st.integers(4, 2000))
    junk = data.draw(st.binary(min_size=1, max_size=8))
    raw[start : start + len(junk)] = junk
    path = tmp_path / "junk.gguf"
    path.write_bytes(raw[: data.draw(st.integers(0, 40_000))] if data.draw(st.booleans()) else raw)
    with contextlib.suppress(ModelError):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", gguf.quants._type_traits, ids=lambda kind: kind.name)
def test_decoding_any_bytes_equals_the_reference(kind: Q) -> None:
    form = gguf_blocks.block_format(kind, "x")
    assert (form.weights, form.size) == gguf.GGML_QUANT_SIZES[kind]
    weights = max(256, form.weights)
    rows = np.random.default_rng(kind).integers(0, 256, (3, weights // form.weights * form.size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, kind)
        found = gguf_blocks.decode(rows.reshape(-1), form, (3, weights))
    assert np.array_equal(found.float().numpy(), expected, equal_nan=True)
