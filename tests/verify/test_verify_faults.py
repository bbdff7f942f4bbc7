"""A fault that depends on the drawn token bends the distribution under p/q verifiers: by how much, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from slipstream.tree import TokenTree
from slipstream.verify import Verifier, make_verifier
from tests.verify.outcomes import all_trees, levels, outcomes

P = {(): torch.tensor([0.5, 0.5]), (0,): torch.tensor([0.5, 0.5]), (1,): torch.tensor([0.5, 0.5])}


def first_token(verifier: Verifier, refused: Callable[[TokenTree], bool]) -> list[float]:
    """The distribution of a step's first token; where the draft is refused it is the target's own."""
    law = torch.zeros(2)
    for likely, tree in all_trees(P, levels(1)):
        for outcome in outcomes(verifier, TokenTree(0) if refused(tree) else tree, P):
            said = torch.eye(2)[tree.tokens[outcome.nodes[0]]] if outcome.nodes else outcome.left
            law += likely * outcome.probability * said
    return law.tolist()


@pytest.mark.parametrize("name", ["rejection", "block", "traversal"])
def test_faults_by_the_token_bend_the_distribution_and_others_do_not(name: str) -> None:
    verifier = make_verifier(name)
    assert first_token(verifier, lambda tree: False) == pytest.approx([0.5, 0.5])
    assert first_token(verifier, lambda tree: True) == pytest.approx([0.5, 0.5])
    assert first_token(verifier, lambda tree: tree.tokens[1] == 1) == pytest.approx([0.75, 0.25])
