"""What the engine's thread owns: the model, its cache, the drafters. It turns requests into sequences."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slipstream import __version__, checks
from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.drafters.registry import AnyDrafter, DrafterSpec, parse_speculate
from slipstream.engine.burst import Burst
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.step import Engine
from slipstream.errors import NotEnoughMemory, OptionError, unknown_choice
from slipstream.grammar import Grammars
from slipstream.inputs import tokenizer_of
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.load import load_model
from slipstream.models.memory import SPARE_PAGES, kv_bytes
from slipstream.models.model import Model
from slipstream.models.selfcheck import is_exact
from slipstream.models.view import TargetView
from slipstream.native.machine import cpu_model, switched_off
from slipstream.policy.saved import SavedPolicy
from slipstream.profiles import Profile
from slipstream.sequence import PLAIN, TARGET, Request, Sequence
from slipstream.text import IncrementalDecoder, StopStrings
from slipstream.types import Limits
from slipstream.verify import Verifier, make_verifier

log = logging.getLogger("slipstream")

_CACHE_TOKENS = 32_768  # default size of the cache, in tokens of all requests together
_PROMPT_ROWS = {"cpu": 512, "cuda": 8192}  # rows of prompts in one step, by device type

_PLAIN = DrafterSpec(PLAIN)

Speculate = str | Mapping[str, object] | DrafterSpec | None


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of an engine, as `LLM` takes it."""

    model: str | Path | Checkpoint
    default: DrafterSpec
    drafters: tuple[DrafterSpec, ...] = ()  # loaded in addition to the default
    verifier: str = "match"
    dtype: str = "auto"
    device: str = "auto"
    quantize: str = "auto"
    exact: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    cache_tokens: int | None = None
    tokenizer: str | Path | None = None  # a directory, if not the model's own
    memory_share: float | None = None  # upper bound on the part of GPU memory that weights and K/V may take
    profile: Profile | None = None  # its priors and costs; its drafter is the default


class EngineCore:
    """Loads the model and the drafters, and manages the set of drafters while requests run."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        verifier = make_verifier(config.verifier)
        if verifier.lossy:
            log.warning("verifier %r is lossy: outputs may differ from the model's own distribution", config.verifier)
        self.model, self.tokenizer = load_model(
            config.model, dtype=config.dtype, device=config.device, quantize=config.quantize, exact=config.exact
        )
        if config.tokenizer is not None:
            self.tokenizer = tokenizer_of(config.tokenizer, self.model.config.vocab_size)
        self.max_model_len = self._length(config.max_model_len)
        self.exact = is_exact(self.model)  # speculative and plain text are bitwise equal on this machine
        if config.exact and not self.exact:
            raise OptionError("exact: the kernels of this machine are not batch-invariant", hint="leave it out")
        self._specs: dict[str, DrafterSpec] = {}  # of the drafters in the set
        self._stores: dict[str, set[str]] = {}  # stores of each drafter
        self._make(config, (config.default, *config.drafters), verifier)
        self.default = str(config.default)
        self._kept = {PLAIN, *map(str, config.drafters)}  # drafters that stay loaded when the default changes

    def _make(self, config: EngineConfig, specs: Iterable[DrafterSpec], verifier: Verifier) -> None:
        """Make everything but the model: drafters, cache, scheduler, runners and policy."""
        trial = PagedCache(0, self.model.device)  # one page, to measure the bytes that each drafter keeps per page
        self.target = TargetView(self.model, trial, self.tokenizer, self.max_model_len, verifier.uses_draws, self.exact)
        distinct = {str(spec): spec for spec in (_PLAIN, *specs)}
        built: dict[str, AnyDrafter] = {}
        for name, spec in distinct.items():
            built[name] = self._built(spec, built.values())
        pages = self._pages_beside(config, built, trial)
        self.cache = self.target.cache = PagedCache(pages, self.model.device)
        self.model.add_store(self.cache, TARGET)
        rows = _PROMPT_ROWS[self.model.device.partition(":")[0]]
        self.engine = Engine(self.model, self.cache, verifier, Scheduler(self.cache, config.max_num_seqs, rows))
        for name, spec in distinct.items():
            self._add(spec, built[name])
        machine = (self.model.device, cpu_model(), torch.get_num_threads())
        kernels = ("library",) if switched_off() else ()  # whose passes cost something else
        facts = (getattr(self.model, "quantize", config.quantize), self.model.dtype, *machine, __version__, *kernels)
        self._saved = SavedPolicy(self.engine.policy, self.model.fingerprint, facts)
        self._saved.restore()
        if config.profile is not None:
            config.profile.require_model(self.model.fingerprint, self.model.name)
            self._saved.start_from(config.profile)

    def renew(self) -> None:
        """Replace everything but the model and its weights, after a failure that no single request caused."""
        verifier = self.engine.verifier
        # What the policy learnt since it was saved goes too: it may be what failed.
        del self.engine, self.cache, self.target, self._saved  # their memory is needed for what replaces them
        gc.collect()
        if self.model.device != "cpu":
            torch.cuda.empty_cache()
        self._make(self.config, list(self._specs.values()), verifier)

    def learnt(self) -> tuple[str, dict[str, Any]]:
        """What the policy's costs depend on, and its state."""
        return self._saved.setup, self.engine.policy.state()

    def close(self) -> None:
        """Keep what the policy has learnt."""
        self._saved.save()

    # -- drafters -----------------------------------------------------------------------------------------------------

    @property
    def drafter(self) -> AnyDrafter:
        """The drafter of requests that name none."""
        return self.engine.drafters[self.default]

    @property
    def names(self) -> list[str]:
        """The drafters that requests may name, the default first."""
        parts = (part.name for drafter in self.engine.drafters.values() for part in drafter.parts.values())
        return list(dict.fromkeys([self.default, *self.engine.drafters, *parts]))

    @property
    def burst(self) -> Burst | None:
        """The bursts of the default drafter, if a device runs rounds and the drafter supports them."""
        return None if self.engine.device is None else self.engine.device.burst(self.default)

    def use(self, spec: DrafterSpec) -> None:
        """Change the default drafter. Running requests keep theirs; if this fails, the default is plain decoding."""
        self.default = PLAIN
        self._remove_unused()
        # Cached pages lack the rows that the new drafter stores beside K/V; it would have to recompute them.
        self.cache.forget_idle()
        if str(spec) not in self._specs:
            self._add(spec, self._built(spec, self.engine.drafters.values()))
        self.default = str(spec)

    def swap_model(self, model: Model) -> Model:
        """Replace the weights by others of the same shape, and decode plainly; returns the previous model."""
        if not self.engine.scheduler.idle:
            raise OptionError("the model cannot be changed while requests are running")
        self._kept = {PLAIN}
        self.use(_PLAIN)
        before, self.model = self.model, model
        old = self.target
        self.target = TargetView(model, self.cache, self.tokenizer, old.longest, old.reads_draws, self.exact)
        self.engine = Engine(model, self.cache, self.engine.verifier, self.engine.scheduler)
        self._add(_PLAIN, self._built(_PLAIN))
        return before

    def choose(self, wanted: object) -> tuple[str, Limits | None]:
        """The name of the drafter that a request asks for, and its limits if it leaves the choice to the policy.

        None asks for the default, False for plain decoding. Limits (`auto:max_nodes=8`) and the names of drafters that
        the policy picks from need no drafter of their own.
        """
        if wanted is None or wanted is True:
            return self.default, None
        if wanted is False:
            return PLAIN, None
        spec = parse_speculate(wanted)  # type: ignore[arg-type]
        if str(spec) in self._specs:
            return str(spec), None
        drafters, limits = self.engine.drafters, spec.checked().limits
        choosing = [name for name in (self.default, *self._specs) if drafters[name].parts]
        if choosing and limits is not None:
            return choosing[0], self._within(limits, choosing[0])
        alike = [loaded for loaded, known in self._specs.items() if known.method == str(spec)]
        if len(alike) == 1:
            return alike[0], None
        for name in choosing:
            if any(part.name == str(spec) for part in drafters[name].parts.values()):
                return name, replace(drafters[name].limits, drafters=frozenset({str(spec)}))
        raise unknown_choice("loaded drafter", str(spec), list(self._specs))

    def _within(self, limits: Limits, name: str) -> Limits:
        """A request's limits, which may name drafters that the policy picks from, and no others."""
        loaded = {part.name for part in self.engine.drafters[name].parts.values()}
        for drafter in (limits.drafters or frozenset()) - loaded:
            raise unknown_choice("loaded drafter", drafter, sorted(loaded))
        return limits

    def _built(self, spec: DrafterSpec, beside: Iterable[AnyDrafter] = ()) -> AnyDrafter:
        """The drafter, whose state and stores have another key than those of the drafters beside it."""
        drafter, taken = spec.build(self.target), {other.key for other in beside}
        if drafter.key in taken:
            drafter.rename(next(key for n in itertools.count(1) if (key := f"{drafter.key}.{n}") not in taken))
        if drafter.taps and not self.target.layered:
            raise OptionError(f"{drafter.name} reads hidden states, which {self.model.name} does not give")
        return drafter

    def _add(self, spec: DrafterSpec, drafter: AnyDrafter) -> None:
        """Add a drafter to the set and create its stores."""
        before = set(self.cache.stores)
        try:
            drafter.attach(self.cache)
        except BaseException as error:  # remove what was attached before the failure
            for store in set(self.cache.stores) - before:
                self.cache.remove_store(store)
            if isinstance(error, torch.OutOfMemoryError):
                what = f"the per-token data of {drafter.name} does not fit beside the K/V of {self.model.name}"
                raise NotEnoughMemory(what, hint="lower max_model_len or cache_tokens") from None
            raise
        self._stores[str(spec)] = set(self.cache.stores) - before
        self._specs[str(spec)] = spec
        self.engine.add_drafter(str(spec), drafter)

    def _remove_unused(self) -> None:
        """Remove drafters that no running request uses and no new request can name."""
        scheduler = self.engine.scheduler
        used = {s.drafter for s in (*scheduler.running, *scheduler.waiting)} | self._kept | {self.default}
        for name in set(self._specs) - used:
            del self._specs[name]
            self.engine.remove_drafter(name)
            for store in self._stores.pop(name):
                self.cache.remove_store(store)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _length(self, asked: int | None) -> int:
        context = self.model.config.context
        if asked is None:
            return context
        return checks.integer("max_model_len", asked, 1, context, valid=f"1 to {context}, the model's own")

    def _pages_beside(self, config: EngineConfig, drafters: dict[str, AnyDrafter], trial: PagedCache) -> int:
        """Pages of the cache. A drafter that no option named is left out if requests need its memory."""
        wanted, affordable = self._pages_wanted(config), self._pages_affordable(config, drafters, trial)
        for name, drafter in drafters.items() if affordable < wanted else ():
            lighter = drafter.lighter()
            if lighter is None:
                continue
            drafters[name] = lighter
            del drafter  # its weights give their memory back
            for store in set(trial.stores):
                trial.remove_store(store)
            before, affordable = affordable, self._pages_affordable(config, drafters, trial)
            log.warning(
                "%s drafts without a trained head: the head would leave room for %d tokens of requests instead of %d",
                name,
                max(0, before) * PAGE_SIZE,
                min(wanted, affordable) * PAGE_SIZE,
            )
        least = -(-self.max_model_len // PAGE_SIZE) + SPARE_PAGES
        asked = config.cache_tokens is not None
        if affordable < (wanted if asked else least):
            longest = (affordable - SPARE_PAGES) * PAGE_SIZE
            per_page = self._page_bytes(drafters, trial)
            raise NotEnoughMemory(
                f"{(wanted if asked else least) * per_page / 2**20:,.0f} MiB of K/V do not fit into memory",
                hint=f"max_model_len={longest} would" if longest > 0 else "the weights leave no room for any",
            )
        return min(wanted, affordable)

    def _pages_wanted(self, config: EngineConfig) -> int:
        """At least those of one sequence of full length."""
        tokens, least = config.cache_tokens, -(-self.max_model_len // PAGE_SIZE) + SPARE_PAGES
        pages = max(least, _CACHE_TOKENS // PAGE_SIZE) if tokens is None else -(-tokens // PAGE_SIZE)
        if pages < least:
            raise OptionError(
                f"cache_tokens={tokens} cannot hold one sequence of max_model_len={self.max_model_len}",
                hint=f"valid: {least * PAGE_SIZE} or more, or a smaller max_model_len",
            )
        return pages

    def _pages_affordable(self, config: EngineConfig, drafters: Mapping[str, AnyDrafter], trial: PagedCache) -> int:
        """Pages that fit into memory; `trial`: where drafters attach to show what they keep."""
        for drafter in drafters.values():
            drafter.attach(trial)
        return kv_bytes(self.model.device, config.memory_share) // self._page_bytes(drafters, trial)

    def _page_bytes(self, drafters: Mapping[str, AnyDrafter], trial: PagedCache) -> int:
        """Bytes of a page: the target's K/V and what drafters keep beside them."""
        kept = sum(store.nbytes for store in trial.stores.values()) + sum(d.separate_bytes for d in drafters.values())
        return PAGE_SIZE * self.model.config.kv_bytes_per_token(self.model.dtype.itemsize) + kept

    # -- requests -----------------------------------------------------------------------------------------------------

    def sequences(self, request: Request) -> list[Sequence]:
        """One sequence per choice."""
        params = request.params
        ends = frozenset[int]() if params.ignore_eos else self.end_ids
        drafter, limits = self.choose(params.speculate)
        needs = self.engine.drafters[drafter].stores_needed
        constraint = None if request.grammar is None else self.grammars.start(request.grammar)
        sequences = []
        for choice in range(params.n):
            sequence = Sequence(
                request,
                choice,
                ends,
                self.max_model_len,
                drafter=drafter,
                limits=limits,
                needs=needs,
                constraint=constraint,
            )
            if self.tokenizer is not None:
                sequence.spell = self.tokenizer.token_text
                if params.detokenize and (request.with_text or params.stop_strings):
                    skip, shown = params.skip_special_tokens, params.include_stop_str_in_output
                    sequence.decoder = IncrementalDecoder(self.tokenizer, request.prompt_ids, skip_special=skip)
                    sequence.stops = StopStrings(params.stop_strings, shown=shown) if params.stop_strings else None
            sequences.append(sequence)
        return sequences

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles structured outputs; made with the first request that has some."""
        return Grammars(self.tokenizer, self.model.config.vocab_size, self.end_ids)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the model's and the tokenizer's, as far as the model has such tokens."""
        declared = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        return frozenset(t for t in (*self.model.config.eos_ids, *declared) if t < self.model.config.vocab_size)
