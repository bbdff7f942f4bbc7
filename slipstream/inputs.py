"""User input in vLLM's spellings: prompts, conversations, parameters and arguments of the engine.

Each function returns plain lists, or raises an error of one line that names the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

from slipstream import checks
from slipstream.errors import OptionError, PromptError, unknown_choice
from slipstream.profiles import Profile, read_profile
from slipstream.sampling import BadWords
from slipstream.text import Tokenizer
from slipstream.text.chat import check_messages
from slipstream.types import SamplingParams

Prompt = str | Seq[int] | Mapping[str, object]
Message = Mapping[str, object]
Named = TypeVar("Named")

_PROMPTS = 'text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}'

# Arguments of vLLM's LLM that change nothing here, with the only values that are accepted.
_INERT: Mapping[str, tuple[object, str]] = {
    "tensor_parallel_size": (1, "a model runs on one device"),
    "pipeline_parallel_size": (1, "a model runs on one device"),
    "enable_prefix_caching": (True, "shared prefixes are always kept"),
    "trust_remote_code": (False, "no code of a model's repository is ever run"),
    "enforce_eager": (False, "graphs are part of how a GPU runs here"),
}


# -- prompts ----------------------------------------------------------------------------------------------------------


def as_prompts(prompts: object, name: str = "prompts") -> list[str | list[int]]:
    """One prompt or several (a list, a generator, an array, ...) as a list of texts and lists of token ids."""
    if isinstance(prompts, str | Mapping):
        return [as_prompt(prompts, name)]
    elements = _elements(prompts, name)
    if elements and _is_integer(elements[0]):
        return [as_prompt(elements, name)]
    return [as_prompt(prompt, f"{name}[{i}]") for i, prompt in enumerate(elements)]


def as_prompt(prompt: object, name: str = "prompt") -> str | list[int]:
    """One prompt: a text, or its token ids as plain integers."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        return _unwrapped(prompt, name)
    ids = _elements(prompt, name)
    for place, token in enumerate(ids):
        if not _is_integer(token):
            raise PromptError(f"{name}[{place}]={checks.shown(token)} is not a token id", hint=f"valid: {_PROMPTS}")
    return [int(token) for token in ids]  # type: ignore[call-overload]


def _unwrapped(prompt: Mapping[str, object], name: str) -> str | list[int]:
    if prompt.keys() == {"prompt_token_ids"}:
        return as_prompt(checks.listed(f"{name}: prompt_token_ids", prompt["prompt_token_ids"], "token ids"), name)
    if prompt.keys() != {"prompt"}:
        given = ", ".join(map(str, prompt)) or "nothing"
        raise PromptError(f"{name} has {given}", hint="valid: either prompt or prompt_token_ids, and nothing else")
    if not isinstance(prompt["prompt"], str):
        raise PromptError(f"{name}: prompt={checks.shown(prompt['prompt'])} is not a text", hint=f"valid: {_PROMPTS}")
    return prompt["prompt"]


def _elements(value: object, name: str) -> list[object]:
    raw = isinstance(value, bytes | bytearray | memoryview)
    if not raw and hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    if raw or not isinstance(value, Iterable):
        raise PromptError(f"{name} must be {_PROMPTS}, not {type(value).__name__}")
    return list(value)


def _is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


# -- conversations ----------------------------------------------------------------------------------------------------


def as_conversations(messages: object) -> list[list[dict[str, object]]]:
    """One conversation or several as lists of checked messages."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        check_messages(messages)  # refuses it
    several = list(messages)  # type: ignore[call-overload]
    if not several or isinstance(several[0], Mapping):
        return [check_messages(several)]
    return [check_messages(conversation, f"messages[{i}]") for i, conversation in enumerate(several)]


def is_conversation(prompt: object) -> bool:
    """Whether this is a list of messages rather than a prompt."""
    return isinstance(prompt, Seq) and not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def template_variables(tools: object, others: object) -> dict[str, Any]:
    """The variables of a chat template that a user may set."""
    if not isinstance(others, Mapping | None):
        raise OptionError(f"chat_template_kwargs={checks.shown(others)} is not a mapping")
    for name in others or ():
        if name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            raise OptionError(f"chat_template_kwargs: {name} is an argument of its own")
    if tools is None:
        return dict(others or {})
    found = checks.listed("tools", tools, "tools")
    for place, tool in enumerate(found):
        if not isinstance(tool, Mapping):
            raise OptionError(f"tools[{place}]={checks.shown(tool)} is not a mapping", hint="give JSON schemas")
    return {**(others or {}), "tools": found}


# -- parameters -------------------------------------------------------------------------------------------------------


def as_params(params: object, count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts; one set, or None, is for all of them."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise OptionError(f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}")
    each = list(params)
    if len(each) != count:
        raise OptionError(f"{len(each)} sampling parameters for {count} prompts", hint="give one, or one per prompt")
    for place, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            raise OptionError(f"sampling_params[{place}] must be SamplingParams, not {type(one).__name__}")
    return each


def given_profile(path: str | Path | None, *, alone: bool) -> Profile | None:
    """The profile, if one is given; `alone`: no drafter is given beside it."""
    if path is None:
        return None
    if not alone:
        raise OptionError("give either a profile or a drafter, not both")
    return read_profile(path)


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The token sequences of forbidden words: at the beginning of a text, and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if tokenizer is None:
            raise OptionError("bad_words need a tokenizer", hint="use logit_bias with -inf")
        bare, spaced = (tuple(tokenizer.encode(lead + word.lstrip(), add_special=False)) for lead in ("", " "))
        found[bare] = None
        if spaced[-len(bare) :] != bare:  # else the bare one already forbids it
            found[spaced] = None
    return tuple(found)


def prediction_ids(prediction: str | Seq[int] | None, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """The tokens of a predicted output."""
    if isinstance(prediction, str):
        if tokenizer is None:
            raise OptionError("a prediction in text needs a tokenizer", hint="give token ids")
        return tuple(tokenizer.encode(prediction, add_special=False))
    _require_tokens("prediction", prediction or (), vocab_size)
    return tuple(prediction or ())


def check_prompt(ids: Seq[int], longest: int, context: int, vocab_size: int) -> None:
    """Refuse a prompt that the model cannot read; `longest`: tokens that a sequence may have."""
    if not ids:
        raise PromptError("the prompt is empty", hint="give at least one token")
    if len(ids) >= longest:
        raise PromptError(
            f"the prompt has {len(ids)} tokens and the context holds {longest}, answer included",
            hint="shorten the prompt" if longest == context else "shorten the prompt or raise max_model_len",
        )
    _require_tokens("prompt", ids, vocab_size)


def checked_params(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Iterable[int]
) -> BadWords | None:
    """The bad words as token ids. What this model cannot honour, or what leaves it no token, is refused."""
    if params.stop_strings and tokenizer is None:
        raise OptionError("stop strings need a tokenizer", hint="use stop_token_ids")
    bad_words = bad_word_ids(params.bad_words or (), tokenizer)
    allowed = params.allowed_token_ids
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.bias,
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": allowed or (),
        "bad_words": (token for word in bad_words for token in word),
    }
    for name, tokens in named.items():
        _require_tokens(name, tokens, vocab_size)
    if allowed is not None:
        forbidden = {word[0] for word in bad_words if len(word) == 1}
        forbidden.update(token for token, bias in params.bias.items() if bias == float("-inf"))
        if params.min_tokens:
            forbidden.update(end_ids, params.stop_token_ids or ())
        if forbidden.issuperset(allowed):
            raise OptionError("allowed_token_ids: bad_words, logit_bias and min_tokens forbid every one of them")
    return BadWords(bad_words) if bad_words else None


def _require_tokens(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise OptionError(f"{name}: there is no token {token}", hint=f"valid: 0 to {vocab_size - 1}")


# -- the engine's arguments -------------------------------------------------------------------------------------------


def check_inert(given: Mapping[str, object], device: str, own: Iterable[str]) -> None:
    """Accept arguments of vLLM that change nothing here; refuse other values of them, and unknown names.

    `own`: the caller's own arguments, for the error message.
    """
    for name, value in given.items():
        if name not in _INERT:
            raise unknown_choice("argument of LLM", name, [*own, *_INERT])
        accepted, why = _INERT[name]
        checked = checks.flag(name, value) if isinstance(accepted, bool) else checks.integer(name, value, 1)
        if checked != accepted and not (name == "enforce_eager" and device == "cpu"):
            raise OptionError(f"{name}={value!r} cannot be honoured: {why}", hint=f"valid: {accepted}")


def tokenizer_of(directory: str | Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory, which must not have more tokens than the model."""
    tokenizer = Tokenizer.from_directory(directory)
    if len(tokenizer) > vocab_size:
        raise OptionError(f"tokenizer={str(directory)!r} has {len(tokenizer)} tokens and the model {vocab_size}")
    return tokenizer


def at_revision(model: Named, revision: str | None) -> Named | str:
    """The model's name with its revision, which only models of the hub have."""
    if revision is None:
        return model
    checks.text("revision", revision)
    if not isinstance(model, str) or "@" in model or "/" not in model or Path(model).expanduser().exists():
        raise OptionError(f"revision={revision!r}: {checks.shown(model)} is no hub id", hint="as in model='owner/name'")
    return f"{model}@{revision}"
