"""Where publishers hand over their events."""

from __future__ import annotations

from typing import Protocol

import msgspec

from schemas.topic import TopicSpec


class EventSink(Protocol):
    """Takes events for the log without ever blocking the engine that reports them. Belongs to one event loop."""

    def offer(self, topic: TopicSpec, key: bytes, value: msgspec.Struct, *, trace: str = "") -> bool:
        """Append in the background, in the order of the calls. ``trace``: goes along as the header ``traceparent``.

        Returns True if the event is in the buffer: it reaches the log unless the process dies first. False: it was
        dropped, nothing of it will appear. Never blocks, never raises for a full buffer or a log that is away.
        """
