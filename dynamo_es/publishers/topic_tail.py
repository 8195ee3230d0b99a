"""Following a topic from now on, for readers to whom only what is new means anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from dynamo_es.log.base import EventLog, LogReader, TopicPartition
from dynamo_es.log.errors import LogClosed, LogError, LogReplaced
from schemas.codec import SchemaError, TopicCodec
from schemas.topic import TopicSpec

logger = logging.getLogger(__name__)

RETRY_S = 0.5


class TopicTail:
    """Values of one topic as they come, beginning at its end. ``open``, then ``run`` until cancelled; one task.

    What cannot be decoded is passed over: the folds that keep state count it and write the dead letter. While the log
    is away, or was replaced, it is tried again twice a second, and what came meanwhile is skipped if it cannot be read
    any more.
    """

    def __init__(
        self,
        log: EventLog,
        topic: TopicSpec,
        namespace: str,
        on_value: Callable[[Any], None],
        retry_s: float = RETRY_S,
    ) -> None:
        self._log = log
        self._retry_s = retry_s
        self._topic = topic.qualified(namespace)
        self._codec = TopicCodec(topic)
        self._on_value = on_value
        self._reader: LogReader | None = None

    async def open(self) -> None:
        """From here on every record is seen. Raises ``LogError``."""
        bounds = await self._log.bounds(self._topic)
        self._reader = self._log.reader({TopicPartition(self._topic, number): at.end for number, at in bounds.items()})

    async def run(self) -> None:
        """Hand over what comes. Returns when the log is closed."""
        try:
            while True:
                try:
                    if self._reader is None:
                        await self.open()
                    await self._step()
                except LogClosed:
                    return
                except LogError as error:
                    logger.info("%s cannot be followed just now: %s", self._topic, error)
                    # A log that is away keeps the position; in another log, or out of retention, it means nothing.
                    if not error.retriable or isinstance(error, LogReplaced):
                        await self._close_reader()
                    await asyncio.sleep(self._retry_s)
        finally:
            await self._close_reader()

    async def _step(self) -> None:
        assert self._reader is not None
        for records in (await self._reader.poll()).values():
            for record in records:
                if record.value is None:
                    continue
                try:
                    value = self._codec.decode(record.value, record.headers)
                except SchemaError:
                    continue
                self._on_value(value)

    async def _close_reader(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            await reader.close()
