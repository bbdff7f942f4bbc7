"""Which replica gets a request: the one that holds most of its conversation, unless others have less to do.

A front routes by what replicas publish of their caches every second, and by what it sent them since.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from slipstream.server.ray.calls import Call
from slipstream.server.ray.prefixes import Prefix, longest, unpacked

_CHOSEN_S = 1.0  # seconds that a request may take from the choice of a replica to its arrival there
_UNPUBLISHED_S = 10.0  # seconds after which a key that is not published counts as evicted
_MOST_UNPUBLISHED = 4096  # keys of a replica


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by characters that need not be read again; each request that runs there weighs against them."""

    def initialize_state(self, request_weight: int = 256) -> None:
        """`request_weight`: characters that one more running request is worth."""
        self._weight = request_weight
        self._chosen: dict[str, tuple[ReplicaID, float]] = {}  # request -> chosen replica, and when it was chosen
        self._running: Counter[ReplicaID] = Counter()  # requests that this front sent
        self._reading: dict[str, list[Prefix]] = {}  # the prefixes of each of those requests
        self._sent: defaultdict[ReplicaID, dict[int, float]] = defaultdict(dict)  # key -> when it was sent
        self._published: dict[ReplicaID, tuple[bytes, frozenset[int]]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All replicas, the best one first; ties in random order."""
        prefixes = _prefixes(pending_request)
        since = time.monotonic() - _CHOSEN_S
        self._chosen = {request: chosen for request, chosen in self._chosen.items() if chosen[1] > since}
        held = {replica.replica_id: self._held(replica, prefixes) for replica in candidate_replicas}
        ranked = sorted(
            candidate_replicas,
            key=lambda replica: (
                self._weight * self._load(replica.replica_id) - held[replica.replica_id],
                random.random(),
            ),
        )
        if pending_request is not None and ranked:
            self._chosen[pending_request.metadata.internal_request_id] = ranked[0].replica_id, time.monotonic()
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note that the replica has the request: the prompt that it reads will be in its cache."""
        request = pending_request.metadata.internal_request_id
        self._chosen.pop(request, None)
        self._running[replica_id] += 1
        self._reading[request] = _prefixes(pending_request)
        self._note(replica_id, self._reading[request])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Note that the request has ended, whatever the reason: the replica holds its prompt from now on."""
        self._running[replica_id] = max(0, self._running[replica_id] - 1)
        self._note(replica_id, self._reading.pop(internal_request_id, []))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the replicas that are gone."""
        super().update_replicas(replicas)
        here = {replica.replica_id for replica in replicas}
        for table in (self._running, self._sent, self._published):
            for gone in table.keys() - here:
                del table[gone]

    def _note(self, replica_id: ReplicaID, prefixes: list[Prefix]) -> None:
        """Note that the replica holds these prefixes for now, whether it publishes them or not."""
        sent, now = self._sent[replica_id], time.monotonic()
        for prefix in prefixes:
            sent.pop(prefix.key, None)
            sent[prefix.key] = now
        while sent and (len(sent) > _MOST_UNPUBLISHED or next(iter(sent.values())) < now - _UNPUBLISHED_S):
            del sent[next(iter(sent))]

    def _load(self, replica_id: ReplicaID) -> int:
        """Requests that run on the replica; includes those of other fronts if Ray Serve has asked it lately."""
        running: int = max(self._running[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)
        return running + [chosen for chosen, _ in self._chosen.values()].count(replica_id)

    def _held(self, replica: RunningReplica, prefixes: list[Prefix]) -> int:
        """Characters of the conversation that the replica holds."""
        packed = replica.routing_stats.get("prefixes", b"")
        known = self._published.get(replica.replica_id)
        if known is None or known[0] != packed:
            known = self._published[replica.replica_id] = packed, unpacked(packed)
        since = time.monotonic() - _UNPUBLISHED_S
        fresh = {key for key, sent in self._sent[replica.replica_id].items() if sent > since}
        return longest(prefixes, known[1], fresh)


def _prefixes(request: PendingRequest | None) -> list[Prefix]:
    call = request.args[0] if request is not None and request.args else None
    return call.prefixes if isinstance(call, Call) else []
