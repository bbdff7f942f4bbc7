"""The interface of a policy, and what it reads of drafters and of the device runner."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

from slipstream.policy.report import Report
from slipstream.policy.trust import Signal
from slipstream.sequence import Sequence, Work
from slipstream.tree import TokenTree
from slipstream.types import Limits, Plan


class Policy(Protocol):
    """Decides before the cost is paid: how much each sequence drafts, and how many rounds the device runs."""

    def plan(self, work: Seq[Work], *, waiting: bool) -> dict[Sequence, Plan]:
        """A plan for all work of the next step. `waiting`: other sequences wait to be admitted."""
        ...

    def single(self, sequence: Sequence) -> Plan:
        """The plan of one host step, for a sequence whose planned burst has no room."""
        ...

    def select(self, trees: Mapping[Sequence, TokenTree], plans: Mapping[Sequence, Plan]) -> dict[Sequence, TokenTree]:
        """The nodes of the drafts that are verified. Sampled trees are cut by depth alone, or refused."""
        ...

    def drafted(self, ms: float) -> None:
        """How long the drafts of the step under way took; called before `select`."""
        ...

    def observe(self, report: Report) -> None:
        """Learn from the costs and results of passes."""
        ...


class HasPlan(Protocol):
    """A drafter's own plan."""

    @property
    def plan(self) -> Plan:
        """The plan of a host step by the drafter's options."""
        ...


class Part(HasPlan, Protocol):
    """What a policy reads of a drafter that it plans apart from others."""

    @property
    def name(self) -> str:
        """The method."""
        ...

    @property
    def key(self) -> str:
        """The key of its state in a sequence."""
        ...

    @property
    def has_signal(self) -> bool:
        """Whether `signal` knows anything."""
        ...

    @property
    def by_request(self) -> bool:
        """Whether it drafts only for requests that bring something to draft from: a prediction or a grammar."""
        ...

    def host_only(self, sequence: Sequence) -> bool:
        """Whether this sequence brings something to draft from."""
        ...

    def signal(self, sequence: Sequence) -> Signal | None:
        """What it knows, at no cost, about whether a draft will pay; None: nothing, and sequences share its call."""
        ...

    def unread(self, sequence: Sequence) -> int:
        """Tokens that it must read before it can draft."""
        ...


class Drafts(HasPlan, Protocol):
    """What a policy reads of a drafter."""

    @property
    def parts(self) -> Mapping[str, Part]:
        """Drafters by label, if it has some and each is planned apart."""
        ...

    @property
    def limits(self) -> Limits:
        """The limits of a drafter with parts."""
        ...

    @property
    def off_device(self) -> tuple[str, ...]:
        """The labels of its parts that draft on the host alone."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether only one of the parts may draft in a step."""
        ...

    @property
    def is_passive(self) -> bool:
        """Whether it neither drafts nor observes."""
        ...


class Rounds(Protocol):
    """What a policy reads of the device runner."""

    def signal(self, sequence: Sequence) -> Signal | None:
        """What its drafter knows, at no cost, about whether a draft will pay; None: this drafter always drafts."""
        ...

    def serves(self, work: Work) -> bool:
        """Whether rounds support everything that the request asks for."""
        ...

    def shape(self, drafter: str, count: int, *, constrained: bool) -> Plan | None:
        """The tree shape of rounds with `count` sequences (empty for a passive drafter); None: it has no rounds.

        `constrained`: of sequences with grammars, which have bursts of their own.
        """
        ...

    def shapes(self, drafter: str, count: int) -> Seq[Plan]:
        """The trees of rounds with `count` sequences among which the policy picks, for a drafter with parts."""
        ...

    def pass_shape(self, rows: int) -> float:
        """A guess at the cost of a captured pass by its rows, relative to a single row."""
        ...

    def chain_cost(self, shape: Plan, count: int) -> float:
        """Weights that rounds with such trees read, relative to plain rounds."""
        ...
