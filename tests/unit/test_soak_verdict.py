"""What a soak calls flat, late and wrong (``tests.bench.soak_verdict``)."""

from __future__ import annotations

import pytest

from tests.bench.soak_verdict import FAULTS, FAULTY_LABELS, POSITIONS, Place, Sample, judge
from tests.unit.test_docker_metrics import METRICS, VALUES

PLACE = Place("frontend", "requests", "requests")
MIB = 2.0**20


def sample(at_s, own=100.0, lag=5.0, files=20.0, **faults):
    end = 10.0 * at_s + 1000
    return Sample(
        at_s, {"frontend": MIB}, {"frontend": own * MIB}, {"frontend": files}, {"frontend": 0.1 * at_s},
        {PLACE: end - lag}, {"requests": end}, {f"frontend: {name}": count for name, count in faults.items()},
    )  # fmt: skip


def bad(samples):
    return [judgement.what for judgement in judge(samples) if not judgement.good]


def test_a_process_that_goes_up_and_down_is_flat():
    assert bad([sample(5.0 * number, own=100 + number % 7, lag=number % 5) for number in range(50)]) == []


def test_memory_that_rises_by_more_than_5_percent_is_not():
    assert bad([sample(5.0 * number, own=100 + 0.2 * number) for number in range(50)]) == ["memory of frontend"]
    assert bad([sample(5.0 * number, own=100 + 0.1 * number) for number in range(50)]) == []


def test_memory_is_what_is_the_process_s_own():
    """The kernel drops pages of files when memory is scarce: a leak would hide behind them."""
    look = Sample(0.0)
    look.add_status(
        "frontend", "Name:\tpython\nVmRSS:\t  100 kB\nRssAnon:\t   60 kB\nRssFile:\t   36 kB\nRssShmem:\t    4 kB\n"
    )
    assert look.own_bytes == {"frontend": 64 * 1024.0}


def test_one_high_sample_decides_nothing():
    samples = [sample(5.0 * number) for number in range(49)]
    assert bad([*samples, sample(245.0, own=200, lag=5000)]) == []


def test_a_fold_that_falls_behind_is_told():
    found = bad([sample(5.0 * number, lag=number) for number in range(50)])
    assert found == ["lag of frontend, requests, requests"]
    # Ten records come a second: so many may lie between two looks.
    assert bad([sample(5.0 * number, lag=number / 5) for number in range(50)]) == []


def test_files_that_are_not_closed_and_counters_of_faults_are_told():
    found = bad([sample(5.0 * number, files=20 + number, losses=number // 49) for number in range(50)])
    assert found == ["open files of frontend", "frontend: losses"]


def test_tables_of_a_store_may_be_as_many_as_it_says():
    """A store that is young has fewer than its bound, so that they grow for an hour or two, and then no more."""
    young = [sample(5.0 * number) for number in range(50)]
    for number, look in enumerate(young):
        look.tables = {"frontend": 20 + number, "streams": number // 5}
    assert bad(young) == []
    young[30].tables["streams"] = 21
    assert bad(young) == ["open table files of a store of streams"]


def test_a_fault_before_the_first_sample_is_none_of_the_time_that_counts():
    assert bad([sample(5.0 * number, losses=3) for number in range(50)]) == []


def test_too_few_samples_are_no_verdict():
    with pytest.raises(ValueError, match="9 samples after the warm-up, at least 10"):
        judge([sample(5.0 * number) for number in range(9)])


def test_everything_that_is_looked_for_is_shown_by_some_process():
    """A name or a label that nobody shows would never tell of a fault."""
    assert {*FAULTS, *FAULTY_LABELS, *POSITIONS} <= METRICS.keys()
    for name, (label, values) in FAULTY_LABELS.items():
        assert values <= VALUES[name, label]


def test_a_page_of_metrics_becomes_a_sample():
    found = Sample(0.0)
    found.add_page(
        "frontend",
        "process_resident_memory_bytes 1.5e+08\n"
        "process_cpu_seconds_total 1.25\n"
        'dynamo_es_fold_position_offset{fold="requests",partition="0",topic="requests"} 3.0\n'
        'dynamo_es_fold_position_offset{fold="requests",partition="1",topic="requests"} 4.0\n'
        'dynamo_es_streams_position_offset{partition="0",topic="ns.requests"} 5.0\n'
        'dynamo_es_snapshots_total{result="written"} 8.0\n'
        'dynamo_es_snapshots_total{result="failed"} 1.0\n'
        "dynamo_es_lease_lost_total 2.0\n",
    )
    found.ends["requests"] = 9.0
    found.add_files("frontend", ["socket:[7]", "/s/a/1.sst", "/s/a/2.sst (deleted)", "/s/b/1.sst", "/s/b/LOG"])
    streams = Place("frontend", "streams", "requests")
    assert (found.rss_bytes, found.files, found.cpu_s) == ({"frontend": 1.5e8}, {"frontend": 2}, {"frontend": 1.25})
    assert found.tables == {"frontend": 2}
    assert found.positions == {PLACE: 7.0, streams: 5.0}
    assert (found.lag(PLACE), found.lag(streams)) == (2.0, 4.0)
    assert found.faults == {
        "frontend: dynamo_es_snapshots_total": 1.0, "frontend: dynamo_es_lease_lost_total": 2.0,
    }  # fmt: skip
