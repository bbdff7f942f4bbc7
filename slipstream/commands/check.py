"""`slipstream check`: will it run here? Answered from headers and configurations, before any weight is read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.commands.opening import fetch_models, spelled
from slipstream.commands.options import Described, ModelSetup
from slipstream.commands.terminal import mebibytes, print_json, say, show_pairs, show_table
from slipstream.errors import DraftMismatch, OptionError
from slipstream.models.memory import KV_SHARE, SPARE_PAGES, available_bytes

if TYPE_CHECKING:
    import torch

    from slipstream.drafters import DrafterSpec
    from slipstream.drafters.translate import Crossing
    from slipstream.drafters.vocabulary import VocabularyComparison
    from slipstream.models.adapter_checkpoint import AdapterCheckpoint
    from slipstream.models.checkpoint import Checkpoint
    from slipstream.models.config import ModelConfig

_FACTS = (
    "family", "parameters", "layers", "hidden_size", "heads", "kv_heads", "experts", "vocab_size", "context",
    "tied_head",
)  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """Bytes by purpose, and what is free."""

    weights: int
    kv: int
    draft_weights: int
    draft_kv: int
    available: int

    @property
    def total(self) -> int:
        """All that is needed."""
        return self.weights + self.kv + self.draft_weights + self.draft_kv

    @property
    def left_for_kv(self) -> int:
        """What K/V may take once the weights are in."""
        return int(KV_SHARE * (self.available - self.weights - self.draft_weights))

    @property
    def fits(self) -> bool:
        """Whether everything has room."""
        return self.kv + self.draft_kv <= self.left_for_kv


@dataclass(frozen=True)
class Fit:
    """How a draft's vocabulary compares with the target's, what translating between them costs, and what is wrong."""

    vocabulary: VocabularyComparison
    translation: Crossing | None
    problem: str | None


@dataclass(frozen=True)
class Findings:
    """All that was found out."""

    model: str
    config: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    speculate: str
    draft_model: str | None
    draft_config: ModelConfig | None
    fit: Fit | None
    memory: Memory

    @property
    def problems(self) -> list[str]:
        """Every reason why it would not run."""
        found = []
        if not self.memory.fits:
            found.append(self._memory_problem())
        if self.fit is not None and self.fit.problem is not None:
            found.append(self.fit.problem)
        return found

    def _memory_problem(self) -> str:
        memory = self.memory
        needed, free = mebibytes(memory.total), mebibytes(memory.available)
        affordable = _affordable(memory, self.max_model_len)
        cure = f"--max-model-len {affordable} would fit" if affordable > 0 else "the weights alone are too large"
        return f"{needed} are needed, {free} are free on {self.device} (K/V may take 80% of what weights leave); {cure}"


def check(
    setup: ModelSetup | None = None,
    as_json: Annotated[bool, Described("print JSON", ("--json",))] = False,
) -> int:
    """Tell whether a model and its drafter fit this machine, without loading them."""
    findings = examine(setup or ModelSetup())
    if as_json:
        print_json(_as_dict(findings), indent=2)
    else:
        _print(findings)
    return 2 if findings.problems else 0


def examine(setup: ModelSetup) -> Findings:
    """Read headers and tokenizers and do the sums."""
    spec = setup.drafter()
    from slipstream.models.load import choose_device, choose_dtype, weight_bytes
    from slipstream.models.loader import open_model

    device = choose_device(setup.device)
    dtype = choose_dtype(setup.dtype, device)
    fetch_models(setup.model, spec)
    target = open_model(setup.model)
    length = _length(setup.max_model_len, target.config.context)
    named = _draft_named(spec)
    draft = open_model(named) if named else None
    fit = _fit(spec, draft, target) if draft else None
    draft_length = math.ceil(length * max(1.0, fit.translation.ratio)) if fit and fit.translation else length
    return Findings(
        model=setup.model,
        config=target.config,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=length,
        speculate=spelled(spec),
        draft_model=named,
        draft_config=draft.config if draft else None,
        fit=fit,
        memory=Memory(
            weights=weight_bytes(target.config, dtype),
            kv=_kv_bytes(target.config, dtype, length),
            draft_weights=weight_bytes(draft.config, dtype) if draft else 0,
            draft_kv=_kv_bytes(draft.config, dtype, draft_length) if draft else 0,
            available=available_bytes(device),
        ),
    )


def _length(asked: int | None, context: int) -> int:
    if asked is not None and not 1 <= asked <= context:
        raise OptionError(f"max_model_len={asked} is out of range", hint=f"valid: 1 to {context}, the model's own")
    return asked or context


def _draft_named(spec: DrafterSpec) -> str | None:
    """The model that a drafter runs, if it runs one: any drafter calls that option `model`."""
    from slipstream.drafters import drafter_class
    from slipstream.drafters.registry import make_options

    options = make_options(spec.method, drafter_class(spec.method).options_type, spec.options)
    named = getattr(options, "model", None)
    return str(named) if named else None


def _fit(spec: DrafterSpec, draft: Checkpoint | AdapterCheckpoint, target: Checkpoint | AdapterCheckpoint) -> Fit:
    """Compare the vocabularies; a drafter that translates between them says so in its class."""
    from slipstream.drafters import drafter_class
    from slipstream.drafters.translate import make_translator, measure
    from slipstream.drafters.vocabulary import compare_vocabularies

    ours, theirs = draft.tokenizer(), target.tokenizer()
    compared = compare_vocabularies(ours, draft.config.vocab_size, theirs, target.config.vocab_size)
    translation = problem = None
    try:
        if getattr(drafter_class(spec.method), "translates", False):
            translation = measure(make_translator(draft.name, ours, theirs))
        else:
            compared.require_same(draft.name)
    except DraftMismatch as error:
        problem = str(error)
    return Fit(compared, translation, problem)


def _pages(tokens: int) -> int:
    from slipstream.cache import PAGE_SIZE

    return -(-tokens // PAGE_SIZE) + SPARE_PAGES


def _kv_bytes(config: ModelConfig, dtype: torch.dtype, tokens: int) -> int:
    """K/V of one sequence of full length."""
    from slipstream.cache import PAGE_SIZE

    return _pages(tokens) * PAGE_SIZE * config.kv_bytes_per_token(dtype.itemsize)


def _affordable(memory: Memory, tokens: int) -> int:
    """The longest sequence that would fit, where one of `tokens` does not; 0 if none does."""
    from slipstream.cache import PAGE_SIZE

    per_page = (memory.kv + memory.draft_kv) // _pages(tokens)
    return max(0, memory.left_for_kv // per_page - SPARE_PAGES) * PAGE_SIZE


def _as_dict(findings: Findings) -> dict[str, Any]:
    memory = asdict(findings.memory) | {"total": findings.memory.total}
    fit = findings.fit
    return {
        "model": findings.model,
        "architecture": _shape(findings.config),
        "device": findings.device,
        "dtype": findings.dtype,
        "max_model_len": findings.max_model_len,
        "speculate": findings.speculate,
        "draft": None
        if findings.draft_config is None or fit is None
        else {
            "model": findings.draft_model,
            "architecture": _shape(findings.draft_config),
            "vocabulary": asdict(fit.vocabulary) | {"same": fit.vocabulary.same, "summary": fit.vocabulary.describe()},
            "translation": asdict(fit.translation) | {"summary": fit.translation.describe()}
            if fit.translation
            else None,
        },
        "memory_bytes": memory,
        "fits": findings.memory.fits,
        "problems": findings.problems,
        "ok": not findings.problems,
    }


def _shape(config: ModelConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in _FACTS} | {"native": _native(config)}


def _native(config: ModelConfig) -> bool:
    """Whether our own decoder runs it; transformers does otherwise."""
    from slipstream.models.adapter_checkpoint import AdapterConfig

    return not isinstance(config, AdapterConfig)


def _architecture(config: ModelConfig) -> str:
    experts = f", {config.experts} experts" if config.experts else ""
    return (
        f"{config.family}, {config.parameters / 1e6:,.1f} M parameters, {config.layers} layers, "
        f"width {config.hidden_size}, {config.heads} heads ({config.kv_heads} K/V){experts}, "
        f"{config.vocab_size:,} tokens, context {config.context:,}{'' if _native(config) else '; not native'}"
    )


def _print(findings: Findings) -> None:
    memory = findings.memory
    facts = [
        ("model", findings.model),
        ("architecture", _architecture(findings.config)),
        ("runs as", f"{findings.dtype} on {findings.device}"),
        ("drafter", findings.speculate),
    ]
    if findings.draft_config is not None and findings.fit is not None:
        facts += [("draft", _architecture(findings.draft_config)), ("vocabulary", findings.fit.vocabulary.describe())]
        if findings.fit.translation is not None:
            facts.append(("translation", findings.fit.translation.describe()))
    show_pairs(facts)
    if not all(_native(config) for config in (findings.config, findings.draft_config) if config is not None):
        say("what is not native runs through transformers, slower; only loading it shows whether it can run trees")
    say()
    context = f"K/V for {findings.max_model_len:,} tokens"
    sums = [["weights", mebibytes(memory.weights)], [context, mebibytes(memory.kv)]]
    if findings.draft_config is None:
        sums.append(["drafter", mebibytes(0)])
    else:
        sums += [["draft weights", mebibytes(memory.draft_weights)], ["draft K/V", mebibytes(memory.draft_kv)]]
    sums += [["total", mebibytes(memory.total)], ["free", mebibytes(memory.available)]]
    show_table(["memory", "size"], sums, right=[1])
    for problem in findings.problems:
        say(f"does not fit: {problem}", "bad")
    if not findings.problems:
        say("fits", "good")
