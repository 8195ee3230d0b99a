from __future__ import annotations

import random

import pytest

from dynamo_es.log.partitioning import Partitioner, partition_for
from tests.contract.log_suite import MURMUR2, kafka_partition


@pytest.mark.parametrize("key", MURMUR2)
@pytest.mark.parametrize("partitions", [1, 2, 3, 8, 12, 100])
def test_a_key_goes_where_the_java_client_sends_it(key, partitions):
    assert partition_for(key, partitions) == kafka_partition(key, partitions)
    assert Partitioner(random.Random(0)).choose(key, partitions) == kafka_partition(key, partitions)


def test_an_empty_key_is_a_key():
    chooser = Partitioner(random.Random(0))
    assert {chooser.choose(b"", 1000) for _ in range(10)} == {partition_for(b"", 1000)}


def test_without_a_key_all_partitions_are_used():
    chooser = Partitioner(random.Random(0))
    assert {chooser.choose(None, 4) for _ in range(200)} == {0, 1, 2, 3}


def test_the_memory_of_keys_is_bounded_and_does_not_change_the_answer():
    chooser = Partitioner(random.Random(0))
    for number in range(17_000):
        chooser.choose(b"%d" % number, 8)
    assert len(chooser._hashes) <= 16_384
    for number in (0, 5, 16_999):
        assert chooser.choose(b"%d" % number, 8) == partition_for(b"%d" % number, 8)
