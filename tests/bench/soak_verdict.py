"""What a soak has shown: memory, open files and lag of each process over time, and everything that went wrong. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from dynamo_es.store.rocks import OPEN_TABLES, OPEN_TABLES_OF_PARTITION

MEMORY_GROWTH = 0.05
FILES_GROWTH = 10
# More tables than a store may keep open are, while it merges some.
MERGED_TABLES = 10
# Positions and ends of the log are looked at one after the other: records of so many seconds may lie between.
LAG_SLACK_S = 1.0
# First and last part of the samples that are compared, by their medians: one high sample decides nothing.
_PART = 5
MIN_SAMPLES = 2 * _PART

# Counters of which any rise is an error.
FAULTS = (
    "dynamo_component_errors_total",
    "dynamo_es_dead_letters_total",
    "dynamo_es_fold_failed_commits_total",
    "dynamo_es_fold_rebuilds_total",
    "dynamo_es_fold_refused_records_total",
    "dynamo_es_index_missing_batches_total",
    "dynamo_es_lease_failed_renewals_total",
    "dynamo_es_lease_lost_total",
    "dynamo_es_log_buffer_dropped_total",
    "dynamo_es_publisher_losses_total",
    "dynamo_es_routing_lost_events_total",
    "dynamo_es_streams_failed_commits_total",
    "dynamo_es_streams_failed_publications_total",
    "dynamo_es_streams_failed_snapshots_total",
    "dynamo_es_streams_given_up_total",
    "dynamo_es_streams_rebuilds_total",
    "dynamo_es_streams_refused_total",
    "dynamo_es_streams_stalls_total",
)
# The same for counters of which only these label values are.
FAULTY_LABELS = {
    "dynamo_es_snapshots_total": ("result", {"failed", "refused"}),
    "dynamo_es_events_total": ("result", {"refused"}),
    "dynamo_es_index_batches_total": ("result", {"gap", "skipped-degraded"}),
}
_OWN_MEMORY = ("RssAnon", "RssShmem")
# Of processes that have a store for each partition.
STREAMS = "streams"
POSITIONS = ("dynamo_es_fold_position_offset", "dynamo_es_streams_position_offset")


class Place(NamedTuple):
    """Where a process reads: ``topic`` without namespace."""

    process: str
    fold: str
    topic: str


@dataclass(slots=True)
class Sample:
    """All processes at one moment. ``at_s``: seconds since the load began.

    Attributes:
        rss_bytes, files, cpu_s: Resident memory, open files, processor time so far, by process.
        tables: Most table files that one of a process's stores has open. ``files`` are without them: their number has a
            bound of its own, which a store comes near after an hour or two.
        own_bytes: Of the resident memory what is the process's own. The rest are pages of files (its code), which the
            kernel takes away and brings back as it likes.
        positions: Sum over partitions of the next offset to fold.
        ends: Sum over partitions of the end of each topic (without namespace).
        faults: Counters of what went wrong, by process and name.
    """

    at_s: float
    rss_bytes: dict[str, float] = field(default_factory=dict)
    own_bytes: dict[str, float] = field(default_factory=dict)
    files: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    positions: dict[Place, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    faults: dict[str, float] = field(default_factory=dict)
    tables: dict[str, float] = field(default_factory=dict)

    def add_page(self, process: str, page: str) -> None:
        """Take what matters from a process's ``/metrics``."""
        for family in text_string_to_metric_families(page):
            for name, labels, value, *_ in family.samples:
                if name == "process_resident_memory_bytes":
                    self.rss_bytes[process] = value
                elif name == "process_cpu_seconds_total":
                    self.cpu_s[process] = value
                elif name in POSITIONS:
                    topic = labels["topic"].rpartition(".")[2]
                    place = Place(process, labels.get("fold", "streams"), topic)
                    self.positions[place] = self.positions.get(place, 0.0) + value
                elif _is_fault(name, labels):
                    told = f"{process}: {name}"
                    self.faults[told] = self.faults.get(told, 0.0) + value

    def add_status(self, process: str, status: str) -> None:
        """Take what matters from a process's ``/proc/PID/status``."""
        sizes = dict(line.split(":", 1) for line in status.splitlines())
        self.own_bytes[process] = 1024.0 * sum(int(sizes[name].split()[0]) for name in _OWN_MEMORY)

    def add_files(self, process: str, targets: Iterable[str]) -> None:
        """Take what a process's ``/proc/PID/fd`` leads to."""
        files = list(targets)
        tables = Counter(path.rpartition("/")[0] for path in files if ".sst" in path)
        self.files[process] = len(files) - tables.total()
        self.tables[process] = max(tables.values(), default=0)

    def lag(self, place: Place) -> float:
        """Records between a position and the end of its topic."""
        return max(0.0, self.ends[place.topic] - self.positions[place])


class Judgement(NamedTuple):
    """One thing that was looked at."""

    what: str
    found: str
    good: bool


def judge(samples: Sequence[Sample]) -> list[Judgement]:
    """The verdict on samples after the warm-up, the state at its end first. Raises ValueError: too few."""
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples after the warm-up, at least {MIN_SAMPLES} are needed")
    return [*_judge_memory(samples), *_judge_files(samples), *_judge_lag(samples), *_judge_faults(samples)]


def _judge_memory(samples: Sequence[Sample]) -> Iterator[Judgement]:
    for process in samples[0].own_bytes:
        first, last = _ends([sample.own_bytes[process] for sample in samples])
        growth = last / first - 1
        found = f"{first / 2**20:.1f} MiB to {last / 2**20:.1f} MiB ({growth:+.1%})"
        yield Judgement(f"memory of {process}", found, growth <= MEMORY_GROWTH)


def _judge_files(samples: Sequence[Sample]) -> Iterator[Judgement]:
    for process in samples[0].files:
        first, last = _ends([sample.files[process] for sample in samples])
        yield Judgement(f"open files of {process}", f"{first:.0f} to {last:.0f}", last - first <= FILES_GROWTH)
    for process in samples[0].tables:
        bound = OPEN_TABLES_OF_PARTITION if process.startswith(STREAMS) else OPEN_TABLES
        most = max(sample.tables[process] for sample in samples)
        found = f"{most:.0f} at most, {bound} are allowed"
        yield Judgement(f"open table files of a store of {process}", found, most <= bound + MERGED_TABLES)


def _judge_lag(samples: Sequence[Sample]) -> Iterator[Judgement]:
    seconds = samples[-1].at_s - samples[0].at_s
    for place in samples[0].positions:
        rate = (samples[-1].ends[place.topic] - samples[0].ends[place.topic]) / seconds
        first, last = _ends([sample.lag(place) for sample in samples])
        found = f"{first:.0f} to {last:.0f} records, {rate:.1f} come a second"
        good = last - first <= max(1.0, LAG_SLACK_S * rate)
        yield Judgement(f"lag of {place.process}, {place.fold}, {place.topic}", found, good)


def _judge_faults(samples: Sequence[Sample]) -> Iterator[Judgement]:
    first: Mapping[str, float] = samples[0].faults
    for name, count in samples[-1].faults.items():
        rise = count - first.get(name, 0.0)
        if rise:
            yield Judgement(name, f"rose by {rise:g}", False)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    part = max(1, len(values) // _PART)
    return statistics.median(values[:part]), statistics.median(values[-part:])


def _is_fault(name: str, labels: Mapping[str, str]) -> bool:
    if name in FAULTY_LABELS:
        label, faulty = FAULTY_LABELS[name]
        return labels.get(label) in faulty
    return name in FAULTS
