"""`slipstream synth`: the target's own text, the same data with any batching and interruption, and what is dropped."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slipstream import LLM, SamplingParams
from slipstream.bench.tune.prompts import Dialogue, question, read_dialogues
from slipstream.errors import OptionError, PromptError
from slipstream.models.config import ModelConfig
from slipstream.noise import key
from slipstream.train.data import ChatData, ChatWriter
from slipstream.train.data_files import ABOUT, CUT, FOLLOWED, INDEX
from slipstream.train.synth import conversation
from slipstream.train.synth.conversation import SOURCES, TEMPERATURES, TURN_TEMPERATURE, Author, Dropped, Made
from slipstream.train.synth.openings import FOLLOW_UPS, KINDS, NAMES, joined
from slipstream.train.synth.scribe import Scribe
from slipstream.train.synth.write import Status, Synthesis, find_room
from slipstream.types import Completion, Output, Stats
from tests.invoking import ROOT
from tests.tiny import tiny_directory

SPECIAL = "{% for m in messages %}<a>{{ m.content }}<b>{% endfor %}"  # <b>, which ends answers too, ends a turn
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}~{% endfor %}"  # nothing but text ends a turn
END = 96
SEED = 14  # with it, the first 30 conversations have two that go on


@functools.cache
def model(template: str | None = SPECIAL, sharpness: float = 4.0) -> Path:
    """A tiny model of characters with a chat template."""
    original = tiny_directory(characters=True, eos=END, sharpness=sharpness)
    folder = Path(tempfile.mkdtemp(dir=original.parent))
    shutil.copytree(original, folder, dirs_exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder


@functools.cache
def loaded(template: str | None = SPECIAL, sharpness: float = 4.0) -> LLM:
    return LLM(model(template, sharpness), speculate="none")


def author(llm: LLM, dialogues: list[Dialogue] | None = None, max_tokens: int = 40, context: int = 512) -> Author:
    assert llm.tokenizer is not None
    return Author(llm.tokenizer, llm.end_ids, seed=SEED, max_tokens=max_tokens, context=context, dialogues=dialogues)


def made(
    folder: Path, llm: LLM, count: int, dialogues: list[Dialogue] | None = None, at_once: int = 16, stop: int = 10**9
) -> Path:
    """Write a data set; raises KeyboardInterrupt when `stop` conversations are there."""

    def tell(status: Status) -> None:
        if status.items >= stop:
            raise KeyboardInterrupt

    with ChatWriter(folder, fingerprint="f", vocab_size=97, arguments={"n": "x"}, sources=SOURCES) as writer:
        Synthesis(writer, Scribe(llm, author(llm, dialogues), at_once).write, shard_items=8).run(count, tell)
    return folder


def entries(folder: Path) -> np.ndarray:  # type: ignore[type-arg]
    return np.concatenate([np.fromfile(path, INDEX) for path in sorted(folder.glob("index-*.bin"))])


def content(folder: Path) -> dict[str, bytes | dict[str, object]]:
    """Every file; of the description what does not depend on the time."""
    files: dict[str, bytes | dict[str, object]] = {p.name: p.read_bytes() for p in folder.glob("*.bin")}
    return {**files, "data.json": {**json.loads((folder / "data.json").read_text()), "created": ""}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 30 conversations, made in one go; not to be written to."""
    return made(tmp_path_factory.mktemp("whole"), loaded(), 30)


# -- many answers -----------------------------------------------------------------------------------------------------


def test_answers_are_those_of_generate_and_come_as_they_finish() -> None:
    llm = loaded()
    params = [SamplingParams(seed=i, max_tokens=1 + 7 * (i % 4), ignore_eos=True) for i in range(20)]
    prompts = [[i, 1 + i, 2] for i in range(20)]
    taken: list[int] = []

    def requests() -> Iterator[tuple[list[int], SamplingParams]]:
        for place, request in enumerate(zip(prompts, params, strict=True)):
            assert len(llm.engine.scheduler.running) + len(llm.engine.scheduler.waiting) < 6
            taken.append(place)
            yield request

    found, order = {}, []
    for place, output in llm.answers(requests(), 6):
        assert len(taken) - len(found) <= 6, "no request is taken before there is room"
        found[place] = output
        order.append(place)
    assert sorted(order) == list(range(20)) and order != sorted(order)
    for place, expected in enumerate(llm.generate(prompts, params)):
        assert found[place].token_ids == expected.token_ids
        assert (found[place].text, expected.text != "") == ("", True), "nobody asked for text"


def test_a_stop_string_still_ends_an_answer() -> None:
    llm = loaded()
    (plain,) = llm.generate([[1, 2, 3]], SamplingParams(seed=1, max_tokens=30, ignore_eos=True))
    params = SamplingParams(seed=1, max_tokens=30, ignore_eos=True, stop=plain.text[5:7])
    ((_, output),) = llm.answers([('!"#', params)], 1)
    assert (output.text, output.finish_reason) == (plain.text[:5], "stop")


def test_closing_cancels_and_bad_requests_leave_nothing() -> None:
    llm = loaded()
    free = llm.cache.available
    answers = llm.answers(
        (([i], SamplingParams(max_tokens=3 if i == 2 else 400, ignore_eos=True)) for i in range(9)), 4
    )
    assert next(answers)[0] == 2
    answers.close()  # type: ignore[attr-defined]
    assert llm.engine.scheduler.idle and llm.cache.available == free
    with pytest.raises(PromptError):
        list(llm.answers([([1], SamplingParams(max_tokens=400)), ([], SamplingParams())], 4))
    assert llm.engine.scheduler.idle and llm.cache.available == free
    with pytest.raises(OptionError, match="at_once=0"):
        next(llm.answers([], 0))


# -- conversations ----------------------------------------------------------------------------------------------------


def test_openings_are_many_and_varied() -> None:
    every = [joined(parts) for slots in KINDS.values() for parts in itertools.product(*slots)]
    assert len(set(every)) == len(every) > 800 and len(KINDS) == 19
    for text in (*every, *FOLLOW_UPS):
        assert text == text.rstrip(" ") and " \n" not in text and "  " not in text


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("template", [SPECIAL, PLAIN, None], ids=["special", "text", "none"])
def test_a_user_turn_is_written_after_the_opening_and_then_asked(template: str | None) -> None:
    llm, number = loaded(template), 0
    assert llm.tokenizer is not None
    writer = author(llm)
    while True:  # the first conversation that is answered
        task = writer.write(number)
        prompt, params = next(task)
        (output,) = llm.generate([prompt], params)
        try:
            asked, answering = task.send(output)
            break
        except StopIteration:
            number += 1
    beginning = llm.tokenizer.decode(prompt, skip_special=False)
    head = {SPECIAL: "<a>", PLAIN: "[user] ", None: ""}[template]
    assert beginning.startswith(head) and (params.temperature, params.top_p) == (TURN_TEMPERATURE, 1.0)
    opening = beginning.removeprefix(head)
    assert opening in {joined(p).replace("\n", " ") for slots in KINDS.values() for p in itertools.product(*slots)}
    assert params.stop_strings == (("~",) if template == PLAIN else ())
    text = llm.tokenizer.decode(asked, skip_special=False)
    assert text.startswith(beginning) and text.endswith({SPECIAL: "<b>", PLAIN: "~", None: ""}[template])
    assert len(text) > len(beginning) + 1
    assert answering.temperature in TEMPERATURES and answering.max_tokens == 40


def test_most_first_turns_are_whole_requests_which_the_target_only_answers() -> None:
    llm, whole = loaded(), 0
    assert llm.tokenizer is not None
    writer = author(llm, context=8192)
    for number in range(200):
        task = writer.write(number)
        prompt, params = next(task)
        text = llm.tokenizer.decode(prompt, skip_special=False)
        if text.endswith("<b>"):  # it is the target's turn to answer
            whole += 1
            assert params.temperature in TEMPERATURES and params.max_tokens == 40
            completion = Completion(0, "", [*VARIED, 50], "length", None, None, Stats(), 0)
            with pytest.raises(StopIteration) as stop:
                task.send(Output("r", None, [], [completion]))
            made_ = stop.value.value
            assert isinstance(made_, Made) and SOURCES[made_.source].startswith("whole request: ")
    assert 0.76 < whole / 200 < 0.9, "five sixths"
    without = author(loaded(None)).write(0)
    assert next(without)[1].max_tokens <= conversation.PLAIN_TURN[1], "a model without a template goes on with openings"


@pytest.mark.parametrize("template", ["{{ 'nobody' }}", "{% for m in messages %}{{ m.content * 2 }}{% endfor %}"])
def test_a_template_that_cannot_be_cut_is_refused(template: str) -> None:
    with pytest.raises(OptionError, match=r"shows a user's words (not at all|more than once)"):
        author(loaded(template))
    task = author(loaded(template), [Dialogue(question("Hello"))]).write(0)
    assert next(task)[1].max_tokens == 40, "a prompt that is given needs no cutting"


def test_every_answer_is_the_targets_own(whole: Path) -> None:
    llm, data, index = loaded(), ChatData(whole), entries(whole)
    assert len(data) == len(index) and (np.diff(index["item"].astype(int)) > 0).all()
    assert {float(t) for t in index["temperature"]} == {float(np.float32(t)) for t in TEMPERATURES}
    prompts, how = [], []
    for chat, entry in zip(data, index, strict=True):  # type: ignore[call-overload]
        temperature = min(TEMPERATURES, key=lambda t: abs(t - float(entry["temperature"])))
        assert chat.sampled == (temperature > 0)
        asked = 1 if entry["source"] < len(NAMES) else 0  # the target wrote the first turn, which took a seed
        seed = key(SEED, int(entry["item"]), asked + (3 if entry["flags"] & FOLLOWED else 1))
        prompts.append(chat.tokens[: chat.prompt_len].tolist())
        how.append(SamplingParams(temperature=temperature, seed=seed, max_tokens=40))
    assert {bool(source < len(NAMES)) for source in index["source"]} == {True, False}
    followed = 0
    for chat, entry, output in zip(data, index, llm.generate(prompts, how), strict=True):  # type: ignore[call-overload]
        prompt, answer = output.prompt_token_ids, chat.tokens[chat.prompt_len :].tolist()
        cut = bool(entry["flags"] & CUT)
        assert output.token_ids[: len(answer) if cut else None] == answer
        assert not cut or len(answer) < len(output.token_ids)
        followed += bool(entry["flags"] & FOLLOWED)
        assert prompt.count(95) == (3 if entry["flags"] & FOLLOWED else 1), "a turn, or a turn, an answer and a turn"
    counts = data.description["counts"]
    assert followed
    assert counts["items"] == 30 == counts["kept"] + sum(counts["dropped"].values())
    assert set(counts["dropped"]) <= {
        *("empty turn", "turn too long", "turn loops"),
        *("prompt too long", "empty answer", "answer loops", "near-duplicate"),
    }


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All first turns are written by the target."""
    monkeypatch.setattr(conversation, "WHOLE_REQUESTS", 0.0)


def told(*outputs: tuple[list[int], str]) -> Made | Dropped:
    """What becomes of conversation 0 if the target says this."""
    task = author(loaded(), max_tokens=60).write(0)
    next(task)
    try:
        for tokens, reason in outputs:
            completion = Completion(0, "", tokens, reason, None, None, Stats(), 0)
            task.send(Output("r", None, [], [completion]))
    except StopIteration as stop:
        assert isinstance(stop.value, Made | Dropped)
        return stop.value
    raise AssertionError("it wants more")


TURN, VARIED = ([41, 42, 43, END], "stop"), [*range(10, 30)]


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([([END], "stop")], "empty turn"),
        ([([0, 0, END], "stop")], "empty turn"),  # blanks
        ([(VARIED * 12, "length")], "turn too long"),
        ([([50] * 30, "stop")], "turn loops"),
        ([TURN, ([END], "stop")], "empty answer"),
        ([TURN, (VARIED[:14] + [50] * 46, "length")], "answer loops"),
    ],
)
def test_what_is_of_no_use_is_dropped_with_its_reason(outputs: list[tuple[list[int], str]], reason: str) -> None:
    assert told(*outputs) == Dropped(reason)


@pytest.mark.usefixtures("written")
def test_an_answer_is_cut_before_it_repeats_itself_unless_it_ended_by_itself() -> None:
    loop = VARIED + [50, 51] * 20
    cut = told(TURN, (loop, "length"))
    assert isinstance(cut, Made) and cut.tokens[cut.prompt_len :] == [*VARIED, 50, 51] and cut.flags == CUT
    kept = told(TURN, ([*loop, END], "stop"))
    assert isinstance(kept, Made) and kept.tokens[kept.prompt_len :] == [*loop, END] and kept.flags == 0
    assert (cut.signature == kept.signature).all()


@pytest.mark.usefixtures("written")
def test_an_answer_may_become_the_text_of_another_question() -> None:
    """The answer is in the prompt then, whole, and only what is said about it is the answer."""
    author_, text = author(loaded(), max_tokens=80), [*range(10, 90)]
    for number in range(60):
        task = author_.write(number)
        next(task)
        task.send(Output("r", None, [], [Completion(0, "", TURN[0], "stop", None, None, Stats(), 0)]))
        try:
            prompt, params = task.send(
                Output("r", None, [], [Completion(0, "", text, "length", None, None, Stats(), 0)])
            )
        except StopIteration:
            continue
        tokenizer = loaded().tokenizer
        assert tokenizer is not None and tokenizer.decode(text) in tokenizer.decode(prompt)
        assert params.max_tokens == 80
        with pytest.raises(StopIteration) as stop:
            task.send(Output("r", None, [], [Completion(0, "", [*VARIED, END], "stop", None, None, Stats(), 0)]))
        made_ = stop.value.value
        assert isinstance(made_, Made) and made_.flags == ABOUT and made_.tokens[made_.prompt_len :] == [*VARIED, END]
        return
    raise AssertionError("a tenth of the conversations are about a text")


@pytest.mark.parametrize("stop", [1, 25])
def test_interrupted_work_resumes_to_the_same_data(tmp_path: Path, whole: Path, stop: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, loaded(), 30, stop=stop, at_once=5)
    before = ChatWriter(tmp_path, fingerprint="f", vocab_size=97, arguments={"n": "x"}, sources=SOURCES).items
    assert before % 8 == 0 and before <= stop
    assert content(made(tmp_path, loaded(), 30, at_once=7)) == content(whole)


def test_killed_work_resumes_to_the_same_data(tmp_path: Path, whole: Path) -> None:
    script = (
        "from pathlib import Path\nimport torch\ntorch.set_num_threads(1)\nfrom slipstream import LLM\n"
        "import time\nimport tests.train.test_synth as t\n"
        "commit = t.ChatWriter.commit\n"
        "def slowly(*args, **named):\n    commit(*args, **named)\n    time.sleep(1)\n"
        "t.ChatWriter.commit = slowly  # so that the next shards are not there before it is killed\n"
        f"t.made(Path({str(tmp_path)!r}), LLM({str(model())!r}, speculate='none'), 30)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "index-00000.bin").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "index-00003.bin").exists(), "it was killed too late"
    assert content(made(tmp_path, loaded(), 30)) == content(whole)


def test_more_can_be_asked_for_later(tmp_path: Path, whole: Path) -> None:
    made(tmp_path, loaded(), 13)
    made(tmp_path, loaded(), 30)
    both = [[(c.tokens.tolist(), c.prompt_len) for c in ChatData(f)] for f in (tmp_path, whole)]  # type: ignore[attr-defined]
    assert both[0] == both[1]


# -- prompts of a file ------------------------------------------------------------------------------------------------


def test_lines_are_read_with_all_their_turns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"instruction": "Sum up.", "input": "A text."}, {"instruction": "Go", "input": ""}, {"text": "t"}]
    path.write_text("\n".join(json.dumps(line) for line in [*lines, {"turns": ["a", "b", "c"]}]))
    expected = [question("Sum up.\n\nA text."), question("Go"), question("t")]
    assert read_dialogues(path) == [*map(Dialogue, expected), Dialogue(question("a"), ("b", "c"))]


def test_prompts_are_answered_turn_by_turn_and_near_duplicates_dropped_across_runs(tmp_path: Path) -> None:
    words = ["why is grass green", "name ten big rivers", "2 + 3 * 4 = ?", "HELLO!", "sort a list in C", "zzz"]
    dialogues = [Dialogue(question(text), ("more", "again")) for text in words]
    dialogues += [*dialogues[:2], Dialogue(question("x" * 505))]
    llm = loaded(sharpness=0.5)  # near chance: no loops
    made(tmp_path, llm, 5, dialogues)
    made(tmp_path, llm, 9, dialogues)
    data = ChatData(tmp_path)
    assert data.description["counts"]["dropped"] == {"near-duplicate": 2, "prompt too long": 1}
    assert llm.tokenizer is not None
    for number, chat in enumerate(data):  # type: ignore[call-overload]
        text = llm.tokenizer.decode(chat.tokens[: chat.prompt_len].tolist(), skip_special=False)
        turns = text.removesuffix("<b>").split("<b>")
        assert [turns[i].removeprefix("<a>") for i in (0, 2, 4)] == [
            dialogues[number].asked[0]["content"],
            "more",
            "again",
        ]


def test_several_turns_need_a_chat_template() -> None:
    with pytest.raises(PromptError, match="no chat template and a prompt has several turns"):
        author(loaded(None), [Dialogue(question("a"), ("b",))])


# -- memory and speed -------------------------------------------------------------------------------------------------


def test_as_many_run_together_as_the_memory_holds() -> None:
    config = ModelConfig("llama", 97, 64, 2, 4, 2, 16, 96, 512, tied_head=False)
    each = 5 * 128 * config.kv_bytes_per_token(4)  # of 513 tokens
    plenty = find_room(config, 4, 10**12, 513, 64)
    assert (plenty.at_once, plenty.max_model_len, plenty.cache_tokens) == (64, 513, (64 * 5 + 2) * 128)
    assert find_room(config, 4, int(20.5 * each / 0.8 / 0.9), 513, 64).at_once == 20
    assert find_room(config, 4, 0, 513, 64).at_once == 1


def test_the_speed_is_that_of_the_second_round() -> None:
    ticks = iter([0.0, 100.0, 200.0, 204.0])
    llm = loaded()
    assert Scribe(llm, author(llm), 5).speed(lambda: next(ticks)) == 5 * 24 / 4
