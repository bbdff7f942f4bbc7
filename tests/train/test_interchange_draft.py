"""A distilled draft as a standalone model: the same output as the draft, in transformers and in our engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.drafters.draft_model_distilled import DistilledHead
from slipstream.drafters.heads import head_checkpoint
from slipstream.drafters.heads.head import Head
from slipstream.drafters.interchange.foreign import write_foreign
from slipstream.errors import CorruptFile, OptionError, PromptError, UnsupportedModel
from slipstream.models import load
from slipstream.text import Tokenizer
from slipstream.train.interchange.export import export_drafter, load_for
from tests.heads import made_for, random_head
from tests.invoking import invoke
from tests.lessons import new_head, saved
from tests.models.test_families import build as family
from tests.tiny import tiny_directory, tiny_llm

HOW = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = [5, 9, 17, 3, 44, 9, 17]


def sixteen_bits(dtype: str | torch.dtype, device: str) -> torch.dtype:
    return torch.bfloat16 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."))


def a_head(llm: LLM, vocab: torch.Tensor, **settings: int) -> tuple[Head, Path]:
    """A draft like no layers of the target's, and its checkpoint."""
    head, shape = new_head(llm, "draft_model", vocab, **settings)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return head, saved(llm, "draft_model", head, shape)


def exported(llm: LLM, place: Path, to: Path) -> Path:
    write_foreign(to, export_drafter(load_for("hf-model", place), place, "hf-model", made_for(llm)[0]))
    return to


@pytest.mark.parametrize(
    ("name", "tied"), [("llama3", False), ("smollm2", True), ("qwen3", False), ("mixtral", False), ("gemma2", False)]
)
@torch.no_grad()
def test_it_has_the_logits_of_the_draft(name: str, tied: bool, tmp_path: Path) -> None:
    """Whatever the target has beyond a Llama: a draft's layers are plain ones. A scaled embedding is written scaled."""
    family(name, tmp_path / "target")
    llm = LLM(tmp_path / "target", speculate=None)
    everything = torch.arange(llm.model.config.vocab_size)
    head, place = a_head(llm, everything[::3], layers=3, mlp=40)
    model = AutoModelForCausalLM.from_pretrained(exported(llm, place, tmp_path / "draft"), dtype=torch.float32)
    assert model.config.num_hidden_layers == 3 and model.config.intermediate_size == 40
    assert model.config.tie_word_embeddings is tied
    tokens = torch.randint(len(everything), (2, 90), generator=torch.Generator().manual_seed(1))
    whole, _ = new_head(llm, "draft_model", everything, layers=3, mlp=40)  # the same draft that may say anything
    whole.load_state_dict(head.state_dict())
    assert isinstance(whole, DistilledHead)
    assert torch.allclose(model(tokens).logits, whole.logits(whole.judged(tokens)), atol=2e-4)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_an_end_that_only_the_tokenizers_files_know_goes_along(file: str, tmp_path: Path) -> None:
    target = Path(shutil.copytree(tiny_directory(context=300, characters=True), tmp_path / "target"))
    (target / "tokenizer_config.json").unlink()
    (target / file).write_text(json.dumps({"eos_token": "<b>"}))
    llm = LLM(target, speculate=None)
    place = exported(llm, a_head(llm, torch.arange(97))[1], tmp_path / "draft")
    copy = Tokenizer.from_directory(place)
    assert copy.eos_ids == (96,) and copy.encode("a<b>") == [65, 96]
    assert json.loads((place / "config.json").read_text())["eos_token_id"] == [96]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm(context=300, characters=True)
    place = a_head(llm, torch.arange(97))[1]
    monkeypatch.setattr("slipstream.models.formats.hf_render._SAMPLE", 5)  # no copy can be compared
    with pytest.raises(PromptError):
        exported(llm, place, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []
    config = replace(llm.model.config, rope_factors=(1.0,) * 8)
    monkeypatch.setattr(llm.model, "config", config)
    with pytest.raises(UnsupportedModel, match="rotation is given as bare factors"):
        exported(llm, place, tmp_path / "draft")


def test_it_drafts_as_the_draft_does_alone_and_in_a_cascade(tmp_path: Path) -> None:
    llm = tiny_llm(context=300, characters=True)
    _, place = a_head(llm, torch.arange(97), layers=2)
    model = exported(llm, place, tmp_path / "draft")
    (plain,) = llm.generate([PROMPT], HOW)
    told = set()
    for draft in (f"checkpoint={place}", f"model={model}", f"model={model},draw=top"):
        llm.use(f"draft_model:depth=4,{draft}")
        (output,) = llm.generate([PROMPT], HOW)
        told.add((tuple(output.token_ids), output.stats.steps, output.stats.accepted))
    assert len(told) == 1 and output.token_ids == plain.token_ids
    llm.use(f"cascade:suffix+draft_model:model={model},depth=4")
    (output,) = llm.generate([PROMPT], HOW)
    assert (tuple(output.token_ids), output.stats.steps, output.stats.accepted) in told
    assert output.stats.draft_faults == 0 and output.stats.accepted > 0


def test_a_checkpoint_whose_weights_do_not_fit_is_refused(tmp_path: Path) -> None:
    place = random_head("draft_model", layers=2)
    broken = load_for("hf-model", place)
    del broken.weights["stack.norm"]
    view = made_for(tiny_llm(context=300, characters=True))[0]
    with pytest.raises(CorruptFile, match=r"draft_model: the weights do not fit the settings: stack\.norm"):
        export_drafter(broken, place, "hf-model", view)
    with pytest.raises(OptionError, match="of kind 'draft_model', but speculators is for 'eagle3'"):
        load_for("speculators", place)


def test_the_command_line_takes_a_directory_or_the_name_of_what_the_model_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    place, model = random_head("draft_model", layers=1), str(tiny_directory(context=300, characters=True))
    order = ["--format", "hf-model", "-m", model, "-o"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft_model").mkdir()  # a directory of that name hides nothing
    for given, message in (
        ("draft_model", "no draft_model drafter has been trained for this target"),
        ("drft_model", "drft_model holds no trained drafter"),
        ("eagle3", "hf-model is for draft_model; eagle3 has no such format"),
        (str(random_head("eagle3")), "of kind 'eagle3', but hf-model is for 'draft_model'"),
        ("~no-such-user/draft", "'~no-such-user/draft' cannot be a path here"),
        ("x" * 300, "cannot be a path here: File name too long"),
    ):
        done = invoke("export", given, *order, str(tmp_path / "none"))
        assert done.exit_code == 2 and message in done.stderr, done.output
    done = invoke("export", str(place), *order, str(tmp_path / "first"))
    assert done.exit_code == 0 and "draft_model as hf-model, 12 weights" in done.stdout, done.output
    checkpoint = head_checkpoint.load(place)
    head_checkpoint.save(head_checkpoint.directory("draft_model", checkpoint.target.fingerprint), checkpoint)
    done = invoke("export", "draft_model", *order, str(tmp_path / "second"))
    assert done.exit_code == 0, done.output
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]
    draft = f"draft_model:model={tmp_path / 'first'}"
    done = invoke("run", "-m", model, "--speculate", draft, "--max-tokens", "8", "hi")
    assert done.exit_code == 0, done.output


def test_the_targets_tables_are_not_rounded_where_models_run_in_sixteen_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` means bfloat16 on a GPU, and here."""
    target = tiny_directory(context=300, characters=True)
    monkeypatch.setattr(load, "choose_dtype", sixteen_bits)
    assert LLM(target, speculate=None).model.dtype == torch.bfloat16
    place = str(random_head("draft_model", layers=1))
    done = invoke("export", place, "--format", "hf-model", "-m", str(target), "-o", str(tmp_path / "draft"))
    assert done.exit_code == 0, done.output
    name = "model.embed_tokens.weight"
    exact = load_file(target / "model.safetensors")[name]
    assert torch.equal(load_file(tmp_path / "draft" / "model.safetensors")[name], exact)
