"""From single answers to the rows of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.peers.protocol import Report, Run


@dataclass(frozen=True)
class Answer:
    """The best of all rounds for one prompt: other processes can only slow it down."""

    kind: str
    tok_s: float
    ttft_ms: float
    tokens: int  # including the first ones, which tok_s excludes
    decode_s: float


@dataclass(frozen=True)
class Row:
    """One mode over all prompts, or why it was skipped."""

    peer: str
    mode: str
    version: str = ""
    tok_s: float = 0.0  # after the first token, all prompts together
    ttft_ms: float = 0.0  # mean over the prompts
    peak_mib: float = 0.0
    startup_s: float = 0.0
    slowest: str = ""  # the kind of prompt with the fewest tokens a second
    slowest_tok_s: float = 0.0
    speedup: float | None = None  # over the peer's own plain decoding; None: every answer came all at once
    worst: str | None = None  # the kind of prompt with the smallest speed-up
    worst_speedup: float | None = None
    identical: bool | None = None  # every text that of the peer's own plain decoding
    answers: Sequence[Answer] = ()
    skipped: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON; a row that was skipped has its reason only."""
        if self.skipped is not None:
            return {"peer": self.peer, "mode": self.mode, "skipped": self.skipped}
        return {key: value for key, value in asdict(self).items() if key != "skipped"}


def best_answers(runs: Sequence[Run]) -> list[Answer]:
    """The best answer for each kind of prompt, in their order."""
    found = []
    for kind in dict.fromkeys(run.kind for run in runs):
        rounds = [run for run in runs if run.kind == kind]
        fastest = max(rounds, key=_rate)
        first = min(run.first_s for run in rounds)
        found.append(Answer(kind, _rate(fastest), 1000 * first, _decoded(fastest), fastest.decode_s))
    return found


def _decoded(run: Run) -> int:
    return len(run.tokens) - run.first_tokens


def _rate(run: Run) -> float:
    return _decoded(run) / run.decode_s if _decoded(run) else 0.0


def overall(answers: Sequence[Answer]) -> float:
    """Tokens of all prompts over the time for all of them; 0 if every token came with the first ones."""
    tokens = sum(answer.tokens for answer in answers)
    return tokens / sum(answer.decode_s for answer in answers) if tokens else 0.0


def row(peer: str, mode: str, alone: Report, runs: Sequence[Run], baseline: str | None) -> Row:
    """The row of `mode`, from its run alone and the runs in turns; `baseline`: the plain mode to compare with."""
    own = [run for run in runs if run.mode == mode]
    answers = best_answers(own)
    slowest = min(answers, key=lambda answer: answer.tok_s)
    found = Row(
        peer,
        mode,
        version=alone.version,
        tok_s=overall(answers),
        ttft_ms=sum(answer.ttft_ms for answer in answers) / len(answers),
        peak_mib=alone.peak_mib,
        startup_s=alone.startup_s,
        slowest=slowest.kind,
        slowest_tok_s=slowest.tok_s,
        answers=answers,
    )
    if baseline is None:
        return found
    plain_runs = [run for run in runs if run.mode == baseline]
    plain = best_answers(plain_runs)
    found = replace(found, identical=all(len(_texts(own + plain_runs, answer.kind)) == 1 for answer in answers))
    # An answer that came all at once has no speed.
    ratios = {a.kind: a.tok_s / p.tok_s for a, p in zip(answers, plain, strict=True) if a.tok_s and p.tok_s}
    if not ratios:
        return found
    worst = min(ratios, key=lambda kind: ratios[kind])
    return replace(found, speedup=overall(answers) / overall(plain), worst=worst, worst_speedup=ratios[worst])


def _texts(runs: Sequence[Run], kind: str) -> set[tuple[int, ...]]:
    return {tuple(run.tokens) for run in runs if run.kind == kind}


def show(rows: Sequence[Row]) -> None:
    """The table, in Markdown; then what was skipped."""
    headers = ["engine", "mode", "tok/s", "first token", "peak memory", "start-up", "slowest prompt"]
    headers += ["speed-up", "worst prompt", "text"]
    print("| " + " | ".join(headers) + " |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | --- | --- |")
    for row in rows:
        if row.skipped is None:
            print("| " + " | ".join(_cells(row)) + " |")
    print()
    for row in rows:
        if row.skipped is not None:
            print(f"skipped: {row.peer}, {row.mode}: {row.skipped}")


def _cells(row: Row) -> list[str]:
    cells = [row.peer, row.mode, f"{row.tok_s:.1f}", f"{row.ttft_ms:.0f} ms", f"{row.peak_mib:,.0f} MiB"]
    cells += [f"{row.startup_s:.1f} s", f"{row.slowest} {row.slowest_tok_s:.1f}"]
    text = {None: "", True: "identical", False: "DIFFERS"}[row.identical]
    if row.speedup is None:
        return [*cells, "", "", text]
    return [*cells, f"{row.speedup:.2f}x", f"{row.worst} {row.worst_speedup:.2f}x", text]
