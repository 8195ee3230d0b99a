"""LoRA adapters in a running vLLM: which are loaded, who asks for them, how one goes. On the engine's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dynamo_es.engines.lora.errors import AdapterConflict, AdapterNotHere
from dynamo_es.engines.scheduling.adapters import FINISH_S
from dynamo_es.engines.vllm_engine.arguments import INSTEAD
from dynamo_es.errors import EngineShutdown, InvalidArgument, Unknown
from dynamo_es.frontend.extras import import_extra
from dynamo_es.router.hashing import lora_name_to_id

T = TypeVar("T")
# How long requests that were aborted may take to go. One whose client takes nothing more does not go by itself.
_ABORT_S = 2.0


@dataclass(slots=True, eq=False)
class HeldAdapter:
    """An adapter from its loading to its end. ``request``: vLLM's ``LoRARequest``; ``open``: how many ask for it."""

    request: Any
    open: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def is_free(self, within_s: float) -> bool:
        """Wait until nobody asks for it; False: that took too long."""
        try:
            async with asyncio.timeout(within_s):
                while self.open:
                    self.left.clear()
                    await self.left.wait()
        except TimeoutError:
            return False
        return True


class VllmAdapters:
    """The adapters of one engine.

    vLLM knows cached blocks of an adapter by its name and keeps them when it goes. So before a name comes back its
    cache is emptied, which it refuses while requests run.
    """

    def __init__(self, engine: Any, dead: type[Exception], abort: Callable[[str], Awaitable[None]]) -> None:
        """``engine``: an ``AsyncLLM``. ``dead``: what it raises when it broke down. ``abort``: ends what is still open
        of an adapter, by its name.
        """
        self._engine = engine
        self._dead = dead
        self._abort = abort
        self._held: dict[str, HeldAdapter] = {}
        # On their way out: no request is taken, and vLLM may still have them.
        self._leaving: dict[str, HeldAdapter] = {}
        # Names whose blocks may be in the cache although they are not loaded.
        self._stale: set[str] = set()

    def enter(self, lora_name: str | None) -> HeldAdapter | None:
        """The adapter for a request that begins; ``leave`` it when that ends. None: it wants none.

        Raises:
            AdapterNotHere: There is no such adapter.
        """
        if lora_name is None:
            return None
        found = self._held.get(lora_name)
        if found is None:
            raise AdapterNotHere(lora_name)
        found.open += 1
        return found

    def leave(self, held: HeldAdapter | None) -> None:
        """A request that entered has ended."""
        if held is not None:
            held.open -= 1
            held.left.set()

    async def load(self, name: str, folder: str) -> None:
        """Read an adapter.

        Raises:
            InvalidArgument: It does not fit the model.
            AdapterConflict: Blocks of an earlier adapter of this name are still cached.
            EngineShutdown, Unknown: As ``unload``; of an earlier adapter of this name, whose unloading failed, as well.
        """
        if name in self._leaving:
            await self.unload(name)
        if name in self._stale:
            if not await self._call(self._engine.reset_prefix_cache()):
                raise AdapterConflict(
                    f"KV blocks of an earlier adapter {name!r} are cached, and requests run; try again"
                )
            self._stale.clear()
        module = import_extra("vllm.lora.request", "vllm", INSTEAD)
        wanted = module.LoRARequest(lora_name=name, lora_int_id=lora_name_to_id(name), lora_path=folder)
        try:
            loaded = await self._call(self._engine.add_lora(wanted))
        except Unknown as error:
            raise InvalidArgument(f"vLLM does not take the adapter {name} in {folder}: {error.__cause__}") from error
        if not loaded:
            raise InvalidArgument(f"vLLM does not take the adapter {name} in {folder}")
        self._held[name] = HeldAdapter(wanted)

    async def unload(self, name: str, finish_s: float = FINISH_S, abort_s: float = _ABORT_S) -> None:
        """Take no more requests of it, let the open ones end within ``finish_s``, and drop it.

        Those that are open then are aborted; ``abort_s`` later it goes, whether or not their clients have noticed.

        Raises:
            EngineShutdown: The engine broke down.
            Unknown: vLLM did not drop it. No request is taken; call again.
        """
        if name in self._held:
            self._leaving[name] = self._held.pop(name)
        leaving = self._leaving[name]
        self._stale.add(name)
        if not await leaving.is_free(finish_s):
            await self._call(self._abort(name))
            await leaving.is_free(abort_s)
        await self._call(self._engine.remove_lora(leaving.request.lora_int_id))
        del self._leaving[name]

    async def _call(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except self._dead as error:
            raise EngineShutdown("vLLM's engine broke down") from error
        except Exception as error:  # The engine's process hands on a failure as this very class.
            raise Unknown(f"vLLM: {error}") from error
