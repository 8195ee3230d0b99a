"""The cards of a worker's adapters in the log: of which names there can be one, and that none is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_es.engines.lora.service import AdapterService
from dynamo_es.errors import EngineShutdown, InvalidArgument
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.models.lora import LoRADownloader
from dynamo_es.models.lora_sources import LoraSources
from dynamo_es.runtime.appender import TopicAppender
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.registration import Registration
from schemas.registry import key_model
from tests.support.half_log import HalfLog
from tests.support.runtimes import wait_for
from tests.unit.engines.lora.test_service import WHERE, folder

MODEL, POET = key_model(*WHERE, 7), key_model(*WHERE, 7, "poet")


class Held:
    """An engine: the adapters that it has. ``breaks``: giving one up fails, once."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.told: list[str] = []
        self.breaks = False

    async def load_adapter(self, name: str, folder: str) -> None:
        self.told.append(f"load {name}")
        self.names.add(name)

    async def unload_adapter(self, name: str) -> None:
        if self.breaks:
            self.breaks = False
            raise EngineShutdown("it broke down")
        self.told.append(f"unload {name}")
        self.names.discard(name)


@asynccontextmanager
async def worker(root: Path) -> AsyncIterator[tuple[AdapterService, Held, HalfLog]]:
    log, held = HalfLog(), Held()
    registration = Registration(
        cast(TopicAppender, log), lambda: cast(Any, SimpleNamespace(ended={})),
        owner="worker", owner_id=7, ttl_s=10.0, heartbeat_s=0.01, rng=random.Random(1),
    )  # fmt: skip
    await registration.start()
    facts = read_model_facts(BUILTIN_MODEL)
    await registration.register(MODEL, make_card(facts, WHERE, 7, name="m", block_size=16, runtime_config={}))
    core = SimpleNamespace(registration=registration, instance_id=7, shutdown_event=asyncio.Event())
    service = AdapterService(
        cast(Endpoint, SimpleNamespace(parts=WHERE, core=core)), held,
        sources=LoraSources([f"file://{root}"]), downloader=LoRADownloader(str(root / "cache")), limit=3,
    )  # fmt: skip
    try:
        yield service, held, log
    finally:
        await registration.close()


@pytest.mark.parametrize("name", ["/", "///"])
async def test_a_name_of_slashes_is_not_the_models_card(tmp_path: Path, name: str) -> None:
    async with worker(tmp_path) as (service, held, log):
        with pytest.raises(InvalidArgument, match="not slashes alone"):
            await service.load(name, folder(tmp_path, "poet"))
        assert (log.written[MODEL][-1].display_name, held.names) == ("m", set())


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_an_adapter_that_could_not_be_registered_leaves_no_card(tmp_path: Path, fails: str) -> None:
    async with worker(tmp_path) as (service, held, log):
        log.fails[POET] = fails
        with pytest.raises(LogUnavailable):
            await service.load("poet", folder(tmp_path, "poet"))
        assert not held.names
        await wait_for(lambda: not log.has(POET))


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_an_unload_that_failed_is_tried_again(tmp_path: Path, fails: str) -> None:
    async with worker(tmp_path) as (service, held, log):
        await service.load("poet", folder(tmp_path, "poet"))
        log.fails[POET] = fails
        with pytest.raises(LogUnavailable):
            await service.unload("poet")
        assert held.names == {"poet"}
        await service.unload("poet")
        assert not held.names
        assert not log.has(POET)


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_an_adapter_whose_unload_failed_can_be_had_again(tmp_path: Path, fails: str) -> None:
    async with worker(tmp_path) as (service, held, log):
        uri = folder(tmp_path, "poet")
        await service.load("poet", uri)
        log.fails[POET] = fails
        with pytest.raises(LogUnavailable):
            await service.unload("poet")
        await service.load("poet", uri)
        seen = log.renewals
        await wait_for(lambda: log.renewals > seen + 3)
        assert log.has(POET)
        assert held.names == {"poet"}


async def test_an_engine_that_failed_to_give_one_up_is_asked_again(tmp_path: Path) -> None:
    async with worker(tmp_path) as (service, held, log):
        await service.load("poet", folder(tmp_path, "poet"))
        held.breaks = True
        with pytest.raises(EngineShutdown):
            await service.unload("poet")
        await service.unload("poet")
        assert (service.names(), held.names, log.has(POET)) == ({}, set(), False)


async def test_what_an_engine_failed_to_give_up_is_given_up_before_it_is_loaded_again(tmp_path: Path) -> None:
    """It takes no requests of it, whatever it still has."""
    async with worker(tmp_path) as (service, held, log):
        await service.load("poet", folder(tmp_path, "poet"))
        held.breaks = True
        with pytest.raises(EngineShutdown):
            await service.unload("poet")
        held.told.clear()
        await service.load("poet", folder(tmp_path, "other"))
        assert held.told == ["unload poet", "load poet"]
        assert (held.names, log.has(POET)) == ({"poet"}, True)
