"""Since when the log has been in its state: what health and metrics tell must not depend on when they are asked."""

from __future__ import annotations

import asyncio
import logging

from dynamo_es.log.state import LogState
from dynamo_es.runtime.core import RuntimeCore

logger = logging.getLogger(__name__)
_INTERVAL_S = 1.0


class LogWatch:
    """Looks at the log's state every second. Belongs to one event loop; ``start`` once, ended with the runtime.

    Attributes:
        state: As last seen.
        since_ms: Unix milliseconds when that condition was first seen.
    """

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        self._task: asyncio.Task[None] | None = None
        self.state: LogState = core.log_state
        self.since_ms = core.clock.now_ms()

    def start(self) -> None:
        """Watch until the runtime is closed."""
        self._task = self._core.tasks.spawn(self._watch(), "log-watch")
        self._core.add_cleanup(self._stop)

    def look(self) -> LogState:
        """The state now."""
        state = self._core.log_state
        if state.state is not self.state.state:
            self.since_ms = self._core.clock.now_ms()
            if state.ok:
                logger.info("the log is well again")
            else:
                logger.warning("the log is %s, serving goes on: %s", state.state.value, state.reason)
        self.state = state
        return state

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_INTERVAL_S)

    async def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
