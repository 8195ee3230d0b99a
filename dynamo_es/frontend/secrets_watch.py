"""TLS and API keys of a frontend: loaded at the start, and again when their files change.

A file that is wrong when it is loaded again changes nothing: what was loaded before stays in force, the mistake is
logged once, and the next look tries again (a certificate may be there before its key).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Gauge

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.api_keys import KeyRing
from dynamo_es.frontend.key_file import read_keys
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.frontend.tls import tls_context, tls_files
from dynamo_es.frontend.tls_handshakes import HandshakeWatch

logger = logging.getLogger(__name__)

Stamp = tuple[object, ...]


@dataclass(slots=True)
class _Watched:
    what: str
    files: Sequence[Path]
    load: Callable[[], Awaitable[None]]
    stamp: Stamp
    problem: str | None = None

    def is_stale(self) -> bool:
        """Whether the files changed and what they hold now could not be loaded."""
        return self.problem is not None


class FrontendSecrets:
    """What the files held at the start, and the watch over them. Belongs to one event loop.

    ``watch`` once the server is there, ``close`` at the end.

    Args:
        tls: Files of certificates.
        keys: The file of API keys.
        clock: Time.
        look: Set by whoever wants everything to be loaded again now; it is cleared then.

    Attributes:
        tls: For the server; None: no TLS.
        keys: None: no keys are needed.
        handshakes: Counts those that fail.
    """

    def __init__(self, tls: TlsConfig, keys: ApiKeysConfig, clock: Clock, look: asyncio.Event | None = None) -> None:
        """Reads files. Raises ``ConfigError``."""
        self._tls_config = tls
        self._tls_stamp = _stamp(tls_files(tls))
        self.handshakes = HandshakeWatch(clock)
        context = tls_context(tls)
        self.tls: ssl.SSLContext | None = None if context is None else self.handshakes.over(context)
        self._key_file = None if keys.file is None else Path(keys.file)
        self._key_stamp = _stamp([] if self._key_file is None else [self._key_file])
        self.keys = None if self._key_file is None else KeyRing(read_keys(self._key_file), clock)
        self._now = look if look is not None else asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def watch(
        self,
        server: FrontendServer,
        interval_s: float,
        stale: Gauge | None = None,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """Look at the files every ``interval_s`` seconds from now on. ``stale``, with a label for what it is, says
        whether that has changed and could not be loaded.
        """
        watched = []
        if self.tls is not None:
            files = tls_files(self._tls_config)
            watched.append(_Watched("TLS certificate", files, lambda: self._load_tls(server), self._tls_stamp))
        if self._key_file is not None:
            watched.append(_Watched("API keys", [self._key_file], self._load_keys, self._key_stamp))
        if stale is not None:
            for item in watched:
                stale.labels(item.what).set_function(item.is_stale)
        if watched:
            self._task = (tasks or BackgroundTasks()).spawn(self._run(watched, interval_s), "secrets-watch")

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self, watched: Sequence[_Watched], interval_s: float) -> None:
        while True:
            try:
                async with asyncio.timeout(interval_s):
                    await self._now.wait()
            except TimeoutError:
                pass
            asked = self._now.is_set()
            self._now.clear()
            for item in watched:
                await _look_at(item, asked=asked)

    async def _load_tls(self, server: FrontendServer) -> None:
        context = await asyncio.to_thread(tls_context, self._tls_config)
        assert context is not None
        await server.use_tls(self.handshakes.over(context))

    async def _load_keys(self) -> None:
        assert self._key_file is not None
        assert self.keys is not None
        self.keys.replace(await asyncio.to_thread(read_keys, self._key_file))


async def _look_at(item: _Watched, *, asked: bool) -> None:
    found = await asyncio.to_thread(_stamp, item.files)
    if found == item.stamp and not asked:
        return
    try:
        await item.load()
    except ConfigError as error:
        if str(error) != item.problem or asked:
            logger.error("%s not loaded again, the old state stays in force: %s", item.what, error)
        item.problem = str(error)
        return
    item.stamp, item.problem = found, None
    logger.info("%s loaded again", item.what)


def _stamp(files: Sequence[Path]) -> Stamp:
    """Differs when a file was replaced or written."""
    stamps: list[object] = []
    for file in files:
        try:
            found = file.stat()
            stamps.append((found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size))
        except OSError as error:
            stamps.append(error.errno)
    return tuple(stamps)
