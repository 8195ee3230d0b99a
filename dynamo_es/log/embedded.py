"""The event log of one machine: SQLite files in a folder, shared by any number of processes.

There is no server. Each process opens a handle of its own; writers of a partition take turns through the kernel's file
locks, readers never wait for writers. An acknowledged record is in the operating system's hands (or, with
``durability=fsync``, on the disk) and survives SIGKILL of any process at any instant. The folder must be on a local
file system: WAL and ``flock`` do not work over the network.

A handle must not cross a fork: neither SQLite connections nor file locks survive one. Open it in the child, or start
children with the ``spawn`` method.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import Bounds, Entry, Position, TopicConfig, TopicDescription, TopicPartition
from dynamo_es.log.checks import ALTERABLE, check_entry, check_topic_config
from dynamo_es.log.doorbell import BellWatcher, make_watcher
from dynamo_es.log.embedded_cursor import find_offset, read_bounds
from dynamo_es.log.embedded_layout import (
    EmbeddedOptions,
    LogLayout,
    list_topics,
    open_folder,
    read_log_id,
    read_topic_file,
)
from dynamo_es.log.embedded_partition import PartitionWriter, Row
from dynamo_es.log.embedded_reader import EmbeddedReader, ReaderAccess
from dynamo_es.log.embedded_retention import RetentionKeeper
from dynamo_es.log.embedded_topics import TopicTable, alter_topic, load_topic
from dynamo_es.log.embedded_writer import AppendQueue, AppendWork, close_queues
from dynamo_es.log.errors import LogClosed, LogError, LogReplaced, UnknownTopic
from dynamo_es.log.partitioning import Partitioner

logger = logging.getLogger(__name__)

T = TypeVar("T")
_READ_THREADS = 4
# Topics beyond so many share their threads.
_MAX_WRITERS = 16


class EmbeddedLog:
    """An ``EventLog`` in a folder. See the module's text for what it promises, ``EmbeddedOptions`` for its bounds."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        *,
        options: EmbeddedOptions | None = None,
        rng: random.Random | None = None,
        watcher: Callable[[asyncio.AbstractEventLoop], BellWatcher] = make_watcher,
    ) -> None:
        """Does no I/O.

        Args:
            folder: Made by ``start`` if it is missing.
            clock: Stamps records, ages segments.
            options: Durability, segment sizes, bounds.
            rng: Chooses partitions for records without a key.
            watcher: Makes what listens to the doorbells of other processes.
        """
        self._layout = LogLayout(folder.absolute())
        self._clock = clock
        self._options = options or EmbeddedOptions()
        self._partitioner = Partitioner(rng or random.Random())  # noqa: S311
        self._make_watcher = watcher
        self._topics = TopicTable(self._layout)
        self._readers: set[EmbeddedReader] = set()
        self._log_id = ""
        self._executor: ThreadPoolExecutor | None = None
        # A topic's appends wait for no other topic's: a lease is renewed in time although events wait for a slow disk.
        self._queues: dict[str, AppendQueue] = {}
        self._watcher: BellWatcher | None = None
        self._closed = False

    @property
    def url(self) -> str:
        suffix = "?durability=fsync" if self._options.durability == "fsync" else ""
        return f"embedded://{self._layout.root}{suffix}"

    @property
    def log_id(self) -> str:
        return self._log_id

    async def start(self) -> None:
        if self._watcher is not None:
            return
        self._check_not_closed()
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="log-reader")
        try:
            self._begin(await loop.run_in_executor(executor, open_folder, self._layout))
        except LogError:
            executor.shutdown(wait=False)
            raise
        self._executor = executor
        self._watcher = self._make_watcher(loop)
        logger.info("event log %s open, id %s", self.url, self._log_id)

    async def reopen(self) -> None:
        self._check_open()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._executor, read_log_id, self._layout)
        if found != self._log_id:
            logger.warning("event log %s: going on with the log of id %s, it was %s", self.url, found, self._log_id)
        self._begin(found)

    def _begin(self, log_id: str) -> None:
        self._log_id = log_id
        self._topics.begin(log_id)
        self._retention = RetentionKeeper(self._layout, log_id, self._options, self._clock)

    async def close(self) -> None:
        self._closed = True
        await close_queues(set(self._queues.values()))
        for reader in list(self._readers):
            await reader.close()
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    async def create_topics(self, topics: Sequence[TopicConfig]) -> None:
        for config in topics:
            check_topic_config(config)
        now_ms = self._clock.now_ms()
        for config in topics:
            await self._in_thread(partial(self._topics.create, config, now_ms))

    async def list_topics(self) -> Sequence[str]:
        return await self._in_thread(lambda: list_topics(self._layout))

    async def describe(self, topic: str) -> TopicDescription:
        found = await self._in_thread(lambda: read_topic_file(self._layout, topic))
        if found is None:
            raise UnknownTopic(topic)
        return TopicDescription(
            topic, found.topic_id, found.partitions, found.compacted, found.retention_ms, found.max_record_bytes,
            details={"folder": str(self._layout.topics / topic)},
        )  # fmt: skip

    @property
    def alterable(self) -> frozenset[str]:
        return ALTERABLE

    async def alter_topic(self, config: TopicConfig) -> None:
        await self._in_thread(lambda: alter_topic(self._layout, config))
        self._topics.forget(config.name)

    async def append(self, topic: str, entry: Entry) -> Position:
        return (await self.append_all(topic, (entry,)))[0]

    async def append_all(self, topic: str, entries: Sequence[Entry]) -> Sequence[Position]:
        self._check_open()
        config = self._topics.known(topic)
        if config is None:
            config = (await self._in_thread(lambda: self._topics.load(topic))).config
        if not entries:
            return []
        now_ms = self._clock.now_ms()
        rows: list[tuple[int, Row]] = []
        size = 0
        for entry in entries:
            size += check_entry(topic, entry, config.partitions, config.max_record_bytes)
            partition = entry.partition
            if partition is None:
                partition = self._partitioner.choose(entry.key, config.partitions)
            headers = msgspec.msgpack.encode(entry.headers) if entry.headers else None
            stamp = now_ms if entry.timestamp_ms is None else entry.timestamp_ms
            rows.append((partition, (stamp, entry.key, entry.value, headers)))
        try:
            return await self._queue_of(topic).submit(AppendWork(topic, rows, size))
        except LogReplaced:
            self._topics.forget(topic)
            raise

    def reader(self, positions: Mapping[TopicPartition, int]) -> EmbeddedReader:
        self._check_open()
        assert self._executor is not None
        assert self._watcher is not None
        access = ReaderAccess(
            layout=self._layout,
            log_id=self._log_id,
            executor=self._executor,
            watcher=self._watcher,
            recheck_s=self._options.recheck_s,
            forget=self._readers.discard,
        )
        reader = EmbeddedReader(access, positions)
        self._readers.add(reader)
        return reader

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        def read() -> Mapping[int, Bounds]:
            config = load_topic(self._layout, topic).config
            return {
                partition: read_bounds(self._layout, TopicPartition(topic, partition), config.compacted)
                for partition in range(config.partitions)
            }

        return await self._in_thread(read)

    async def offset_at(self, position: TopicPartition, timestamp_ms: int) -> int:
        await self._check_position(position)
        return await self._in_thread(lambda: find_offset(self._layout, position, timestamp_ms))

    async def trim(self, position: TopicPartition, before_offset: int) -> int:
        await self._check_position(position)
        return await self._in_thread(lambda: self._retention.trim(position, before_offset))

    async def enforce_retention(self, now_ms: int) -> Mapping[TopicPartition, int]:
        return await self._in_thread(lambda: self._retention.enforce(now_ms))

    async def _check_position(self, position: TopicPartition) -> None:
        config = (await self._in_thread(lambda: load_topic(self._layout, position.topic))).config
        if not 0 <= position.partition < config.partitions:
            raise InvalidArgument(
                f"topic {position.topic!r} has partitions 0 to {config.partitions - 1}, not {position.partition}"
            )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        self._check_open()
        assert self._executor is not None

        def checked() -> T:
            self._topics.check_log()
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._executor, checked)

    def _make_writer(self, position: TopicPartition) -> PartitionWriter:
        topic = position.topic
        config = self._topics.load(topic).config
        check = partial(self._topics.check, topic)
        return PartitionWriter(self._layout, position, config, self._options, self._clock, check)

    def _check_not_closed(self) -> None:
        if self._closed:
            raise LogClosed(f"{self.url} was closed")

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._watcher is None:
            raise LogClosed(f"{self.url} was not started")

    def _queue_of(self, topic: str) -> AppendQueue:
        """Whose turn it is to append to ``topic``: its own queue, as long as there are few of them."""
        self._check_not_closed()
        queue = self._queues.get(topic)
        if queue is None:
            queues = list(dict.fromkeys(self._queues.values()))
            if len(queues) < _MAX_WRITERS:
                queue = AppendQueue(self._make_writer, self._options, asyncio.get_running_loop(), f"{self.url} {topic}")
                queue.start()
            else:
                queue = queues[len(self._queues) % _MAX_WRITERS]
            self._queues[topic] = queue
        return queue
