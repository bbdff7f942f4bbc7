"""`slipstream run`: the answer, as text, as JSON, and with its drafts shown."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.commands.run import run
from slipstream.commands.shared.options import EngineSetup, Sampling
from slipstream.commands.shared.show import Origins, draw_tree, mark_origins
from slipstream.models.formats import builtin
from tests.invoking import invoke


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
    first = answer["logprobs"][0]
    assert first["token_id"] == answer["token_ids"][0] and isinstance(first["text"], str) and first["rank"] >= 1
    assert [entry["rank"] for entry in first["top"]] == [1, 2, 3]
    assert answer["stats"]["emitted"] == 6


def test_logprobs_have_their_text(tiny: str) -> None:
    from slipstream.text import Tokenizer

    done = invoke("run", "-m", tiny, "--json", "--max-tokens", "5", "--logprobs", "2", "--ignore-eos", "Hi")
    answer, tokenizer = json.loads(done.stdout), Tokenizer.from_directory(tiny)
    for token, entry in zip(answer["token_ids"], answer["logprobs"], strict=True):
        best, second = entry["top"]
        assert entry["token_id"] == token and entry["text"] == tokenizer.token_text(token)
        shared = {name: entry[name] for name in ("token_id", "text", "logprob", "rank")}
        assert best == shared, "greedy takes the likeliest"
        assert second["logprob"] <= best["logprob"] and second["text"] == tokenizer.token_text(second["token_id"])


def test_logprobs_of_an_unlikely_token_come_beside_the_likeliest(tiny: str) -> None:
    options = ["--json", "--max-tokens", "20", "--logprobs", "1", "--temperature", "2", "--seed", "1", "--ignore-eos"]
    entries = json.loads(invoke("run", "-m", tiny, *options, "Hi").stdout)["logprobs"]
    others = [entry for entry in entries if entry["top"][0]["token_id"] != entry["token_id"]]
    assert others and all(len(entry["top"]) == 1 for entry in entries)
    assert all(entry["logprob"] <= entry["top"][0]["logprob"] for entry in others)


def test_a_seed_survives_json(tiny: str) -> None:
    options = ["run", "-m", tiny, "--json", "--max-tokens", "20", "--temperature", "1", "--ignore-eos", "Hi"]
    answers = [json.loads(invoke(*options).stdout) for _ in range(3)]
    assert all(answer["seed"] < 2**53 for answer in answers), "JavaScript loses what is beyond"
    assert len({answer["seed"] for answer in answers}) == 3
    again = json.loads(invoke(*options, "--seed", str(answers[0]["seed"])).stdout)
    assert again["token_ids"] == answers[0]["token_ids"]


def test_an_answer_of_one_step_has_a_speed(tiny: str) -> None:
    done = invoke("run", "-m", tiny, "--max-tokens", "1", "Hi")
    assert "0.0 tok/s" not in done.stderr and done.stderr.startswith("1 token in one step, ")
    stats = json.loads(invoke("run", "-m", tiny, "--max-tokens", "1", "--json", "Hi").stdout)["stats"]
    assert stats["steps"] == 1 and stats["tokens_per_second"] == pytest.approx(1000 / stats["prefill_ms"], rel=0.01)


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
    options = ["run", "-m", tiny, "--speculate", "suffix", "--max-tokens", "60", "--ignore-eos", " fox" * 7]
    done = invoke(*options, "--show", "origin")
    accepted = json.loads(invoke(*options, "--json").stdout)["stats"]["accepted"]
    assert done.exit_code == 0
    assert "[brackets]" in done.stderr
    assert accepted > 0, "a model that repeats itself should have been drafted for"
    plain = invoke(*options).stdout
    assert len(done.stdout) > len(plain)
    assert sorted(done.stdout.replace("[", "").replace("]", "")) == sorted(plain.replace("[", "").replace("]", ""))


def test_run_show_tree_draws_every_step(tiny: str) -> None:
    options = ["run", "-m", tiny, "--speculate", "suffix", "--max-tokens", "40", "--ignore-eos", " fox" * 7]
    done = invoke(*options, "--show", "tree")
    stats = json.loads(invoke(*options, "--json").stdout)["stats"]
    assert len(re.findall(r"^step \d+", done.stdout, re.MULTILINE)) == stats["steps"]
    counted = [(int(d), int(a)) for d, a in re.findall(r"(\d+) drafted, (\d+) accepted", done.stdout)]
    assert sum(drafted for drafted, _ in counted) == stats["drafted"]
    assert done.stdout.count("*") >= stats["accepted"] > 0


def test_run_explains_what_was_drafted(tiny: str) -> None:
    done = invoke("run", "-m", tiny, "--explain", "--max-tokens", "40", "--temperature", "0", "Hello, hello, hello")
    assert done.exit_code == 0, done.output
    assert "no draft: the step measured what plain decoding costs" in done.stderr
    assert re.search(r"steps? \d+.*(promised|was tried|no draft)", done.stderr)
    assert re.search(r"of \d+ steps drafted|Nothing promised to pay", done.stderr)
    fixed = invoke("run", "-m", tiny, "--explain", "--speculate", "suffix", "--max-tokens", "4", "Hello")
    assert "the drafter was fixed" in fixed.stderr


def test_terminal_text_is_not_obeyed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Screen())
    assert mark_origins([("\x1b[2J[bold]", False), ("ok\n", True)], True) == "\\x1b[2J[bold]\x1b[32mok\n\x1b[0m"


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


@pytest.mark.real_model
def test_run_on_the_real_model(smollm2_path: Path) -> None:
    done = invoke("run", "-m", str(smollm2_path), "--max-tokens", "16", "What is the capital of France?")
    assert "Paris" in done.stdout
