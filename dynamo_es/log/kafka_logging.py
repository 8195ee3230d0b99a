"""What aiokafka may write into the log: no login, and of an attempt that fails ten times a second one in a while."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from aiokafka.protocol.admin import (
    SaslAuthenticateRequest_v0,
    SaslAuthenticateRequest_v1,
    SaslAuthenticateResponse_v0,
    SaslAuthenticateResponse_v1,
)

from dynamo_es.clock import Clock

# AIOKafkaClient logs under the package's name.
_CONNECTING = ("aiokafka", "aiokafka.conn", "aiokafka.cluster")
_RUNNING = (
    *_CONNECTING,
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
)
REPEAT_S = 30.0
# At DEBUG every request is logged as it goes out: these carry passwords and tokens.
_LOGINS = (
    SaslAuthenticateRequest_v0,
    SaslAuthenticateRequest_v1,
    SaslAuthenticateResponse_v0,
    SaslAuthenticateResponse_v1,
)


class RepeatFilter(logging.Filter):
    """Lets a message through once in ``REPEAT_S``; messages are told apart by their text before formatting.

    A message that would show a login shows only that there was one.

    Its memory is the number of distinct messages in aiokafka's source. Nothing above WARNING is lost for good: the
    errors themselves reach the caller as ``LogUnavailable``.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple("(login)" if isinstance(item, _LOGINS) else item for item in record.args)
        if record.levelno <= logging.DEBUG:
            # Who asks for these wants all of them.
            return True
        now = self._clock.monotonic()
        key = (record.name, str(record.msg))
        last = self._last.get(key)
        if last is not None and now - last < REPEAT_S:
            return False
        self._last[key] = now
        return True

    def install(self) -> None:
        """Begin to filter aiokafka's loggers."""
        for name in _RUNNING:
            logging.getLogger(name).addFilter(self)

    def remove(self) -> None:
        """Stop filtering. Safe to call twice."""
        for name in _RUNNING:
            logging.getLogger(name).removeFilter(self)


@contextlib.contextmanager
def quiet_aiokafka() -> Iterator[None]:
    """Keep aiokafka silent while connecting: our error says it once, with the reasons and what to do."""
    loggers = [logging.getLogger(name) for name in _CONNECTING]
    silence = _Silence()
    for logger in loggers:
        logger.addFilter(silence)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(silence)


class _Silence(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False
