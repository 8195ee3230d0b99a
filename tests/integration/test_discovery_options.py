"""Options of which workers a frontend considers, and of how many a model needs at first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.options import load
from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.errors import ModelNotReady
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.model_card import BUILTIN_MODEL
from tests.integration.test_discovery import Fleet, is_ready
from tests.support.runtimes import wait_for


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    log = MemoryLog("test", SystemClock(), Random(1))
    await log.start()
    fleet = Fleet(log)
    yield fleet
    await fleet.close()
    await log.close()


async def test_a_prefix_of_namespaces_wins_over_one_namespace(fleet: Fleet) -> None:
    models = await fleet.directory(namespace="other", namespace_prefix="blue")
    for number, namespace in enumerate(("other", "blue-1", "blue", "red")):
        await fleet.worker(BUILTIN_MODEL, name=f"m{number}", path=f"{namespace}.backend.generate")
    await wait_for(lambda: is_ready(models, "m1") and is_ready(models, "m2"))
    assert sorted(models.statuses()) == ["m1", "m2"]


@pytest.mark.parametrize("given", ["", "0", "1", "3", "4294967295"])
async def test_any_block_size_is_taken_as_in_dynamo_and_0_is_the_cards(fleet: Fleet, given: str) -> None:
    config = load(FrontendConfig, None, {"DYN_KV_CACHE_BLOCK_SIZE": given})
    models = await fleet.directory(kv_cache_block_size=config.kv_cache_block_size)
    await fleet.worker(BUILTIN_MODEL, block_size=64)
    await wait_for(lambda: is_ready(models))
    assert models.statuses()["m"].block_size == (int(given or 0) or 64)


@pytest.mark.parametrize("given", ["-1", "4294967296", "1.5"])
def test_a_block_size_that_is_no_u32_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="DYN_KV_CACHE_BLOCK_SIZE"):
        load(FrontendConfig, None, {"DYN_KV_CACHE_BLOCK_SIZE": given})


async def test_a_model_is_ready_when_it_has_had_enough_workers(fleet: Fleet) -> None:
    models = await fleet.directory(router_min_initial_workers=2)
    await fleet.worker(BUILTIN_MODEL)
    waits = "1 of 2 workers are there (--router-min-initial-workers)"
    await wait_for(lambda: "m" in models.statuses() and models.statuses()["m"].reason == waits)
    with pytest.raises(ModelNotReady):
        models.find("m")
    second = await fleet.worker(BUILTIN_MODEL)
    await wait_for(lambda: is_ready(models))
    await second.close()
    await wait_for(lambda: models.statuses()["m"].namespaces["dynamo"]["worker_types"]["aggregated"]["workers"] == 1)
    assert is_ready(models)
