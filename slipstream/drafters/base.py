"""The drafter interface: options, proposals, and what a drafter learns from the outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from slipstream.cache import PagedCache
from slipstream.checks import Checked
from slipstream.policy.report import DraftCall
from slipstream.policy.trust import Signal
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree
from slipstream.types import Limits, Plan

if TYPE_CHECKING:
    import torch

    from slipstream.drafters.device.device_draft import DeviceDraft, DeviceKeeper
    from slipstream.gpu.lanes import Lanes
    from slipstream.models.view import TargetView


@dataclass(frozen=True)
class DraftOptions(Checked):
    """The options that every drafter has."""

    depth: int = 8
    nodes: int = 16
    branch: int = 2
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("depth", 0), ("nodes", 0), ("branch", 1)):
            self.require(getattr(self, name) >= low, name, f"{low} or more")
        self.require(self.nodes <= 192, "nodes", "192 at most")
        self.require(0.0 <= self.min_confidence <= 1.0, "min_confidence", "0 to 1")

    @property
    def plan(self) -> Plan:
        """The plan that these options ask for, before a policy reduces it."""
        return Plan(self.depth, self.nodes, self.branch, self.min_confidence)

    @property
    def limits(self) -> Limits | None:
        """Bounds within which the policy decides; None: the options are the plan."""
        return None


Options = TypeVar("Options", bound=DraftOptions)


@dataclass(frozen=True)
class DraftRequest:
    """One sequence that may draft in this step, and its plan."""

    sequence: Sequence
    plan: Plan


@dataclass(frozen=True)
class Outcome:
    """The result of one sequence's step: the tokens added (accepted ones and the target's own).

    A prefill chunk adds none, but its rows have taps like all others.
    """

    sequence: Sequence
    tokens: list[int]
    taps: dict[int, torch.Tensor]  # layer -> hidden states of the rows that were committed in this step
    tree: TokenTree | None = None  # the verified tree: the policy may have pruned it
    scouted: Mapping[int, int] = field(default_factory=dict)  # childless scout -> the target's choice after it


class Drafter(ABC, Generic[Options]):
    """Makes draft trees. Weights and statistics live here; the state of a request lives in its sequence."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `slipstream drafters`
    helps: ClassVar[str]  # when it helps, and when it does not
    cost: ClassVar[str]  # what a draft costs
    needs: ClassVar[str] = "nothing"  # what the user must provide
    translates: ClassVar[bool] = False  # whether its model's vocabulary is not the target's
    options_type: type[Options]
    taps: tuple[int, ...] = ()  # layers whose hidden states `observe` wants
    stores_needed: tuple[
        str, ...
    ] = ()  # stores it cannot fill later: a cached prefix is used only as far as they reach
    parts: Mapping[str, Drafter[Any]] = {}  # its drafters by label, if the policy plans each of them separately
    limits: Limits = Limits()  # limits within which the policy plans the parts
    exclusive: bool = False  # whether only one of the parts may draft in a step
    by_request: ClassVar[bool] = False  # whether it drafts only from what a request brings (a grammar, a prediction)
    separate_bytes: int = 0  # size of stores it made outside the cache it is attached to

    def __init__(self, options: Options, target: TargetView) -> None:
        self.options = options
        self.target = target
        # Key of its state and of its store. With several drafters of one kind, each gets its own key.
        self.key: str = self.name
        self.part_faults: Counter[str] = Counter()  # faults by label, of parts that the policy plans separately
        self.given: frozenset[str] = frozenset()  # options set by the user: a runner honours them or does not run it

    @classmethod
    def resolve_class(cls, given: Mapping[str, object]) -> type[Drafter[Any]]:
        """The class for these options: this one, unless a method has several."""
        return cls

    @classmethod
    def usual(cls, options: Options, *, on_cpu: bool) -> Plan:
        """The plan of a lone sequence: on the host with a CPU (float32 weights), or on the device with a GPU if the
        drafter can draft there. Printed by `slipstream drafters`.
        """
        return options.plan

    def rename(self, key: str) -> None:
        """Set another key, before `attach`."""
        self.key = key

    @property
    def plan(self) -> Plan:
        """The plan before a policy reduces it."""
        return self.options.plan

    @property
    def is_passive(self) -> bool:
        """Whether the drafter neither drafts nor learns: a step may then skip `propose` and `observe`."""
        return not (self.plan.drafts or self.taps or type(self).observe is not Drafter.observe)

    @property
    def origins(self) -> frozenset[str]:
        """The origins that the drafter's nodes may have."""
        return frozenset({self.name})

    @property
    def samples(self) -> bool:
        """Whether the drafter's nodes may be sampled from a q; such trees cannot be merged."""
        return False

    def host_only(self, sequence: Sequence) -> bool:
        """Whether the draft for this sequence needs something that device rounds do not read."""
        return False

    def signal(self, sequence: Sequence) -> Signal | None:
        """A free estimate of whether a draft will pay. None: it always drafts."""
        return None

    @property
    def off_device(self) -> tuple[str, ...]:
        """The labels of the parts that can draft only on the host."""
        return ()

    @property
    def has_signal(self) -> bool:
        """Whether `signal` ever returns a signal."""
        return type(self).signal is not Drafter.signal

    def unread(self, sequence: Sequence) -> int:
        """The number of tokens that the drafter must read before it can draft."""
        return 0

    def attach(self, cache: PagedCache) -> None:
        """Create the drafter's own stores."""

    def lighter(self) -> Drafter[Any] | None:
        """The drafter without what it loaded unasked, to free memory for requests; None: it loaded nothing unasked."""
        return None

    def scratch_rows(self, plan: Plan) -> int:
        """Slots after the root that a proposal may write in the drafter's own store."""
        return 0

    @abstractmethod
    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        """One tree per request, rooted at the sequence's last token. May raise: the engine handles it."""

    def extend(self, request: DraftRequest, tree: TokenTree) -> None:
        """Continue a tree of other drafters within the plan, where that is nearly free. No node is sampled."""

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Learn what was accepted. Called after every step with all sequences that ran and continue, drafting or not.

        May raise. It is then called once per sequence, and a sequence for which it raises again stops drafting.
        """

    def depart(self, outcome: Outcome) -> None:
        """A sequence has ended in this step. Other sequences may share its pages from now on: complete their rows.

        Called instead of `observe`. More tokens may have been committed than were emitted.
        """

    def rollback(self, sequence: Sequence, length: int) -> None:
        """Tokens of the sequence after the first `length` were taken back: drop the state kept for them.

        Called only by another drafter that drafts on top of its own guesses.
        """

    def device_draft(self, lanes: int) -> DeviceDraft | None:
        """The draft for `lanes` sequences in device rounds; None if the drafter or its options do not support that.

        Whether they do does not depend on `lanes`.
        """
        return None

    def device_drafts(self, lanes: int) -> Mapping[tuple[Plan, ...], DeviceDraft]:
        """The drafts among which the policy picks for rounds of `lanes` lanes, by the plans of the parts."""
        return {}

    def device_keepers(self, lanes: Lanes, drafting: Seq[Plan] = ()) -> Seq[DeviceKeeper]:
        """Keepers for rounds in which the drafter does not draft. `drafting`: the plans of its parts, if any."""
        return ()

    def take_calls(self) -> list[DraftCall]:
        """The calls of the parts since the last `take_calls`, if the policy plans them separately."""
        return []

    def close(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that is finished."""
