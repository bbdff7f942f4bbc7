"""The facade: text in, text out."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from pathlib import Path

import torch

from slipstream.cache import PAGE_SIZE, PagedCache
from slipstream.drafters import DrafterSpec, parse_speculate
from slipstream.drafters.registry import DEFAULT
from slipstream.engine import Engine, Progress
from slipstream.engine.scheduler import Scheduler
from slipstream.errors import NotEnoughMemory, OptionError, PromptError
from slipstream.models.builtin import DEFAULT_MODEL
from slipstream.models.checkpoint import Checkpoint
from slipstream.models.decoder import Decoder
from slipstream.models.load import load_model
from slipstream.models.memory import KV_SHARE, SPARE_PAGES, available_bytes
from slipstream.models.selfcheck import is_exact
from slipstream.models.view import TargetView
from slipstream.policy import FixedPolicy
from slipstream.sequence import TARGET, Request, Sequence
from slipstream.text import IncrementalDecoder, StopStrings
from slipstream.types import Delta, Output, SamplingParams
from slipstream.verify import make_verifier

log = logging.getLogger("slipstream")

Prompt = str | Seq[int]
Message = Mapping[str, object]

_WARM_UP_TOKENS = 48  # of an answer: enough for graphs to be captured and replayed
_WARM_UP_LENGTHS = (1, 30, 60, 120, 240, 480, 2000)
_WARM_UP_NEW = 30  # tokens of which none comes twice: a drafter may wait until one does, and such rounds are others
_CACHE_TOKENS = 32_768  # tokens of context that the cache holds by default, all requests together
_PROMPT_ROWS = {"cpu": 512, "cuda": 8192}  # rows of prompts in one step, by kind of device


class LLM:
    """A model, a drafter and a verifier behind `generate`, `chat` and `stream`.

    `model`: a built-in name, a path, a hub id, or a checkpoint that is open already.
    `speculate`: a drafter's name with options ("suffix", "ngram:max_n=5"), a mapping, vLLM's `speculative_config`, or
    None for plain decoding. `max_model_len`: longest sequence, prompt included (default: the model's own context; what
    does not fit into memory is refused). `cache_tokens`: tokens of context that all running requests have together.
    `quantize`: what the weights are kept in on a CPU, none, int8, int4 or auto (see docs/quantization.md). `exact`: the
    same text with any drafter bit for bit, on a GPU too and in 16 bits, or an error (see docs/exact.md).
    """

    def __init__(
        self,
        model: str | Path | Checkpoint = DEFAULT_MODEL,
        *,
        speculate: str | Mapping[str, object] | DrafterSpec | None = DEFAULT,
        speculative_config: Mapping[str, object] | None = None,
        verifier: str = "match",
        dtype: str = "auto",
        device: str = "auto",
        quantize: str = "auto",
        exact: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        cache_tokens: int | None = None,
    ) -> None:
        if speculative_config is not None and speculate != DEFAULT:
            raise OptionError("give either speculate or speculative_config, not both")
        spec = parse_speculate(speculate if speculative_config is None else speculative_config)
        self._verifier = make_verifier(verifier)
        if max_num_seqs < 1:
            raise OptionError(f"max_num_seqs={max_num_seqs} is out of range", hint="valid: 1 or more")
        if self._verifier.lossy:
            log.warning("verifier %r is lossy: answers may leave the model's own distribution", verifier)
        self.model, self.tokenizer = load_model(model, dtype=dtype, device=device, quantize=quantize, exact=exact)
        self.quantize = self.model.quantize if isinstance(self.model, Decoder) else "none"  # what `auto` stands for
        self.max_model_len = self._length(max_model_len)
        self.exact = is_exact(self.model)  # bitwise equality of speculative and plain text on this machine
        if exact and not self.exact:
            raise OptionError("exact: a row depends on its company in the kernels of this machine", hint="leave it out")
        pages = self._pages(cache_tokens)
        self.cache = PagedCache(pages, self.model.device)
        self.model.add_store(self.cache, TARGET)
        self._max_num_seqs = max_num_seqs
        self._requests = 0
        self._engine: Engine | None = None
        self._outboxes: dict[Sequence, deque[Delta]] = {}  # of the sequences that somebody streams
        self.use(spec)

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests, with the drafter in use."""
        assert self._engine is not None
        return self._engine

    def use(self, speculate: str | Mapping[str, object] | DrafterSpec | None) -> None:
        """Change the drafter. Nothing may be running; the model stays loaded. If this fails, decoding is plain."""
        spec = parse_speculate(speculate)
        if self._engine is not None:
            if not self._engine.scheduler.idle:
                raise OptionError("the drafter cannot be changed while requests are running")
            self._remove_stores()
            # Pages of earlier requests lack what the next drafter keeps beside K/V: it would be blind to those prompts.
            self.cache.forget_idle()
        self._install(parse_speculate(None))
        self._install(spec)

    def warm_up(self) -> None:
        """Compile kernels and capture graphs now, with the drafter in use, rather than while the first requests wait.

        Prompts of several lengths are answered, one after the other, and forgotten: attention splits a context by the
        number of rows, and every way to split it is a kernel of its own. On a CPU there is nothing to do.
        """
        if self.model.device == "cpu":
            return
        how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_WARM_UP_TOKENS)
        for length in _WARM_UP_LENGTHS:
            if length + _WARM_UP_TOKENS <= self.max_model_len:
                self.generate([[0] * length], how)
        if self.max_model_len >= _WARM_UP_NEW + _WARM_UP_TOKENS:
            self.generate([[*range(_WARM_UP_NEW)]], how)
        self.cache.forget_idle()

    def _remove_stores(self) -> None:
        for name in set(self.cache.stores) - {TARGET}:
            self.cache.remove_store(name)

    def _install(self, spec: DrafterSpec) -> None:
        reads_draws = self._verifier.uses_draws
        view = TargetView(self.model, self.cache, self.tokenizer, self.max_model_len, reads_draws, self.exact)
        drafter = spec.build(view)
        if drafter.taps and not view.layered:
            raise OptionError(f"{drafter.name} reads hidden states, which {self.model.name} does not give")
        try:
            drafter.attach(self.cache)
        except BaseException as error:  # what was attached before the failure must not stay
            self._remove_stores()
            if isinstance(error, torch.OutOfMemoryError):
                what = f"what {drafter.name} keeps for every token does not fit beside the K/V of {self.model.name}"
                raise NotEnoughMemory(what, hint="lower max_model_len or cache_tokens") from None
            raise
        self._engine = Engine(
            self.model,
            self.cache,
            drafter,
            self._verifier,
            FixedPolicy(drafter.plan),
            Scheduler(self.cache, self._max_num_seqs, _PROMPT_ROWS[self.model.device.partition(":")[0]]),
        )

    def _length(self, asked: int | None) -> int:
        context = self.model.config.context
        if asked is None:
            return context
        if not 1 <= asked <= context:
            raise OptionError(f"max_model_len={asked} is out of range", hint=f"valid: 1 to {context}, the model's own")
        return asked

    def _pages(self, tokens: int | None) -> int:
        """Pages of the cache: at least one sequence of full length, if the memory allows."""
        asked = tokens is not None
        least = -(-self.max_model_len // PAGE_SIZE) + SPARE_PAGES
        pages = -(-tokens // PAGE_SIZE) if tokens is not None else max(least, _CACHE_TOKENS // PAGE_SIZE)
        if pages < least:
            raise OptionError(
                f"cache_tokens={tokens} cannot hold one sequence of max_model_len={self.max_model_len}",
                hint=f"valid: {least * PAGE_SIZE} or more, or a smaller max_model_len",
            )
        per_page = PAGE_SIZE * self.model.config.kv_bytes_per_token(self.model.dtype.itemsize)
        affordable = int(available_bytes(self.model.device) * KV_SHARE) // per_page
        if affordable < least or (asked and affordable < pages):
            raise NotEnoughMemory(
                f"{max(least, pages if asked else least) * per_page / 2**20:,.0f} MiB of K/V do not fit into memory",
                hint=f"max_model_len={max(1, (affordable - SPARE_PAGES) * PAGE_SIZE)} would",
            )
        return min(pages, affordable)

    # -- asking -------------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[Output]:
        """Answer prompts (texts or token ids), all in one continuous batch; one output per prompt, in order."""
        listed = _as_list(prompts)
        return self._run([self._request(p, q) for p, q in zip(listed, _spread(params, len(listed)), strict=True)])

    def chat(
        self,
        conversations: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[Output]:
        """Answer conversations ([{"role": ..., "content": ...}, ...]) by the model's own chat template."""
        listed = [conversations] if conversations and isinstance(conversations[0], Mapping) else conversations
        prompts = [self._chat_prompt(c) for c in listed]  # type: ignore[arg-type]
        requests = [self._request(p, q) for p, q in zip(prompts, _spread(params, len(prompts)), strict=True)]
        return self._run(requests)

    def stream(self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt or conversation; yields what each step added. Closing the iterator cancels the request."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
            prompt = self._chat_prompt(prompt)  # type: ignore[arg-type]
        sequences = self._sequences(self._request(prompt, params or SamplingParams()))  # type: ignore[arg-type]
        return self._stream(sequences)

    def _stream(self, sequences: list[Sequence]) -> Iterator[Delta]:
        outbox: deque[Delta] = deque()
        self._outboxes.update(dict.fromkeys(sequences, outbox))
        self.engine.scheduler.add(sequences)
        try:
            while outbox or not all(s.finished for s in sequences):
                while not outbox:
                    self._step()
                yield outbox.popleft()
        finally:
            for sequence in sequences:
                self.engine.cancel(sequence)
                del self._outboxes[sequence]

    def _step(self) -> None:
        """One step for everybody; each stream finds what is its own in its outbox, whoever made the step."""
        for progress in self.engine.step():
            if progress.sequence in self._outboxes:
                self._outboxes[progress.sequence].append(_delta(progress))

    def _run(self, requests: list[Request]) -> list[Output]:
        groups = [self._sequences(request) for request in requests]
        for group in groups:
            self.engine.scheduler.add(group)
        try:
            while not all(sequence.finished for group in groups for sequence in group):
                self._step()
        finally:  # an interrupt leaves nothing behind
            for group in groups:
                for sequence in group:
                    self.engine.cancel(sequence)
        return [_output(request, group) for request, group in zip(requests, groups, strict=True)]

    def answers(self, requests: Iterable[tuple[Prompt, SamplingParams]], at_once: int) -> Iterator[tuple[int, Output]]:
        """Answer any number of prompts, `at_once` of them under way; yields (place among them, output) as they finish.

        Requests are taken only when there is room for some, so a later one may depend on an earlier answer; several at
        a time, so that most steps have no prompt to feed. Outputs have token ids and, unless stop strings ask for it,
        no text: decoding costs time. Closing the iterator cancels what is under way.
        """
        if at_once < 1:
            raise OptionError(f"at_once={at_once} is out of range", hint="valid: 1 or more")
        source = enumerate(requests)
        under_way: dict[int, tuple[Request, list[Sequence]]] = {}
        try:
            while True:
                room = at_once - len(under_way)
                for place, (prompt, params) in itertools.islice(source, room if room >= at_once / 8 else 0):
                    request = self._request(prompt, params)
                    under_way[place] = request, self._sequences(request, with_text=bool(params.stop_strings))
                    self.engine.scheduler.add(under_way[place][1])
                if not under_way:
                    return
                self._step()
                for place in [p for p, (_, group) in under_way.items() if all(s.finished for s in group)]:
                    yield place, _output(*under_way.pop(place))
        finally:
            for _, group in under_way.values():
                for sequence in group:
                    self.engine.cancel(sequence)

    # -- from what the user gave to sequences -------------------------------------------------------------------------

    def _chat_prompt(self, conversation: Seq[Message]) -> list[int]:
        if self.tokenizer is None:
            raise OptionError(f"{self.model.name} has no tokenizer, so there is no chat template", hint="use generate")
        return self.tokenizer.encode_chat([dict(message) for message in conversation])

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise OptionError(f"{self.model.name} has no tokenizer", hint="give token ids instead of text")
            text: str | None = prompt
            ids = self.tokenizer.encode(prompt)
        else:
            text, ids = None, [int(token) for token in prompt]
        self._check_prompt(ids, params)
        self._requests += 1
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        return Request(f"request-{self._requests}", text, ids, params, seed)

    def _check_prompt(self, ids: list[int], params: SamplingParams) -> None:
        vocab = self.model.config.vocab_size
        if not ids:
            raise PromptError("the prompt is empty", hint="give at least one token")
        if len(ids) >= self.max_model_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens and the context holds {self.max_model_len}, answer included",
                hint="shorten the prompt or raise max_model_len",
            )
        named = {"prompt": ids, "logit_bias": list(params.bias), "stop_token_ids": list(params.stop_token_ids or ())}
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab:
                    raise OptionError(f"{name}: there is no token {token}", hint=f"valid: 0 to {vocab - 1}")
        if params.stop_strings and self.tokenizer is None:
            raise OptionError("stop strings need a tokenizer", hint="use stop_token_ids")

    def _sequences(self, request: Request, *, with_text: bool = True) -> list[Sequence]:
        """One sequence per choice; `with_text`: its tokens become text as they come."""
        params = request.params
        ends = frozenset() if params.ignore_eos else self.end_ids
        sequences = []
        for choice in range(params.n):
            sequence = Sequence(request, choice, ends, self.max_model_len)
            if self.tokenizer is not None and with_text:
                sequence.decoder = IncrementalDecoder(self.tokenizer, request.prompt_ids)
                sequence.stops = StopStrings(params.stop_strings) if params.stop_strings else None
            sequences.append(sequence)
        return sequences

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer: the model's and the tokenizer's, as far as the model has such tokens."""
        declared = self.tokenizer.eos_ids if self.tokenizer is not None else ()
        return frozenset(t for t in (*self.model.config.eos_ids, *declared) if t < self.model.config.vocab_size)


def _output(request: Request, group: list[Sequence]) -> Output:
    return Output(request.id, request.prompt, request.prompt_ids, [s.completion() for s in group])


def _delta(progress: Progress) -> Delta:
    sequence, count = progress.sequence, progress.new_tokens
    text = sequence.text[sequence.text_shown :]
    sequence.text_shown = len(sequence.text)
    return Delta(
        index=sequence.choice,
        text=text,
        token_ids=sequence.output_ids[-count:],
        origins=sequence.stats.origins[-count:],
        finish_reason=sequence.finish_reason,
        completion=sequence.completion() if sequence.finished else None,
        tree=progress.tree,
    )


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise OptionError(f"{len(params)} sampling parameters for {count} prompts", hint="give one, or one per prompt")
    return list(params)
