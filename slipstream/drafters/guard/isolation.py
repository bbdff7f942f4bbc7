"""Isolates drafters of other packages from the engine: a plug-in may raise, return invalid trees or hang.

It runs in its own thread with a deadline and reads views that it cannot write; its trees are checked and copied there.
After the deadline the thread is abandoned and asked to end, which a loop in Python obeys. Code that holds the GIL (a C
extension that does not release it) blocks the whole process and cannot be abandoned.

A class derived from one of our drafters other than `Drafter` itself (such as `HeadDrafter`) runs parts of the
engine, including stores and passes of the target: it is trusted like a built-in one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest, Outcome
from slipstream.drafters.guard.views import SequenceView, TargetFacts
from slipstream.errors import DraftFault, OptionError
from slipstream.sequence import Sequence
from slipstream.tree import Draw, TokenTree
from slipstream.types import Plan

if TYPE_CHECKING:
    from slipstream.models.view import TargetView

log = logging.getLogger("slipstream")
T = TypeVar("T")


def is_plug_in(kind: type[Drafter[Any]]) -> bool:
    """Whether a drafter's class derives from `Drafter` and from nothing else of this package."""
    return not any(base.__module__.startswith("slipstream.") for base in kind.__mro__ if base is not Drafter)


class Isolated(Drafter[DraftOptions]):
    """A plug-in as the engine sees it. Any failure in it becomes a DraftFault, in bounded time."""

    FIRST_SECONDS: ClassVar[float] = 1.0  # for the first call of each method: imports, warm-up
    SECONDS: ClassVar[float] = 0.25
    CHANCES: ClassVar[int] = 2  # hung calls after which it is no longer called

    def __init__(self, kind: type[Drafter[Any]], options: DraftOptions, target: TargetView) -> None:
        for method in ("attach", "scratch_rows", "device_draft"):
            if getattr(kind, method) is not getattr(Drafter, method):
                raise OptionError(
                    f"drafter {kind.name!r} has a method `{method}`, but a plug-in has no store and no device draft",
                    hint="derive from a drafter that has, such as GrowingDrafter or HeadDrafter",
                )
        vars(self)["name"] = kind.name  # a class variable in every other drafter
        super().__init__(options, target)
        self._inner = kind(options, cast("TargetView", TargetFacts.of(target)))
        self._plan: Plan = self._inner.plan
        self._origins = frozenset(self._inner.origins)
        self._samples: bool = self._inner.samples
        self.taps = tuple(self._inner.taps)
        listening = ("observe", "depart", "rollback", "close")
        self._listens = {name for name in listening if getattr(kind, name) is not getattr(Drafter, name)}
        self._worker: _Worker | None = None
        self._warm: set[str] = set()  # methods that have returned once
        self._hung = 0

    def rename(self, key: str) -> None:
        super().rename(key)
        self._inner.rename(key)

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def is_passive(self) -> bool:
        return not (self._plan.drafts or self.taps or "observe" in self._listens)

    @property
    def origins(self) -> frozenset[str]:
        return self._origins

    @property
    def samples(self) -> bool:
        return self._samples

    @property
    def gone(self) -> bool:
        """Whether it hung so often that it is no longer called."""
        return self._hung >= self.CHANCES

    def propose(self, requests: Seq[DraftRequest]) -> list[TokenTree]:
        if self.gone:
            raise DraftFault(f"{self.name} has hung {self._hung} times and is no longer called")
        views = [replace(request, sequence=self._view(request.sequence)) for request in requests]
        return self._ask("propose", partial(self._proposed, views))

    def _proposed(self, requests: list[DraftRequest]) -> list[TokenTree]:
        """In the worker: the plug-in's trees, checked and copied."""
        trees = self._inner.propose(requests)
        if type(trees) is not list or len(trees) != len(requests):
            raise DraftFault(f"not a list of {len(requests)} trees was returned")
        vocab_size = self.target.config.vocab_size
        return [_handed_over(tree, w.sequence.tokens[-1], vocab_size) for tree, w in zip(trees, requests, strict=True)]

    def observe(self, outcomes: Seq[Outcome]) -> None:
        self._tell("observe", lambda: ([self._seen(outcome) for outcome in outcomes],))

    def depart(self, outcome: Outcome) -> None:
        self._tell("depart", lambda: (self._seen(outcome),))

    def rollback(self, sequence: Sequence, length: int) -> None:
        self._tell("rollback", lambda: (self._view(sequence), length))

    def close(self, sequence: Sequence) -> None:
        self._tell("close", lambda: (self._view(sequence),))

    def _view(self, sequence: Sequence) -> Sequence:
        return cast(Sequence, SequenceView.of(sequence, self.key))  # attributes that it lacks are not for plug-ins

    def _seen(self, outcome: Outcome) -> Outcome:
        return replace(
            outcome,
            sequence=self._view(outcome.sequence),
            tokens=list(outcome.tokens),
            taps={layer: hidden.clone() for layer, hidden in outcome.taps.items()},
            tree=None if outcome.tree is None else outcome.tree.copy(),
            scouted=dict(outcome.scouted),
        )

    def _tell(self, method: str, arguments: Callable[[], tuple[object, ...]]) -> None:
        if method in self._listens and not self.gone:
            self._ask(method, partial(getattr(self._inner, method), *arguments()))

    def _ask(self, method: str, action: Callable[[], T]) -> T:
        if self._worker is None:
            self._worker = _Worker(self.name)
            weakref.finalize(self, self._worker.end)
        seconds = self.SECONDS if method in self._warm else self.FIRST_SECONDS
        try:
            answer = self._worker.run(action, seconds)
        except TimeoutError:
            self._worker.abandon()
            self._worker = None
            self._hung += 1
            raise DraftFault(f"{self.name}.{method} did not return within {seconds} s and was abandoned") from None
        self._warm.add(method)
        return answer


class _Worker:
    """A thread that runs one call after the other, until it is abandoned."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=f"slipstream-{name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(SystemExit):  # raised by `abandon` between two calls
            while (call := self._calls.get()) is not None:
                call()
                del call  # or the thread would keep the drafter alive

    def run(self, action: Callable[[], T], seconds: float) -> T:
        """The action's result; TimeoutError if it takes too long, DraftFault if it raises anything."""
        answer: Future[T] = Future()
        self._calls.put(partial(_settle, answer, action))
        return answer.result(seconds)

    def end(self) -> None:
        """End the thread after its pending calls."""
        self._calls.put(None)

    def abandon(self) -> None:
        """End the thread as soon as it executes Python again, without waiting."""
        self.end()
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit))


def _settle(answer: Future[T], action: Callable[[], T]) -> None:
    try:
        with torch.inference_mode():
            result = action()
    except BaseException as error:  # whatever a plug-in raises fails its own draft only
        kind = "" if isinstance(error, DraftFault) else f"{type(error).__name__}: "
        answer.set_exception(DraftFault(kind + _reason(error)))
    else:
        answer.set_result(result)


def _reason(error: BaseException) -> str:
    try:
        log.debug("a plug-in raised", exc_info=error)
        return " ".join(str(error).split())[:200]
    except BaseException:  # even `str` of it is the plug-in's code
        return "no message"


def _handed_over(tree: object, root_token: int, vocab_size: int) -> TokenTree:
    """A copy of the tree, with the distributions of its sampled nodes."""
    if type(tree) is not TokenTree:
        raise DraftFault(f"a {type(tree).__name__} was returned instead of a TokenTree")
    tree.check(root_token, vocab_size)
    own, draws = TokenTree(root_token), dict[int, Draw]()
    for node in range(1, len(tree)):
        draw = tree.draws[node]
        if draw is not None:
            if id(draw) not in draws:
                draws[id(draw)] = Draw(draw.q.detach().clone())
            draw = draws[id(draw)]
        own.add(
            tree.parents[node],
            tree.tokens[node],
            origin=tree.origins[node],
            confidence=tree.confidence[node],
            draw=draw,
            scout=tree.scouts[node],
        )
    return own
