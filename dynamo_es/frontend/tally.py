"""Counts of one event loop, handed to Prometheus when its page is asked for.

``prometheus_client``'s own metrics take a lock and check labels at every observation, about 1.5 µs each and fifteen of
them a request. These belong to one event loop, so they are plain numbers; the library still makes the page.
"""

from __future__ import annotations

import abc
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric


class Tally:
    """A number that goes up, or up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Distribution:
    """A histogram with fixed upper bounds.

    Args:
        bounds: Ascending; a value on a bound belongs to it.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


Child = TypeVar("Child", Tally, Distribution)


class Family(Protocol):
    """Something that gives a metric with all its children."""

    def metric(self) -> Metric:
        """The metric as it is now."""


class TallyFamily(abc.ABC, Generic[Child]):
    """Children of one metric by their label values. Subclasses make a child and the metric."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(labels)
        self.children: dict[tuple[str, ...], Child] = {}

    def child(self, *values: str) -> Child:
        """The child of these label values, made when it is first asked for."""
        found = self.children.get(values)
        if found is None:
            found = self.children[values] = self._make()
        return found

    def remove(self, *values: str) -> None:
        """Drop a child; no error if it is not there."""
        self.children.pop(values, None)

    @abc.abstractmethod
    def _make(self) -> Child:
        """A child before its first value."""


class CounterFamily(TallyFamily[Tally]):
    """A counter; ``name`` ends in ``_total``."""

    def _make(self) -> Tally:
        return Tally()

    def metric(self) -> Metric:
        """The counter with all its children."""
        result = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for values, child in self.children.items():
            result.add_metric(values, child.value)
        return result


class GaugeFamily(TallyFamily[Tally]):
    """A gauge."""

    def _make(self) -> Tally:
        return Tally()

    def metric(self) -> Metric:
        """The gauge with all its children."""
        result = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for values, child in self.children.items():
            result.add_metric(values, child.value)
        return result


class HistogramFamily(TallyFamily[Distribution]):
    """A histogram with the same bounds for all children."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(name, text, labels)
        self._bounds = tuple(bounds)
        self._marks = [*(repr(float(bound)) for bound in bounds), "+Inf"]

    def _make(self) -> Distribution:
        return Distribution(self._bounds)

    def metric(self) -> Metric:
        """The histogram with all its children."""
        result = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for values, child in self.children.items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for mark, count in zip(self._marks, child.counts, strict=True):
                total += count
                buckets.append((mark, total))
            result.add_metric(values, buckets, child.sum)
        return result


class TallyCollector:
    """A collector for a ``CollectorRegistry``."""

    def __init__(self) -> None:
        self._families: list[Family] = []

    def add(self, family: Family) -> None:
        """Show this family too."""
        self._families.append(family)

    def describe(self) -> list[Metric]:
        """What it will give, so that a registry refuses a second collector of the same names."""
        return [family.metric() for family in self._families]

    def collect(self) -> Iterator[Metric]:
        """All families as they are now."""
        for family in self._families:
            yield family.metric()
