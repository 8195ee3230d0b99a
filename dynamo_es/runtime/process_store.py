"""The state store of a process: one for all folds that it runs."""

from __future__ import annotations

from pathlib import Path

from dynamo_es.config.tree import StateConfig
from dynamo_es.store.base import StateStore
from dynamo_es.store.memory import MemoryStore
from dynamo_es.store.rocks import RocksStore
from streams.kv_index import KvIndexFold
from streams.registry import RegistryFold
from streams.requests import RequestsFold
from streams.worker_load import WorkerLoadFold

ALL_FAMILIES = tuple(
    family for fold in (RegistryFold, KvIndexFold, WorkerLoadFold, RequestsFold) for family in fold.families
)


def open_store(state: StateConfig) -> StateStore:
    """The process's state store; in memory without a folder. Raises ``StoreError``."""
    if state.state_dir is None:
        return MemoryStore()
    return RocksStore(Path(state.state_dir), ALL_FAMILIES)
