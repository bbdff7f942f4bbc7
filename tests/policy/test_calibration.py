"""Confidences become probabilities: calibrated by what was accepted, tilted by the request."""

from __future__ import annotations

import random

import pytest

from slipstream import SamplingParams
from slipstream.policy.calibration import Calibration, Tilt, temperature_class
from slipstream.tree import TokenTree


def chain(*confidences: float, origin: str = "head") -> TokenTree:
    tree, joint, node = TokenTree(0), 1.0, 0
    for token, given in enumerate(confidences, 1):
        joint *= given
        node = tree.add(node, token, origin=origin, confidence=joint)
    return tree


def test_without_counts_a_confidence_is_taken_at_its_word() -> None:
    assert Calibration().survivals(chain(0.9, 0.5), 0, {}) == pytest.approx([1.0, 0.9, 0.45])


def test_a_drafter_that_is_always_sure_and_always_wrong_is_found_out() -> None:
    worth = Calibration()
    for _ in range(60):
        worth.add_tree(chain(0.99, 0.99), [], 0)
    assert worth.survivals(chain(0.99, 0.99), 0, {})[1] < 0.1


def test_a_drafter_that_understates_is_found_out_too() -> None:
    worth = Calibration()
    for _ in range(60):
        worth.add_tree(chain(0.3, 0.3), [1, 2], 0)
    assert worth.survivals(chain(0.3, 0.3), 0, {})[2] > 0.8


def test_counts_approach_the_true_rate_of_each_class() -> None:
    worth, chooser = Calibration(), random.Random(1)
    for _ in range(3000):
        worth.add_tree(chain(0.55), [1] if chooser.random() < 0.7 else [], 0)
        worth.add_tree(chain(0.55, origin="other"), [1] if chooser.random() < 0.2 else [], 0)
    assert worth.acceptance("head", 0, 1, 0.55) == pytest.approx(0.7, abs=0.05)
    assert worth.acceptance("other", 0, 1, 0.55) == pytest.approx(0.2, abs=0.05)
    assert worth.acceptance("head", 2, 1, 0.55) == pytest.approx(0.55), "another temperature has its own counts"


def test_only_nodes_whose_parent_was_accepted_are_counted() -> None:
    worth = Calibration()
    for _ in range(100):
        worth.add_tree(chain(0.8, 0.8), [], 0)
    assert worth.acceptance("head", 0, 2, 0.8) == pytest.approx(0.8)


def test_survival_never_rises_along_a_path_and_scouts_have_none() -> None:
    worth, tree = Calibration(), chain(0.5, 1.0, 0.9)
    for _ in range(50):
        worth.add_tree(chain(0.5, 1.0), [1, 2], 0)
    tree.add(0, 9, scout=True)
    tilt = Tilt()
    for _ in range(50):
        tilt.add(1.0, 4)
    values = worth.survivals(tree, 0, {"head": tilt})
    assert values[1] >= values[2] >= values[3] and values[4] == 0.0


def test_a_request_that_accepts_less_than_expected_is_tilted_down_and_recovers() -> None:
    tilt = Tilt()
    assert tilt.factor == 1.0
    for _ in range(20):
        tilt.add(2.0, 0)
    low = tilt.factor
    for _ in range(40):
        tilt.add(2.0, 2)
    assert low < 0.4 < 0.9 < tilt.factor


def test_temperature_classes() -> None:
    assert temperature_class(SamplingParams(temperature=0.0)) == 0
    assert temperature_class(SamplingParams(temperature=0.7)) == 1
    assert temperature_class(SamplingParams(temperature=1.0, top_p=0.9)) == 1
    assert temperature_class(SamplingParams(temperature=1.0)) == 2


def test_counts_are_the_same_after_they_were_saved() -> None:
    worth, again = Calibration(), Calibration()
    for _ in range(30):
        worth.add_tree(chain(0.6, 0.7), [1], 1)
    again.restore(worth.state())
    assert again.survivals(chain(0.6, 0.7), 1, {}) == worth.survivals(chain(0.6, 0.7), 1, {})
