"""Dynamo's ``run_kv_indexer``, ``run_slot_tracker`` and ``run_select_service``: from a command line to the end.

Each serves plain HTTP on all addresses until SIGINT or SIGTERM, without keys: put it behind what guards your network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from dynamo_es.clock import SystemClock
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.line_writer import LineWriter
from dynamo_es.http_listen import StatusListener
from dynamo_es.router.config_arguments import to_texts
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.replica_events import ReplicaEvent
from dynamo_es.router.replica_link import ReplicaLink
from dynamo_es.router.selection_service import SelectionService
from dynamo_es.services.command_lines import (
    IndexerArguments,
    SelectionArguments,
    TrackerArguments,
    indexer_arguments,
    selection_arguments,
    tracker_arguments,
)
from dynamo_es.services.kv_indexer import KvIndexer
from dynamo_es.services.kv_indexer_http import AccessLines, build_indexer_app
from dynamo_es.services.refusals import ServiceRefusal
from dynamo_es.services.selection_http import build_selection_app
from dynamo_es.services.slot_tracker import SlotTracker
from dynamo_es.services.slot_tracker_http import build_slot_tracker_app

logger = logging.getLogger(__name__)

_HOST = "0.0.0.0"  # noqa: S104 - as in Dynamo; see the module
_TEST_VARIABLE = "DYN_KV_INDEXER_TEST_ENDPOINTS"
_ACCESS_LINES = 10_000
"""That may wait for the disk; of more, the newest are lost."""
_TRUE = ("1", "true", "yes", "on")
OnReady = Callable[[int], None]


def run_kv_indexer(args: list[str]) -> None:
    """Serve the standalone KV indexer (port 8090) until SIGINT or SIGTERM. Blocks; not from within an event loop.

    ``args``: the command line without the program's name; ``["--help"]`` tells it.

    Raises:
        ConfigError: ``args`` are wrong, or a file that they name cannot be used; says what and how.
        AddressUnavailable: The port is taken.
    """
    arguments = indexer_arguments(to_texts("args", args))
    _run(lambda stop: serve_kv_indexer(arguments, stop, os.environ))


def run_slot_tracker(args: list[str]) -> None:
    """The same for the slot tracker (port 8091)."""
    arguments = tracker_arguments(to_texts("args", args))
    _run(lambda stop: serve_slot_tracker(arguments, stop))


def run_select_service(args: list[str]) -> None:
    """The same for the selection service (port 8092), whose router is configured by ``DYN_ROUTER_…`` variables."""
    arguments = selection_arguments(to_texts("args", args))
    _run(lambda stop: serve_selection(arguments, stop, os.environ))


async def serve_kv_indexer(
    arguments: IndexerArguments, stop: asyncio.Event, env: Mapping[str, str], on_ready: OnReady = lambda port: None
) -> None:
    """Serve until ``stop`` is set. ``on_ready`` is told the port. Raises as ``run_kv_indexer``."""
    indexer, lines, access = KvIndexer(), None, None
    if arguments.access_log is not None:
        lines = LineWriter(arguments.access_log, _ACCESS_LINES)
        access = AccessLines(lines.offer, SystemClock(), arguments.trace_id_header, local=arguments.local_time)
    try:
        if arguments.peers:
            await indexer.recover(arguments.peers)
        for worker in arguments.workers:
            assert arguments.block_size is not None
            try:
                indexer.register(
                    arguments.tenant, worker.instance_id, worker.endpoint, arguments.block_size, worker.dp_rank
                )
            except ServiceRefusal as error:
                raise ConfigError(f"--workers: {error}") from error
        tests = env.get(_TEST_VARIABLE, "").strip().lower() in _TRUE
        app = build_indexer_app(indexer, access=access, test_endpoints=tests)
        async with _serving(app, arguments.port, on_ready):
            await stop.wait()
    finally:
        await indexer.close()
        if lines is not None:
            await asyncio.to_thread(lines.close)


async def serve_slot_tracker(
    arguments: TrackerArguments, stop: asyncio.Event, on_ready: OnReady = lambda port: None
) -> None:
    """The same for the slot tracker."""
    clock, router_id = SystemClock(), random.SystemRandom().getrandbits(64)
    link: ReplicaLink | None = None

    def publish(event: ReplicaEvent) -> None:
        if link is not None:
            link.publish(event)

    tracker = SlotTracker(clock.monotonic, publish, router_id)
    if arguments.replica_sync_port is not None:
        link = ReplicaLink(
            arguments.replica_sync_port, arguments.replica_sync_peers, router_id, tracker.on_replica_event
        )
        link.start()
    try:
        async with _serving(build_slot_tracker_app(tracker, link), arguments.port, on_ready):
            await stop.wait()
    finally:
        if link is not None:
            await link.close()


async def serve_selection(
    arguments: SelectionArguments, stop: asyncio.Event, env: Mapping[str, str], on_ready: OnReady = lambda port: None
) -> None:
    """The same for the selection service."""
    try:
        service = SelectionService(
            indexer_peers=list(arguments.indexer_peers),
            replica_sync_port=arguments.replica_sync_port,
            replica_sync_peers=list(arguments.replica_sync_peers),
            selection_cache=_cache(arguments),
            env=_with_arguments(arguments, env),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    try:
        async with _serving(build_selection_app(service), arguments.port, on_ready):
            await stop.wait()
    finally:
        await service.shutdown_async()


@asynccontextmanager
async def _serving(app: Starlette, port: int, on_ready: OnReady) -> AsyncIterator[None]:
    listener = StatusListener(app, _HOST, port, options="--port")
    await listener.start()
    logger.info("serving HTTP on %s:%d", listener.host, listener.port)
    on_ready(listener.port)
    try:
        yield
    finally:
        await listener.close()


def _run(serve: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    # The command line imports this package.
    from dynamo_es.cli.process import run_async, stop_on_signals

    async def run() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        await serve(stop)

    run_async(run())


def _cache(arguments: SelectionArguments) -> SelectionCacheConfig:
    return SelectionCacheConfig(
        ttl_secs=arguments.cache_ttl_secs,
        max_entries=arguments.cache_max_entries,
        max_bytes=arguments.cache_max_bytes,
    )


def _with_arguments(arguments: SelectionArguments, env: Mapping[str, str]) -> Mapping[str, str]:
    """Flags go before variables."""
    reuse = None if arguments.assume_kv_reuse is None else str(arguments.assume_kv_reuse).lower()
    given = {
        "DYN_ROUTER_ASSUME_KV_REUSE": reuse,
        "DYN_ROUTER_TRACKING_HASH": arguments.tracking_hash,
        "DYN_ROUTER_TRACKING_KEY_FILE": arguments.tracking_key_file,
        "DYN_ROUTER_TRACKING_KEY_ID": arguments.tracking_key_id,
    }
    return {**env, **{name: value for name, value in given.items() if value is not None}}
