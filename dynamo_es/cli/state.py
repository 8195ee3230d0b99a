"""``dynamo-es state``: what the log folds to, and whether a process's state store agrees with it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dynamo_es.cli.process import run_on_log
from dynamo_es.config.command_options import ToolLoggingConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.tree import LogConfig, StateConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import EventLog
from dynamo_es.store.base import StateStore
from dynamo_es.store.layout import PROCESS_FOLDER, partition_folders, process_folders
from dynamo_es.store.rocks import RocksStore
from schemas.kv_events import KV_EVENTS, TIERS
from streams.fold import Fold
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState
from streams.refold import refold
from streams.registry import RegistryFold, RegistryState
from streams.requests import RequestsFold, RequestsState
from streams.start import find_start
from streams.worker_load import WorkerLoadFold, WorkerLoadState

FOLDS: tuple[Any, ...] = (RegistryFold(), KvIndexFold(), WorkerLoadFold(), RequestsFold())


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("state", help="show what the log folds to, or verify a state store against it")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    names = [fold.name for fold in FOLDS]
    show = actions.add_parser("show", help="fold the log from its start and print the views")
    show.add_argument("view", nargs="?", choices=names, help="only this view")
    verify = actions.add_parser(
        "verify", help="fold the log up to a store's positions and compare digests; exit code 1 if they differ"
    )
    add_flags(verify, StateConfig)
    for sub, run in ((show, _run_show), (verify, _run_verify)):
        add_flags(sub, LogConfig)
        add_flags(sub, ToolLoggingConfig)
        sub.set_defaults(run=run)


def _run_show(flags: argparse.Namespace) -> int:
    return run_on_log(flags, lambda log, config: _show(log, config, flags.view))


def _run_verify(flags: argparse.Namespace) -> int:
    state_dir = load(StateConfig, flags, os.environ).state_dir
    if state_dir is None:
        raise ConfigError("state verify needs --state-dir: the store to compare with the log")
    return run_on_log(flags, lambda log, config: _verify(log, config, Path(state_dir)))


async def _show(log: EventLog, config: LogConfig, view: str | None) -> int:
    for fold in FOLDS:
        if view in (None, fold.name):
            state, positions = await refold(fold, log, config.namespace)
            print(f"{fold.name}: {sum(positions.values())} offsets folded, digest {fold.digest(state)[:16]}")
            for line in _PRINTERS[type(state)](state):
                print(f"  {line}")
    return 0


class _Store(NamedTuple):
    """A store of a process, and what is folded into it: of the partition only, if there is one."""

    folder: Path
    folds: Sequence[Any]
    partition: int | None = None


def _stores_in(state_dir: Path, namespace: str) -> list[_Store]:
    """A process has one store, a frontend of several processes one for each of them, an indexer its own and one for
    each partition that it follows (or once followed).
    """
    if not (state_dir / PROCESS_FOLDER).is_dir():
        several = process_folders(state_dir).values()
        return [_Store(folder, FOLDS) for folder in several] or [_Store(state_dir, FOLDS)]
    partitions = partition_folders(state_dir, KV_EVENTS.qualified(namespace))
    index = [fold for fold in FOLDS if isinstance(fold, KvIndexFold)]
    own = _Store(state_dir / PROCESS_FOLDER, FOLDS)
    return [own, *(_Store(folder, index, number) for number, folder in partitions.items())]


async def _verify(log: EventLog, config: LogConfig, state_dir: Path) -> int:
    stores = _stores_in(state_dir, config.namespace)
    differing = False
    for place in stores:
        store = RocksStore(place.folder, [family for fold in place.folds for family in fold.families], read_only=True)
        if len(stores) > 1:
            print(f"{place.folder}:")
        try:
            agreeing = [await _agrees(fold, log, config.namespace, store, place.partition) for fold in place.folds]
        finally:
            store.close()
        if not all(agreeing):
            differing = True
            print(f"delete {place.folder}: the next start folds it anew from the log", file=sys.stderr)
    return 1 if differing else 0


async def _agrees(fold: Fold[Any], log: EventLog, namespace: str, store: StateStore, partition: int | None) -> bool:
    """Compare one fold's rows with the log, and print what was found."""
    positions = store.positions(fold.name)
    if not positions:
        print(f"{fold.name}: nothing committed yet")
        return True
    made_from = store.identity(fold.name).get("log_id", "none")
    if made_from != log.log_id:
        print(f"{fold.name}: OF ANOTHER LOG: the store was made from log {made_from}, {log.url} is {log.log_id}")
        return False
    # Positions that the log has not: folding up to them says nothing about the store.
    unfit = (
        await find_start(log, store, fold, namespace, partitions=None if partition is None else (partition,))
    ).wipe_reason
    if unfit:
        print(f"{fold.name}: DOES NOT FIT THE LOG: {unfit}")
        return False
    stored = fold.digest(fold.load(store))
    state, _ = await refold(fold, log, namespace, until=positions)
    folded = fold.digest(state)
    same = stored == folded
    print(
        f"{fold.name}: {'equal' if same else 'DIFFERENT'} at {sum(positions.values())} offsets "
        f"(store {stored[:16]}, log {folded[:16]})"
    )
    if not same:
        await _tell_trimmed(fold, log, namespace)
    return same


async def _tell_trimmed(fold: Fold[Any], log: EventLog, namespace: str) -> None:
    """A log that lost its beginning to retention may fold to less than a store that saw all of it."""
    for spec in fold.topics:
        topic = spec.qualified(namespace)
        for number, limits in sorted((await log.bounds(topic)).items()):
            if limits.start > 0:
                print(f"  {topic}[{number}] begins at offset {limits.start}: what was before it is in the store only")


def _registry_lines(state: RegistryState) -> list[str]:
    lines = [f"lease {lease.lease_id:x} {lease.owner} {lease.owner_id}" for lease in state.leases.values()]
    lines += [
        f"instance {item.namespace}.{item.component}.{item.endpoint} {item.instance_id} {item.state} {item.address}"
        for item in state.instances.values()
    ]
    return lines + [f"model {card.display_name} on {card.instance_id}" for card in state.models.values()]


def _index_lines(state: KvIndexState) -> list[str]:
    lines = []
    for key, source in state.sources.items():
        trust = "retired" if source.retired else "exact" if source.exact else "degraded"
        blocks = " ".join(f"{tier}={count}" for tier, count in zip(TIERS, source.counts, strict=True) if count)
        lines.append(
            f"source {key.model}/{key.worker_id}:{key.dp_rank} {trust} next_seq={source.next_seq} "
            f"block_size={source.block_size} {blocks or 'empty'}"
        )
    return lines


def _load_lines(state: WorkerLoadState) -> list[str]:
    return [
        f"rank {key.model}/{key.worker_id}:{key.dp_rank} used_blocks="
        f"{rank.load.kv_used_blocks if rank.load is not None else None} "
        f"passes={rank.forward_pass.counter if rank.forward_pass is not None else 0}"
        for key, rank in state.ranks.items()
    ]


def _request_lines(state: RequestsState) -> list[str]:
    lines = [f"{len(state.bookings)} open bookings", f"{len(state.sessions)} sessions"]
    return lines + [
        f"booking {booking.request_id}#{booking.attempt} on {booking.worker_id}:{booking.dp_rank} "
        f"prefill_tokens={booking.prefill_tokens}"
        for booking in list(state.bookings.values())[:100]
    ]


_PRINTERS: dict[type, Callable[[Any], list[str]]] = {
    RegistryState: _registry_lines,
    KvIndexState: _index_lines,
    WorkerLoadState: _load_lines,
    RequestsState: _request_lines,
}
