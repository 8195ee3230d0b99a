"""Topics of the embedded log: making them and knowing them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import uuid

import msgspec

from dynamo_es.log.base import TopicConfig, TopicPartition
from dynamo_es.log.doorbell import Doorbell
from dynamo_es.log.embedded_layout import (
    LogLayout,
    TopicFile,
    exclusive_lock,
    map_os_error,
    read_topic,
    sync_folder,
    write_file,
)
from dynamo_es.log.embedded_segment import create_segment
from dynamo_es.log.errors import LogError, TopicMismatch, UnknownTopic

logger = logging.getLogger(__name__)


class TopicTable:
    """Configurations of the topics that were used so far. What never changes is read once. Safe in threads."""

    def __init__(self, layout: LogLayout) -> None:
        self._layout = layout
        self._known: dict[str, TopicConfig] = {}

    def known(self, topic: str) -> TopicConfig | None:
        """Without I/O; None if it must be loaded."""
        return self._known.get(topic)

    def load(self, topic: str) -> TopicConfig:
        """Raises ``UnknownTopic``, ``LogUnavailable``, ``LogFormatError``."""
        config = self._known.get(topic)
        if config is None:
            config = read_topic(self._layout, topic)
            if config is None:
                raise UnknownTopic(topic)
            self._known[topic] = config
        return config

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
