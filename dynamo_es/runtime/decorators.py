"""``dynamo_worker``: a coroutine function that gets a runtime (Dynamo's decorator; spec/services a.1)."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

from dynamo_es.runtime.runtime import DistributedRuntime

Worker = Callable[..., Awaitable[Any]]


def dynamo_worker(
    enable_nats: bool | None = None, *, env: Mapping[str, str] | None = None
) -> Callable[[Worker], Callable[..., Awaitable[None]]]:
    """Calls the function with a ``DistributedRuntime`` on the running loop before its arguments.

    Backend names come from ``DYN_DISCOVERY_BACKEND``, ``DYN_REQUEST_PLANE`` and ``DYN_EVENT_PLANE``; all mean the log
    here. Unlike Dynamo's, it closes the runtime when the function is over. ``env``: the environment; None: this
    process's. Not in Dynamo.
    """
    if enable_nats is not None:
        warnings.warn("enable_nats has no effect", DeprecationWarning, stacklevel=2)

    def decorate(function: Worker) -> Callable[..., Awaitable[None]]:
        @wraps(function)
        async def run(*args: Any, **kwargs: Any) -> None:
            given = os.environ if env is None else env
            runtime = DistributedRuntime(
                asyncio.get_running_loop(),
                given.get("DYN_DISCOVERY_BACKEND", "etcd"),
                given.get("DYN_REQUEST_PLANE", "tcp"),
                event_plane=given.get("DYN_EVENT_PLANE"),
            )
            try:
                await function(runtime, *args, **kwargs)
            finally:
                await runtime.close()

        return run

    return decorate
