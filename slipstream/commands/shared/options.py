"""What the verbs share: how a parameter is described to a command line, and the groups of options that recur.

Nothing here imports torch: `slipstream --help` reads this file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from slipstream.errors import OptionError
from slipstream.models.builtin import DEFAULT_MODEL
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.drafters import DrafterSpec

MAX_TOKENS = 512  # small models may repeat themselves for ever; whoever wants more says so


@dataclass(frozen=True)
class Described:
    """Stands in a parameter's `Annotated`: its help, and its names where they are not simply the parameter's own."""

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    positional: bool = False


@dataclass(frozen=True)
class ModelSetup:
    """Which model, with which drafter, in how much memory."""

    model: Annotated[str, Described("built-in name, directory, .gguf file or hub id", ("--model", "-m"), "MODEL")] = (
        DEFAULT_MODEL
    )
    speculate: Annotated[
        str | None, Described("drafter: suffix (the default), none, ngram:max_n=5,depth=8, or JSON", metavar="DRAFTER")
    ] = None
    speculative_config: Annotated[str | None, Described("the same, as vLLM spells it", metavar="JSON")] = None
    dtype: Annotated[str, Described("auto, float32, bfloat16 or float16")] = "auto"
    device: Annotated[str, Described("auto, cpu, cuda or cuda:N")] = "auto"
    quantize: Annotated[str, Described("weights on a CPU: auto, none, int8 or int4")] = "auto"
    exact: Annotated[bool, Described("the same text with any drafter bit for bit, on a GPU too, at a price")] = False
    max_model_len: Annotated[
        int | None, Described("longest sequence in tokens, prompt included (default: the model's own)")
    ] = None

    def drafter(self) -> DrafterSpec:
        """The drafter that was asked for; whatever is wrong with it is told before a model is touched."""
        from slipstream.drafters.registry import DEFAULT, parse_speculate

        if self.speculative_config is None:
            return parse_speculate(DEFAULT if self.speculate is None else self.speculate)
        if self.speculate is not None:
            raise OptionError("give either --speculate or --speculative-config, not both")
        try:
            config = json.loads(self.speculative_config)
        except json.JSONDecodeError as error:
            raise OptionError(f"--speculative-config is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise OptionError("--speculative-config is not a JSON object", hint='as in {"method": "ngram"}')
        return parse_speculate(config)


@dataclass(frozen=True)
class EngineSetup(ModelSetup):
    """The same, for verbs that run the model."""

    verifier: Annotated[
        str, Described("how drafts are checked: match, rejection, block, traversal or typical (lossy)")
    ] = "match"
    threads: Annotated[int | None, Described("CPU threads (default: torch's choice)")] = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and where an answer ends: `SamplingParams` in the spelling of a command line."""

    temperature: Annotated[float, Described("0: always the likeliest token")] = 0.0
    top_k: Annotated[int, Described("keep the k likeliest tokens (0: all)")] = 0
    top_p: Annotated[float, Described("keep the likeliest tokens that make up this share")] = 1.0
    min_p: Annotated[float, Described("drop tokens less likely than this share of the likeliest")] = 0.0
    repetition_penalty: Annotated[float, Described("above 1: avoid tokens of prompt and answer")] = 1.0
    presence_penalty: Annotated[float, Described("above 0: avoid tokens of the answer")] = 0.0
    frequency_penalty: Annotated[float, Described("above 0: avoid them more the more often they came")] = 0.0
    seed: Annotated[int | None, Described("same seed, same answer (default: a fresh one each time)")] = None
    max_tokens: Annotated[
        int | None, Described(f"longest answer in tokens (default: {MAX_TOKENS}; the demo has its own)")
    ] = None
    min_tokens: Annotated[int, Described("shortest answer in tokens")] = 0
    stop: Annotated[tuple[str, ...], Described("end before this text (repeatable)", metavar="TEXT")] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], Described("end at this token (repeatable)", ("--stop-token-id",), "ID")
    ] = ()
    ignore_eos: Annotated[bool, Described("go on after the end-of-answer token")] = False
    n: Annotated[int, Described("number of answers", ("-n",))] = 1
    logprobs: Annotated[int | None, Described("log-probabilities of each token and of so many alternatives")] = None
    logit_bias: Annotated[tuple[str, ...], Described("add to a token's logit (repeatable)", metavar="ID=VALUE")] = ()

    def params(self, max_tokens: int = MAX_TOKENS, seed: int | None = None) -> SamplingParams:
        """The engine's parameters; `max_tokens` and `seed` are the verb's own defaults."""
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias),
            seed=seed if self.seed is None else self.seed,
            max_tokens=max_tokens if self.max_tokens is None else self.max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )

    def require_single_answer(self, verb: str) -> None:
        """Refuse what a verb that shows one answer after the other cannot honour."""
        if self.n != 1:
            raise OptionError(f"{verb} gives one answer at a time: -n {self.n} cannot be honoured", hint="use run -n")
        if self.logprobs is not None:
            raise OptionError(f"{verb} has no place for --logprobs", hint="use run --json --logprobs")


def _biases(settings: tuple[str, ...]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for setting in settings:
        token, _, value = setting.partition("=")
        try:
            index, bias = int(token), float(value)
        except ValueError:
            raise OptionError(f"--logit-bias {setting!r} is not ID=VALUE", hint="as in --logit-bias 42=-5") from None
        if index in biases:
            raise OptionError(f"--logit-bias names token {index} twice")
        biases[index] = bias
    return biases
