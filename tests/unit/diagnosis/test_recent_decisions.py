"""Decisions of the log, summed up by model. Pure."""

from __future__ import annotations

import pytest

from dynamo_es.diagnosis.recent_decisions import RecentDecisions
from schemas.columns import pack_u64
from schemas.requests import Candidate, Routed


def candidate(worker_id, device=0, host=0, disk=0):
    return Candidate(worker_id, 0, device, host, disk, 0.0, 0.0, 0, 1.0)


def routed(candidates, *, overlap_blocks=0, mode="kv", worker_id=1):
    hashes = pack_u64([1, 2, 3])
    return Routed(
        1, "r", 0, 9, "m", mode, worker_id, 0, 16, 48, hashes, hashes, overlap_blocks, 0, 0, candidates, "", [], 5
    )


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ([candidate(1, disk=1)], "overlap"),
        ([candidate(1, disk=1), candidate(2)], "overlap"),
        ([candidate(1, disk=1), candidate(2, disk=1)], "equal-overlap"),
        ([candidate(1), candidate(2, disk=1)], "load-over-overlap"),
        ([candidate(1), candidate(2)], "no-overlap"),
    ],
)
def test_OPS_02_a_block_on_disk_that_the_log_has_rounded_to_none_counts(candidates, reason):
    recent = RecentDecisions()
    recent.add(routed(candidates), 1)
    assert recent.decisions == {reason: 1}


def test_OPS_02_blocks_are_those_of_decisions_by_cache():
    recent = RecentDecisions()
    recent.add(routed([candidate(1, device=2)], overlap_blocks=2), 1)
    recent.add(routed([], mode="round-robin"), 2)
    assert recent.decisions == {"overlap": 1, "round-robin": 1}
    assert (recent.mode, recent.queried_blocks, recent.matched_blocks, recent.selected_blocks) == (
        "round-robin",
        3,
        2,
        2,
    )
