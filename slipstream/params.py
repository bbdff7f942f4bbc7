"""Sampling parameters, and the checks of their values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slipstream import checks
from slipstream.errors import OptionError

GREEDY_TEMPERATURE = 1e-5  # temperatures below this would overflow the division and are greedy in effect


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings are vLLM's; everything applies at every node of a tree.

    `max_tokens=None` runs to EOS or to the end of the context. `seed=None` draws a fresh seed for each request;
    the seed that was used is in the output, so that any answer can be reproduced.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # sees the prompt and the output
    presence_penalty: float = 0.0  # sees the output only
    frequency_penalty: float = 0.0  # sees the output only
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # how many top tokens beside the chosen one; 0: the chosen one alone
    prompt_logprobs: int | None = None  # how many top tokens for each token of the prompt
    bad_words: Sequence[str] | None = None  # never generated, at the beginning of a text or after a space
    allowed_token_ids: Sequence[int] | None = None  # only these are generated; None: all
    include_stop_str_in_output: bool = False  # keep the stop string, or the stop token's text, in the text
    skip_special_tokens: bool = True  # special tokens give no text
    detokenize: bool = True  # False: token ids only
    speculate: str | Mapping[str, object] | bool | None = None  # a drafter; False: plain decoding; None: the default
    structured_outputs: Mapping[str, object] | None = None  # one of json, json_object, regex, choice, grammar
    prediction: str | Sequence[int] | None = None  # a text, or its tokens, that the answer will repeat in large parts

    def __post_init__(self) -> None:
        """Convert every value to Python's own type, or refuse it: what passes here cannot fail in a batch."""
        checked: dict[str, object] = {name: check(name, getattr(self, name)) for name, check in _CHECKS.items()}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        fits = self.max_tokens is None or self.min_tokens <= self.max_tokens
        checks.require(fits, "min_tokens", self.min_tokens, "at most max_tokens")
        if self.stop and not self.detokenize:
            raise OptionError("detokenize=False leaves no text to search for stop strings", hint="use stop_token_ids")
        if self.structured_outputs and self.ignore_eos:
            raise OptionError("structured_outputs end with an end token, which ignore_eos ignores", hint="leave it out")

    @property
    def greedy(self) -> bool:
        """Whether the choice is the largest logit, without noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def bias(self) -> Mapping[int, float]:
        """`logit_bias`, always as a mapping."""
        return self.logit_bias or {}

    @property
    def penalised(self) -> bool:
        """Whether the logits depend on earlier tokens."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before the choice: by penalties, a bias, a mask, or a minimum length."""
        return self.penalised or self.masks or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def cuts(self) -> bool:
        """Whether min-p, top-k or top-p leave some tokens out of a draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def masks(self) -> bool:
        """Whether a list forbids some tokens."""
        return self.allowed_token_ids is not None or bool(self.bad_words)


def _speculate(name: str, value: object) -> object:
    if isinstance(value, bool | Mapping | None):
        return value
    return checks.text(name, value)


def _stop(name: str, value: object) -> tuple[str, ...]:
    return checks.strings(name, [value] if isinstance(value, str) else () if value is None else value)


def _bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping | None):
        raise OptionError(f"{name}={checks.shown(value)} is not a mapping", hint="as in {token id: number}")
    valid = f"numbers up to {_LARGEST_BIAS:g}; -inf forbids a token"
    return {
        checks.integer(f"{name}: token id", _number(token), 0): -math.inf
        if isinstance(bias, float) and bias == -math.inf
        else checks.number(f"{name}[{token}]", bias, -_LARGEST_BIAS, _LARGEST_BIAS, valid=valid)
        for token, bias in (value or {}).items()
    }


def _number(key: object) -> object:
    """A key of a JSON object, where numbers are strings."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def _words(name: str, value: object) -> tuple[str, ...]:
    words = () if value is None else checks.listed(name, value, "words")
    return tuple(checks.text(f"{name}[{i}]", word) for i, word in enumerate(words))


def _allowed(name: str, value: object) -> tuple[int, ...] | None:
    ids = None if value is None else checks.token_ids(name, value)
    if ids == ():
        raise OptionError(f"{name} is empty, so no token is allowed", hint="valid: token ids, or None for all")
    return ids


def _structured(name: str, value: object) -> dict[str, object] | None:
    """Exactly one kind and its source: a schema as JSON text, a pattern, the choices, a grammar."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) != 1 or (kind := next(iter(value))) not in _KINDS:
        raise OptionError(f"{name}={checks.shown(value)} is not valid", hint=f"give one of {', '.join(_KINDS)}")
    return {kind: _KINDS[kind](f"{name}: {kind}", value[kind])}


def _schema(name: str, value: object) -> str:
    """A JSON schema as text, which is what compiles and what is kept of a mapping that the caller may change."""
    try:
        schema = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{name} is no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(schema, dict):
        raise OptionError(f"{name}={checks.shown(value)} is no JSON schema", hint="valid: an object, or its JSON text")
    return json.dumps(schema)


def _true(name: str, value: object) -> bool:
    checks.require(value is True, name, value, "True")
    return True


def _choices(name: str, value: object) -> tuple[str, ...]:
    found = checks.strings(name, value)
    checks.require(len(found) > 0, name, value, "one string or more")
    return found


_KINDS: Mapping[str, Callable[[str, object], object]] = {
    "json": _schema,
    "json_object": _true,
    "regex": checks.text,
    "choice": _choices,
    "grammar": checks.text,
}


def _prediction(name: str, value: object) -> str | tuple[int, ...] | None:
    if value is None or isinstance(value, str):
        return value or None
    return checks.token_ids(name, value) or None


def _or_none(check: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else check(name, value)


def _int(low: int, high: int | None = None, **wording: str) -> Callable[[str, object], int]:
    return lambda name, value: checks.integer(name, value, low, high, **wording)


def _float(low: float, high: float, **wording: str) -> Callable[[str, object], float]:
    return lambda name, value: checks.number(name, value, low, high, **wording)


# Everything is computed in float32: beyond these bounds logits would overflow.
_LARGEST = 3e38
_LARGEST_BIAS = 1e9
_PENALTIES = (1e-6, 1e6)

_CHECKS: Mapping[str, Callable[[str, object], object]] = {
    "n": _int(1, 16_384),
    "temperature": _float(0.0, _LARGEST, valid="0 (greedy) to 3e+38"),
    "top_k": lambda name, value: max(0, checks.integer(name, value, -1, valid="-1 or 0 (off), or 1 and more")),
    "top_p": _float(5e-324, 1.0, valid="above 0, up to 1 (off)"),
    "min_p": _float(0.0, 1.0, valid="0 (off) to 1"),
    "repetition_penalty": _float(*_PENALTIES),
    "presence_penalty": _float(-2.0, 2.0),
    "frequency_penalty": _float(-2.0, 2.0),
    "logit_bias": _bias,
    "seed": _or_none(_int(-(2**63), 2**64 - 1, valid="an integer of 64 bits, or None")),
    "max_tokens": _or_none(_int(1)),
    "min_tokens": _int(0),
    "stop": _stop,
    "stop_token_ids": lambda name, value: () if value is None else checks.token_ids(name, value),
    "ignore_eos": checks.flag,
    "logprobs": _or_none(_int(0, 1000)),
    "prompt_logprobs": _or_none(_int(0, 1000)),
    "bad_words": _words,
    "allowed_token_ids": _allowed,
    "include_stop_str_in_output": checks.flag,
    "skip_special_tokens": checks.flag,
    "detokenize": checks.flag,
    "speculate": _speculate,
    "structured_outputs": _structured,
    "prediction": _prediction,
}
