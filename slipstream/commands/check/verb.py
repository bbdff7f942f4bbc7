"""`slipstream check`: whether a model fits this machine, from headers and configurations, without reading weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from slipstream import checks
from slipstream.commands.check.heads import TrainedHead, available_head, examine_head
from slipstream.commands.check.missing import missing_models, tell_missing
from slipstream.commands.shared.opening import fetch_models
from slipstream.commands.shared.options import Described, ModelSetup
from slipstream.commands.shared.terminal import mebibytes, print_json, say, show_pairs, show_table
from slipstream.errors import DraftMismatch
from slipstream.models.memory import KV_SHARE, SPARE_PAGES, available_bytes

if TYPE_CHECKING:
    import torch

    from slipstream.drafters import DrafterSpec
    from slipstream.drafters.foreign.translate import Crossing
    from slipstream.drafters.foreign.vocabulary import VocabularyComparison
    from slipstream.models.config import ModelConfig
    from slipstream.models.formats.adapter_checkpoint import AdapterCheckpoint
    from slipstream.models.formats.checkpoint import Checkpoint

_FACTS = (
    "family", "parameters", "layers", "hidden_size", "heads", "kv_heads", "experts", "vocab_size", "context",
    "tied_head",
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose, and free bytes."""

    weights: int
    kv: int
    draft_weights: int
    draft_kv: int
    available: int

    @property
    def total(self) -> int:
        """Bytes needed in all."""
        return self.weights + self.kv + self.draft_weights + self.draft_kv

    @property
    def left_for_kv(self) -> int:
        """Bytes for the KV cache after the weights are loaded."""
        return int(KV_SHARE * (self.available - self.weights - self.draft_weights))

    @property
    def fits(self) -> bool:
        """Whether everything fits."""
        return self.kv + self.draft_kv <= self.left_for_kv


@dataclass(frozen=True)
class Draft:
    """A draft model: its vocabulary compared with the target's, the cost of translation, problems."""

    model: str
    config: ModelConfig
    vocabulary: VocabularyComparison
    translation: Crossing | None
    problem: str | None
    weights: int  # bytes
    kv: int


@dataclass(frozen=True)
class Findings:
    """The results of a check."""

    model: str
    config: ModelConfig
    device: str
    dtype: str
    quantize: str
    max_model_len: int
    speculate: str
    drafts: list[Draft]
    heads: list[TrainedHead]
    memory: Memory

    @property
    def problems(self) -> list[str]:
        """All reasons why it would not run."""
        found = []
        if not self.memory.fits:
            found.append(self._memory_problem())
        parts = [*(draft.problem for draft in self.drafts), *(head.problem for head in self.heads)]
        return found + [problem for problem in parts if problem is not None]

    def _memory_problem(self) -> str:
        memory = self.memory
        needed, free = mebibytes(memory.total), mebibytes(memory.available)
        affordable = _affordable(memory, self.max_model_len)
        cure = f"--max-model-len {affordable} would fit" if affordable > 0 else "the weights alone are too large"
        return f"{needed} are needed, {free} are free on {self.device} (K/V may take 80% of what weights leave); {cure}"


def check(
    setup: ModelSetup | None = None,
    fetch: Annotated[bool, Described("download missing models")] = False,
    as_json: Annotated[bool, Described("print JSON", ("--json",))] = False,
) -> int:
    """Check whether a model and its drafter fit this machine, without loading them."""
    setup = setup or ModelSetup()
    if not fetch and (missing := missing_models(setup.model, setup.drafter())):
        tell_missing(missing, as_json=as_json)
        return 2
    findings = examine(setup)
    if as_json:
        print_json(_as_dict(findings), indent=2)
    else:
        _print(findings)
    return 2 if findings.problems else 0


def examine(setup: ModelSetup) -> Findings:
    """Read headers and tokenizers and compute the memory."""
    spec = setup.drafter()
    from slipstream.models.formats.resolve import open_model
    from slipstream.models.load import choose_device, choose_dtype, choose_quantize, require_exact, weight_bytes

    device = choose_device(setup.device)
    dtype = choose_dtype(setup.dtype, device)
    fetch_models(setup.model, spec)
    target = open_model(setup.model)
    quantize = choose_quantize(setup.quantize, target, dtype, device)
    if setup.exact:
        require_exact(target, dtype, device)
    length = _length(setup.max_model_len, target.config.context)
    drafts = [_examine_draft(part, target, dtype, device, length) for part in spec.parts() if part.model is not None]
    parts = (part for part in spec.parts() if part.model is None)
    heads = [head for part in parts if (head := examine_head(part, target.config, dtype)) is not None]

    def memory(heads: list[TrainedHead]) -> Memory:
        return Memory(
            weights=weight_bytes(target.config, dtype, quantize),
            kv=_kv_bytes(target.config, dtype, length),
            draft_weights=sum(draft.weights for draft in drafts) + sum(head.weights for head in heads),
            draft_kv=sum(draft.kv for draft in drafts) + sum(head.per_token for head in heads) * _rows(length),
            available=available_bytes(device),
        )

    found = available_head(spec, target.config, dtype)
    if found is not None and memory([*heads, found]).fits:  # else it is left out when the model is loaded
        heads.append(found)
    return Findings(
        model=setup.model,
        config=target.config,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        quantize=quantize,
        max_model_len=length,
        speculate=str(spec),
        drafts=drafts,
        heads=heads,
        memory=memory(heads),
    )


def _length(requested: int | None, context: int) -> int:
    if requested is None:
        return context
    return checks.integer("max_model_len", requested, 1, context, valid=f"1 to {context}, the model's own")


def _examine_draft(
    spec: DrafterSpec, target: Checkpoint | AdapterCheckpoint, dtype: torch.dtype, device: str, length: int
) -> Draft:
    """The model that one drafter runs."""
    from slipstream.drafters import drafter_class
    from slipstream.drafters.foreign.translate import make_translator, measure
    from slipstream.drafters.foreign.vocabulary import compare_vocabularies
    from slipstream.models.formats.resolve import open_model
    from slipstream.models.load import choose_quantize, weight_bytes

    assert spec.model is not None
    draft = open_model(spec.model)
    ours, theirs = draft.tokenizer(), target.tokenizer()
    compared = compare_vocabularies(ours, draft.config.vocab_size, theirs, target.config.vocab_size)
    translation = problem = None
    try:
        if drafter_class(spec.method).translates:
            translation = measure(make_translator(draft.name, ours, theirs))
            length = math.ceil(length * max(1.0, translation.ratio))
        else:
            compared.require_same(draft.name)
    except DraftMismatch as error:
        problem = str(error)
    return Draft(
        model=spec.model,
        config=draft.config,
        vocabulary=compared,
        translation=translation,
        problem=problem,
        weights=weight_bytes(draft.config, dtype, choose_quantize("auto", draft, dtype, device)),
        kv=_kv_bytes(draft.config, dtype, length),
    )


def _pages(tokens: int) -> int:
    from slipstream.cache import PAGE_SIZE

    return -(-tokens // PAGE_SIZE) + SPARE_PAGES


def _rows(tokens: int) -> int:
    """Rows of the pages of one sequence of full length."""
    from slipstream.cache import PAGE_SIZE

    return _pages(tokens) * PAGE_SIZE


def _kv_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """KV cache of one sequence of full length."""
    return _rows(tokens) * config.kv_bytes_per_token(dtype.itemsize)


def _affordable(memory: Memory, tokens: int) -> int:
    """The longest sequence that would fit if one of `tokens` does not; 0 if none does."""
    from slipstream.cache import PAGE_SIZE

    per_page = (memory.kv + memory.draft_kv) // _pages(tokens)
    return max(0, memory.left_for_kv // per_page - SPARE_PAGES) * PAGE_SIZE


def _as_dict(findings: Findings) -> dict[str, Any]:
    return {
        "model": findings.model,
        "architecture": _shape(findings.config),
        "device": findings.device,
        "dtype": findings.dtype,
        "quantize": findings.quantize,
        "max_model_len": findings.max_model_len,
        "speculate": findings.speculate,
        "drafts": [_draft_as_dict(draft) for draft in findings.drafts],
        "heads": [asdict(head) for head in findings.heads],
        "memory_bytes": asdict(findings.memory) | {"total": findings.memory.total},
        "fits": findings.memory.fits,
        "problems": findings.problems,
        "ok": not findings.problems,
    }


def _draft_as_dict(draft: Draft) -> dict[str, Any]:
    vocabulary, translation = draft.vocabulary, draft.translation
    return {
        "model": draft.model,
        "architecture": _shape(draft.config),
        "vocabulary": asdict(vocabulary) | {"same": vocabulary.same, "summary": vocabulary.describe()},
        "translation": asdict(translation) | {"summary": translation.describe()} if translation else None,
        "weight_bytes": draft.weights,
        "kv_bytes": draft.kv,
    }


def _shape(config: ModelConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in _FACTS} | {"native": _native(config)}


def _native(config: ModelConfig) -> bool:
    """Whether our own decoder runs it; otherwise transformers does."""
    from slipstream.models.formats.adapter_checkpoint import AdapterConfig

    return not isinstance(config, AdapterConfig)


def _architecture(config: ModelConfig) -> str:
    experts = f", {config.experts} experts" if config.experts else ""
    return (
        f"{config.family}, {config.parameters / 1e6:,.1f} M parameters, {config.layers} layers, "
        f"width {config.hidden_size}, {config.heads} heads ({config.kv_heads} K/V){experts}, "
        f"{config.vocab_size:,} tokens, context {config.context:,}{'' if _native(config) else '; not native'}"
    )


def _kept(quantize: str) -> str:
    return "" if quantize == "none" else f", weights in {quantize}"


def _print(findings: Findings) -> None:
    memory = findings.memory
    facts = [
        ("model", findings.model),
        ("architecture", _architecture(findings.config)),
        ("runs as", f"{findings.dtype} on {findings.device}{_kept(findings.quantize)}"),
        ("drafter", findings.speculate),
    ]
    for draft in findings.drafts:
        facts += [("draft", _architecture(draft.config)), ("vocabulary", draft.vocabulary.describe())]
        if draft.translation is not None:
            facts.append(("translation", draft.translation.describe()))
    facts += [("head", head.describe()) for head in findings.heads if head.problem is None]
    show_pairs(facts)
    if not all(_native(config) for config in (findings.config, *(draft.config for draft in findings.drafts))):
        say("not native: it runs through transformers, slower; whether it can verify trees is known after loading")
    say()
    context = f"K/V for {findings.max_model_len:,} tokens"
    sums = [["weights", mebibytes(memory.weights)], [context, mebibytes(memory.kv)]]
    if not (findings.drafts or findings.heads):
        sums.append(["drafter", mebibytes(0)])
    else:
        sums += [["draft weights", mebibytes(memory.draft_weights)], ["draft K/V", mebibytes(memory.draft_kv)]]
    sums += [["total", mebibytes(memory.total)], ["free", mebibytes(memory.available)]]
    show_table(["memory", "size"], sums, right=[1])
    for problem in findings.problems:
        say(f"does not fit: {problem}", "bad")
    if not findings.problems:
        say("fits", "good")
