"""What services over Python engines of the same process have in common: their models' names, and their end."""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

from dynamo_es.router.config_arguments import to_text
from dynamo_es.runtime.core import RuntimeCore


class TextModels(Protocol):
    """Models by family and name."""

    def remove(self, family: Literal["chat", "completions"], name: str) -> None:
        """Raises ``ModelError``: there is none."""

    def names(self, family: Literal["chat", "completions"]) -> list[str]:
        """In the order in which they came."""


class EngineService:
    """Belongs to one event loop; ``shutdown`` may be called from any thread."""

    def __init__(self, models: TextModels) -> None:
        """``models``: what the service serves."""
        self._text_models = models
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def remove_chat_completions_model(self, model: str) -> None:
        """Requests that run go on. Raises ``ModelError``: there is none."""
        self._text_models.remove("chat", to_text("model", model))

    def remove_completions_model(self, model: str) -> None:
        """The same for text completions."""
        self._text_models.remove("completions", to_text("model", model))

    def list_chat_completions_models(self) -> list[str]:
        """Names, in the order in which they came."""
        return self._text_models.names("chat")

    def list_completions_models(self) -> list[str]:
        """Names, in the order in which they came."""
        return self._text_models.names("completions")

    def shutdown(self) -> None:
        """Let ``run`` end; returns at once."""
        if self._loop is None:
            self._stop.set()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _end_with(self, core: RuntimeCore) -> None:
        """Let ``run`` end when the runtime does."""
        await core.shutdown_event.wait()
        self._stop.set()
