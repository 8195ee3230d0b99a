"""Command lines of the standalone services, with Dynamo's flags (spec/services f). Pure.

What cannot be parsed is a ``ConfigError`` with the usage; ``--help`` is one with the whole help, as in Dynamo.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from dynamo_es.errors import ConfigError
from dynamo_es.router.selection_catalog import zmq_endpoint_problem
from dynamo_es.router.selection_requests import DEFAULT, PartitionKey

_MAX_PORT = 65_535
_MAX_THREADS = 65_535
_U64 = 2**64
_U32 = 2**32


class _Parser(argparse.ArgumentParser):
    """Tells everything by raising."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"error: {message}\n\n{self.format_usage()}\nFor more information, try '--help'.\n")

    def print_help(self, file: object = None) -> None:
        raise ConfigError(self.format_help())


@dataclass(frozen=True, slots=True)
class FirstWorker:
    """A rank that is listened to from the start."""

    instance_id: int
    dp_rank: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class IndexerArguments:
    """Of ``run_kv_indexer``. ``block_size`` in tokens."""

    port: int
    tenant: PartitionKey
    block_size: int | None
    workers: Sequence[FirstWorker]
    peers: Sequence[str]
    access_log: str | None
    trace_id_header: str
    local_time: bool


@dataclass(frozen=True, slots=True)
class TrackerArguments:
    """Of ``run_slot_tracker``."""

    port: int
    replica_sync_port: int | None
    replica_sync_peers: Sequence[str]


@dataclass(frozen=True, slots=True)
class SelectionArguments:
    """Of ``run_select_service``; None: as the environment, or else the default, says."""

    port: int
    indexer_peers: Sequence[str]
    replica_sync_port: int | None
    replica_sync_peers: Sequence[str]
    cache_ttl_secs: float | None
    cache_max_entries: int | None
    cache_max_bytes: int | None
    assume_kv_reuse: bool | None
    tracking_hash: str | None
    tracking_key_file: str | None
    tracking_key_id: str | None


def indexer_arguments(argv: Sequence[str]) -> IndexerArguments:
    """Parse. Raises ``ConfigError``."""
    parser = _parser("indexer", "Standalone KV cache indexer", 8090)
    add = parser.add_argument
    add("--block-size", type=_whole(1, _U32 - 1), help="KV cache block size for initial workers, in tokens")
    _add_threads(parser)
    add("--workers", help="initial workers: worker_id[:dp_rank]=zmq_address,...")
    add("--model-name", default=DEFAULT, help="model name of initial workers")
    add("--routing-group", default=DEFAULT, help="routing group of initial workers")
    add("--peers", help="URLs of peers, with commas, whose index is taken over at the start")
    add("--access-log", help="write an access log (JSON lines) to this file")
    add("--trace-id-header", default="x-trace-id", help="header that holds the trace id")
    add("--access-log-local-time", action="store_true", help="time stamps of the local zone instead of UTC")
    flags = parser.parse_args(list(argv))
    if flags.workers is not None and flags.block_size is None:
        raise ConfigError("--block-size is required when --workers is specified")
    return IndexerArguments(
        flags.port, PartitionKey(flags.model_name, flags.routing_group), flags.block_size, _workers(flags.workers),
        _parts(flags.peers), flags.access_log, flags.trace_id_header, flags.access_log_local_time,
    )  # fmt: skip


def tracker_arguments(argv: Sequence[str]) -> TrackerArguments:
    """Parse. Raises ``ConfigError``."""
    parser = _parser("slot_tracker", "Standalone KV router slot tracker", 8091)
    _add_replicas(parser)
    flags = parser.parse_args(list(argv))
    return TrackerArguments(flags.port, flags.replica_sync_port, _replicas(flags))


def selection_arguments(argv: Sequence[str]) -> SelectionArguments:
    """Parse. Raises ``ConfigError``."""
    parser = _parser("select_service", "Worker selection service that needs no runtime", 8092)
    add = parser.add_argument
    _add_threads(parser)
    add("--indexer-peers", help="URLs of selection services or indexers, with commas, whose index is taken over")
    _add_replicas(parser)
    add("--selection-cache-ttl-secs", type=_seconds, help="how long a selection can be booked by its id, in s")
    add("--selection-cache-max-entries", type=_whole(0, _U64 - 1), help="how many selections can be")
    add("--selection-cache-max-bytes", type=_whole(0, _U64 - 1), help="how many bytes they may take, about")
    add("--router-assume-kv-reuse", action=argparse.BooleanOptionalAction, default=None,
        help="requests of a worker share blocks with equal contents")  # fmt: skip
    add("--router-tracking-hash", help="how active blocks are identified")
    add("--router-tracking-key-file", help="file of the 32-byte key of keyed identities")
    add("--router-tracking-key-id", help="epoch of that key")
    flags = parser.parse_args(list(argv))
    if flags.router_tracking_hash == "keyed-xxh3-v1" and flags.router_tracking_key_file is None:
        raise ConfigError("keyed-xxh3-v1 requires router_tracking_key_file")
    return SelectionArguments(
        flags.port, _parts(flags.indexer_peers), flags.replica_sync_port, _replicas(flags),
        flags.selection_cache_ttl_secs, flags.selection_cache_max_entries, flags.selection_cache_max_bytes,
        flags.router_assume_kv_reuse, flags.router_tracking_hash, flags.router_tracking_key_file,
        flags.router_tracking_key_id,
    )  # fmt: skip


def _parser(name: str, what: str, port: int) -> _Parser:
    parser = _Parser(prog=f"python -m dynamo_es.{name}", description=what, allow_abbrev=False)
    # 0 takes a free one.
    parser.add_argument("--port", type=_whole(0, _MAX_PORT), default=port, help=f"HTTP port (default {port})")
    return parser


def _add_threads(parser: _Parser) -> None:
    text = "taken for Dynamo's sake: there is one index, on the event loop"
    parser.add_argument("--threads", type=_whole(0, _MAX_THREADS), default=4, help=text)


def _add_replicas(parser: _Parser) -> None:
    parser.add_argument("--replica-sync-port", type=_whole(1, _MAX_PORT), help="port on which bookings are told (ZMQ)")
    parser.add_argument("--replica-sync-peers", help="ZMQ endpoints of others that tell theirs, with commas")


def _replicas(flags: argparse.Namespace) -> Sequence[str]:
    peers = _parts(flags.replica_sync_peers)
    if peers and flags.replica_sync_port is None:
        raise ConfigError("replica_sync_peers requires replica_sync_port")
    for peer in peers:
        if zmq_endpoint_problem(peer) is not None:
            raise ConfigError(f"invalid replica peer endpoint `{peer}`")
    return peers


def _workers(text: str | None) -> list[FirstWorker]:
    found = []
    for part in _parts(text):
        name, separator, endpoint = part.partition("=")
        instance_id, _, dp_rank = name.partition(":")
        if not separator or not instance_id.isdecimal() or not (dp_rank or "0").isdecimal():
            raise ConfigError(f"--workers: `{part}` is not worker_id[:dp_rank]=zmq_address")
        problem = zmq_endpoint_problem(endpoint)
        if problem is not None:
            raise ConfigError(problem)
        worker = FirstWorker(int(instance_id), int(dp_rank or 0), endpoint)
        if worker.instance_id >= _U64 or worker.dp_rank >= _U32:
            raise ConfigError(f"--workers: `{name}` is out of range")
        found.append(worker)
    return found


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


class _whole:  # noqa: N801 - argparse shows it
    """A number from ``low`` to ``high``."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or not self._low <= int(text) <= self._high:
            raise argparse.ArgumentTypeError(f"'{text[:64]}' is no whole number from {self._low} to {self._high}")
        return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"'{text[:64]}' is no number of seconds")
    return seconds
