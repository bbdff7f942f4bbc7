"""The input and the output of a verifier."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from slipstream.tree import TokenTree

if TYPE_CHECKING:
    import torch


class Distributions(Protocol):
    """The target at the nodes of a tree, lazily: a verifier asks only for the nodes it visits."""

    def choose(self, node: int) -> int:
        """The target's own choice after `node`, by the noise of that position."""
        ...

    def probabilities(self, node: int) -> torch.Tensor:
        """The target's distribution after `node`: float64, sums to 1, over the whole vocabulary."""
        ...

    def key(self, node: int, purpose: int) -> int:
        """Key of the random number of `node` for a purpose, in this step."""
        ...


@dataclass(frozen=True)
class Verdict:
    """`nodes`: the accepted path below the root. `tokens`: theirs, and one more of the target's own."""

    nodes: list[int]
    tokens: list[int]


class Verifier(ABC):
    """Decides which drafted tokens are accepted."""

    name: ClassVar[str]
    uses_draws: ClassVar[bool]  # True: reads the q of sampled nodes, so they must not be pruned or merged
    lossy: ClassVar[bool] = False  # True: the output may differ from the target's own distribution

    @abstractmethod
    def __call__(self, tree: TokenTree, target: Distributions) -> Verdict:
        """The accepted path. Always at least one token: the target's own."""
