"""The public interface: text in, text out."""

from __future__ import annotations

import itertools
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from inspect import signature
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from slipstream import checks, inputs, noise
from slipstream.cache import PagedCache
from slipstream.drafters import parse_speculate
from slipstream.drafters.registry import DEFAULT, AnyDrafter
from slipstream.engine import Engine, EngineLoop
from slipstream.engine.burst import Burst
from slipstream.engine.core import EngineConfig, Speculate
from slipstream.engine.mailbox import Mailbox
from slipstream.errors import OptionError
from slipstream.inputs import Message, Prompt
from slipstream.models.decoder import Decoder
from slipstream.models.formats.builtin import DEFAULT_MODEL
from slipstream.models.formats.checkpoint import Checkpoint
from slipstream.models.load import choose_device
from slipstream.models.model import Model
from slipstream.models.view import TargetView
from slipstream.progress_bar import progress_bar
from slipstream.sequence import Request, Sequence
from slipstream.text import Tokenizer
from slipstream.types import Delta, Output, SamplingParams, WarmUp

T = TypeVar("T")

_WARM_UP_TOKENS = 24  # of each answer: enough for graphs to be captured and replayed
_WARM_UP_LENGTHS = (1, 15, 23, 31, 47, 63, 95, 127, 191, 255, 383, 511, 2000)  # the sizes that prompts are padded to
_WARM_UP_NEW = 30  # distinct tokens: rounds in which a drafter finds no repetition are captured too


class EngineClient:
    """What `LLM` and `AsyncLLM` share: a model, drafters and a verifier behind an engine loop. Safe from any thread.

    `model`: a built-in name, a path, a hub id, or an open checkpoint. `speculate`: a drafter's name with options
    ("suffix", "ngram:max_n=5"), a mapping, vLLM's `speculative_config`, or None for plain decoding. `profile`: a file
    of `slipstream tune`, in place of these. `drafters`: more of them, which requests may name
    (`SamplingParams.speculate`); the first is the default if `speculate` is not given. `max_model_len`: the longest
    sequence, prompt included (default: the model's own context; what does not fit into memory is refused).
    `cache_tokens`: the size of the KV cache, in tokens of all requests together. `quantize`: the format of the weights
    on a CPU: none, int8, int4 or auto (see docs/quantization.md). `exact`: bitwise the same text with any drafter, on a
    GPU too and in 16 bits, or an error (see docs/exact.md). `tokenizer`: a directory whose tokenizer replaces the
    model's. `revision`: of a model on the hub. `seed`: requests without a seed get one derived from this and their
    number. `gpu_memory_utilization`: upper bound on the part of GPU memory that weights and K/V may take. `others`:
    arguments of vLLM that change nothing here (`tensor_parallel_size=1`, ...); other values of them are refused.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint = DEFAULT_MODEL,
        *,
        speculate: Speculate = DEFAULT,
        speculative_config: Mapping[str, object] | None = None,
        profile: str | Path | None = None,
        drafters: Seq[Speculate] = (),
        verifier: str = "match",
        dtype: str = "auto",
        device: str = "auto",
        quantize: str = "auto",
        exact: bool = False,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        cache_tokens: int | None = None,
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float | None = None,
        **others: object,
    ) -> None:
        device = choose_device(device)
        inputs.check_inert(others, device, signature(EngineClient).parameters.keys() - {"others"})
        self._seed = None if seed is None else checks.integer("seed", seed, -(2**63), 2**64 - 1)
        if gpu_memory_utilization is not None:
            checks.number("gpu_memory_utilization", gpu_memory_utilization, 0.01, 1.0)
        if speculative_config is not None and speculate != DEFAULT:
            raise OptionError("give either speculate or speculative_config, not both")
        found = inputs.given_profile(profile, alone=speculative_config is None and speculate == DEFAULT)
        speculate = speculate if found is None else found.speculate
        beside = tuple(map(parse_speculate, checks.listed("drafters", drafters, "drafters")))  # type: ignore[arg-type]
        chosen = parse_speculate(speculate if speculative_config is None else speculative_config)
        config = EngineConfig(
            model=inputs.at_revision(model, revision),
            default=beside[0] if beside and not (speculative_config or found) and speculate == DEFAULT else chosen,
            drafters=beside,
            verifier=verifier,
            dtype=dtype,
            device=device,
            quantize=quantize,
            exact=exact,
            max_model_len=max_model_len,
            max_num_seqs=checks.integer("max_num_seqs", max_num_seqs, 1),
            cache_tokens=cache_tokens,
            tokenizer=tokenizer,
            memory_share=gpu_memory_utilization,
            profile=found,
        )
        self._loop = EngineLoop()
        # The loop does not reference the LLM: when the last reference to the LLM is gone, the engine's thread ends.
        self._close = weakref.finalize(self, self._loop.close)
        try:
            self._core = self._loop.load(config)
        except BaseException:
            self._close()
            raise
        self._requests = itertools.count(1)

    def close(self) -> None:
        """End all requests and release the model. No further requests are accepted."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine that runs the requests."""
        return self._core.engine

    @property
    def drafter(self) -> AnyDrafter:
        """The drafter of requests that name none."""
        return self._core.drafter

    @property
    def drafters(self) -> list[str]:
        """What requests may name as `speculate`, the default first."""
        return self._core.names

    @property
    def target(self) -> TargetView:
        """The drafters' view of the model."""
        return self._core.target

    @property
    def model(self) -> Model:
        """The model."""
        return self._core.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, if there is one."""
        return self._core.tokenizer

    @property
    def cache(self) -> PagedCache:
        """The KV cache of all requests."""
        return self._core.cache

    @property
    def burst(self) -> Burst | None:
        """The rounds of the default drafter on the device; None where it does not draft in rounds."""
        return self._core.burst

    @property
    def exact(self) -> bool:
        """Whether speculative and plain text are bitwise equal on this machine."""
        return self._core.exact

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence, prompt included."""
        return self._core.max_model_len

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self._core.end_ids

    @property
    def quantize(self) -> str:
        """The format of the weights, with `auto` resolved."""
        return self.model.quantize if isinstance(self.model, Decoder) else "none"

    def use(self, speculate: Speculate) -> None:
        """Change the default drafter. Running requests keep theirs; if this fails, the default is plain decoding."""
        spec = parse_speculate(speculate)
        self._loop.call(lambda: self._core.use(spec))

    def swap_model(self, model: Model) -> Model:
        """Replace the weights by others of the same shape and decode plainly, while nothing runs; returns the old."""
        return self._loop.call(lambda: self._core.swap_model(model))

    def warm_up(self) -> WarmUp:
        """Compile kernels and capture graphs now, rather than during the first requests.

        Makes the rounds of all loaded drafters, for every batch up to `max_num_seqs` and every kind of sampling, and
        runs prompts of the lengths that graphs are made for. Does nothing on a CPU. Returns what it took.
        """
        if self.model.device == "cpu":
            return WarmUp()
        began, before = time.perf_counter(), torch.cuda.memory_reserved()
        if (device := self.engine.device) is not None:
            self._loop.call(device.warm_up)
        how = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_WARM_UP_TOKENS)
        prompts = [*([token] * length for length in _WARM_UP_LENGTHS for token in range(2)), [*range(_WARM_UP_NEW)]]
        for prompt in prompts:  # the second pass of a size is captured
            if len(prompt) + _WARM_UP_TOKENS <= self.max_model_len:
                list(self._finished(enumerate([self._request(prompt, how)]), 1))
                self.reset_prefix_cache()  # a cached part would leave fewer rows
        mib = (torch.cuda.memory_reserved() - before) / 2**20
        return WarmUp(time.perf_counter() - began, mib, 0 if device is None else device.graphs)

    def on_engine(self, action: Callable[[], T]) -> T:
        """Run `action` on the engine's thread, between two steps; returns its result or raises its error."""
        return self._loop.call(action)

    def learnt(self) -> tuple[str, dict[str, Any]]:
        """The setup that the policy's costs were measured on, and what the policy has learnt, as plain data."""
        return self._loop.call(self._core.learnt)

    def reset_prefix_cache(self) -> None:
        """Remove the pages of finished requests from the prefix cache."""
        self._loop.call(self.cache.forget_idle)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of prompts and outputs."""
        if self.tokenizer is None:
            raise OptionError(f"{self.model.name} has no tokenizer")
        return self.tokenizer

    # -- from user input to requests ---------------------------------------------------------------------------------

    def sequences(self, prompt: Prompt, params: SamplingParams, *, trace: bool = False) -> list[Sequence]:
        """The sequences of a request, one per choice, for programs that step `engine` themselves."""
        return self._core.sequences(self._request(prompt, params, trace=trace))

    def chat_prompts(
        self,
        messages: object,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: object = None,
        chat_template_kwargs: object = None,
    ) -> list[list[int]]:
        """The token ids of a conversation, or of several, by the model's chat template."""
        options = inputs.template_variables(tools, chat_template_kwargs)
        options["add_generation_prompt"] = checks.flag("add_generation_prompt", add_generation_prompt)
        options["continue_final_message"] = checks.flag("continue_final_message", continue_final_message)
        return [self._chat_prompt(c, **options) for c in inputs.as_conversations(messages)]

    def _chat_prompt(self, conversation: Seq[Message], **options: Any) -> list[int]:
        if self.tokenizer is None:
            raise OptionError(f"{self.model.name} has no tokenizer, so there is no chat template", hint="use generate")
        return self.tokenizer.encode_chat(conversation, **options)

    def _request(self, prompt: Prompt, params: SamplingParams, *, with_text: bool = True, **more: Any) -> Request:
        """A checked request; `more`: other fields of it."""
        given = inputs.as_prompt(prompt)
        if isinstance(given, str) and self.tokenizer is None:
            raise OptionError(f"{self.model.name} has no tokenizer", hint="give token ids instead of text")
        ids = self.get_tokenizer().encode(given) if isinstance(given, str) else given
        vocab, ends = self.model.config.vocab_size, frozenset[int]() if params.ignore_eos else self.end_ids
        inputs.check_prompt(ids, self.max_model_len, self.model.config.context, vocab)
        words = inputs.checked_params(params, self.tokenizer, vocab, ends)
        structured = params.structured_outputs
        more["grammar"] = None if structured is None else self._core.grammars.source(structured)
        more["prediction"] = inputs.prediction_ids(params.prediction, self.tokenizer, vocab)
        self._core.choose(params.speculate)  # raises if it is not loaded
        number, seed = next(self._requests), params.seed
        if seed is None:
            seed = secrets.randbits(63) if self._seed is None else noise.key(self._seed, number)
        text = given if isinstance(given, str) else None
        return Request(f"request-{number}", text, ids, params, seed, words, with_text, **more)

    def _finished(self, source: Iterator[tuple[int, Request]], at_once: int) -> Iterator[tuple[int, Output]]:
        """Requests as they finish, `at_once` of them concurrently. If one fails, all are cancelled."""
        outbox = Mailbox()
        under_way: dict[int, tuple[int, Request]] = {}
        try:
            while True:
                room = at_once - len(under_way)
                taken = list(itertools.islice(source, room if room >= at_once / 8 else 0))
                under_way.update(zip(self._loop.submit([r for _, r in taken], outbox), taken, strict=True))
                if not under_way:
                    return
                message = outbox.get()
                if message.error is not None:
                    raise message.error
                place, request = under_way.pop(message.ticket)
                assert message.completions is not None
                yield (
                    place,
                    Output(
                        request.id, request.prompt, request.prompt_ids, message.completions, message.prompt_logprobs
                    ),
                )
        finally:
            for ticket in under_way:
                self._loop.cancel(ticket)


class LLM(EngineClient):
    """A model, drafters and a verifier, with `generate`, `chat` and `stream`. Safe to call from any thread."""

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[Output]:
        """Answer prompts, all in one continuous batch; one output per prompt, in order.

        A prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. `use_tqdm`: a progress bar, if
        standard error is a terminal.
        """
        return self._answer(inputs.as_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        use_tqdm: bool = False,
    ) -> list[Output]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]) or several by the model's own chat template.

        `tools` and `chat_template_kwargs` are passed to the template, and refused if it does not use them.
        `continue_final_message` (with `add_generation_prompt=False`): the answer continues the last message.
        """
        prompts = self.chat_prompts(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._answer(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt | Seq[Message], sampling_params: SamplingParams | None = None, *, trace: bool = False
    ) -> Iterator[Delta]:
        """Answer one prompt or conversation; yields what each step added. Closing the iterator cancels the request.

        `trace`: deltas carry the trees that were drafted.
        """
        (params,) = inputs.as_params(sampling_params, 1)
        if inputs.is_conversation(prompt):
            (conversation,) = inputs.as_conversations(prompt)
            prompt = self._chat_prompt(conversation)
        return self._stream(self._request(prompt, params, trace=trace))  # type: ignore[arg-type]

    def _answer(self, prompts: Seq[Prompt], params: object, use_tqdm: bool) -> list[Output]:
        each = inputs.as_params(params, len(prompts))
        requests = [self._request(prompt, how) for prompt, how in zip(prompts, each, strict=True)]
        with progress_bar(len(requests), checks.flag("use_tqdm", use_tqdm)) as done:
            return self._run(requests, done)

    def _stream(self, request: Request) -> Iterator[Delta]:
        outbox = Mailbox()
        (ticket,) = self._loop.submit([request], outbox, streams=True)
        try:
            while (message := outbox.get()).delta is not None:
                yield message.delta
            if message.error is not None:
                raise message.error
        finally:
            self._loop.cancel(ticket)

    def _run(self, requests: list[Request], done: Callable[[int], None]) -> list[Output]:
        outputs: dict[int, Output] = {}
        for place, output in self._finished(enumerate(requests), len(requests)):
            outputs[place] = output
            done(len(outputs))
        return [outputs[place] for place in range(len(requests))]

    def answers(
        self, requests: Iterable[tuple[Prompt, SamplingParams]], at_once: int, *, text: bool = False
    ) -> Iterator[tuple[int, Output]]:
        """Answer any number of prompts, `at_once` of them concurrently; yields (index, output) as they finish.

        Prompts are read from the iterator only when there is room for some, so a later one may depend on an earlier
        answer; several at a time, so that most steps have no prefill. Outputs have token ids and, unless `text` or stop
        strings ask for it, no text: detokenizing costs time. Closing the iterator cancels the running requests.
        """
        checks.integer("at_once", at_once, 1)
        made = (self._request(prompt, params, with_text=text) for prompt, params in requests)
        return self._finished(enumerate(made), at_once)
