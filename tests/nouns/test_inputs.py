"""User input in vLLM's spelling, and one line for each error."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.errors import EngineClosed, OptionError, SlipstreamError
from slipstream.inputs import bad_word_ids
from slipstream.models import memory
from slipstream.models.load import choose_dtype
from slipstream.progress_bar import progress_bar
from slipstream.text import Tokenizer
from tests.tiny import tiny_directory, tiny_llm

SHORT = SamplingParams(temperature=0.0, max_tokens=3)
HELLO = [{"role": "user", "content": "hello"}]


@functools.cache
def llm() -> LLM:
    return tiny_llm(characters=True)


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_one_prompt_in_every_spelling_is_one_prompt() -> None:
    ids = llm().get_tokenizer().encode("abc")
    (expected,) = llm().generate("abc", SHORT)
    spellings: list[Any] = [
        "abc", ["abc"], ids, [ids], tuple(ids), {"prompt": "abc"}, [{"prompt": "abc"}], {"prompt_token_ids": ids},
        (text for text in ["abc"]), iter([{"prompt_token_ids": tuple(ids)}]), np.array(ids), [np.array(ids)],
        torch.tensor(ids), torch.tensor([ids]), map(int, ids), {"prompt_token_ids": np.array(ids)},
    ]  # fmt: skip
    for spelling in spellings:
        (output,) = llm().generate(spelling, sampling_params=SHORT)
        assert output.token_ids == expected.token_ids and output.prompt_token_ids == ids, spelling
    assert [o.prompt for o in llm().generate(["a", {"prompt": "b"}, [3]], SHORT)] == ["a", "b", None]
    assert llm().generate([]) == [] and llm().generate(iter([]), SHORT) == []
    assert all(type(token) is int for token in llm().generate(np.array(ids), SHORT)[0].prompt_token_ids)


WRONG_PROMPTS: list[tuple[Any, str]] = [
    (b"abc", r"^prompts must be text, token ids, .* not bytes$"),
    (memoryview(b"abc"), r"^prompts must be .* not memoryview$"),
    (5, r"^prompts must be .* not int$"),
    (None, r"^prompts must be .* not NoneType$"),
    (1.5, r"^prompts must be .* not float$"),
    ([1.5], r"^prompts\[0\] must be .* not float$"),
    ([True], r"^prompts\[0\] must be .* not bool$"),
    ([1, "a"], r"^prompts\[1\]='a' is not a token id"),
    ([["1", "2"]], r"^prompts\[0\]\[0\]='1' is not a token id"),
    (["a", b"abc"], r"^prompts\[1\] must be .* not bytes$"),
    (["a", None], r"^prompts\[1\] must be .* not NoneType$"),
    ([[1, 2], [3, 2.5]], r"^prompts\[1\]\[1\]=2.5 is not a token id"),
    ({"x": 1}, r"^prompts has x \(valid: either prompt or prompt_token_ids"),
    ([{}], r"^prompts\[0\] has nothing"),
    ({"prompt": "a", "prompt_token_ids": [1]}, r"^prompts has prompt, prompt_token_ids"),
    ({"prompt": "a", "multi_modal_data": {}}, r"^prompts has prompt, multi_modal_data"),
    ({"prompt": 5}, r"^prompts: prompt=5 is not a text"),
    ({"prompt_token_ids": "abc"}, r"^prompts: prompt_token_ids='abc' is not a list of token ids"),
    ({"prompt_token_ids": ["a"]}, r"^prompts\[0\]='a' is not a token id"),
    ([[]], r"^the prompt is empty"),
    ("", r"^the prompt is empty"),
    ([-1], r"^prompt: there is no token -1"),
    ("\ud800", r"surrogate"),
]


@pytest.mark.parametrize(("prompts", "message"), WRONG_PROMPTS, ids=[m for _, m in WRONG_PROMPTS])
def test_a_wrong_prompt_is_reported_in_one_line(prompts: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        llm().generate(prompts)
    assert "\n" not in str(caught.value)
    assert llm().engine.scheduler.idle


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": 0}, "^sampling_params must be SamplingParams or a list of them, not dict$"),
        ("greedy", "^sampling_params must be .* not str$"),
        (5, "^sampling_params must be .* not int$"),
        ([SHORT, 5], r"^sampling_params\[1\] must be SamplingParams, not int$"),
        ([SHORT], "^1 sampling parameters for 2 prompts"),
        ([], "^0 sampling parameters for 2 prompts"),
    ],
)
def test_wrong_parameters_are_reported_in_one_line(params: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        llm().generate(["a", "b"], params)
    with pytest.raises(OptionError, match=r"^(sampling_params must|\d sampling parameters)"):
        llm().stream("a", params if params != [SHORT] else [])


def test_parameters_may_be_a_generator() -> None:
    outputs = llm().generate(["a", "b"], (SamplingParams(temperature=0, max_tokens=n) for n in (1, 2)))
    assert [len(output.token_ids) for output in outputs] == [1, 2]


# -- conversations ----------------------------------------------------------------------------------------------------


def test_one_conversation_in_every_spelling() -> None:
    (expected,) = llm().chat(HELLO, SHORT)
    assert expected.prompt_token_ids == llm().get_tokenizer().encode("hello|")
    for spelling in (HELLO, tuple(HELLO), [HELLO], iter(HELLO), iter([HELLO])):
        (output,) = llm().chat(messages=spelling, sampling_params=SHORT)  # type: ignore[arg-type]
        assert output.token_ids == expected.token_ids
    assert len(llm().chat([HELLO, HELLO], SHORT)) == 2
    assert list(llm().stream(HELLO, SHORT))[-1].completion.token_ids == expected.token_ids  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"^messages is empty"),
        ("hi", r"^messages must be a list, not str"),
        (5, r"^messages must be a list, not int"),
        (HELLO[0], r"^messages must be a list, not dict"),
        (["hi"], r"^messages\[0\] must be a list, not str"),
        ([[]], r"^messages\[0\] is empty"),
        ([{"content": "x"}], r"^messages\[0\] has no role"),
        ([{"role": "user"}], r"^messages\[0\] has no content"),
        ([HELLO, [{"content": "x"}]], r"^messages\[1\]\[0\] has no role"),
        ([*HELLO, 5], r"^messages\[1\] must be a mapping, not int"),
    ],
)
def test_a_wrong_conversation_is_reported_in_one_line(messages: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        llm().chat(messages)


TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% if thinking %}hm{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The tiny model, its tokenizer's directory given apart, with a template that has everything."""
    folder, files = tmp_path_factory.mktemp("template"), tiny_directory(characters=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((files / name).read_text())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(files, tokenizer=str(folder), speculate=None)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "<user>hello</s><assistant>"),
        ({"add_generation_prompt": False}, "<user>hello</s>"),
        ({"tools": [{"name": "f"}]}, "[f]<user>hello</s><assistant>"),
        ({"chat_template_kwargs": {"thinking": True}}, "<user>hello</s><assistant>hm"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<user>hello"),
    ],
)
def test_arguments_reach_the_template(templated: LLM, options: dict[str, Any], prompt: str) -> None:
    (output,) = templated.chat(HELLO, SHORT, **options)
    assert output.prompt_token_ids == templated.get_tokenizer().encode(prompt)


@pytest.mark.parametrize("content", ["so it", " so it", "so it \n", "</s>"])
def test_a_message_is_continued_as_transformers_does(content: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from tests.vocabularies import save_directory, train_byte_level

    for template in (TEMPLATE, TEMPLATE.replace(" | trim", "")):
        save_directory(train_byte_level(), tmp_path, chat_template=template)
        messages = [*HELLO, {"role": "assistant", "content": content}]
        theirs = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
            messages, tokenize=False, continue_final_message=True
        )
        ours = Tokenizer.from_directory(tmp_path)
        assert ours.render_chat(messages, add_generation_prompt=False, continue_final_message=True) == theirs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"continue_final_message": True}, "^continue_final_message needs add_generation_prompt=False"),
        ({"add_generation_prompt": 1}, "^add_generation_prompt=1 is not a bool"),
        ({"tools": "f"}, "^tools='f' is not a list of tools"),
        ({"tools": ["f"]}, r"^tools\[0\]='f' is not a mapping"),
        ({"chat_template_kwargs": 5}, "^chat_template_kwargs=5 is not a mapping"),
        ({"chat_template_kwargs": {"messages": []}}, "^chat_template_kwargs: messages is an argument of its own"),
        ({"chat_template_kwargs": {"mood": 1}}, "^the model's chat template has no place for 'mood'"),
        ({"use_tqdm": "yes"}, "^use_tqdm='yes' is not a bool"),
    ],
)
def test_wrong_arguments_of_a_chat_are_reported_in_one_line(
    templated: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        templated.chat(HELLO, SHORT, **options)


def test_tools_are_refused_where_the_template_has_no_place_for_them() -> None:
    with pytest.raises(OptionError, match="no place for 'tools'"):
        llm().chat(HELLO, tools=[{"name": "f"}])


# -- the engine's arguments -------------------------------------------------------------------------------------------


def test_arguments_of_vllm_that_change_nothing_are_accepted() -> None:
    made = LLM(
        model=str(tiny_directory(characters=True)), speculate=None, dtype="float", gpu_memory_utilization=0.9,
        max_num_seqs=4, tensor_parallel_size=1, enable_prefix_caching=True, trust_remote_code=False, enforce_eager=True,
        device="cpu", seed=7,
    )  # fmt: skip
    assert made.generate("abc", SHORT)[0].token_ids == llm().generate("abc", SHORT)[0].token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 2}, "^tensor_parallel_size=2 cannot be honoured"),
        ({"tensor_parallel_size": True}, "^tensor_parallel_size=True is not an integer"),
        ({"enable_prefix_caching": False}, "^enable_prefix_caching=False cannot be honoured"),
        ({"trust_remote_code": True}, "^trust_remote_code=True cannot be honoured"),
        ({"enforce_eager": "no"}, "^enforce_eager='no' is not a bool"),
        ({"gpu_memory_utilization": 1.5}, "^gpu_memory_utilization=1.5 is out of range"),
        ({"gpu_memory_utilization": 0}, "^gpu_memory_utilization=0 is out of range"),
        ({"max_num_seqs": 0}, "^max_num_seqs=0 is out of range"),
        ({"max_num_seqs": 2.5}, "^max_num_seqs=2.5 is not an integer"),
        ({"seed": 1.5}, "^seed=1.5 is not an integer"),
        ({"revision": "main"}, "^revision='main': .* is no hub id"),
        ({"revision": 5}, "^revision=5 is not a name"),
        ({"tokenizer": "/no/such/place"}, "no/such/place"),
        ({"dtype": "int3"}, "^unknown dtype 'int3'"),
        ({"speculat": "ngram"}, "^unknown argument of LLM 'speculat' .*did you mean 'speculate'"),
        ({"quantization": "fp8"}, "^unknown argument of LLM 'quantization'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SlipstreamError, match=message) as caught:
        LLM(tiny_directory(), **arguments)
    assert "\n" not in str(caught.value)


def test_graphs_cannot_be_left_out_on_a_gpu() -> None:
    from slipstream.inputs import check_inert

    with pytest.raises(OptionError, match=r"^enforce_eager=True cannot be honoured"):
        check_inert({"enforce_eager": True}, "cuda", ())


def test_a_revision_is_that_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("slipstream.models.formats.hub.download", lambda name: asked.append(name) or tiny_directory())
    LLM("owner/name", revision="v1.0", speculate=None)
    assert asked == ["owner/name@v1.0"]


def test_a_tokenizer_larger_than_the_model_is_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    from tests.vocabularies import save_directory, train_byte_level

    save_directory(train_byte_level(), tmp_path)
    with pytest.raises(OptionError, match=r"tokens and the model 97"):
        LLM(tiny_directory(), tokenizer=tmp_path, speculate=None)


def test_half_is_float16() -> None:
    assert (choose_dtype("half", "cpu"), choose_dtype("float", "cpu")) == (torch.float16, torch.float32)


def test_the_seed_of_the_engine_makes_requests_without_one_repeatable() -> None:
    free = SamplingParams(max_tokens=12)
    first, again, other = (LLM(tiny_directory(), speculate=None, seed=seed) for seed in (3, 3, 4))
    said = [[o.token_ids for o in each.generate([[1, 2]] * 3, free)] for each in (first, again, other)]
    assert said[0] == said[1] != said[2]
    assert len({tuple(tokens) for tokens in said[0]}) == 3, "requests differ by their number"


def test_the_share_of_a_gpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * gib, 100 * gib))
    assert memory.kv_bytes("cuda", None) == int(60 * gib * memory.KV_SHARE)
    assert memory.kv_bytes("cuda", 0.7) == pytest.approx(30 * gib, rel=1e-6)  # 40 are taken
    assert memory.kv_bytes("cuda", 0.3) == 0
    assert memory.kv_bytes("cuda", 1.0) == int(60 * gib * memory.KV_SHARE)


def test_an_engine_is_closed_when_its_block_ends() -> None:
    with tiny_llm() as made:
        assert made.generate([[1, 2]], SHORT)[0].finished
    for _ in range(2):
        with pytest.raises(EngineClosed, match="closed"):
            made.generate([[1, 2]], SHORT)
        made.close()


def test_a_model_without_a_tokenizer_has_none_to_give() -> None:
    with pytest.raises(OptionError, match="no tokenizer"):
        tiny_llm().get_tokenizer()
    with pytest.raises(OptionError, match=r"^bad_words need a tokenizer"):
        tiny_llm().generate([[1]], SamplingParams(bad_words=["x"]))


# -- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, wanted, shown in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr("sys.stderr", stream)
        outputs = llm().generate(["a", "b"], SHORT, use_tqdm=wanted)
        assert len(outputs) == 2
        assert ("2/2" in stream.getvalue()) is shown
        with progress_bar(3, wanted) as done:
            done(1)


# -- bad words --------------------------------------------------------------------------------------------------------


def test_bad_words_are_forbidden_at_the_beginning_and_after_a_space(byte_level: Tokenizer) -> None:
    for word in ("the", " the", "quick brown"):
        bare, spaced = (tuple(byte_level.encode(lead + word.strip(), add_special=False)) for lead in ("", " "))
        assert bare != spaced
        found = bad_word_ids([word], byte_level)
        assert found == ((bare,) if spaced[-len(bare) :] == bare else (bare, spaced))
    assert bad_word_ids(["a", "a"], llm().tokenizer) == ((65,),), "a space of its own adds nothing"
