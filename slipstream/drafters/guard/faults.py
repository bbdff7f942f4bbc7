"""Calls of drafters that may fail: the failing sequence loses its drafter, and no request fails."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.drafters.base import Drafter, DraftOptions, DraftRequest, Outcome
from slipstream.sequence import Sequence
from slipstream.tree import TokenTree

Drop = Callable[[Sequence, Exception], None]


def proposals(drafter: Drafter[DraftOptions], requests: list[DraftRequest], drop: Drop) -> list[TokenTree | None]:
    """The drafter's trees; None for the sequences on which it failed, for which it is dropped."""
    try:
        offers = drafter.propose(requests)
        if len(offers) != len(requests):
            raise ValueError(f"{len(offers)} trees for {len(requests)} sequences")
        return list(offers)
    except Exception as error:
        if len(requests) > 1:  # find the request that fails: ask for each alone
            return [proposals(drafter, [request], drop)[0] for request in requests]
        drop(requests[0].sequence, error)
        return [None]


def tell(drafter: Drafter[DraftOptions], outcomes: list[Outcome], drop: Drop) -> None:
    """Let the drafter observe; it is dropped for the sequences on which it fails."""
    try:
        drafter.observe(outcomes)
    except Exception as error:
        if len(outcomes) == 1:
            drop(outcomes[0].sequence, error)
            return
        for outcome in outcomes:
            tell(drafter, [outcome], drop)
