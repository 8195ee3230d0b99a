"""A log behind a ``TopicAppender`` that fails when a test says so, with the record in it or without."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dynamo_es.log.errors import LogUnavailable
from schemas.registry import Lease


class HalfLog:
    """Attributes:
    written: Values by key, in their order; None took the key back.
    fails: What happens to the next append under a key, once: ``before`` it is written, or ``after``.
    renewals: How often a lease was written.
    """

    def __init__(self) -> None:
        self.written: defaultdict[bytes, list[Any]] = defaultdict(list)
        self.fails: dict[bytes, str] = {}
        self.renewals = 0

    def has(self, key: bytes) -> bool:
        """Whether a reader finds something under a key."""
        return bool(self.written.get(key)) and self.written[key][-1] is not None

    async def append(self, topic: Any, key: bytes, value: Any) -> None:
        self.renewals += isinstance(value, Lease)
        fails = self.fails.pop(key, None)
        if fails == "before":
            raise LogUnavailable("the log is away")
        self.written[key].append(value)
        if fails == "after":
            raise LogUnavailable("the log is away, with the record in it")
