"""The public surface: names, parameters and defaults that users write down. Changing it means changing this file."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

import slipstream
from slipstream import LLM, AsyncLLM, SamplingParams, errors
from slipstream.cli import app, benches, corpora
from slipstream.drafters import drafter_names, registry
from slipstream.drafters.base import Drafter, DraftOptions
from slipstream.drafters.growing.tree_growth import GrowingDrafter, GrowthOptions
from slipstream.drafters.heads.head_drafter import HeadDrafter, HeadOptions
from slipstream.llm import EngineClient
from slipstream.types import Completion, Delta, Logprob, Output, Plan, RequestMetrics, Stats
from slipstream.verify import make_verifier


def parameters(function: Any) -> dict[str, Any]:
    """Names and defaults; a parameter without a default has `...`."""
    found = inspect.signature(function).parameters.values()
    return {p.name: ... if p.default is inspect.Parameter.empty else p.default for p in found if p.name != "self"}


def public(kind: type, *bases: type) -> set[str]:
    """The public methods and properties that a class, or one of these bases, defines itself."""
    kinds = (property, classmethod, staticmethod)
    return {
        name
        for one in (kind, *bases)
        for name, value in vars(one).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    }


def test_names() -> None:
    assert slipstream.__all__ == [
        "LLM",
        "AsyncLLM",
        "Completion",
        "Delta",
        "Logprob",
        "Output",
        "Plan",
        "RequestMetrics",
        "SamplingParams",
        "SlipstreamError",
        "Stats",
        "TokenTree",
        "__version__",
    ]
    assert sorted(dir(slipstream)) == sorted(slipstream.__all__)
    for name in slipstream.__all__:
        assert getattr(slipstream, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = slipstream.nonsense


def test_sampling_params() -> None:
    assert parameters(SamplingParams) == {
        "n": 1,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": None,
        "seed": None,
        "max_tokens": None,
        "min_tokens": 0,
        "stop": None,
        "stop_token_ids": None,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "bad_words": None,
        "allowed_token_ids": None,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "detokenize": True,
        "speculate": None,
        "structured_outputs": None,
        "prediction": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_llm() -> None:
    assert parameters(LLM) == {
        "model": "smollm2-135m",
        "speculate": "auto",
        "speculative_config": None,
        "profile": None,
        "drafters": (),
        "verifier": "match",
        "dtype": "auto",
        "device": "auto",
        "quantize": "auto",
        "exact": False,
        "max_model_len": None,
        "max_num_seqs": 64,
        "cache_tokens": None,
        "tokenizer": None,
        "revision": None,
        "seed": None,
        "gpu_memory_utilization": None,
        "others": ...,
    }
    assert {name: parameters(getattr(LLM, name)) for name in ("generate", "chat", "stream", "answers", "use")} == {
        "generate": {"prompts": ..., "sampling_params": None, "use_tqdm": False},
        "chat": {
            "messages": ...,
            "sampling_params": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": None,
            "chat_template_kwargs": None,
            "use_tqdm": False,
        },
        "stream": {"prompt": ..., "sampling_params": None, "trace": False},
        "answers": {"requests": ..., "at_once": ..., "text": False},
        "use": {"speculate": ...},
    }
    asking = {"generate", "chat", "stream", "answers", "use", "swap_model", "warm_up", "get_tokenizer", "close"}
    asking |= {"reset_prefix_cache", "on_engine", "learnt"}
    reading = {"engine", "drafter", "target", "model", "tokenizer", "cache", "exact", "max_model_len", "end_ids"}
    more = {"quantize", "burst", "sequences", "chat_prompts", "drafters"}
    assert public(LLM, EngineClient) == asking | reading | more


def test_async_llm() -> None:
    assert parameters(AsyncLLM) == {"model": "smollm2-135m", "max_queue": None, "options": ...}
    per_request = {"trace": False, "priority": 0, "timeout": None}
    assert {name: parameters(getattr(AsyncLLM, name)) for name in ("generate", "chat", "request", "submit")} == {
        "generate": {"prompt": ..., "sampling_params": None, **per_request},
        "chat": {
            "messages": ...,
            "sampling_params": None,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "tools": None,
            "chat_template_kwargs": None,
            **per_request,
        },
        "request": {"prompt": ..., "params": ..., **per_request},
        "submit": {"request": ..., "streams": True},
    }
    assert public(AsyncLLM) == {"generate", "chat", "request", "submit", "status", "under_way", "alive", "max_num_seqs"}
    assert issubclass(AsyncLLM, EngineClient)


def test_drafters() -> None:
    assert public(Drafter) == {
        "resolve_class",
        "usual",
        "rename",
        "plan",
        "is_passive",
        "origins",
        "samples",
        "lighter",
        "extend",
        "host_only",
        "signal",
        "attach",
        "scratch_rows",
        "propose",
        "observe",
        "depart",
        "rollback",
        "device_draft",
        "device_drafts",
        "device_keepers",
        "has_signal",
        "off_device",
        "close",
        "take_calls",
        "unread",
    }
    assert Drafter.__abstractmethods__ == {"propose"}
    assert parameters(Drafter.__init__) == {"options": ..., "target": ...}
    assert parameters(DraftOptions) == {"depth": 8, "nodes": 16, "branch": 2, "min_confidence": 0.0}
    assert parameters(Plan) == {
        "depth": 0, "nodes": 0, "branch": 1, "min_confidence": 0.0, "min_level": 0.0, "parts": (), "rounds": 0,
        "ahead": False,
    }  # fmt: skip
    built_in = {
        "auto", "none", "ngram", "suffix", "lookahead", "draft_model", "foreign_draft", "early_exit", "layer_skip",
        "kangaroo", "eagle3", "medusa", "mtp", "parallel", "merge", "cascade", "grammar", "prediction",
    }  # fmt: skip
    assert set(registry._BUILT_IN) == built_in
    assert set(drafter_names()) >= built_in  # and those of other packages that are installed


def test_drafters_to_derive_from() -> None:
    """What a drafter of another package that runs a model can override and call."""
    assert public(GrowingDrafter) - public(Drafter) == {"bring_up", "follows", "room", "width"}
    assert public(HeadDrafter) - public(Drafter) == {"loop_type", "plan_for"}
    assert issubclass(HeadDrafter, GrowingDrafter)
    assert GrowingDrafter.__abstractmethods__ == HeadDrafter.__abstractmethods__ == {"_feed_roots", "_run"}
    growth = {"depth": 4, "nodes": 0, "branch": 1, "min_confidence": 0.0, "draw": "auto"}
    assert parameters(GrowthOptions) == growth
    assert parameters(HeadOptions) == {**growth, "depth": 0, "branch": 4, "checkpoint": ""}
    for kind in (GrowingDrafter, HeadDrafter):
        assert parameters(kind.__init__) == parameters(Drafter.__init__)


def test_results() -> None:
    """The fields of what users get."""
    fields = {
        Output: "request_id prompt prompt_token_ids outputs prompt_logprobs",
        Completion: "index text token_ids finish_reason stop_reason logprobs stats seed metrics cached_tokens",
        Delta: "index text token_ids origins finish_reason completion trees decisions logprobs",
        Logprob: "logprob rank decoded_token",
        RequestMetrics: "arrival_time first_token_time last_token_time chunks",
        Stats: "steps drafting_steps drafted accepted emitted decoded offered_by_depth accepted_by_depth draft_ms "
        "verify_ms other_ms prefill_ms decode_ms draft_faults lossy origins drafted_by decisions",
    }
    for kind, names in fields.items():
        assert [field.name for field in dataclasses.fields(kind)] == names.split(), kind.__name__
    assert public(Output) == {
        "text", "token_ids", "finish_reason", "finished", "stats", "metrics", "logprobs", "cumulative_logprob",
    }  # fmt: skip
    assert public(Completion) == {"cumulative_logprob"}
    assert public(Delta) == {"then"}
    assert public(RequestMetrics) == {"time_to_first_token"}
    rates = {"tokens_per_step", "tokens_per_second", "acceptance_length", "acceptance_rate"}
    assert public(Stats) == rates | {"add", "as_dict", "outcome_of"}


def test_verifiers() -> None:
    lossless = {"match", "rejection", "block", "traversal"}
    assert all(not make_verifier(name).lossy for name in lossless)
    assert make_verifier("typical").lossy
    with pytest.raises(errors.OptionError) as refused:
        make_verifier("nonsense")
    assert str(refused.value).endswith("valid: block, match, rejection, traversal, typical)")


def test_command_line_verbs() -> None:
    verbs = [command.name for command in app.registered_commands]
    assert verbs == [
        "demo", "run", "chat", "serve", "batch", "check", "drafters", "tune", "simulate", "synth", "train", "import",
        "export", "env",
    ]  # fmt: skip
    assert [group.name for group in app.registered_groups] == ["corpus", "bench"]
    assert [command.name for command in benches.registered_commands] == ["compare"]
    assert [command.name for command in corpora.registered_commands] == ["build"]


def test_exceptions() -> None:
    """Which exception is a kind of which."""
    found = {
        name: tuple(base.__name__ for base in kind.__bases__)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    model_errors = {"ModelNotFound", "CorruptFile", "HashMismatch", "UnsupportedModel", "ShapeMismatch"}
    others = {"ModelError", "DraftMismatch", "DraftFault", "CacheFull", "EngineClosed", "ServerFailed", "WriterFailed"}
    others |= {"EngineFailed", "QueueFull", "DeadlineExceeded"}
    assert found == {
        "SlipstreamError": ("Exception",),
        "OptionError": ("SlipstreamError", "ValueError"),
        "PromptError": ("OptionError",),
        **dict.fromkeys(model_errors | {"NotEnoughMemory"}, ("ModelError",)),
        **dict.fromkeys(others, ("SlipstreamError",)),
    }
