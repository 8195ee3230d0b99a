"""Topics of the embedded log: making them, knowing them, and noticing that others were made in their place."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid
from typing import NamedTuple

import msgspec

from dynamo_es.log.base import TopicConfig, TopicPartition
from dynamo_es.log.checks import check_alteration
from dynamo_es.log.doorbell import Doorbell
from dynamo_es.log.embedded_layout import (
    LogLayout,
    TopicFile,
    exclusive_lock,
    map_os_error,
    read_log_id,
    read_topic,
    read_topic_file,
    sync_folder,
    write_file,
)
from dynamo_es.log.embedded_segment import create_segment
from dynamo_es.log.errors import LogError, LogReplaced, TopicMismatch, UnknownTopic

logger = logging.getLogger(__name__)


class KnownTopic(NamedTuple):
    """A topic's configuration and identity."""

    config: TopicConfig
    topic_id: str


def load_topic(layout: LogLayout, topic: str) -> KnownTopic:
    """A topic as it is now. Raises ``UnknownTopic``, ``LogUnavailable``."""
    found = read_topic_file(layout, topic)
    if found is None:
        raise UnknownTopic(topic)
    config = TopicConfig(topic, found.partitions, found.compacted, found.retention_ms, found.max_record_bytes)
    return KnownTopic(config, found.topic_id)


def alter_topic(layout: LogLayout, wanted: TopicConfig) -> None:
    """``EventLog.alter_topic``. Safe beside processes that use the topic: they see the file whole, old or new.

    Raises ``UnknownTopic``, ``TopicMismatch``, ``InvalidArgument``, ``LogUnavailable``.
    """
    with exclusive_lock(layout.lock):
        known = load_topic(layout, wanted.name)
        check_alteration(wanted, known.config)
        content = TopicFile(
            topic_id=known.topic_id,
            partitions=wanted.partitions,
            compacted=wanted.compacted,
            retention_ms=wanted.retention_ms,
            max_record_bytes=wanted.max_record_bytes,
        )
        path = layout.topic_file(wanted.name)
        try:
            write_file(path, msgspec.json.encode(content))
        except OSError as error:
            raise map_os_error(path, error, "written") from error


def check_log(layout: LogLayout, log_id: str) -> None:
    """Raises ``LogReplaced`` if the folder holds another log, ``LogUnavailable`` if it holds none."""
    found = read_log_id(layout)
    if found != log_id:
        raise LogReplaced(f"the log in {layout.root}", found, log_id)


def check_place(layout: LogLayout, log_id: str, topic: str, topic_id: str) -> None:
    """As ``check_log``, for the topic as well; a topic that is missing is left to whoever opens it."""
    check_log(layout, log_id)
    found = read_topic_file(layout, topic)
    if found is not None and found.topic_id != topic_id:
        raise LogReplaced(f"topic {topic!r} in {layout.root}", found.topic_id, topic_id)


class TopicTable:
    """The log and the topics that appends go to, as they were first seen. Safe in threads."""

    def __init__(self, layout: LogLayout) -> None:
        self._layout = layout
        self._log_id = ""
        self._known: dict[str, KnownTopic] = {}

    def begin(self, log_id: str) -> None:
        """Append to this log, and to its topics as they are now."""
        self._log_id = log_id
        self._known = {}

    def forget(self, topic: str) -> None:
        """Append to the topic as it is now."""
        self._known.pop(topic, None)

    def known(self, topic: str) -> TopicConfig | None:
        """Without I/O; None if it must be loaded."""
        found = self._known.get(topic)
        return None if found is None else found.config

    def load(self, topic: str) -> KnownTopic:
        """Raises ``UnknownTopic``, ``LogReplaced``, ``LogUnavailable``."""
        found = self._known.get(topic)
        if found is None:
            check_log(self._layout, self._log_id)
            found = self._known[topic] = load_topic(self._layout, topic)
        return found

    def check_log(self) -> None:
        """Raises ``LogReplaced``, ``LogUnavailable``."""
        check_log(self._layout, self._log_id)

    def check(self, topic: str) -> None:
        """Whether what is in the folder now is what appends were meant for. Raises as ``check_log``."""
        check_place(self._layout, self._log_id, topic, self.load(topic).topic_id)

    def create(self, wanted: TopicConfig, now_ms: int) -> None:
        """Create a topic unless it is there.

        Raises:
            TopicMismatch: It is there with another partition count.
            LogFull, LogUnavailable: It could not be created; nothing is left of it.
        """
        with exclusive_lock(self._layout.lock):
            found = read_topic(self._layout, wanted.name)
            if found is None:
                _make_topic(self._layout, wanted, now_ms)
                return
        if found.partitions != wanted.partitions:
            raise TopicMismatch(wanted.name, found.partitions, wanted.partitions)
        settings = (found.compacted, found.retention_ms, found.max_record_bytes)
        if settings != (wanted.compacted, wanted.retention_ms, wanted.max_record_bytes):
            logger.info(
                "topic %s keeps the settings it was created with: compacted=%s, retention_ms=%s, max_record_bytes=%s",
                wanted.name,
                *settings,
            )


def _make_topic(layout: LogLayout, wanted: TopicConfig, now_ms: int) -> None:
    """Everything in a temporary folder first; its renaming makes the topic."""
    temporary = layout.topics / f".tmp-{uuid.uuid4().hex}"
    try:
        for partition in range(wanted.partitions):
            folder = temporary / str(partition)
            folder.mkdir(parents=True)
            create_segment(folder, 0, now_ms)
            bell = Doorbell(layout.bell(TopicPartition(wanted.name, partition)))
            bell.ring(0)
            bell.close()
        content = TopicFile(
            topic_id=uuid.uuid4().hex,
            partitions=wanted.partitions,
            compacted=wanted.compacted,
            retention_ms=wanted.retention_ms,
            max_record_bytes=wanted.max_record_bytes,
        )
        write_file(temporary / "topic.json", msgspec.json.encode(content))
        os.rename(temporary, layout.topics / wanted.name)
        sync_folder(layout.topics)
    except LogError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            path = layout.topics / wanted.name
            raise map_os_error(path, error, "created (the folder is there without topic.json: move it away)") from error
        raise map_os_error(layout.topics, error, "written") from error
