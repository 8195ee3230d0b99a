from __future__ import annotations

import logging
from types import SimpleNamespace

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import TopicPartition
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.runtime.progress import ProgressWatch, StallWatch
from streams.runner import RunnerStatus

P0, P3 = TopicPartition("ns.kv-events", 0), TopicPartition("ns.kv-events", 3)


class Runner:
    """A fold whose position and ends the test sets; ``error`` is what the log answers."""

    def __init__(self, name="kv-index"):
        self.fold = SimpleNamespace(name=name)
        self.status = RunnerStatus.LIVE
        self.at = {P0: 5, P3: 7}
        self.end = {P0: 5, P3: 7}
        self.error = None
        self.asked = 0

    def positions(self):
        return self.at

    def ends(self):
        return self.end

    async def measure_lag(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return 0


def watch_over(*runners, timeout_s=30.0):
    clock = ManualClock()
    return ProgressWatch(lambda: runners, timeout_s=timeout_s, clock=clock), clock


async def test_EVT_15_an_idle_partition_is_no_stall_however_long():
    runner = Runner()
    watch, clock = watch_over(runner)
    for _ in range(200):
        await watch.look()
        clock.advance(5)
    assert watch.stalls() == []


async def test_EVT_14_a_position_that_stays_while_the_end_grows_is_a_stall_that_is_named(caplog):
    runner = Runner()
    watch, clock = watch_over(runner)
    await watch.look()
    for _ in range(7):
        runner.end = {**runner.end, P3: runner.end[P3] + 10}
        await watch.look()
        assert watch.stalls() == []
        clock.advance(5)
    with caplog.at_level(logging.INFO):
        await watch.look()
        await watch.look()
    (stall,) = watch.stalls()
    assert (stall.fold, stall.topic, stall.partition, stall.offset) == ("kv-index", "ns.kv-events", 3, 7)
    assert (stall.lag_records, stall.seconds) == (70, 35.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "kv-index stands at ns.kv-events[3]@7 for 35 s, 70 records behind; this process is not ready until it gets on"
    ]
    runner.at = {**runner.at, P3: 8}
    with caplog.at_level(logging.INFO):
        await watch.look()
    assert watch.stalls() == []
    assert caplog.records[-1].getMessage() == "kv-index gets on at ns.kv-events[3]"


async def test_a_fold_that_is_slow_but_gets_on_is_no_stall():
    runner = Runner()
    watch, clock = watch_over(runner)
    for step in range(50):
        runner.at = {**runner.at, P0: step}
        runner.end = {**runner.end, P0: 1_000_000}
        await watch.look()
        clock.advance(20)
    assert watch.stalls() == []


async def test_while_the_log_is_away_nothing_is_said_and_the_clock_starts_anew():
    runner = Runner()
    watch, clock = watch_over(runner)
    runner.end = {**runner.end, P0: 9}
    await watch.look()
    clock.advance(29)
    runner.error = LogUnavailable("no broker answers")
    await watch.look()
    clock.advance(600)
    await watch.look()
    assert watch.stalls() == []
    runner.error = None
    await watch.look()
    clock.advance(29)
    await watch.look()
    assert watch.stalls() == []
    clock.advance(2)
    await watch.look()
    assert len(watch.stalls()) == 1


async def test_a_fold_that_loads_or_has_ended_is_not_asked():
    runner = Runner()
    watch, clock = watch_over(runner)
    runner.end = {**runner.end, P0: 9}
    for status in (RunnerStatus.NEW, RunnerStatus.LOADING, RunnerStatus.LOG_AWAY, RunnerStatus.STOPPED):
        runner.status = status
        await watch.look()
        clock.advance(100)
        await watch.look()
        assert watch.stalls() == []
    assert runner.asked == 0


async def test_two_folds_of_one_name_are_told_apart():
    stuck, moving = Runner(), Runner()
    watch, clock = watch_over(stuck, moving)
    stuck.end = {**stuck.end, P0: 6}
    for step in range(10):
        moving.at, moving.end = {P0: step}, {P0: 100}
        await watch.look()
        clock.advance(5)
    assert [stall.offset for stall in watch.stalls()] == [5]


def test_zero_turns_it_off():
    watch = StallWatch(0)
    watch.note(0, {P0: 1}, {P0: 2}, 0.0)
    assert watch.stalls(1e9) == []


async def test_a_fold_that_is_stopped_before_the_process_ends_is_no_stall_and_shifts_nobody():
    first, second = Runner("a"), Runner("b")
    runners = [first, second]
    clock = ManualClock()
    watch = ProgressWatch(lambda: runners, timeout_s=30.0, clock=clock)
    for runner in runners:
        runner.end = {**runner.end, P3: 100}
    await watch.look()
    clock.advance(31)
    await watch.look()
    assert [stall.fold for stall in watch.stalls()] == ["a", "b"]
    runners.remove(first)
    assert [stall.fold for stall in watch.stalls()] == ["b"]
    await watch.look()
    assert [(stall.fold, stall.seconds) for stall in watch.stalls()] == [("b", 31.0)]
