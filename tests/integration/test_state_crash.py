from __future__ import annotations

import random

import pytest

from dynamo_es.store.rocks import RocksStore
from streams.refold import refold
from tests.support.event_storm import EventStorm
from tests.support.fold_process import FAMILIES, FOLDS, NAMESPACE
from tests.support.kill_loop import covered_after_kills, poured


async def records_in_store(log, state_dir):
    """How many records the committed rows are of; each fold's are the log folded up to its committed positions."""
    covered = 0
    store = RocksStore(state_dir, FAMILIES, lock_timeout_s=5)
    try:
        for make in FOLDS:
            fold = make()
            positions = store.positions(fold.name)
            state, _ = await refold(fold, log, NAMESPACE, until=positions)
            assert fold.digest(fold.load(store)) == fold.digest(state), fold.name
            covered += sum(positions.values())
    finally:
        store.close()
    return covered


@pytest.mark.crash
async def test_SCALE_08_state_equals_a_fold_from_the_start_after_each_of_fifty_kills(tmp_path):
    """What is in hand is bounded by one read, and no position is committed before its records are folded."""
    rng = random.Random(11)
    url, state_dir = f"embedded://{tmp_path}/log", tmp_path / "state"
    async with poured(url, NAMESPACE, rng, EventStorm(3)) as log:
        process = ("tests.support.fold_process", url, str(state_dir))
        await covered_after_kills(process, 50, 0.12, rng, lambda: records_in_store(log, state_dir))
