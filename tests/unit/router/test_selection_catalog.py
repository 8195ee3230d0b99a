"""Which workers the selection service can use, and what it says of the others (answers of Dynamo 1.5.1)."""

from __future__ import annotations

import pytest

from dynamo_es.router.selection_catalog import event_endpoint_problem, missing_parts, zmq_endpoint_problem
from dynamo_es.router.selection_requests import PartitionKey, WorkerSpec

PARTITION = PartitionKey()
BAD_DIGIT = "invalid TCP port: invalid digit found in string"
TOO_LARGE = "invalid TCP port: number too large to fit in target type"


@pytest.mark.parametrize(
    "url",
    [
        "tcp://a:1",
        "tcp://a:0",
        "tcp://[::1]:5",
        "tcp://*:5",
        "tcp://a:+5",
        "tcp://a:00000000005",
        "ipc://x",
        "inproc://x",
    ],
)
def test_endpoints_that_can_be_listened_to(url: str) -> None:
    assert zmq_endpoint_problem(url) is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "missing scheme"),
        ("tcp:/a:1", "missing scheme"),
        ("TCP://a:1", "unsupported scheme `TCP`"),
        ("://a:1", "unsupported scheme ``"),
        ("ipc://", "missing address"),
        ("tcp://", "missing address"),
        ("tcp://a", "missing TCP port"),
        ("tcp://::1:5", "missing TCP port"),
        ("tcp://[]", "missing TCP port"),
        ("tcp://:5", "missing TCP host"),
        ("tcp://[::1]", "missing closing `]`"),
        ("tcp://[a]b:5", "missing closing `]`"),
        ("tcp://a:", "invalid TCP port: cannot parse integer from empty string"),
        ("tcp://a:x", BAD_DIGIT),
        ("tcp://a:5/", BAD_DIGIT),
        ("tcp://a:+", BAD_DIGIT),
        ("tcp://a:\N{ARABIC-INDIC DIGIT FIVE}", BAD_DIGIT),
        ("tcp://a:65536", TOO_LARGE),
        ("tcp://a:" + "9" * 10_000, TOO_LARGE),
    ],
)
def test_endpoints_that_cannot(url: str, problem: str) -> None:
    assert zmq_endpoint_problem(url) == f"invalid ZMQ endpoint `{url}`: {problem}"


@pytest.mark.parametrize(
    ("endpoints", "problem"),
    [
        (
            {0: "x", 1: "y"},
            "invalid kv_events endpoint for worker 1 dp_rank 0: invalid ZMQ endpoint `x`: missing scheme",
        ),
        (
            {0: "tcp://a:1", 1: "y"},
            "invalid replay endpoint for worker 1 dp_rank 0: invalid ZMQ endpoint `z`: missing scheme",
        ),
    ],
)
def test_the_first_rank_with_a_bad_endpoint_is_named(endpoints: dict[int, str], problem: str) -> None:
    spec = WorkerSpec(1, PARTITION, kv_events_endpoints=endpoints, replay_endpoint="z", data_parallel_size=2)
    assert event_endpoint_problem(spec) == problem


def test_what_a_worker_lacks_is_told_in_order() -> None:
    assert missing_parts(WorkerSpec(1, PARTITION, data_parallel_size=2), uses_events=True, queues=True) == [
        "endpoint is required",
        "block_size must be greater than 0",
        "max_num_batched_tokens is required while queueing is enabled",
        "kv_events endpoint is required for dp_rank 0",
        "kv_events endpoint is required for dp_rank 1",
    ]
