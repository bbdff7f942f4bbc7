"""What a drafter is: options, a proposal, and what it learns from the outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from slipstream.cache import PagedCache
from slipstream.errors import OptionError
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Plan

if TYPE_CHECKING:
    import torch

    from slipstream.drafters.device_draft import DeviceDraft
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class DraftOptions:
    """The knobs that every drafter has, under the same names everywhere."""

    depth: int = 8
    nodes: int = 16
    branch: int = 2
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("depth", 0), ("nodes", 0), ("branch", 1)):
            self.require(getattr(self, name) >= low, name, f"{low} or more")
        self.require(self.nodes <= 192, "nodes", "192 at most")
        self.require(0.0 <= self.min_confidence <= 1.0, "min_confidence", "0 to 1")

    def require(self, ok: bool, name: str, valid: str) -> None:
        """Refuse an option that is out of range."""
        if not ok:
            raise OptionError(f"{name}={getattr(self, name)!r} is out of range", hint=f"valid: {valid}")

    @property
    def plan(self) -> Plan:
        """What these options ask for when nothing stands against it."""
        return Plan(self.depth, self.nodes, self.branch, self.min_confidence)


Options = TypeVar("Options", bound=DraftOptions)


@dataclass(frozen=True)
class Wish:
    """One sequence that may draft in this step, and how much."""

    sequence: Sequence
    plan: Plan


@dataclass(frozen=True)
class Outcome:
    """What became of one sequence's step: the tokens that were added (accepted ones and the target's own).

    A piece of a prompt adds none, but its rows have taps like all others.
    """

    sequence: Sequence
    tokens: list[int]
    taps: dict[int, torch.Tensor]  # layer -> hidden states of the rows that were committed in this step
    tree: TokenTree | None = None  # as it was verified: the policy may have left nodes out
    scouted: Mapping[int, int] = field(default_factory=dict)  # scout without children -> the target's choice after it


class Drafter(ABC, Generic[Options]):
    """Makes trees of guesses. Weights and statistics live here; the state of a request lives in its sequence."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `slipstream drafters`
    helps: ClassVar[str]  # when it helps, and when it does not
    cost: ClassVar[str]  # what a draft costs
    needs: ClassVar[str] = "nothing"  # what it must be given
    translates: ClassVar[bool] = False  # whether it runs a model of another vocabulary than the target's
    options_type: type[Options]
    taps: tuple[int, ...] = ()  # layers whose hidden states `observe` wants

    def __init__(self, options: Options, target: TargetView) -> None:
        self.options = options
        self.target = target
        # Where its state and its store are found. One of several drafters of a kind is given another key.
        self.key: str = self.name

    @classmethod
    def serving(cls, given: Mapping[str, object]) -> type[Drafter[Any]]:
        """The class that serves the options that were given: this one, unless a method has several."""
        return cls

    def rename(self, key: str) -> None:
        """Give it another key, before it is attached."""
        self.key = key

    @property
    def plan(self) -> Plan:
        """What it does when nothing stands against it."""
        return self.options.plan

    @property
    def blind(self) -> bool:
        """Whether it neither drafts nor learns: steps may then run without asking it or telling it anything."""
        return not (self.plan.drafts or self.taps or type(self).observe is not Drafter.observe)

    @property
    def origins(self) -> frozenset[str]:
        """The origins that its nodes may have."""
        return frozenset({self.name})

    @property
    def samples(self) -> bool:
        """Whether its nodes may be drawn from a q; such trees cannot be merged."""
        return False

    def attach(self, cache: PagedCache) -> None:
        """Make the drafter's own stores."""

    def scratch_rows(self, plan: Plan) -> int:
        """Slots behind the root that a proposal may write in the drafter's own store."""
        return 0

    @abstractmethod
    def propose(self, wishes: Seq[Wish]) -> list[TokenTree]:
        """One tree per wish, each rooted at its sequence's last token. May raise: the engine copes."""

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Learn what was accepted. Called after every step for all that ran in it and goes on, drafting or not.

        May raise, and may then be called again for each sequence alone: whoever raises there is dropped.
        """

    def depart(self, outcome: Outcome) -> None:
        """A sequence has ended in this step. Its pages may be found by others from now on: complete what lies in them.

        Called instead of `observe`. More tokens may have been committed than were given out.
        """

    def rollback(self, sequence: Sequence, length: int) -> None:
        """Tokens of the sequence behind the first `length` were taken back: forget what was kept of them.

        Happens only below another drafter, which asks for guesses behind guesses of its own.
        """

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        """How it drafts for so many sequences where whole rounds run on the device, if it can and its options allow it.

        Whether it can does not depend on how many there are.
        """
        return None

    def close(self, sequence: Sequence) -> None:
        """The sequence is finished."""
