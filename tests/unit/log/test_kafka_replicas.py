"""What is told of a topic's replicas when an append fails."""

from __future__ import annotations

from dynamo_es.log.kafka_admin import _tell_replicas


def partition(number, leader, *in_sync, replicas=(1, 2, 3)):
    return {"partition": number, "leader": leader, "replicas": list(replicas), "isr": list(in_sync)}


def test_nothing_is_said_of_replicas_that_are_well():
    assert _tell_replicas([partition(0, 1, 1, 2, 3), partition(1, 2, 1, 2, 3)], [1, 2, 3, 4]) == ""


def test_silent_brokers_count_if_they_have_replicas():
    partitions = [partition(0, 1, 1, 2, replicas=(1, 2)), partition(1, 2, 2, 3, replicas=(2, 3))]
    assert _tell_replicas(partitions, [2]) == "brokers with its replicas that do not answer: 1, 3"


def test_everything_that_is_wrong_is_told():
    partitions = [partition(2, -1, 1, 2), partition(0, 1, 1), partition(1, 1, 1, 2, 3)]
    assert _tell_replicas(partitions, [1, 2, 3]) == (
        "partitions without a leader: 2; partitions with replicas that are not in sync: 0, 2 (down to 1 of 3; appends "
        "need min.insync.replicas)"
    )
