from __future__ import annotations

import random
from collections import Counter

import pytest

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.choosers import (
    DeviceAwareChooser,
    DirectChooser,
    LeastLoadedChooser,
    PowerOfTwoChooser,
    RandomChooser,
    RoundRobinChooser,
)
from dynamo_es.router.routing_request import RoutingRequest, WorkerFacts
from streams.requests import BookingKey

RANKS = [WorkerRank(number, 0) for number in (1, 2, 3, 4)]


def loaded(**requests) -> ActiveSequences:
    """Bookings by worker: ``w1=3``."""
    sequences = ActiveSequences()
    for name, count in requests.items():
        for number in range(count):
            sequences.book(BookingKey(f"{name}-{number}", 1), WorkerRank(int(name[1:]), 0), [], 1)
    return sequences


def ask(**options) -> RoutingRequest:
    return RoutingRequest("r", [1, 2, 3], **options)


def choose(chooser, ranks=RANKS, **options) -> int:
    return chooser.choose(ask(**options), ranks).rank.worker_id


def test_least_loaded_takes_the_least_and_ties_at_random():
    chooser = LeastLoadedChooser(loaded(w1=2, w2=1, w3=1, w4=3), random.Random(1))
    seen = Counter(choose(chooser) for _ in range(1000))
    assert set(seen) == {2, 3}
    assert min(seen.values()) > 400


def test_LOAD_03_least_loaded_spreads_a_burst_that_is_booked_at_once():
    sequences = ActiveSequences()
    chooser = LeastLoadedChooser(sequences, random.Random(1))
    for number in range(8):
        rank = chooser.choose(ask(), RANKS[:2]).rank
        sequences.book(BookingKey(f"r{number}", 1), rank, [], 3)
    assert {sequences.load(rank).requests for rank in RANKS[:2]} == {4}


def test_power_of_two_never_takes_the_most_loaded_and_mostly_the_least():
    chooser = PowerOfTwoChooser(loaded(w1=9, w2=1, w3=5, w4=3), random.Random(1))
    seen = Counter(choose(chooser) for _ in range(3000))
    # The most loaded of four loses to each other; the least is in half of the pairs.
    assert 1 not in seen
    assert seen[2] / 3000 == pytest.approx(1 / 2, abs=0.04)
    assert seen[4] / 3000 == pytest.approx(1 / 3, abs=0.04)
    assert choose(chooser, RANKS[:1]) == 1


def test_power_of_two_is_even_between_equals():
    chooser = PowerOfTwoChooser(ActiveSequences(), random.Random(1))
    seen = Counter(choose(chooser) for _ in range(4000))
    assert min(seen.values()) > 850


def test_direct_goes_where_it_is_told_and_nowhere_else():
    chooser = DirectChooser(loaded(w2=1), random.Random(1))
    assert choose(chooser, [WorkerRank(2, 0)], worker_id=2) == 2
    ranks = [WorkerRank(2, 0), WorkerRank(2, 1)]
    assert chooser.choose(ask(worker_id=2), ranks).rank == WorkerRank(2, 1)
    with pytest.raises(InvalidArgument, match="it names none"):
        choose(chooser)


DEVICES = {1: "cuda", 2: "cuda", 3: "cpu", 4: "cpu"}


@pytest.mark.parametrize(
    ("requests", "expected"),
    [
        # 16 on two GPUs weigh 16 / (2 * 8) = 1, so does one on each CPU; more on either side sends to the other.
        ({"w1": 8, "w2": 7, "w3": 1, "w4": 1}, {2}),
        ({"w1": 9, "w2": 8, "w3": 1, "w4": 1}, {3, 4}),
        ({"w1": 9, "w2": 8, "w3": 1, "w4": 0}, {4}),
        ({}, {1, 2}),
    ],
)
def test_device_aware_weighs_kinds_then_takes_the_least_loaded(requests, expected):
    chooser = DeviceAwareChooser(
        loaded(**requests), lambda worker: WorkerFacts(device_type=DEVICES[worker]), 8.0, random.Random(1)
    )
    assert {choose(chooser) for _ in range(100)} == expected


def test_modes_have_the_names_of_the_command_line():
    rng, sequences = random.Random(1), ActiveSequences()
    choosers = [
        RoundRobinChooser(),
        RandomChooser(rng),
        PowerOfTwoChooser(sequences, rng),
        DirectChooser(sequences, rng),
        LeastLoadedChooser(sequences, rng),
        DeviceAwareChooser(sequences, lambda worker: WorkerFacts(), 8.0, rng),
    ]
    from dynamo_es.router.modes import mode_named

    assert len({mode_named(chooser.mode) for chooser in choosers}) == 6


@pytest.mark.parametrize("chooser", [RoundRobinChooser(), RandomChooser(random.Random(1))])
def test_plain_modes_book_the_whole_prompt_and_no_blocks(chooser):
    choice = chooser.choose(ask(), RANKS)
    assert (choice.prefill_tokens, choice.tracking_hashes, choice.costs) == (3, (), ())
