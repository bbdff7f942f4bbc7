"""The command line: every verb, on a tiny random model, as a user and as a script would call it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import slipstream
from slipstream.cache import PAGE_SIZE
from slipstream.cli import app
from slipstream.commands.conversation import Conversation
from slipstream.commands.demo import executable
from slipstream.commands.options import EngineSetup, ModelSetup, Sampling
from slipstream.commands.run import run
from slipstream.commands.show import Origins, draw_tree, mark_origins
from slipstream.errors import OptionError, PromptError
from slipstream.models import builtin

ROOT = Path(__file__).parent.parent
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog. Grüße, 東京 👍🏽!", "def add(a, b):\n    return a + b\n"]
CONTEXT = 512
ENDLESS = ["--ignore-eos", "--max-tokens", "20000"]


def save_model(path: Path, *, extra: str = "", context: int = CONTEXT, template: str | None = TEMPLATE) -> Path:
    """A random Llama of two layers with a byte-level tokenizer that knows a few words."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [*SPECIALS, extra] if extra else SPECIALS
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(str(path))
    backend.save(str(path / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    if template is not None:
        described["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(described))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same shape, another token map, no chat template."""
    return str(save_model(tmp_path_factory.mktemp("other"), extra="<|extra|>", template=None))


def invoke(*arguments: str, input: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), input=input)


def call(*arguments: str, input: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own. One thread: two would fight over busy cores for nothing."""
    return subprocess.run(
        [sys.executable, "-m", "slipstream", *arguments],
        input=input, capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


# -- start-up ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["--help", "--version", "run --help", "run", "nonsense"])
def test_help_and_usage_errors_do_not_wait_for_torch(line: str) -> None:
    loaded = _modules_after(line.split())
    assert not loaded & {"torch", "transformers", "numpy", "tokenizers"}


@pytest.mark.parametrize("verb", [["run", "Hi", "--max-tokens", "4"], ["check"]], ids=lambda verb: verb[0])
def test_no_verb_imports_transformers(tiny: str, verb: list[str]) -> None:
    loaded = _modules_after([*verb, "-m", tiny])
    assert "torch" in loaded
    assert "transformers" not in loaded


def _modules_after(arguments: list[str]) -> set[str]:
    script = (
        "import sys\nfrom slipstream.cli import main\n"
        f"sys.argv = ['slipstream', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('\\nMODULES', *sys.modules)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("MODULES ")[2].split())


def test_version_and_module() -> None:
    done = call("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"slipstream {slipstream.__version__}")


def test_help_names_the_default_drafter() -> None:
    from slipstream.drafters.registry import DEFAULT

    assert f"{DEFAULT} (the default)" in " ".join(invoke("run", "--help").output.replace("│", " ").split())


def test_verbs_work_without_typer_and_rich(tiny: str) -> None:
    script = (
        "import sys\nsys.modules['typer'] = sys.modules['rich'] = None\n"
        "from slipstream.commands.run import run\nfrom slipstream.commands.check import check\n"
        "from slipstream.commands.drafters import drafters\n"
        "from slipstream.commands.options import EngineSetup, Sampling\n"
        f"setup = EngineSetup(model={tiny!r})\n"
        "run('Hi', setup, Sampling(max_tokens=4))\ncheck(setup)\ndrafters()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "fits" in done.stdout


# -- run --------------------------------------------------------------------------------------------------------------


def test_run_answers_and_reports(tiny: str) -> None:
    done = invoke("run", "-m", tiny, "--max-tokens", "12", "The quick brown fox")
    assert done.exit_code == 0
    assert re.search(r"\d+ tokens, [\d.]+ tok/s, [\d.]+ tokens per step, ", done.stderr)
    assert "tok/s" not in done.stdout


def test_run_json_has_everything(tiny: str) -> None:
    done = invoke(
        "run", "-m", tiny, "--json", "--max-tokens", "6", "-n", "2", "--logprobs", "3", "--temperature", "0.9",
        "--seed", "7", "--ignore-eos", "--speculate", "ngram:max_n=3", "Hi",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["model"], answer["speculate"], answer["seed"]) == (tiny, "ngram:max_n=3", 7)
    assert len(answer["token_ids"]) == 6 and answer["finish_reason"] == "length"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"] == answer["text"]
    assert len(answer["logprobs"]) == 6 and len(answer["logprobs"][0]["top"]) == 3
    assert answer["stats"]["emitted"] == 6


def test_run_streams_what_json_says(tiny: str) -> None:
    options = ["run", "-m", tiny, "--max-tokens", "40", "--temperature", "0.7", "--seed", "3", "Grüße"]
    text = json.loads(invoke(*options, "--json").stdout)["text"]
    assert invoke(*options).stdout.rstrip("\n") == text.rstrip("\n")
    plain = invoke(*options, "--speculate", "none")
    assert plain.stdout.rstrip("\n") == text.rstrip("\n")
    assert "nothing drafted" in plain.stderr


def test_run_tells_the_seed_it_drew(tiny: str) -> None:
    options = ["run", "-m", tiny, "--max-tokens", "20", "--temperature", "1", "Hi"]
    first = invoke(*options)
    seed = re.search(r"seed (\d+)", first.stderr)
    assert seed
    assert invoke(*options, "--seed", seed[1]).stdout == first.stdout


def test_run_several_answers(tiny: str) -> None:
    done = invoke("run", "-m", tiny, "--max-tokens", "5", "-n", "2", "--temperature", "1", "Hi")
    assert "--- answer 1 of 2" in done.stdout and "--- answer 2 of 2" in done.stdout


def test_run_raw_and_system(tiny: str) -> None:
    def prompt_tokens(*options: str) -> int:
        done = invoke("run", "-m", tiny, "--json", "--max-tokens", "1", *options, "Hi")
        return int(json.loads(done.stdout)["prompt_tokens"])

    assert prompt_tokens("--raw") < prompt_tokens() < prompt_tokens("--system", "Be brief.")


def test_run_reads_standard_input(tiny: str) -> None:
    options = ["run", "-m", tiny, "--max-tokens", "5", "--json"]
    piped, given = (json.loads(invoke(*options, prompt, input="Hi\n").stdout) for prompt in ("-", "Hi"))
    assert (piped["token_ids"], piped["prompt_tokens"]) == (given["token_ids"], given["prompt_tokens"])


def test_run_show_origin_marks_drafted_tokens(tiny: str) -> None:
    options = ["run", "-m", tiny, "--max-tokens", "60", "--ignore-eos", "fox fox fox fox fox fox fox"]
    done = invoke(*options, "--show", "origin")
    accepted = json.loads(invoke(*options, "--json").stdout)["stats"]["accepted"]
    assert done.exit_code == 0
    assert "[brackets]" in done.stderr
    assert accepted > 0, "a model that repeats itself should have been drafted for"
    plain = invoke(*options).stdout
    assert len(done.stdout) > len(plain)
    assert sorted(done.stdout.replace("[", "").replace("]", "")) == sorted(plain.replace("[", "").replace("]", ""))


def test_run_show_tree_draws_every_step(tiny: str) -> None:
    options = ["run", "-m", tiny, "--max-tokens", "40", "--ignore-eos", "fox fox fox fox fox fox fox"]
    done = invoke(*options, "--show", "tree")
    stats = json.loads(invoke(*options, "--json").stdout)["stats"]
    assert len(re.findall(r"^step \d+", done.stdout, re.MULTILINE)) == stats["steps"]
    counted = [(int(d), int(a)) for d, a in re.findall(r"(\d+) drafted, (\d+) accepted", done.stdout)]
    assert sum(drafted for drafted, _ in counted) == stats["drafted"]
    assert done.stdout.count("*") >= stats["accepted"] > 0


def test_terminal_text_is_not_obeyed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Screen())
    assert mark_origins([("\x1b[2J[bold]", False), ("ok\n", True)], True) == "\\x1b[2J[bold]\x1b[32mok\n\x1b[0m"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--speculate", "sufix"], "error: unknown drafter 'sufix'\nhint: did you mean 'suffix'?"),
        (["--speculate", "suffix:dept=3"], "error: unknown option of drafter 'suffix': 'dept'\nhint: did you mean"),
        (["--speculative-config", "{"], "error: --speculative-config is not JSON"),
        (["--speculative-config", "[1]"], "error: --speculative-config is not a JSON object"),
        (["--speculative-config", '{"method": "ngram"}', "--speculate", "none"], "error: give either"),
        (["--verifier", "magic"], "error: unknown verifier 'magic'"),
        (["--temperature", "-1"], "error: temperature=-1.0 is out of range\nhint: valid: 0"),
        (["--show", "everything"], "error: unknown --show 'everything'"),
        (["--show", "tree", "--json"], "error: --show is for people"),
        (["--logprobs", "2"], "error: --logprobs needs --json"),
        (["--raw", "--system", "x"], "error: --system needs the chat template"),
        (["--logit-bias", "5"], "error: --logit-bias '5' is not ID=VALUE"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "error: --logit-bias names token 5 twice"),
        (["--logit-bias", "5000=1"], "error: logit_bias: "),
        (["--stop-token-id", "5000"], "error: stop_token_ids: "),
        (["--threads", "0"], "error: threads=0 is out of range"),
        (["--device", "tpu"], "error: unknown device 'tpu'"),
        (["--max-model-len", "9999"], "error: max_model_len=9999 is out of range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals_are_one_line_and_a_hint(tiny: str, options: list[str], complaint: str) -> None:
    done = invoke("run", "-m", tiny, "Hi", *options)
    assert done.exit_code == 2
    assert done.stderr.startswith(complaint)
    assert "Traceback" not in done.stderr and done.stdout == ""


def test_bad_model_path(tmp_path: Path) -> None:
    done = invoke("run", "-m", str(tmp_path / "nowhere"), "Hi")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no such model") and "\nhint: " in done.stderr


def test_debug_shows_where(tmp_path: Path) -> None:
    done = invoke("run", "-m", str(tmp_path / "nowhere"), "Hi", "--debug")
    assert done.exit_code == 2
    assert "Traceback" in done.stderr and "error: no such model" in done.stderr


@pytest.mark.parametrize("given", [b"", b"\n", b"  \n", b"\xff\xfe"])
def test_useless_standard_input(tiny: str, given: bytes) -> None:
    done = invoke("run", "-m", tiny, "-", input=given)
    assert done.exit_code == 2
    complaint = "standard input is not UTF-8" if given[:1] == b"\xff" else "the prompt is empty"
    assert done.stderr.startswith(f"error: {complaint}")


@pytest.mark.parametrize("line", ["run", "run Hi --no-such-option", "run Hi --seed x", "sing"])
def test_wrong_usage_exits_with_2(line: str) -> None:
    assert invoke(*line.split()).exit_code == 2


def test_broken_pipe_is_quiet(tiny: str) -> None:
    command = f"{sys.executable} -m slipstream run -m {tiny} --ignore-eos --max-tokens 400 Hi | head -c 1 >/dev/null"
    shell = ["bash", "-c", f"set -o pipefail; {command}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode in (0, 141)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_warnings_of_the_engine_go_to_stderr(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.drafters.suffix import SuffixDrafter

    def fail(*args: object) -> None:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(SuffixDrafter, "propose", fail)
    done = invoke("run", "-m", tiny, "--max-tokens", "3", "--ignore-eos", "Hi")
    assert done.exit_code == 0
    assert re.search(r"^warning: .*out of ideas", done.stderr, re.MULTILINE)
    assert "draft faults: 1" in done.stderr


def test_plain_function_takes_plain_arguments(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("Hi", EngineSetup(model=tiny), Sampling(max_tokens=2), as_json=True)
    assert json.loads(capsys.readouterr().out)["stats"]["emitted"] <= 2


def test_download_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str) -> None:
    fetched = []

    def fetch(name: str, progress: Any = None) -> Path:
        if progress is not None:
            progress(1, 2)
            progress(2, 2)
            fetched.append(name)
        return Path(tiny)

    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "fetch", fetch)
    done = invoke("run", "--max-tokens", "1", "Hi")
    assert done.exit_code == 0, done.stderr
    assert fetched == [builtin.DEFAULT_MODEL]
    assert re.match(rf"downloading {builtin.DEFAULT_MODEL} \(.*\): [\d.]+ MiB, once, to ", done.stderr)


# -- pieces of run ----------------------------------------------------------------------------------------------------


def test_origins_follow_split_characters_and_stops(tiny: str) -> None:
    """Whatever is held back, the pieces put together are the answer."""
    from slipstream.llm import LLM

    llm = LLM(tiny)
    assert llm.tokenizer is not None
    for seed in range(6):
        params = replace(Sampling(temperature=1.5, stop=("e",)).params(60, seed), ignore_eos=True)
        prompt = llm.tokenizer.encode("👍🏽 東京 fox fox fox")
        origins = Origins(llm.tokenizer, prompt)
        deltas = list(llm.stream(prompt, params))
        pieces = [piece for delta in deltas for piece in origins.push(delta)]
        assert deltas[-1].completion is not None
        assert "".join(text for text, _ in pieces) == deltas[-1].completion.text


def test_tree_is_drawn_with_forks(tiny: str) -> None:
    from slipstream.text import Tokenizer
    from slipstream.tree import TokenTree

    tokenizer = Tokenizer.from_directory(tiny)
    a, b, c = (tokenizer.encode(letter, add_special=False)[0] for letter in "abc")
    tree = TokenTree(a)
    left = tree.add(0, b, origin="x")
    tree.add(left, c, origin="x")
    tree.add(0, c, origin="x")
    assert draw_tree(TokenTree(a), [b], tokenizer) == ['"a" + "b"']
    assert draw_tree(tree, [b, a], tokenizer) == [
        '"a"  3 drafted, 1 accepted', '  |- "b"* "c"', '  `- "c"', '  + "a"',
    ]  # fmt: skip


# -- chat -------------------------------------------------------------------------------------------------------------


def test_chat_by_script(tiny: str, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = [
        "Hello", "/system Be brief.", "first\\", "second", '"""', "/help is text here", "", "end", '"""',
        "/usr/bin is a path", f"/save {saved}", "/stats", "/nonsense", "/save", "/help", "/reset", "/stats", "/system",
        "   ", "/exit", "never read",
    ]  # fmt: skip
    done = invoke("chat", "-m", tiny, "--max-tokens", "4", "--ignore-eos", input="\n".join(script) + "\n")
    assert done.exit_code == 0, done.output
    messages = json.loads(saved.read_text())
    assert [m["content"] for m in messages if m["role"] != "assistant"] == [
        "Be brief.", "Hello", "first\nsecond", "/help is text here\n\nend", "/usr/bin is a path",
    ]  # fmt: skip
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 4]
    assert done.stderr.count("first token after") == 4 + 2, "after each answer, and for /stats twice"
    assert "16 tokens" in done.stderr
    assert "error: unknown command '/nonsense'" in done.stderr
    assert "error: /save needs a file name" in done.stderr
    assert "/reset         forget" in done.stderr
    assert ">>>" not in done.stdout, "no prompts where nobody sees them"


def test_chat_ends_with_its_input(tiny: str) -> None:
    assert invoke("chat", "-m", tiny, input="").exit_code == 0


def test_chat_forgets_the_oldest_turns(tiny: str) -> None:
    lines = ["word " * 12] * 4 + ["x" * 3000, "short"]
    done = invoke("chat", "-m", tiny, "--max-model-len", "256", "--max-tokens", "8", input="\n".join(lines))
    assert done.exit_code == 0
    assert re.search(r"the context holds 256 tokens: the oldest \d+ turns were dropped", done.stderr)
    assert re.search(r"error: that is \d+ tokens and the context holds 256", done.stderr)
    assert done.stderr.count("first token after") == 5


def test_chat_refuses_what_it_cannot_do(tiny: str, other: str) -> None:
    for options in (["-n", "2"], ["--logprobs", "1"]):
        assert invoke("chat", "-m", tiny, *options, input="").exit_code == 2
    done = invoke("chat", "-m", other, input="")
    assert done.exit_code == 2 and "no chat template" in done.stderr


def test_conversation_keeps_what_fits(tiny: str) -> None:
    from slipstream.text import Tokenizer

    conversation = Conversation(Tokenizer.from_directory(tiny), room=120, longest=40, system="S")
    for number in range(5):
        prompt, _ = conversation.ask(f"question {number}")
        assert len(prompt) + 40 <= 120
        conversation.answered(f"answer {number}")
    contents = [message["content"] for message in conversation.messages]
    assert contents[0] == "S" and contents[-1] == "answer 4" and "question 0" not in contents
    before = conversation.messages
    with pytest.raises(PromptError):
        conversation.ask("y" * 2000)
    assert conversation.messages == before
    conversation.ask("interrupted at once")
    conversation.answered("")
    assert "interrupted at once" not in [message["content"] for message in conversation.messages]


@contextlib.contextmanager
def terminal(*arguments: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The program behind a pseudo-terminal of its own, so that Ctrl-C arrives as it does for a person."""
    ours, theirs = pty.openpty()
    # The leader of a new session gets the first terminal that it opens as its own; an ignored SIGINT is inherited.
    opened = 'exec "$@" <"$0" >"$0" 2>"$0"'
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from slipstream.cli import main; main()"
    )
    process = subprocess.Popen(
        ["sh", "-c", opened, os.ttyname(theirs), sys.executable, "-c", program, *arguments],
        cwd=ROOT, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )  # fmt: skip
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _expect(descriptor: int, pattern: str, seconds: float = 60) -> str:
    """Read until the pattern was seen."""
    seen, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, seen):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{pattern!r} did not come; there was {seen[-500:]!r}"
        try:
            seen += os.read(descriptor, 65536).decode("utf-8", "replace")
        except OSError:  # the other side is closed
            assert re.search(pattern, seen), seen[-500:]
    return seen


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = str(save_model(tmp_path_factory.mktemp("patient"), context=30_000))
    with terminal("chat", "-m", patient, "--speculate", "none", *ENDLESS) as (screen, process):
        _expect(screen, ">>> ")
        os.write(screen, b"Hello\n")
        _expect(screen, "Hello\r\n(.|\n)+")
        time.sleep(0.5)
        os.write(screen, b"\x03")
        _expect(screen, r"\(stopped\)(.|\n)*>>> ")
        time.sleep(0.5)  # between showing its prompt and waiting for keys readline is deaf
        os.write(screen, b"\x03")
        _expect(screen, r"/exit leaves(.|\n)*>>> ")
        os.write(screen, b"/save /dev/null\n")
        _expect(screen, r"saved 2 messages(.|\n)*>>> ")
        os.write(screen, b"\x04")
        assert process.wait(30) == 0


def test_ctrl_c_ends_run_quietly(tmp_path_factory: pytest.TempPathFactory) -> None:
    patient = str(save_model(tmp_path_factory.mktemp("patient"), context=30_000))
    with terminal("run", "-m", patient, "--speculate", "none", "Hi", *ENDLESS) as (screen, process):
        _expect(screen, r"\x1b\[K[^\x1b]{20}")
        os.write(screen, b"\x03")
        assert process.wait(30) == 130
        with contextlib.suppress(OSError):
            assert "Traceback" not in os.read(screen, 1 << 20).decode("utf-8", "replace")


def test_colours_and_trees_in_a_terminal(tiny: str) -> None:
    prompt = "fox fox fox fox fox fox fox"
    options = ["-m", tiny, "--max-tokens", "40", "--ignore-eos", prompt]
    with terminal("run", "--show", "origin", *options) as (screen, process):
        assert "\x1b[32m" in _expect(screen, "tok/s")
        assert process.wait(30) == 0
    with terminal("run", "--show", "tree", *options) as (screen, process):
        assert "✓" in _expect(screen, "tok/s")
    with terminal("drafters") as (screen, process):
        assert "suffix" in _expect(screen, "Options are given")


# -- drafters, check, env ---------------------------------------------------------------------------------------------


def test_drafters() -> None:
    listed = json.loads(invoke("drafters", "--json").stdout)
    assert {"none", "ngram", "suffix", "draft_model"} <= {drafter["name"] for drafter in listed["drafters"]}
    assert all(drafter[fact] for drafter in listed["drafters"] for fact in ("summary", "helps", "cost", "needs"))
    one = json.loads(invoke("drafters", "ngram", "--json").stdout)
    assert {"name": "max_n", "type": "int", "default": 4} in one["options"]
    assert "suffix (default)" in invoke("drafters").stdout
    assert invoke("drafters", "nope").exit_code == 2


def test_a_broken_plugin_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from slipstream.drafters import registry

    broken = EntryPoint("broken", "no_such_module:Drafter", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [broken])
    done = invoke("drafters")
    assert done.exit_code == 0
    assert "cannot be loaded: ModuleNotFoundError" in done.stdout and "suffix (default)" in done.stdout


def test_check_plans_memory(tiny: str) -> None:
    done = invoke("check", "-m", tiny, "--max-model-len", "128")
    assert done.exit_code == 0
    assert done.stdout.rstrip().endswith("fits") and "K/V for 128 tokens" in done.stdout
    found = json.loads(invoke("check", "-m", tiny, "--max-model-len", "128", "--json").stdout)
    # two layers, K and V, two heads of 8, float32, and two pages to spare
    assert found["memory_bytes"]["kv"] == (128 + 2 * PAGE_SIZE) * 2 * 2 * 2 * 8 * 4
    assert found["ok"] and found["fits"] and found["draft"] is None
    assert found["architecture"]["layers"] == 2 and found["dtype"] == "float32"


def test_check_loads_no_weights(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.models.hf import HFCheckpoint

    def refuse(*args: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(HFCheckpoint, "weight", refuse)
    assert invoke("check", "-m", tiny, "--speculate", f"draft_model:model={tiny}").exit_code == 0


def test_check_compares_vocabularies(tiny: str, other: str) -> None:
    same = invoke("check", "-m", tiny, "--speculate", f"draft_model:model={tiny}")
    assert same.exit_code == 0 and "same vocabulary" in same.stdout and "draft K/V" in same.stdout
    differing = invoke("check", "-m", tiny, "--speculate", f"draft_model:model={other}")
    assert differing.exit_code == 2
    assert "token 3 is '<|extra|>' in the draft" in differing.stdout
    found = json.loads(invoke("check", "-m", tiny, "--json", "--speculate", f"draft_model:model={other}").stdout)
    assert found["draft"]["vocabulary"]["difference"][0] == 3 and not found["ok"] and found["fits"]


def test_check_refuses_what_does_not_fit(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.commands.check.available_bytes", lambda device: 300_000)
    done = invoke("check", "-m", tiny)
    assert done.exit_code == 2
    length = re.search(r"--max-model-len (\d+) would fit", done.stdout)
    assert length
    assert invoke("check", "-m", tiny, "--max-model-len", length[1]).exit_code == 0
    assert invoke("check", "-m", tiny, "--max-model-len", "9999").exit_code == 2
    with pytest.raises(OptionError):
        ModelSetup(speculate="nope").drafter()


def test_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    (tmp_path / "file").write_bytes(b"x" * 2**20)
    report = json.loads(invoke("env", "--json").stdout)
    assert report["versions"]["slipstream"] == slipstream.__version__ and report["versions"]["torch"]
    assert report["cpu"]["torch threads"] >= 1 and isinstance(report["cpu"]["MKL packed products"], bool)
    assert report["cache"]["directory"] == str(tmp_path) and report["cache"]["size"] == "1.0 MiB"
    assert report["cache"][builtin.DEFAULT_MODEL].startswith("not downloaded yet")
    assert report["environment"]["SLIPSTREAM_CACHE"] == str(tmp_path)
    done = invoke("env")
    assert done.exit_code == 0 and "capability" in done.stdout and "secret" not in done.stdout


# -- demo -------------------------------------------------------------------------------------------------------------


def test_demo_json_keeps_its_promises(tmp_path_factory: pytest.TempPathFactory) -> None:
    roomy = str(save_model(tmp_path_factory.mktemp("roomy"), context=4096))
    done = invoke("demo", "-m", roomy, "--json", "--max-tokens", "12")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    kinds = [entry["kind"] for entry in report["prompts"]]
    assert kinds == ["code", "json", "rewriting", "chat", "story", "arithmetic"]
    for entry in report["prompts"]:
        assert {"plain_tok_s", "speculative_tok_s", "speedup", "tokens_per_step", "identical"} <= set(entry)
        assert entry["identical"]
    assert {"model", "speculate", "exact", "speedup", "torch_threads"} <= set(report)


def test_demo_for_people(tmp_path_factory: pytest.TempPathFactory) -> None:
    roomy = str(save_model(tmp_path_factory.mktemp("roomy"), context=4096))
    done = invoke("demo", "-m", roomy, "--max-tokens", "8", "--temperature", "1")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("(identical to plain decoding") == 6
    assert re.search(r"^all +[\d.]+ +[\d.]+ +[\d.]+x", done.stdout, re.MULTILINE)
    assert f" run -m {roomy} --show tree" in done.stdout


def test_demo_notices_a_difference(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream.verify.match import Match

    honest = Match.__call__

    def meddle(self: Match, tree: Any, distributions: Any) -> Any:
        verdict = honest(self, tree, distributions)
        return replace(verdict, tokens=[*verdict.tokens[:-1], 70]) if tree.drafted else verdict

    monkeypatch.setattr(Match, "__call__", meddle)
    roomy = str(save_model(tmp_path_factory.mktemp("roomy"), context=4096))
    done = invoke("demo", "-m", roomy, "--max-tokens", "24")
    assert done.exit_code == 1
    assert "NOT identical" in done.stdout


def test_next_command_is_how_we_were_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "venv" / "bin" / "slipstream"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert executable() == "venv/bin/slipstream"
    monkeypatch.setenv("PATH", str(program.parent))
    assert executable() == "slipstream"
    monkeypatch.setattr(sys, "argv", ["/somewhere/slipstream/__main__.py"])
    assert executable().endswith(" -m slipstream")


@pytest.mark.real_model
def test_run_on_the_real_model(smollm2_path: Path) -> None:
    done = invoke("run", "-m", str(smollm2_path), "--max-tokens", "16", "What is the capital of France?")
    assert "Paris" in done.stdout


@pytest.mark.real_model
def test_demo_on_the_real_model(smollm2_path: Path) -> None:
    report = json.loads(invoke("demo", "-m", str(smollm2_path), "--json", "--max-tokens", "32").stdout)
    assert report["exact"] is False or all(entry["identical"] for entry in report["prompts"])
    copying = next(entry for entry in report["prompts"] if entry["kind"] == "rewriting")
    assert copying["tokens_per_step"] > 1.5
