"""Rows of several column families, and the position, after SIGKILL at any instant."""

from __future__ import annotations

import random

import pytest

from dynamo_es.store.rocks import RocksStore
from streams.refold import refold
from tests.support.event_storm import EventStorm
from tests.support.kill_loop import covered_after_kills, poured
from tests.support.processor_process import NAMESPACE, PLACES, WINDOWS, folder_of


async def check_stores(log, state_dir):
    """Every partition's rows are the fold of the log up to its position; the positions, summed."""
    covered = 0
    for place, make in PLACES.items():
        fold = make(WINDOWS)
        store = RocksStore(folder_of(state_dir, place), fold.families, lock_timeout_s=5)
        try:
            position = store.positions(fold.name).get(place, 0)
            families = {family: list(store.scan(family)) for family in fold.families}
            assert position or not any(families.values()), families
            stored = fold.load(store)
        finally:
            store.close()
        state, _ = await refold(make(WINDOWS), log, NAMESPACE, until={place: position})
        assert fold.digest(stored) == fold.digest(state), place
        covered += position
    return covered


@pytest.mark.crash
async def test_index_windows_and_position_are_all_there_or_none(tmp_path):
    """EVT-19: one batch over all families of a partition's store, killed before, in and after it."""
    rng = random.Random(5)
    url, state_dir = f"embedded://{tmp_path}/log", tmp_path / "state"
    async with poured(url, NAMESPACE, rng, EventStorm(4)) as log:
        process = ("tests.support.processor_process", url, str(state_dir))
        await covered_after_kills(process, 8, 0.25, rng, lambda: check_stores(log, state_dir))
