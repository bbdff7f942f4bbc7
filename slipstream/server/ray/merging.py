"""The metrics of several replicas as one page, each sample with the label of its replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


def merged(pages: Iterable[tuple[str, bytes]]) -> bytes:
    """One page from pairs (replica, page)."""
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for family in text_string_to_metric_families(page.decode()):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    return generate_latest(registry)


class _Collected:
    """A collector of metrics that the replicas have counted, for a registry."""

    def __init__(self, families: dict[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        """All metric families."""
        yield from self._families.values()
