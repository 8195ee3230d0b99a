"""LoRA adapters in a running vLLM: which are loaded, who asks for them, how one goes. On the engine's event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from dynamo_es.engines.lora.errors import AdapterConflict
from dynamo_es.engines.scheduling.adapters import FINISH_S
from dynamo_es.engines.vllm_engine.arguments import INSTEAD
from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.extras import import_extra
from dynamo_es.router.hashing import lora_name_to_id

_SHOWN = 64


class VllmAdapters:
    """The adapters of one engine.

    vLLM knows cached blocks of an adapter by its name and keeps them when it goes. So before a name comes back its
    cache is emptied, which it refuses while requests run.
    """

    def __init__(self, engine: Any, abort: Callable[[str], Awaitable[None]]) -> None:
        """``engine``: an ``AsyncLLM``. ``abort``: ends what is still open of an adapter, by its name."""
        self._engine = engine
        self._abort = abort
        self._requests: dict[str, Any] = {}
        self._open: Counter[str] = Counter()
        self._left = asyncio.Event()
        # Names whose blocks may be in the cache although they are not loaded.
        self._stale: set[str] = set()

    def enter(self, lora_name: str | None) -> Any:
        """vLLM's ``LoRARequest`` for a request that begins; ``leave`` when it ends.

        Raises:
            InvalidArgument: There is no such adapter.
        """
        if lora_name is None:
            return None
        found = self._requests.get(lora_name)
        if found is None:
            raise InvalidArgument(f"this worker has no LoRA adapter {str(lora_name)[:_SHOWN]!r}")
        self._open[lora_name] += 1
        return found

    def leave(self, lora_name: str | None) -> None:
        """A request that entered has ended."""
        if lora_name is not None:
            self._open[lora_name] -= 1
            self._left.set()

    async def load(self, name: str, folder: str) -> None:
        """Read an adapter.

        Raises:
            InvalidArgument: It does not fit the model.
            AdapterConflict: Blocks of an earlier adapter of this name are still cached.
        """
        if name in self._stale:
            if not await self._engine.reset_prefix_cache():
                raise AdapterConflict(
                    f"KV blocks of an earlier adapter {name!r} are cached, and requests run; try again"
                )
            self._stale.clear()
        module = import_extra("vllm.lora.request", "vllm", INSTEAD)
        wanted = module.LoRARequest(lora_name=name, lora_int_id=lora_name_to_id(name), lora_path=folder)
        try:
            loaded = await self._engine.add_lora(wanted)
        except Exception as error:  # The engine's process hands on a failure as this very class.
            raise InvalidArgument(f"vLLM does not take the adapter {name} in {folder}: {error}") from error
        if not loaded:
            raise InvalidArgument(f"vLLM does not take the adapter {name} in {folder}")
        self._requests[name] = wanted

    async def unload(self, name: str, finish_s: float = FINISH_S) -> None:
        """Take no more requests of it, let the open ones end within ``finish_s``, and drop it."""
        wanted = self._requests.pop(name)
        self._stale.add(name)
        try:
            async with asyncio.timeout(finish_s):
                await self._wait(name)
        except TimeoutError:
            await self._abort(name)
            await self._wait(name)
        del self._open[name]
        await self._engine.remove_lora(wanted.lora_int_id)

    async def _wait(self, name: str) -> None:
        while self._open[name]:
            self._left.clear()
            await self._left.wait()
