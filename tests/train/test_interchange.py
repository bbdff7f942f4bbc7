"""EAGLE-3 heads of other projects: they draft here what they draft there, and go back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from slipstream import SamplingParams
from slipstream.drafters.eagle3 import Eagle3Drafter
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head_drafter import frame_of, make_head, settings_of
from slipstream.drafters.interchange import import_drafter
from slipstream.drafters.interchange.foreign import Foreign, read_foreign, write_foreign
from slipstream.errors import CorruptFile, DraftMismatch, ModelNotFound, OptionError, ShapeMismatch, UnsupportedModel
from slipstream.models.view import TargetView
from slipstream.train.interchange.export import export_drafter, load_for
from tests.foreign_heads import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    TOKENS,
    WIDTH,
    eagle_weights,
    folder,
    layer_config,
    original_config,
    speculators_config,
    target_directory,
    target_llm,
    target_view,
)
from tests.heads import made_for, random_head
from tests.invoking import invoke
from tests.tiny import tiny_llm


def brought(place: Path) -> head_checkpoint.Trained:
    return import_drafter(read_foreign(place), target_view(), "tiny")


def taken(checkpoint: head_checkpoint.Trained) -> Foreign:
    return export_drafter(checkpoint, Path("head"), "speculators", target_view())


# -- the same drafts --------------------------------------------------------------------------------------------------


class Reference:
    """The draft step from its public description, one row after the other: no page, no batch, nothing of ours.

    `ids`: layers whose input is read. Our one addition: the first token has a row too, on a hidden state of zeros.
    """

    def __init__(self, weights: dict[str, torch.Tensor], layer: dict[str, Any], ids: list[int], **flags: bool) -> None:
        self.weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
        self.layer, self.ids, self.flags = layer, ids, flags
        self.target = LlamaForCausalLM.from_pretrained(target_directory(), dtype=torch.float32).eval()

    def logits(self, text: list[int], path: list[int]) -> torch.Tensor:
        """[draft tokens], after the last token of `path`, which is below the last token of `text`."""
        states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states  # [k]: what layer k reads
        tapped = torch.cat([states[i][0] for i in self.ids], -1)
        if self.flags.get("norm_before_fc"):
            tapped = self.norm(tapped, "input_norm")
        known = tapped @ self.weights["fc.weight"].T
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        hidden = torch.zeros(WIDTH)
        for position, token in enumerate(text + path):
            if 0 < position < len(text):
                hidden = known[position - 1]
            hidden = self.row(token, hidden, position)
        return self.norm(hidden, "norm") @ self.weights["lm_head.weight"].T

    def row(self, token: int, hidden: torch.Tensor, position: int) -> torch.Tensor:
        weights = {n.removeprefix("layers.0."): w for n, w in self.weights.items() if n.startswith("layers.0.")}
        residual, hidden = hidden, self.norm(hidden, "layers.0.hidden_norm")
        if self.flags.get("norm_before_residual"):
            residual = hidden
        embedded = self.norm(self.target.model.embed_tokens.weight[token], "layers.0.input_layernorm")
        inputs = torch.cat([embedded, hidden])
        q, k, v = (weights[f"self_attn.{p}_proj.weight"] @ inputs for p in "qkv")
        self.keys.append(self.turned(k.view(KV_HEADS, HEAD_DIM), position))
        self.values.append(v.view(KV_HEADS, HEAD_DIM))
        keys, values = (torch.stack(rows).repeat_interleave(HEADS // KV_HEADS, 1) for rows in (self.keys, self.values))
        q = self.turned(q.view(HEADS, HEAD_DIM), position)
        odds = torch.softmax(torch.einsum("hd,nhd->hn", q, keys) / HEAD_DIM**0.5, -1)
        mixed = torch.einsum("hn,nhd->hd", odds, values).flatten()
        hidden = residual + weights["self_attn.o_proj.weight"] @ mixed
        normed = self.norm(hidden, "layers.0.post_attention_layernorm")
        inner = functional.silu(weights["mlp.gate_proj.weight"] @ normed) * (weights["mlp.up_proj.weight"] @ normed)
        return hidden + weights["mlp.down_proj.weight"] @ inner

    def turned(self, x: torch.Tensor, position: int) -> torch.Tensor:
        angles = position * self.layer["rope_theta"] ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cosine, sine = angles.cos().repeat(2), angles.sin().repeat(2)
        first, second = x.chunk(2, -1)
        return x * cosine + torch.cat([-second, first], -1) * sine

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]


CASES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], list[int], dict[str, bool]]] = {
    "original": (original_config(), eagle_weights("midlayer."), [2, 3, 3], {}),
    "original, layers named": (
        original_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}),
        eagle_weights("midlayer."),
        [1, 3, 5],
        {},
    ),
    "speculators": (speculators_config(), eagle_weights(), [1, 4, 5], {"norm_before_residual": True}),
    "speculators, taps normed": (
        speculators_config(norm_before_residual=False, norm_before_fc=True),
        eagle_weights(norm_before_fc=True),
        [1, 4, 5],
        {"norm_before_fc": True},
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_an_imported_head_gives_every_node_the_logits_of_the_original(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights, ids, flags = CASES[case]
    head_checkpoint.save(tmp_path / "head", brought(folder(config, weights)))
    llm = target_llm(f"eagle3:checkpoint={tmp_path / 'head'},depth=4,nodes=12,branch=3")
    drafter = llm.drafter
    assert isinstance(drafter, Eagle3Drafter)
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []
    healthy = drafter._add_level

    def recording(growth: Any, logits: torch.Tensor, level: int) -> None:
        for node, row in zip(range(growth.fed - len(logits), growth.fed), logits, strict=True):
            seen.append((list(growth.sequence.tokens), growth.tree.path_tokens(node), row.clone()))
        healthy(growth, logits, level)

    monkeypatch.setattr(drafter, "_add_level", recording)
    llm.generate([[5, 9, 17, 3] * 34], SamplingParams(temperature=1.0, seed=4, max_tokens=12, ignore_eos=True))
    assert llm.engine.draft_faults == 0
    assert len(seen) > 30 and {len(path) for _, path, _ in seen} == {0, 1, 2, 3}
    reference = Reference(weights, layer_config(), ids, **flags)
    for text, path, row in seen[:: len(seen) // 12]:
        assert torch.allclose(row, reference.logits(text, path), atol=1e-4), (len(text), path)


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_speculators_to_ours_and_back_is_the_same_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    config = speculators_config(norm_before_fc=True)
    weights = eagle_weights(norm_before_fc=True, dtype=dtype)
    head_checkpoint.save(tmp_path / "ours", brought(folder(config, weights)))
    write_foreign(tmp_path / "theirs", taken(load_for("speculators", tmp_path / "ours")))
    back = read_foreign(tmp_path / "theirs")
    assert back.weights.keys() == weights.keys()
    for name, weight in weights.items():
        assert back.weights[name].dtype == weight.dtype and torch.equal(back.weights[name], weight), name
    layer = config["transformer_layer_config"]
    assert {name: back.config["transformer_layer_config"][name] for name in layer} == layer
    assert {name: back.config[name] for name in config.keys() - {"transformer_layer_config"}} == {
        name: value for name, value in config.items() if name != "transformer_layer_config"
    }


def test_the_original_layout_comes_back_as_speculators() -> None:
    weights = eagle_weights("midlayer.")
    foreign = taken(brought(folder(original_config(), weights, pickled="pytorch_model.bin")))
    for name, weight in weights.items():
        assert torch.equal(foreign.weights[name.replace("midlayer.", "layers.0.")], weight), name
    assert foreign.config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    assert foreign.config["norm_before_residual"] is False


def test_the_original_layout_goes_out_as_it_came_and_names_layers_for_sglang_and_for_vllm() -> None:
    weights = eagle_weights("midlayer.")
    ours = brought(folder(original_config(), weights))
    flat = export_drafter(ours, Path("head"), "sglang-eagle3", target_view())
    assert flat.weights.keys() == weights.keys()
    assert all(torch.equal(flat.weights[name], weight) for name, weight in weights.items())
    assert original_config().items() <= flat.config.items()
    # What layer k reads is counted as k by vLLM, and as k - 1, the layer that wrote it, by SGLang.
    assert flat.config["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    assert flat.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 2]
    alone = {name: value for name, value in flat.config.items() if name != "eagle_aux_hidden_state_layer_ids"}
    for config in (flat.config, alone):
        back = brought(folder(config, flat.weights))
        assert back.settings == ours.settings
        assert all(torch.equal(back.weights[name], weight) for name, weight in ours.weights.items())
    with pytest.raises(DraftMismatch, match="norm_before_residual"):
        normed = brought(folder(speculators_config(), eagle_weights()))
        export_drafter(normed, Path("head"), "sglang-eagle3", target_view())


def test_rows_in_another_order_are_sorted_with_their_tokens() -> None:
    weights = eagle_weights()
    vocab = weights["d2t"] + torch.arange(61)
    mixed = torch.randperm(61, generator=torch.Generator().manual_seed(1))
    shuffled = weights | {"d2t": vocab[mixed] - torch.arange(61), "lm_head.weight": weights["lm_head.weight"][mixed]}
    one, other = (brought(folder(speculators_config(), w)) for w in (weights, shuffled))
    assert torch.equal(one.vocab, other.vocab) and torch.equal(one.weights["rows"], other.weights["rows"])


def own_head(view: TargetView, made: head_checkpoint.Made) -> head_checkpoint.Trained:
    """A head of ours, which borrows the target's rows."""
    vocab = torch.arange(0, TOKENS, 2)
    settings = settings_of(Eagle3Drafter.settings_type(vocabulary=len(vocab), taps=(1, 3, 5)))
    torch.manual_seed(5)
    head = make_head(Eagle3Drafter, settings, frame_of(view, vocab))
    weights = {name: weight.detach() for name, weight in head.state_dict().items()}
    return head_checkpoint.Trained("eagle3", settings, made, vocab, weights)


def test_a_head_of_ours_drafts_the_same_after_a_journey(tmp_path: Path) -> None:
    view, made = made_for(target_llm())
    ours = own_head(view, made)
    foreign = taken(ours)
    assert torch.equal(foreign.weights["lm_head.weight"], view.head_rows(ours.vocab))
    write_foreign(tmp_path / "theirs", foreign)
    back = brought(tmp_path / "theirs")
    assert back.settings["own_rows"] and torch.equal(back.vocab, ours.vocab)
    for name, weight in ours.weights.items():
        assert torch.equal(back.weights[name], weight), name
    drafted = []
    for number, checkpoint in enumerate((ours, back)):
        head_checkpoint.save(tmp_path / str(number), checkpoint)
        llm = target_llm(f"eagle3:checkpoint={tmp_path / str(number)}")
        (output,) = llm.generate([[7, 8, 9]], SamplingParams(temperature=1.0, seed=2, max_tokens=40, ignore_eos=True))
        drafted.append((output.token_ids, output.stats.drafted, output.stats.accepted_by_depth))
    assert drafted[0] == drafted[1] and drafted[0][1] > 0


# -- what is refused --------------------------------------------------------------------------------------------------


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: weight for key, weight in eagle_weights().items() if key != name}


WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], type[Exception], str]] = {
    "missing": (speculators_config(), without("norm.weight"), CorruptFile, "lacks norm.weight"),
    "shape": (
        speculators_config(),
        eagle_weights() | {"lm_head.weight": torch.zeros(61, 32)},
        ShapeMismatch,
        r"lm_head.weight is \[61, 32\], but should be \[61, 64\]",
    ),
    "bias": (
        speculators_config(),
        eagle_weights() | {"layers.0.self_attn.q_proj.bias": torch.zeros(96)},
        UnsupportedModel,
        "has unknown weights: layers.0.self_attn.q_proj.bias",
    ),
    "vocabulary": (
        speculators_config(transformer_layer_config=layer_config(vocab_size=98)),
        eagle_weights(),
        DraftMismatch,
        "vocab_size 98, but this target has 97",
    ),
    "width": (original_config(hidden_size=128), eagle_weights(), DraftMismatch, "hidden_size 128"),
    "tokens": (
        speculators_config(),
        eagle_weights() | {"d2t": torch.full((61,), 90)},
        DraftMismatch,
        "outside the target's 97",
    ),
    "mask": (speculators_config(), eagle_weights() | {"t2d": torch.ones(97) > 0}, CorruptFile, "d2t and t2d"),
    "twice": (speculators_config(), eagle_weights() | {"d2t": -torch.arange(61)}, CorruptFile, "a token twice"),
    "count": (speculators_config(draft_vocab_size=60), eagle_weights(), CorruptFile, "draft_vocab_size 60"),
    "activation": (original_config(hidden_act="gelu"), eagle_weights(), UnsupportedModel, "hidden_act = 'gelu'"),
    "layers": (original_config(num_hidden_layers=2), eagle_weights(), UnsupportedModel, "num_hidden_layers = 2"),
    "output": (speculators_config(norm_output=True), eagle_weights(), UnsupportedModel, "norm_output = True"),
    "rotation": (
        original_config(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        eagle_weights(),
        UnsupportedModel,
        "scales RoPE differently",
    ),
    "yarn": (original_config(rope_scaling={"rope_type": "yarn"}), eagle_weights(), UnsupportedModel, "'yarn'"),
    "taps": (
        speculators_config(eagle_aux_hidden_state_layer_ids=[2, 20, 37]),
        eagle_weights(),
        DraftMismatch,
        r"reads layers \[2, 20, 37\] of its target, but this one has 6",
    ),
    "embeddings": (
        speculators_config(),
        eagle_weights() | {"embed_tokens.weight": torch.ones(97, 64)},
        UnsupportedModel,
        "has embeddings that differ",
    ),
    "types": (
        speculators_config(),
        eagle_weights() | {"norm.weight": torch.ones(64, dtype=torch.bfloat16)},
        UnsupportedModel,
        "bfloat16 and float32",
    ),
    "config": ({}, eagle_weights(), CorruptFile, "config.json lacks vocab_size"),
    "stranger": ({}, {"encoder.weight": torch.zeros(2)}, UnsupportedModel, "first weight is 'encoder.weight'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_held_is_refused_by_name(what: str) -> None:
    config, weights, kind, message = WRONG[what]
    with pytest.raises(kind, match=message) as caught:
        brought(folder(config, weights))
    assert "\n" not in str(caught.value)


def test_embeddings_that_are_the_targets_are_not_needed_twice() -> None:
    embedding = target_view().embed(torch.arange(TOKENS)).clone()
    place = folder(speculators_config(), eagle_weights() | {"embed_tokens.weight": embedding})
    assert not any("embed_tokens" in name for name in brought(place).weights)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="not a directory"):
        read_foreign(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match="holds no weights"):
        read_foreign(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(CorruptFile, match=r"pytorch_model\.bin cannot be read"):
        read_foreign(tmp_path)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(CorruptFile, match="does not hold named tensors"):
        read_foreign(tmp_path)
    place = folder({}, eagle_weights())
    (place / "config.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"config\.json cannot be read"):
        read_foreign(place)


def test_a_head_that_others_cannot_hold_is_not_exported() -> None:
    llm = tiny_llm(context=300, characters=True)  # two layers: three different ones cannot be read
    place = random_head("eagle3")
    checkpoint = load_for("speculators", place)
    with pytest.raises(DraftMismatch, match="reads 2 layers"):
        export_drafter(checkpoint, place, "speculators", llm.target)
    with pytest.raises(OptionError, match="this target is another"):
        export_drafter(checkpoint, place, "speculators", target_view())
    with pytest.raises(OptionError, match=r"unknown format 'gguf'.*speculators"):
        load_for("gguf", place)
    with pytest.raises(OptionError, match="of kind 'eagle3', but vllm-medusa is for 'medusa'"):
        load_for("vllm-medusa", place)


# -- the command line -------------------------------------------------------------------------------------------------


def test_import_and_export_from_the_command_line(tmp_path: Path) -> None:
    source, model = folder(speculators_config(), eagle_weights()), str(target_directory())
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    done = invoke("import", str(source), "-o", ours, "-m", model)
    assert done.exit_code == 0 and "eagle3, 61 draft tokens" in done.stdout, done.output
    assert json.loads((tmp_path / "ours" / "drafter.json").read_text())["provenance"]["imported"] == source.name
    done = invoke("export", ours, "--format", "speculators", "-o", theirs, "-m", model)
    assert done.exit_code == 0 and "eagle3 as speculators, 15 weights" in done.stdout, done.output
    done = invoke("run", "-m", model, "--speculate", f"eagle3:checkpoint={ours}", "--max-tokens", "8", "hello")
    assert done.exit_code == 0, done.output
    for line, message in (
        (["export", ours, "--format", "speculators", "-o", theirs, "-m", model], "exists"),
        (["export", ours, "--format", "onnx", "-o", f"{theirs}2", "-m", model], "unknown format 'onnx'"),
        (["import", f"{theirs}3", "-o", f"{ours}2", "-m", model], "is not a directory"),
    ):
        done = invoke(*line)
        assert done.exit_code == 2 and message in done.stderr, done.output
