"""Dynamo's ``KvDcRelay`` (spec/services g): the relay of a data centre, in a process that has a runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Self

from dynamo_es.router.config_arguments import instance_of, optional, to_text, to_u64
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.services.dc_relay.relay import DcRelay
from dynamo_es.services.dc_relay.settings import RelayScope, RelaySettings


class KvDcRelay:
    """Tells routers of other data centres what this one's KV caches hold, through topic ``dc-relay``.

    One relay a data centre: of two with one ``dc_id``, readers go by the one that started last. Methods are Dynamo's;
    all but ``start`` raise ``RuntimeError`` at once, not when awaited, before ``start`` has completed.
    """

    _endpoint: Endpoint
    _settings: RelaySettings
    _relay: DcRelay | None
    _starting: asyncio.Lock

    def __new__(
        cls,
        endpoint: Endpoint,
        dc_id: str,
        namespace_filter: str | None = None,
        endpoint_prefix: str | None = None,
        publication_threshold: int = 16,
        publication_delay_ms: int = 1,
        recovery_attempt_timeout_ms: int = 30_000,
    ) -> Self:
        """Checks types only; the rest is checked by ``start``.

        Args:
            endpoint: Any endpoint of the process's runtime.
            dc_id: The data centre; stays the same over restarts.
            namespace_filter: Watch only this namespace; None: all.
            endpoint_prefix: Watch only endpoints that begin with these parts: ``namespace[.component[.endpoint]]``.
            publication_threshold: Changed blocks that are published at once.
            publication_delay_ms: How long fewer of them wait for more.
            recovery_attempt_timeout_ms: How long a rank whose events are missing may take to announce itself anew
                before it is fenced, and asked again.

        Raises:
            TypeError, OverflowError: An argument is of the wrong type or out of range.
        """
        self = object.__new__(cls)
        prefix = optional(to_text)("endpoint_prefix", endpoint_prefix)
        namespace = optional(to_text)("namespace_filter", namespace_filter)
        self._endpoint = instance_of("endpoint", endpoint, Endpoint)
        self._settings = RelaySettings(
            to_text("dc_id", dc_id),
            RelayScope(None if namespace is None else (namespace,), () if prefix is None else (prefix,)),
            to_u64("publication_threshold", publication_threshold),
            to_u64("publication_delay_ms", publication_delay_ms),
            to_u64("recovery_attempt_timeout_ms", recovery_attempt_timeout_ms),
        )
        self._relay = None
        self._starting = asyncio.Lock()
        return self

    async def start(self) -> tuple[()]:
        """Begin to relay; nothing if it began before, or has ended.

        Raises:
            ConfigError: A setting is wrong, in Dynamo's words.
            LogError, StoreError: The runtime cannot be started.
        """
        async with self._starting:
            if self._relay is None:
                relay = DcRelay(self._endpoint.core, self._settings)
                await relay.start()
                self._relay = relay
        return ()

    def health(self) -> Awaitable[dict[str, Any]]:
        """``healthy, shutting_down, host_last_error, endpoint_count, active_endpoint_count, fenced_endpoint_count``."""
        relay = self._started()

        async def tell() -> dict[str, Any]:
            return relay.health()

        return tell()

    def flush(self) -> Awaitable[tuple[()]]:
        """Publish what is pending without waiting for threshold or delay; nothing after ``shutdown``.

        Raises:
            LogError: The log is away, or was not read to its end since the start; the relay tries on.
        """
        return _empty(self._started().flush())

    def shutdown(self) -> Awaitable[tuple[()]]:
        """Stop. Idempotent."""
        return _empty(self._started().close())

    def wait_for_shutdown(self) -> Awaitable[tuple[()]]:
        """Wait until it has stopped: by ``shutdown``, or with its runtime."""
        return _empty(self._started().ended.wait())

    def _started(self) -> DcRelay:
        if self._relay is None:
            raise RuntimeError("KvDcRelay.start() must complete first")
        return self._relay


async def _empty(work: Awaitable[object]) -> tuple[()]:
    await work
    return ()
