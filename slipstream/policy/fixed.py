"""The plainest policy: what the options say, cut to what a sequence can still use."""

from __future__ import annotations

from slipstream.errors import DraftFault
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan


class FixedPolicy:
    """One plan for all, except where the end of the answer or of the context is near."""

    def __init__(self, wanted: Plan) -> None:
        self._wanted = wanted

    def plan(self, sequence: Sequence) -> Plan:
        """The plan of one sequence for this step."""
        wanted = self._wanted
        # The target adds one token to whatever is accepted, so a draft of `remaining` tokens could not be used up.
        depth = min(wanted.depth, sequence.remaining - 1)
        if depth <= 0 or wanted.nodes <= 0 or sequence.drafter_dropped:
            return Plan()
        return Plan(depth, wanted.nodes, wanted.branch, wanted.min_confidence)

    def select(self, tree: TokenTree, plan: Plan) -> TokenTree:
        """The nodes that ride in the pass. Sampled trees are only cut by depth, which does not look at tokens."""
        tree = tree.cut(plan.depth)
        if not tree.sampled:
            return tree.pruned(plan.nodes)
        if len(tree) - 1 > plan.nodes:
            raise DraftFault(f"{len(tree) - 1} nodes were sampled and {plan.nodes} planned; none of them may be pruned")
        return tree
