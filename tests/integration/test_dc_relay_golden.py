"""``KvDcRelay`` as Dynamo's was seen to be (golden kv_dc_relay.json; its further errors by release 1.5.1)."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.llm import KvDcRelay
from tests.support.relay_sites import ENDPOINT, Site, site
from tests.support.runtimes import wait_for

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/services/kv_dc_relay.json").read_text())
CASES = {case["case"]: case["result"] for case in GOLDEN["cases"]}
BAD: dict[str, dict[str, Any]] = {
    "empty": {"dc_id": ""},
    "thr0": {"publication_threshold": 0},
    "delay0": {"publication_delay_ms": 0},
    "rec0": {"recovery_attempt_timeout_ms": 0},
    "ws": {"dc_id": " a"},
}
NOT_STARTED = "^" + re.escape("KvDcRelay.start() must complete first") + "$"


@pytest.fixture
async def east():
    async with site("east") as made:
        yield made


def control(east: Site):
    return east.runtime().endpoint("dynamo.kv_dc_relay.control")


def test_it_has_dynamos_methods() -> None:
    assert sorted(name for name in vars(KvDcRelay) if not name.startswith("_")) == CASES["dir"]
    assert list(inspect.signature(KvDcRelay).parameters) == [
        "endpoint", "dc_id", "namespace_filter", "endpoint_prefix", "publication_threshold", "publication_delay_ms",
        "recovery_attempt_timeout_ms",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "text"),
    [
        ((), {}, TypeError, "KvDcRelay.__new__() missing 2 required positional arguments: 'endpoint' and 'dc_id'"),
        (("ep",), {}, TypeError, "KvDcRelay.__new__() missing 1 required positional argument: 'dc_id'"),
        ((5, "a"), {}, TypeError, "argument 'endpoint': 'int' object cannot be converted to 'Endpoint'"),
        (("ep", 5), {}, TypeError, "argument 'dc_id': 'int' object cannot be converted to 'PyString'"),
        (("ep", "a", 5), {}, TypeError, "argument 'namespace_filter': 'int' object cannot be converted to 'PyString'"),
        (
            ("ep", "a", None, 5), {}, TypeError,
            "argument 'endpoint_prefix': 'int' object cannot be converted to 'PyString'",
        ),
        (
            ("ep", "a"), {"publication_threshold": "x"}, TypeError,
            "argument 'publication_threshold': 'str' object cannot be interpreted as an integer",
        ),
        (("ep", "a"), {"publication_delay_ms": -1}, OverflowError, "can't convert negative int to unsigned"),
        (("ep", "a"), {"recovery_attempt_timeout_ms": 2**64}, OverflowError, "int too big to convert"),
        (("ep", "a"), {"namespaces": ["x"]}, TypeError, CASES["ctor#6"]["msg"]),
        (("ep", "a"), {"tuning": {}}, TypeError, CASES["ctor#12"]["msg"]),
    ],
)  # fmt: skip
async def test_the_constructor_checks_types_only(east: Site, arguments, keywords, error, text) -> None:
    given = [control(east) if argument == "ep" else argument for argument in arguments]
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        KvDcRelay(*given, **keywords)
    KvDcRelay(control(east), "", publication_threshold=0)


@pytest.mark.parametrize("name", BAD)
async def test_start_tells_what_is_wrong(east: Site, name: str) -> None:
    expected = CASES["start_bad"][name]
    relay = KvDcRelay(control(east), **{"dc_id": "a", **BAD[name]})
    with pytest.raises(Exception, match=f"^{re.escape(expected['msg'])}$"):
        await relay.start()
    # It has not started by that.
    with pytest.raises(RuntimeError, match=NOT_STARTED):
        relay.health()


@pytest.mark.parametrize("name", ["health", "flush", "shutdown", "wait_for_shutdown"])
async def test_nothing_can_be_asked_before_it_has_started(east: Site, name: str) -> None:
    with pytest.raises(RuntimeError, match=NOT_STARTED):
        getattr(KvDcRelay(control(east), "a"), name)()


async def test_its_life_is_dynamos(east: Site) -> None:
    relay = KvDcRelay(control(east), "a")
    assert [list(each) for each in await asyncio.gather(relay.start(), relay.start())] == [CASES["start2"]["ok"]] * 2
    assert await relay.health() == CASES["health0"]["ok"]
    assert list(await relay.flush()) == CASES["flush0"]["ok"]

    # An endpoint with a model but without KV events is there and not active, as by release 1.5.1.
    worker = await east.worker(events=False)

    async def health(expected: dict[str, Any]) -> None:
        async with asyncio.timeout(60):
            while await relay.health() != expected:
                await asyncio.sleep(0.01)

    await health(CASES["health0"]["ok"] | {"endpoint_count": 1})
    worker.publish_events()
    await health(CASES["health2"]["ok"])
    assert list(await relay.flush()) == []

    waiting = asyncio.ensure_future(relay.wait_for_shutdown())
    assert not waiting.done()
    assert [list(await relay.shutdown()), list(await relay.shutdown())] == [[], []]
    await wait_for(waiting.done)
    over = CASES["health3"]["ok"] | {"healthy": False, "shutting_down": True, "active_endpoint_count": 0}
    assert await relay.health() == over
    assert list(await relay.start()) == []
    assert list(await relay.flush()) == CASES["flush_after"]["ok"]
    assert await relay.health() == over


@pytest.mark.parametrize(
    ("keywords", "found"),
    [
        ({"namespace_filter": "ns"}, 1),
        ({"namespace_filter": "n"}, 0),
        ({"endpoint_prefix": ENDPOINT.rpartition(".")[0]}, 1),
        ({"endpoint_prefix": "ns.back"}, 0),
    ],
)
async def test_filters_are_dynamos(east: Site, keywords, found: int) -> None:
    await east.worker()
    relay = KvDcRelay(control(east), "a", **keywords)
    await relay.start()
    health = await relay.health()
    assert health["endpoint_count"] == found


async def test_it_ends_with_its_runtime(east: Site) -> None:
    runtime = east.runtime()
    relay = KvDcRelay(runtime.endpoint("a.b.c"), "a")
    await relay.start()
    waiting = asyncio.ensure_future(relay.wait_for_shutdown())
    runtime.shutdown()
    async with asyncio.timeout(60):
        await waiting
    assert (await relay.health())["shutting_down"]
    await runtime.close()
