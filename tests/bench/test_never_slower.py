"""`benchmarks.never_slower`: what its intervals cover, what passes, and what is measured or not measured again."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import cell_tables, never_slower
from benchmarks.cell_figures import beside_fixed, figure, timing_noise
from benchmarks.cells import LIBRARY, Cell, Row, append, load
from benchmarks.never_slower import KINDS, work
from slipstream.bench.prompts import BenchPrompt

CELL = Cell("int8", 1, 0.0, "code")
NOISE = 0.04  # of one time, as a logarithm
RUNS = 400


def row(cell: Cell = CELL, setting: str = "auto", prompt: str = "p0", round_: int = 0, **fields: float) -> Row:
    plain, mine = fields.pop("plain", 1000.0), fields.pop("mine", 500.0)
    made = Row(*cell, setting, prompt, round_, 100, 20.0, mine, mine, 20.0, plain, plain, same=True)
    return replace(made, **fields)


class World:
    """Prompts with lengths and speed-ups of their own, measured with noise."""

    def __init__(self, seed: int, cells: int = 1, prompts: int = 16) -> None:
        self.rng = np.random.default_rng(seed)
        self.plain = 800 * np.exp(0.4 * self.rng.standard_normal((cells, prompts)))
        self.mine = self.plain / np.exp(0.3 + 0.25 * self.rng.standard_normal((cells, prompts)))

    @property
    def truth(self) -> np.ndarray:
        """The speed-up of each cell without noise."""
        return self.plain.sum(axis=1) / self.mine.sum(axis=1)

    def rows(self, rounds: int, batch: int = 1, busy: float = 0.0, drift: float = 0.0) -> list[Row]:
        """`busy`: how often something else makes an answer half as long again; `drift`: noise of whole rounds."""
        found = []
        for round_ in range(rounds):
            whole = drift * self.rng.standard_normal()
            for cell in range(len(self.plain)):
                together = self._noise(busy) if batch > 1 else (0.0, 0.0)
                for place in range(self.plain.shape[1]):
                    plain, mine = together if batch > 1 else self._noise(busy)
                    times = {
                        "plain": self.plain[cell, place] * math.exp(plain),
                        "mine": self.mine[cell, place] * math.exp(mine + whole),
                    }
                    found.append(row(Cell("int8", batch, 0.0, f"kind {cell}"), "auto", f"p{place}", round_, **times))
        return found

    def _noise(self, busy: float) -> tuple[float, float]:
        plain, mine = NOISE * self.rng.standard_normal(2) + 0.4 * (self.rng.random(2) < busy)
        return float(plain), float(mine)


def covered(rows: list[Row], truth: float, peers: list[Row]) -> tuple[bool, float]:
    found = figure(rows, peers)
    assert found.timing is not None
    return abs(math.log(found.value / truth)) <= found.timing, found.timing


@pytest.mark.parametrize(("rounds", "busy"), [(2, 0.0), (3, 0.0), (2, 0.05)])
def test_the_timing_interval_of_a_cell_holds_what_it_says(rounds: int, busy: float) -> None:
    found = [World(seed) for seed in range(RUNS)]
    hits, widths = zip(*(covered(world.rows(rounds, busy=busy), world.truth[0], []) for world in found), strict=True)
    assert 0.925 <= np.mean(hits) <= 0.995, np.mean(hits)
    if not busy:  # the noise of 16 prompts is known after two rounds: not Student's 12.7 of one degree of freedom
        error = math.sqrt(2) * NOISE / math.sqrt(16 * rounds)
        assert error * 1.9 < np.mean(widths) < error * 3.2, np.mean(widths) / error


def test_a_batch_is_one_unit_whose_noise_its_peers_know() -> None:
    """Twelve cells, in each all prompts of a round have the same noise."""
    hits, alone, widths = [], [], []
    for seed in range(RUNS // 4):
        world = World(seed, cells=12, prompts=6)
        rows = world.rows(2, batch=8)
        for cell in range(12):
            own = [one for one in rows if one.kind == f"kind {cell}"]
            hit, width = covered(own, world.truth[cell], rows)
            hits.append(hit)
            widths.append(width)
            alone.append(timing_noise(own))
    assert 0.93 <= np.mean(hits) <= 0.995, np.mean(hits)
    assert {one.freedom for one in alone if one} == {1}  # without peers two rounds have one degree of freedom
    assert np.mean(widths) < 0.2


def test_noise_of_whole_rounds_widens_the_interval() -> None:
    hits, widths, calm = [], [], []
    for seed in range(RUNS // 2):
        world = World(seed)
        hit, width = covered(world.rows(4, drift=0.05), world.truth[0], [])
        hits.append(hit)
        widths.append(width)
        calm.append(covered(world.rows(4), world.truth[0], [])[1])
    assert np.mean(hits) >= 0.8 and np.mean(widths) > 1.7 * np.mean(calm)  # four rounds: not all of 95%


def test_one_round_has_no_timing_interval_and_does_not_pass() -> None:
    found = figure(World(0).rows(1))
    assert found.timing is None and found.misses == ["one round"]


def test_an_unfinished_second_round_does_not_move_the_speed_up() -> None:
    """The second round has only the prompts that are fastest: each prompt counts once."""
    first = [row(prompt=f"p{place}", mine=1000.0 if place else 200.0) for place in range(8)]
    second = row(prompt="p0", round_=1, mine=200.0)
    assert figure([*first, second]).value == pytest.approx(figure(first).value)


def test_criteria() -> None:
    def misses(mine: tuple[float, float], **fields: float) -> list[str]:
        rows = [row(prompt=f"p{p}", round_=r, mine=mine[r], **fields) for p in range(8) for r in range(2)]
        return figure(rows).misses

    assert misses((1000.0, 1000.0)) == []
    assert misses((1021.0, 1021.0)) == ["speed-up"]
    assert misses((900.0, 1100.0)) == ["lower end"]
    assert misses((1000.0, 1000.0), ttft_ms=20.5) == ["TTFT"]
    assert misses((1000.0, 1000.0), same=False) == ["texts"]


def test_ratios_of_first_tokens_and_throughput() -> None:
    rows = [row(prompt=f"p{p}", ttft_ms=t, wall_ms=50.0, plain_wall_ms=80.0) for p, t in enumerate((20.0, 20.0, 80.0))]
    found = figure(rows)
    assert found.ttft == pytest.approx(2.0) and found.ttft_medians == pytest.approx(1.0)
    assert found.throughput == pytest.approx(1.6) and found.tokens_per_second == pytest.approx(2000.0)


def fixed_rows(times: dict[str, list[float]]) -> list[Row]:
    return [row(setting=s, prompt=f"p{p}", mine=ms) for s, listed in times.items() for p, ms in enumerate(listed)]


def test_a_fixed_setting_is_chosen_on_one_half_and_scored_on_the_other() -> None:
    """`suffix` looks best on the even prompts and is bad on the odd ones; `eagle3` the other way round."""
    found = beside_fixed(
        fixed_rows({"auto": [500.0] * 4, "suffix": [250.0, 2000.0] * 2, "eagle3": [2000.0, 400.0] * 2})
    )
    assert found is not None and found.chosen == ("suffix", "eagle3")
    assert found.fixed == pytest.approx(0.5) and found.auto == pytest.approx(2.0) and found.ratio == pytest.approx(4.0)


def test_where_every_fixed_setting_loses_plain_decoding_is_the_best() -> None:
    found = beside_fixed(fixed_rows({"auto": [1000.0] * 4, "suffix": [1500.0] * 4}))
    assert found is not None and found.chosen == ("none", "none") and found.ratio == pytest.approx(1.0)
    assert beside_fixed(fixed_rows({"suffix": [1500.0] * 4})) is None


def command(**changed: object) -> argparse.Namespace:
    fields = {"batch": [1, 8], "temperature": [0.0, 1.0], "kinds": KINDS, "each": 16, "speculate": ["auto", "suffix"]}
    return argparse.Namespace(**{**fields, **changed})


def answered(given: argparse.Namespace, weights: str = "none") -> Iterator[Row]:
    for cell, group, settings in work(given, weights, set(), 0):
        yield from (row(cell, setting, prompt.name) for setting in settings for prompt in group)


def test_what_is_done_is_done_by_setting(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    append(file, list(answered(command(speculate=["auto"]))))
    done: set[object] = {one.key for one in load(file)}
    assert list(work(command(speculate=["auto"]), "none", done, 0)) == []
    left = list(work(command(), "none", done, 0))
    assert len(left) == 16 * 12 and all(settings == ["suffix"] and cell.batch == 1 for cell, _, settings in left)
    assert len(list(work(command(speculate=["auto"]), "none", done, 1))) == 16 * 12 + 12  # the second round


class _Model:
    """Stands for a loaded model and its measurement: a row takes a second."""

    def __init__(self, now: list[float], **_: object) -> None:
        self.now = now

    def __enter__(self) -> _Model:
        return self

    def __exit__(self, *_: object) -> None: ...

    def warm_up(self, *_: object) -> None: ...

    def rows(self, cell: Cell, group: list[BenchPrompt], round_: int, settings: list[str], turn: int) -> list[Row]:
        self.now[0] += 1.0
        return [row(cell, setting, prompt.name, round_) for setting in settings for prompt in group]


def test_a_run_stops_in_time_and_goes_on_with_first_rounds_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(never_slower, "keep_policy_in", lambda folder: None)
    monkeypatch.setattr(never_slower, "LLM", lambda **_: _Model(now))
    monkeypatch.setattr(never_slower, "Measurement", lambda llm, tokens: llm)
    monkeypatch.setattr(never_slower, "time", argparse.Namespace(monotonic=lambda: now[0]))
    given = command(
        file=tmp_path / "f", quantize=["none", "int8"], rounds=2, each=2, batch=[1], tokens=8, minutes=0.5
    )  # 24 groups of each weights and round, 30 of them in half a minute
    cells = len(KINDS) * 2 * 2
    assert never_slower.measure(given) == 4 * 24 - 30
    found = load(given.file)
    assert {one.round for one in found} == {0} and {one.weights for one in found} == {"none", "int8"}
    assert never_slower.measure(given) == 4 * 24 - 60
    found = load(given.file)
    assert len({one.cell for one in found if one.round == 0}) == cells
    assert [one.round for one in found] == sorted(one.round for one in found)
    assert never_slower.measure(argparse.Namespace(**{**vars(given), "minutes": math.inf})) == 0
    assert len(load(given.file)) == 4 * 24 * 2


def test_every_cell_has_sixteen_prompts_and_they_take_turns() -> None:
    made = list(answered(command(speculate=["auto"])))
    prompts = {cell: {one.prompt for one in made if one.cell == cell} for cell in {one.cell for one in made}}
    assert len(prompts) == 24 and all(len(names) == 16 for names in prompts.values())
    alone = [one.cell for one in made if one.batch == 1]
    assert all(one != other for one, other in pairwise(alone))


def test_four_bits_and_fixed_settings_are_measured_alone() -> None:
    assert {one.batch for one in answered(command(), "int4")} == {1}
    assert {one.setting for one in answered(command()) if one.batch == 8} == {"auto"}


def test_of_two_rows_about_the_same_the_later_one_counts(tmp_path: Path) -> None:
    append(tmp_path / "f", [row(mine=1.0), row(mine=2.0), row(setting="suffix", mine=3.0)])
    assert [one.e2e_ms for one in load(tmp_path / "f")] == [2.0, 3.0]


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    rows = World(0, cells=2).rows(2)
    library = [replace(one, weights="none" + LIBRARY, e2e_ms=3 * one.plain_e2e_ms) for one in rows]
    fixed = [replace(one, setting="suffix", e2e_ms=one.plain_e2e_ms) for one in rows]
    cell_tables.show([*rows, *library, *fixed])
    printed = capsys.readouterr().out
    assert "2 of 4 cells pass, speed-up 2, lower end 2" in printed and "none (library) 1" in printed
    (pooled,) = [line for line in printed.splitlines() if line.startswith("| all | 1 |")]
    assert pooled.endswith("| pass |") and f"{figure(rows).value:.3f}x" in pooled  # the library's rows are not in it
    assert "average of the cells:" in printed and "(pass)" in printed
