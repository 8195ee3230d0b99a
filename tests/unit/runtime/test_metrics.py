from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import TopicPartition
from dynamo_es.runtime.health import fold_entry, snapshot_entry
from dynamo_es.runtime.metrics import BoundsCollector, Collector, LabelBound, Samples, counter, gauge
from dynamo_es.runtime.metrics_folds import FOLD_FAMILIES, fill_fold, progress
from dynamo_es.runtime.metrics_index import SnapshotAgeCollector, SnapshotCollector
from dynamo_es.runtime.metrics_runtime import topic_label
from streams.runner import RunnerCounters, RunnerStatus
from streams.snapshot_writer import SnapshotCounters
from streams.state_writer import StoreCondition

LAG = gauge("x_lag_records", "Lag", "fold")
SEEN = counter("x_seen_total", "Seen", "fold")


class Two(Collector):
    families = (LAG, SEEN)

    def fill(self, samples):
        samples.add(SEEN, 1, "a")
        samples.add(SEEN, 2, "a")
        samples.most(LAG, 3, "a")
        samples.most(LAG, 1, "a")


def page(*collectors):
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


def test_values_of_equal_labels_are_one_sample():
    text = page(Two())
    assert 'x_seen_total{fold="a"} 3.0' in text
    assert 'x_lag_records{fold="a"} 3.0' in text
    assert "# HELP x_lag_records Lag\n# TYPE x_lag_records gauge" in text


def test_a_second_collector_of_the_same_names_is_refused():
    registry = CollectorRegistry()
    registry.register(Two())
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Two())


def test_OPS_03_a_label_has_no_more_values_than_its_bound_and_the_rest_is_counted():
    bound = LabelBound("model", 3)
    names = [f"m{number}" for number in range(10_000)]
    assert {bound.of(name) for name in names} == {"m0", "m1", "m2", "other"}
    assert {bound.of(name) for name in names} == {"m0", "m1", "m2", "other"}
    assert bound.overflows == 2 * 9_997
    assert 'dynamo_es_metric_label_overflows_total{label="model"} 19994.0' in page(BoundsCollector(bound))
    bound.retain({"m1", "m9"})
    assert [bound.of(name) for name in ("m1", "m9", "m5", "m6")] == ["m1", "m9", "m5", "other"]


@pytest.mark.parametrize(
    ("topic", "label"),
    [
        ("dynamo.kv-events", "kv-events"),
        ("a.b.requests", "requests"),
        ("events of worker 7", "engine"),
        ("", "engine"),
    ],
)
def test_topics_of_dead_letters_are_a_closed_set(topic, label):
    assert topic_label(topic) == label


PLACE = TopicPartition("ns.kv-events", 0)


def fold(status, *, began=0, position=0, end=0, restoring=None):
    return SimpleNamespace(
        fold=SimpleNamespace(name="kv-index"), status=status, counters=RunnerCounters(), restoring=restoring,
        began={PLACE: began}, positions=lambda: {PLACE: position}, ends=lambda: {PLACE: end},
        store_condition=StoreCondition.WRITTEN, unwritten_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("runner", "ratio"),
    [
        (fold(RunnerStatus.NEW), 0.0),
        (fold(RunnerStatus.LOADING), 0.0),
        (fold(RunnerStatus.LOADING, restoring=(2, 8)), 0.25),
        (fold(RunnerStatus.CATCHING_UP, began=100, position=150, end=300), 0.25),
        (fold(RunnerStatus.CATCHING_UP, began=100, position=300, end=300), 1.0),
        (fold(RunnerStatus.CATCHING_UP, began=5, position=5, end=5), 1.0),
        (fold(RunnerStatus.LIVE, began=100, position=150, end=300), 1.0),
    ],
)
def test_progress_of_a_start(runner, ratio):
    assert progress(runner) == ratio


def test_health_shows_progress_until_a_fold_is_live():
    restoring = fold_entry(fold(RunnerStatus.LOADING, restoring=(3, 8)))
    assert restoring == {
        "state": "loading", "lag_records": 0, "restoring_snapshots": {"partitions_done": 3, "partitions": 8},
        "progress_percent": 37.5,
    }  # fmt: skip
    behind = fold_entry(fold(RunnerStatus.CATCHING_UP, position=1, end=3))
    assert behind == {"state": "catching-up", "lag_records": 2, "progress_percent": 33.3}
    assert fold_entry(fold(RunnerStatus.LIVE, position=3, end=3)) == {"state": "live", "lag_records": 0}


def test_health_and_metrics_tell_of_a_store_that_takes_nothing():
    runner = fold(RunnerStatus.LIVE)
    runner.store_condition, runner.unwritten_bytes, runner.counters.let_go = StoreCondition.BEHIND, 700, 2
    assert fold_entry(runner)["store"] == {"state": "behind", "unwritten_bytes": 700}
    samples = Samples()
    fill_fold(samples, runner, 0)
    found = {sample.name: sample.value for family in samples.metrics(FOLD_FAMILIES) for sample in family.samples}
    assert found["dynamo_es_fold_unwritten_bytes"] == 700
    assert found["dynamo_es_fold_let_go_total"] == 2


def test_snapshots_by_partition_with_age_and_offset():
    clock = ManualClock(now_ms=1_000_000)
    counters = SnapshotCounters(written=2, failed=1, covered={0: (50, 400_000), 3: (7, 990_000)})
    text = page(SnapshotAgeCollector(lambda: [counters], lambda partition: 60, clock), SnapshotCollector(counters))
    assert 'dynamo_es_snapshot_age_seconds{partition="0"} 600.0' in text
    assert 'dynamo_es_snapshot_age_seconds{partition="3"} 10.0' in text
    assert 'dynamo_es_snapshot_covered_offset{partition="0"} 50.0' in text
    assert 'dynamo_es_snapshot_uncovered_records{partition="0"} 10.0' in text
    assert 'dynamo_es_snapshots_total{result="failed"} 1.0' in text
    entry = snapshot_entry(counters, clock)
    assert entry["oldest_age_seconds"] == 600.0
    assert entry["partitions"]["3"] == {"covered_offset": 7, "age_seconds": 10.0}
    assert re.fullmatch(r"[a-z_]+", next(iter(entry)))
    assert snapshot_entry(SnapshotCounters(), clock)["oldest_age_seconds"] is None
