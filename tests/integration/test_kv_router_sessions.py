"""``KvRouter`` with sessions kept together and with predicted prefill times, on workers of this process."""

from __future__ import annotations

import random
import sys

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.errors import ConfigError
from dynamo_es.log.memory import MemoryLog
from dynamo_es.router import kv_router
from dynamo_es.router.config import KvRouterConfig
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.errors import SessionElsewhere
from dynamo_es.router.kv_router import KvRouter
from tests.integration.test_kv_router import TOKENS, Fleet
from tests.support.runtimes import wait_for

AIC = KvRouterConfig(router_prefill_load_model="aic")
DEPLOYMENT = AicPerfConfig("vllm", "h200_sxm", "Qwen/Qwen3-32B")


class HundredTokensASecond:
    def predict_s(self, tokens, prefix=0, batch=1):
        return tokens / 100


@pytest.fixture
async def fleet():
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    fleet = Fleet(log)
    yield fleet
    await fleet.close()
    await log.close()


def prompt(number):
    return [number] * 16


async def test_best_worker_keeps_a_session_for_its_time_and_routers_share_it(fleet):
    for _ in range(3):
        await fleet.worker()
    router = await fleet.router(session_affinity_ttl_secs=60)
    other = await fleet.router(session_affinity_ttl_secs=60)
    await other.start()
    first = (await router.best_worker(prompt(1), request_id="a", session_id="s"))[0]
    for number in range(6):
        assert (await router.best_worker(prompt(number), request_id=f"r{number}", session_id="s"))[0] == first
    sessions = other._views.requests.state.sessions.sessions
    await wait_for(lambda: sessions)
    assert (await other.best_worker(prompt(9), request_id="b", session_id="s"))[0] == first
    unbound = {(await router.best_worker(prompt(20 + n), request_id=f"u{n}"))[0] for n in range(6)}
    assert len(unbound) > 1
    for name in ("a", *(f"r{number}" for number in range(6)), *(f"u{number}" for number in range(6))):
        await router.free(name)
    await other.free("b")
    for one in (router, other):
        await wait_for(lambda one=one: not one._views.requests.state.bookings)
        affinity = one._router.affinity
        assert affinity.rank_of(affinity.digest("s"), fleet.clock.now_ms()).worker_id == first
        assert affinity.rank_of(affinity.digest("s"), fleet.clock.now_ms() + 61_000) is None


async def test_generate_reads_the_session_of_the_agent(fleet):
    for _ in range(3):
        await fleet.worker()
    router = await fleet.router(session_affinity_ttl_secs=60)
    workers = set()
    for number in range(6):
        request = {"model": "m", "token_ids": prompt(number), "agent_context": {"session_id": "s"}}
        [frame async for frame in await router.generate_from_request(request)]
        workers.add(fleet.asked[-1]["routing"]["worker_id"])
    assert len(workers) == 1
    assert fleet.asked[-1]["agent_context"] == {"session_id": "s"}
    (elsewhere,) = {worker.core.instance_id for worker in fleet.runtimes[:3]} - workers - {max(
        {worker.core.instance_id for worker in fleet.runtimes[:3]} - workers
    )}  # fmt: skip
    pinned = {**request, "routing": {"worker_id": elsewhere}}
    with pytest.raises(SessionElsewhere):
        [frame async for frame in await router.generate_from_request(pinned)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"session_affinity_ttl_secs": 0}, "between 1 and 31536000"),
        ({"session_affinity_mode": "loose"}, 'invalid session affinity mode "loose"'),
    ],
)
async def test_a_wrong_affinity_is_refused_at_construction(fleet, options, text):
    runtime = await fleet.runtime("router")
    with pytest.raises(ValueError, match=text):
        KvRouter(runtime.endpoint("dynamo.backend.generate"), 4, **options)


async def test_predicted_prompts_fall_with_time_in_every_router(fleet, monkeypatch):
    monkeypatch.setattr(kv_router, "load_aic_times", lambda config: HundredTokensASecond())
    await fleet.worker()
    router = await fleet.router(AIC, aic_perf_config=DEPLOYMENT)
    other = await fleet.router(AIC, aic_perf_config=DEPLOYMENT)
    await other.start()
    await router.best_worker(list(range(1000, 1400)), request_id="a")

    async def booked(one):
        (row,) = await one.get_potential_loads([])
        return row["potential_prefill_tokens"]

    assert 390 < await booked(router) <= 400
    await wait_for(lambda: other._views.requests.state.bookings)
    fleet.clock.offset_s += 2
    assert 180 < await booked(router) <= 200
    assert abs(await booked(other) - await booked(router)) < 10
    await router.mark_prefill_complete("a")
    assert await booked(router) == 0


async def test_the_model_needs_a_deployment_and_its_extra(fleet, monkeypatch):
    await fleet.worker()
    with pytest.raises(ConfigError, match="needs to know the deployment: aic_backend, aic_system and aic_model_path"):
        await (await fleet.router(AIC)).best_worker(TOKENS)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    with pytest.raises(ConfigError, match="need the extra aic"):
        await (await fleet.router(AIC, aic_perf_config=DEPLOYMENT)).best_worker(TOKENS)
