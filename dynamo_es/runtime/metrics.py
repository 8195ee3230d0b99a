"""How metrics are declared and filled: families with fixed names and labels, and label values that stay few.

Numbers live where things happen (counters of folds, buffers, publishers); a collector reads them when the page is asked
for. So nothing is paid between two scrapes, and what is gone vanishes from the page by itself.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

OTHER = "other"
MAX_MODELS = 64
"""Models that have label values of their own; further ones are summed up as ``other``. Anyone who may write to the log
can make up model names, so that their number is no fleet's."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric's name, type, help text and labels. The name of a counter ends in ``_total``."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[str, ...] = ()

    def metric(self) -> CounterMetricFamily | GaugeMetricFamily:
        """The family without samples."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        return make(self.name, self.text, labels=self.labels)


def counter(name: str, text: str, *labels: str) -> Family:
    """Declare a counter."""
    assert name.endswith("_total"), name
    return Family(name, "counter", text, labels)


def gauge(name: str, text: str, *labels: str) -> Family:
    """Declare a gauge; the name tells its unit."""
    return Family(name, "gauge", text, labels)


class Samples:
    """The values of one scrape. Values of the same labels add up, so several runtimes of a process make one page."""

    def __init__(self) -> None:
        self._values: dict[Family, dict[tuple[str, ...], float]] = {}

    def add(self, family: Family, value: float, *labels: str) -> None:
        """Add to the sample of these label values."""
        values = self._values.setdefault(family, {})
        values[labels] = values.get(labels, 0.0) + value

    def most(self, family: Family, value: float, *labels: str) -> None:
        """Keep the larger one: for what does not add up, such as ages."""
        values = self._values.setdefault(family, {})
        values[labels] = max(values.get(labels, value), value)

    def metrics(self, families: Sequence[Family]) -> Iterator[Metric]:
        """All families in order; those without samples are left out."""
        for family in families:
            values = self._values.get(family)
            if values:
                metric = family.metric()
                for labels, value in values.items():
                    metric.add_metric(labels, value)
                yield metric


class Collector(abc.ABC):
    """A prometheus collector over declared families. Subclasses set ``families`` and fill them."""

    families: Sequence[Family] = ()

    def describe(self) -> list[Metric]:
        """What it may give, so that a registry refuses a second collector of the same names."""
        return [family.metric() for family in self.families]

    def collect(self) -> Iterator[Metric]:
        """The families as they are now."""
        samples = Samples()
        self.fill(samples)
        yield from samples.metrics(self.families)

    @abc.abstractmethod
    def fill(self, samples: Samples) -> None:
        """Add the values of this moment. Must be quick (it runs on the event loop) and must not raise."""


LABEL_OVERFLOWS = counter(
    "dynamo_es_metric_label_overflows_total",
    "Values that were shown as 'other' because a label had its most values already; counted at each scrape",
    "label",
)


class LabelBound:
    """Keeps the values of a label few: the first ``limit`` that come keep their names, later ones are ``other``."""

    def __init__(self, label: str, limit: int) -> None:
        self.label = label
        self.overflows = 0
        self._limit = limit
        self._known: set[str] = set()

    def of(self, value: str) -> str:
        """``value``, or ``other``."""
        if value in self._known:
            return value
        if len(self._known) < self._limit:
            self._known.add(value)
            return value
        self.overflows += 1
        return OTHER

    def retain(self, values: Collection[str]) -> None:
        """Forget all others: they are gone, and leave their room to new ones."""
        self._known.intersection_update(values)


class BoundsCollector(Collector):
    """What the bounds on labels held back."""

    families = (LABEL_OVERFLOWS,)

    def __init__(self, *bounds: LabelBound) -> None:
        self._bounds = bounds

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        for bound in self._bounds:
            samples.add(LABEL_OVERFLOWS, bound.overflows, bound.label)
