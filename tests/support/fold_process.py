"""A process that folds everything into a RocksDB store until it is killed: ``python -m tests.support.fold_process``."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from dynamo_es.clock import SystemClock
from dynamo_es.log.open import open_log
from dynamo_es.store.rocks import RocksStore
from streams.kv_index import KvIndexFold
from streams.registry import RegistryFold
from streams.requests import RequestsFold
from streams.runner import FoldRunner
from streams.worker_load import WorkerLoadFold

FOLDS = (RegistryFold, KvIndexFold, WorkerLoadFold, RequestsFold)
FAMILIES = [family for fold in FOLDS for family in fold.families]
NAMESPACE = "storm"


class NoLetters:
    def offer_dead_letter(self, letter: object) -> None:
        return None


async def main(url: str, state_dir: str, namespace: str = NAMESPACE) -> None:
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    store = RocksStore(Path(state_dir), FAMILIES, lock_timeout_s=5)
    for fold in FOLDS:
        runner = FoldRunner(
            fold(), log, store, namespace,
            clock=SystemClock(), dead_letters=NoLetters(), flush_interval_s=0.005,
        )  # fmt: skip
        await runner.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
