"""What a KV index answers, whichever way its state came about."""

from __future__ import annotations

from collections.abc import Sequence

from streams.kv_index_state import KvIndexState
from streams.testing import FoldDriver
from tests.support.snapshots import from_snapshot

Depths = dict[tuple[int, int], tuple[int, int, int]]
"""Blocks in device memory, in the host's, and on disk, by worker and rank."""


def match_everywhere(
    driver: FoldDriver[KvIndexState], chain: Sequence[int], model: str = "m", block_size: int = 4
) -> Depths:
    """The look-up of a chain of sequence hashes: live, after a full replay, and restarted from the committed rows and
    from a snapshot of them, each with the tail. Fails unless all four agree.
    """
    views = [driver, driver.replayed(), driver.restarted(), from_snapshot(driver)]
    found: list[Depths] = [
        {
            (item.source.key.worker_id, item.source.key.dp_rank): (item.device, item.host, item.disk)
            for item in view.state.match(model, chain, block_size)
        }
        for view in views
    ]
    assert all(depths == found[0] for depths in found), found
    assert len({view.digest() for view in views}) == 1
    return found[0]
