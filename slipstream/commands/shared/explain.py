"""What the policy decided over the course of an answer, step by step and in a sentence or two."""

from __future__ import annotations

from collections import Counter

from slipstream.types import Decision, Stats


def explained(stats: Stats) -> list[str]:
    """A line per decision, runs of plain steps in one, and a summary at the end."""
    decisions = stats.decisions
    if not decisions:
        return ["The policy decided nothing: the drafter was fixed, or the answer came from one step."]
    lines: list[str] = []
    plain: list[tuple[int, Decision]] = []
    first = 1
    for decision in decisions:
        if decision.drafters:
            lines += [*_plain(plain), _line(first, decision)]
            plain = []
        else:
            plain.append((first, decision))
        first += decision.steps
    return [*lines, *_plain(plain), *_summary(decisions)]


def _steps(first: int, last: int) -> str:
    return f"step {first:<4}" if first == last else f"steps {first} to {last}:"


def _line(first: int, made: Decision) -> str:
    accepted = f"{max(0, made.tokens - made.steps)} of {made.nodes} nodes accepted"
    which = _steps(first, first + made.steps - 1)
    return f"{which} {accepted}, {made.draft_ms:.1f} + {made.verify_ms:.1f} ms: {made.reason}"


def _plain(steps: list[tuple[int, Decision]]) -> list[str]:
    if not steps:
        return []
    (first, decision), (last, final) = steps[0], steps[-1]
    return [f"{_steps(first, last + final.steps - 1)} {decision.reason}"]


def _summary(decisions: list[Decision]) -> list[str]:
    drafted = [made for made in decisions if made.drafters]
    used = Counter[str]()
    for made in drafted:
        if not made.probe:
            used["+".join(made.drafters)] += made.steps
    tried, steps = sum(made.steps for made in drafted if made.probe), sum(made.steps for made in decisions)
    tokens = sum(made.tokens for made in decisions)
    ms = sum(made.draft_ms + made.verify_ms for made in decisions)
    plain_ms = sum(made.tokens * made.plain_ms for made in decisions)
    if not drafted:
        return [f"Nothing promised to pay: all {steps} steps decoded plainly, at no cost."]
    ways = ", ".join(f"{way} {count}" for way, count in used.most_common())
    trials = f" and {tried} to learn what they bring" if tried else ""
    return [
        f"{sum(made.steps for made in drafted)} of {steps} steps drafted ({ways or 'none by choice'}{trials}).",
        f"{tokens} tokens took {ms:.0f} ms; plain decoding would have taken about {plain_ms:.0f} ms"
        f" ({plain_ms / ms:.2f}x).",
    ]
