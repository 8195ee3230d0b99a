"""The adapters of one worker: fetched, given to its engine, registered, and taken back (Dynamo's LoRA handlers).

Answers are Dynamo's: ``{"status": "success", "message", "lora_name", "lora_id"}``. What is not Dynamo's: a source must
be allowed (``LoraSources``), and a name that is loaded from another source already is refused, not kept in silence.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.engines.lora.errors import AdapterConflict, AdapterMissing
from dynamo_es.engines.lora.host import AdapterHost
from dynamo_es.engines.lora.turns import Turns
from dynamo_es.errors import DynamoException, EngineShutdown, InvalidArgument
from dynamo_es.models.card_json import slug
from dynamo_es.models.errors import LoraError
from dynamo_es.models.lora import LoRADownloader, is_adapter
from dynamo_es.models.lora_sources import LoraSources, SourceRefused
from dynamo_es.router.hashing import lora_name_to_id
from dynamo_es.runtime.endpoint import Endpoint
from schemas.registry import ModelCard, key_model

logger = logging.getLogger(__name__)
_CLOSE_S = 5.0
Answer = dict[str, Any]
# As names of models are: no white space, no control characters.
_NAME = re.compile(r"[^\s\x00-\x1f\x7f]{1,200}")


def adapter_card(base: ModelCard, name: str, slots: int) -> ModelCard:
    """What is registered for an adapter beside its model (spec/services d.6)."""
    return msgspec.structs.replace(
        base,
        display_name=name,
        suffix=slug(name),
        lora_name=name,
        aliases=[],
        user_data={"lora_adapter": True, "lora_id": lora_name_to_id(name)},
        details={**base.details, "lora": {"max_gpu_lora_count": slots}},
    )


class AdapterService:
    """The adapters of the worker at one endpoint. Belongs to its event loop. Loads and unloads come one by one."""

    def __init__(
        self,
        endpoint: Endpoint,
        host: AdapterHost,
        *,
        sources: LoraSources,
        downloader: LoRADownloader,
        limit: int,
        loaded: Mapping[str, str] | None = None,
    ) -> None:
        """``limit``: adapters at a time. ``loaded``: URIs of those that the engine has from the start, by name."""
        self.endpoint = endpoint
        self._host = host
        self._sources = sources
        self._downloader = downloader
        self.limit = limit
        self._loaded = dict(loaded or {})
        # Of those the ones that are withdrawn while the engine did not give them up.
        self._leaving: set[str] = set()
        self._turns = Turns()
        self._tasks: set[asyncio.Task[Answer]] = set()

    async def register_loaded(self) -> None:
        """Register what the engine has from the start; the model is registered. Raises ``LogError``."""
        for name in sorted(self._loaded):
            await self._register(name)

    def names(self) -> Mapping[str, int]:
        """What is loaded: ids by name."""
        return {name: lora_name_to_id(name) for name in self._loaded}

    def list_loras(self) -> Answer:
        """Dynamo's answer."""
        names = self.names()
        return {"status": "success", "loras": names, "count": len(names)}

    async def load(self, name: str, uri: str) -> Answer:
        """Have an adapter and register it. Loaded from there already: nothing changes, but it is registered again if an
        ``unload`` failed half way.

        Raises:
            InvalidArgument: The name is none, or the adapter does not fit the model.
            SourceRefused: The source is not allowed.
            LoraError, ConfigError: It cannot be had.
            AdapterConflict: Another adapter is in the way.
            TooManyOperations, EngineShutdown, LogError: Not now. Nothing is loaded or registered.
            Unknown: The engine failed, as in an ``unload`` before that this one had to bring to its end.
        """
        return await self._to_its_end(self._load(name, uri))

    async def unload(self, name: str) -> Answer:
        """Withdraw an adapter, then give it up.

        Raises:
            AdapterMissing: It is not loaded.
            Unknown: The engine failed to drop it: it is withdrawn and not served, and another try is needed.
            TooManyOperations, EngineShutdown, LogError: Not now. It stays as it is, except that routers may have
                forgotten it, and will within a heartbeat after a ``LogError``. ``unload`` or ``load`` it again.
        """
        return await self._to_its_end(self._unload(name))

    async def close(self) -> None:
        """Let what is under way end, for a moment. Idempotent."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _to_its_end(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Half an adapter is none: a caller that goes away does not end it."""
        task = asyncio.create_task(work, name="lora-adapter")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _load(self, name: str, uri: str) -> Answer:
        if not _NAME.fullmatch(name) or not slug(name):
            # What is registered without a slug is the model itself.
            raise InvalidArgument("lora_name must be 1 to 200 characters without white space, and not slashes alone")
        async with self._turn():
            if name in self._leaving:
                await self._give_up(name)
            if self._loaded.get(name) == uri:
                if self.endpoint.core.registration.row(self._key(slug(name))) is None:
                    await self._register(name)  # Its unloading got no further than this.
                return _done(name, f"LoRA adapter '{name}' already loaded")
            source = await asyncio.to_thread(self._sources.resolve, uri)
            self._check_room(name)
            folder = await self._downloader.download_if_needed(source)
            if not await asyncio.to_thread(is_adapter, folder):
                raise LoraError(uri, f"{uri} has no adapter_config.json with weights beside it")
            if await asyncio.to_thread(self._sources.resolve, source) != source:
                raise SourceRefused(f"source.uri {uri[:200]!r} was changed while it was looked at; try again")
            await self._host.load_adapter(name, folder)
            self._loaded[name] = uri
            try:
                await self._register(name)
            except DynamoException:
                del self._loaded[name]
                await self._host.unload_adapter(name)
                raise
        logger.info("LoRA adapter %s loaded", name)
        return _done(name, f"LoRA adapter '{name}' loaded successfully")

    async def _unload(self, name: str) -> Answer:
        async with self._turn():
            if name not in self._loaded:
                raise AdapterMissing(f"LoRA adapter '{name}' not found. Available LoRAs: {sorted(self._loaded)}")
            await self._give_up(name)
        logger.info("LoRA adapter %s unloaded", name)
        return _done(name, f"LoRA adapter '{name}' unloaded successfully")

    async def _give_up(self, name: str) -> None:
        await self.endpoint.core.registration.unregister(self._key(slug(name)))
        self._leaving.add(name)
        await self._host.unload_adapter(name)
        self._leaving.discard(name)
        del self._loaded[name]

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._turns.take():
            if self.endpoint.core.shutdown_event.is_set():
                raise EngineShutdown("the worker is shutting down")
            yield

    def _check_room(self, name: str) -> None:
        base = self._base()
        if name in self._loaded:
            raise AdapterConflict(f"LoRA adapter '{name}' is loaded from another source; unload it first")
        if name in (base.display_name, *base.aliases):
            raise AdapterConflict(f"'{name}' is the name of the model itself")
        for known in self._loaded:
            if slug(known) == slug(name) or lora_name_to_id(known) == lora_name_to_id(name):
                raise AdapterConflict(f"'{name}' cannot be told from the loaded adapter '{known}' in the registry")
        if len(self._loaded) >= self.limit:
            raise AdapterConflict(f"{self.limit} adapters are loaded, as many as there may be; unload one first")

    def _base(self) -> ModelCard:
        row = self.endpoint.core.registration.row(self._key(""))
        if not isinstance(row, ModelCard):
            raise EngineShutdown("the worker's model is not registered")
        return row

    async def _register(self, name: str) -> None:
        card = adapter_card(self._base(), name, self.limit)
        await self.endpoint.core.registration.register(self._key(card.suffix), card)

    def _key(self, suffix: str) -> bytes:
        return key_model(*self.endpoint.parts, self.endpoint.core.instance_id, suffix)


def _done(name: str, message: str) -> Answer:
    return {"status": "success", "message": message, "lora_name": name, "lora_id": lora_name_to_id(name)}


def adapter_service(
    endpoint: Endpoint,
    host: AdapterHost,
    config: LoraConfig,
    *,
    limit: int | None = None,
    loaded: Mapping[str, str] | None = None,
) -> AdapterService:
    """As the options say. ``limit``: the engine's own, in place of theirs; ``loaded``: see ``AdapterService``."""
    return AdapterService(
        endpoint,
        host,
        sources=LoraSources(config.sources),
        downloader=LoRADownloader(),
        limit=config.max_gpu_lora_count if limit is None else limit,
        loaded=loaded,
    )
