"""``dynamo-es diagnose`` over real frontends and mock workers: each cause of OPS-02, and a fleet without any."""

from __future__ import annotations

import asyncio
import json

import pytest

from dynamo_es.cli.main import main
from dynamo_es.config.tree import FrontendConfig
from dynamo_es.diagnosis.causes import Cause, Diagnosis, diagnose
from dynamo_es.diagnosis.facts import Facts, read_health
from dynamo_es.diagnosis.from_frontend import ask_frontend
from dynamo_es.diagnosis.from_log import read_log
from dynamo_es.diagnosis.text import text_of
from dynamo_es.log.base import Entry
from dynamo_es.router.config import KvRouterSettings
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, KvEvents, key_kv_events
from streams.runner import RunnerStatus
from tests.support.runtimes import wait_for
from tests.support.served_fleet import COMPLETIONS, served_fleet

LONG = "The sky over the observatory is dark at night, although it is full of stars. "
TOPIC = KV_EVENTS.qualified("dynamo")
CODEC = TopicCodec(KV_EVENTS)


async def look(fleet, *, log: bool = False, live: bool = True) -> Diagnosis:
    """By the frontend's page, with ``log`` by that and the log; once its views are ``live``."""
    if live:
        await wait_for(lambda: all(runner.status is RunnerStatus.LIVE for runner in fleet.core.runners()))
    logged = None
    if log:
        await fleet.core.buffer.flush(60)
        logged = await read_log(fleet.log, "dynamo", 0)
    found = diagnose(Facts(read_health((await fleet.get("/health")).body), log=logged, since="15min"))
    lines = list(text_of(found))
    assert all("\n" not in line and "  " not in line.strip() for line in lines)
    assert found.healthy == (not codes(found))
    return found


async def look_at_log(fleet) -> Diagnosis:
    await fleet.core.buffer.flush(60)
    return diagnose(Facts(log=await read_log(fleet.log, "dynamo", 0), since="15min"))


def causes_of(found: Diagnosis) -> list[Cause]:
    return [*found.causes, *(cause for model in found.models for cause in model.causes)]


def codes(found: Diagnosis) -> set[str]:
    return {cause.code for cause in causes_of(found)}


async def ask(fleet, *prompts: str) -> None:
    for prompt in prompts:
        reply = await fleet.ask(COMPLETIONS, prompt=prompt, max_tokens=2)
        assert reply.status == 200, reply.text


def sources(fleet):
    fleet.views.kv_index.state.settle()
    return list(fleet.views.kv_index.state.sources.values())


async def warm(fleet, workers: int = 1) -> None:
    """Every worker's events are there, and the long prompt is cached somewhere, as the frontend knows."""
    await wait_for(lambda: sum(source.exact for source in sources(fleet)) == workers)
    await ask(fleet, LONG)
    await wait_for(lambda: any(sum(source.counts) >= 4 for source in sources(fleet)))


async def append(fleet, worker: int, seq: int, *, model="m", version=1, block_size=16) -> None:
    value = KvEvents(version, model, worker, 0, 5, seq, block_size, False, [])
    key = key_kv_events(model, worker, 0)
    position = await fleet.log.append(TOPIC, Entry(CODEC.encode(value), key, ()))
    await fleet.views.kv_index.wait_applied(position, 60)


async def answer(request, context):
    yield {"token_ids": [65], "finish_reason": "stop"}


async def test_OPS_02_a_fleet_that_routes_by_cache_has_no_cause():
    async with served_fleet() as fleet:
        await fleet.mock_worker()
        await fleet.mock_worker()
        await warm(fleet, workers=2)
        await ask(fleet, LONG + "1", LONG + "2")
        for found in (await look(fleet), await look(fleet, log=True), await look_at_log(fleet)):
            assert found.healthy
            (model,) = found.models
            assert model.by_cache
            assert "2 of 2 ranks exact, 2 of 3 decisions by overlap" in model.summary


async def test_OPS_02_prompts_under_one_block():
    async with served_fleet() as fleet:
        await fleet.mock_worker()
        await wait_for(lambda: any(source.exact for source in sources(fleet)))
        await ask(fleet, "Hi", "Ho")
        for found in (await look(fleet), await look(fleet, log=True), await look_at_log(fleet)):
            (cause,) = causes_of(found)
            assert (cause.code, cause.model) == ("prompts-short", "m")
            assert "2 of 2 decisions" in cause.what
            assert "16 tokens" in cause.what


async def test_OPS_02_no_events_of_a_worker():
    async with served_fleet() as fleet:
        runtime = await fleet.worker(answer)
        await ask(fleet, LONG)
        for found in (await look(fleet), await look(fleet, log=True), await look_at_log(fleet)):
            cause = next(cause for cause in causes_of(found) if cause.code == "no-events")
            assert cause.workers == [runtime.core.instance_id]
            assert "1 of 1 ranks" in cause.what
        page = (await fleet.get("/metrics")).text
        assert 'dynamo_es_routing_decisions_total{model="m",reason="no-events"} 1.0' in page


async def test_OPS_02_events_under_another_model_name():
    async with served_fleet() as fleet:
        runtime = await fleet.worker(answer)
        await append(fleet, runtime.core.instance_id, 0, model="org/m")
        found = await look(fleet)
        assert codes(found) == {"events-under-other-model"}
        assert "org/m" in causes_of(found)[0].what


async def test_OPS_02_events_of_a_worker_are_missing():
    async with served_fleet() as fleet:
        runtime = await fleet.worker(answer)
        await append(fleet, runtime.core.instance_id, 0)
        assert codes(await look(fleet)) == set()
        await append(fleet, runtime.core.instance_id, 7)
        for found in (await look(fleet), await look_at_log(fleet)):
            (cause,) = causes_of(found)
            assert cause.code == "events-missing"
            assert cause.workers == [runtime.core.instance_id]


async def test_OPS_02_the_tokenizer_is_not_loaded(tmp_path):
    async with served_fleet() as fleet:
        await fleet.worker(answer, wait=False, source_path=str(tmp_path / "nowhere"))
        await wait_for(lambda: (status := fleet.models.statuses().get("m")) and "not loaded" in (status.reason or ""))
        found = await look(fleet)
        assert codes(found) == {"tokenizer-not-loaded"}
        assert "nowhere" in causes_of(found)[0].what


async def test_OPS_02_a_hash_version_that_is_not_known():
    async with served_fleet() as fleet:
        runtime = await fleet.worker(answer)
        await append(fleet, runtime.core.instance_id, 0, version=9)
        assert codes(await look(fleet)) == {"hash-version", "no-events"}
        await wait_for(lambda: fleet.core.appender.counters.dead_letters)
        await fleet.core.buffer.flush(60)
        found = await look_at_log(fleet)
        assert codes(found) == {"hash-version", "no-events"}
        assert f"m/{runtime.core.instance_id}:0 (1)" in found.causes[0].what


async def test_OPS_01_OPS_02_block_sizes_that_differ():
    async with served_fleet() as fleet:
        await fleet.mock_worker()
        await fleet.mock_worker()
        await fleet.mock_worker(block_size=64, wait=False)
        await wait_for(lambda: sum(source.exact for source in sources(fleet)) == 3)
        for found in (await look(fleet), await look_at_log(fleet)):
            (cause,) = causes_of(found)
            assert cause.code == "block-size-mismatch"
            assert "64" in cause.what
            assert "16" in cause.what


async def test_OPS_02_all_workers_have_the_same_of_a_prompt():
    async with served_fleet() as fleet:
        await fleet.mock_worker()
        await warm(fleet)
        await fleet.mock_worker()
        await wait_for(lambda: sum(source.exact for source in sources(fleet)) == 2)
        # By name: the second worker gets the prompt too.
        (other,) = [source.key.worker_id for source in sources(fleet) if not sum(source.counts)]
        reply = await fleet.ask(COMPLETIONS, prompt=LONG, max_tokens=2, nvext={"backend_instance_id": other})
        assert reply.status == 200
        await wait_for(lambda: all(sum(source.counts) >= 4 for source in sources(fleet)))
        counters = dict(fleet.models.routers())["m"].router.counters
        counters.decisions.clear()
        await ask(fleet, LONG)
        found = await look(fleet)
        assert found.healthy
        assert "1 of 1 found the same overlap at every worker" in found.models[0].summary


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"config": FrontendConfig(router_mode="round-robin")}, "mode-not-kv"),
        ({"settings": KvRouterSettings(use_kv_events=False)}, "events-disabled"),
        ({"settings": KvRouterSettings(overlap_score_credit=0.0)}, "credit-zero"),
    ],
)
async def test_OPS_02_caches_are_not_asked_for_by_intention(options, code):
    async with served_fleet(**options) as fleet:
        await fleet.mock_worker()
        await wait_for(lambda: any(source.exact for source in sources(fleet)))
        await ask(fleet, LONG)
        assert codes(await look(fleet)) == {code}
        if code == "mode-not-kv":
            assert codes(await look_at_log(fleet)) == {code}


async def test_an_alias_is_told_with_its_model():
    async with served_fleet() as fleet:
        await fleet.worker(answer, aliases=["other"], model_input="Text")
        page = read_health((await fleet.get("/health")).body)
        assert (page.models["m"].routed_as, page.models["other"].routed_as) == (None, "m")
        assert page.models["other"].routing is None
        assert [model.model for model in (await look(fleet)).models] == ["m"]


async def test_OPS_02_workers_that_take_text():
    async with served_fleet() as fleet:
        await fleet.worker(answer, model_input="Text")
        assert codes(await look(fleet)) == {"workers-take-text"}


async def test_OPS_02_the_log_is_away_and_a_fold_is_behind():
    async with served_fleet() as fleet:
        await fleet.mock_worker()
        await wait_for(lambda: any(source.exact for source in sources(fleet)))
        fleet.frontend_log.read_only = True
        await ask(fleet, LONG)
        await wait_for(lambda: fleet.core.log_state.state.value != "ok")
        found = await look(fleet, live=False)
        assert "log-away" in codes(found)
        assert "read-only" in found.causes[0].what
        fleet.frontend_log.read_only = False


async def test_OPS_02_a_worker_that_only_the_log_knows():
    async with served_fleet() as fleet:
        assert codes(await look(fleet)) == {"no-workers"}
        runtime = await fleet.worker(answer)
        logged = await read_log(fleet.log, "dynamo", 0)
        page = read_health((await fleet.get("/health")).body)
        page.models.clear()
        assert codes(diagnose(Facts(page, log=logged))) == {"not-at-frontend"}
        # Its events are in the log, and the frontend's view stands still.
        await fleet.views.kv_index.stop()
        value = KvEvents(1, "m", runtime.core.instance_id, 0, 5, 0, 16, False, [])
        await fleet.log.append(TOPIC, Entry(CODEC.encode(value), key_kv_events("m", runtime.core.instance_id, 0), ()))
        found = await look(fleet, log=True, live=False)
        assert "view-behind" in codes(found)
        assert "no-events" not in codes(found)


async def test_the_page_is_asked_over_http_and_what_is_none_is_told():
    found = {}

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        body = found["body"]
        writer.write(b"HTTP/1.1 503 x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        page = {
            "status": "healthy",
            "log": {"state": "ok"},
            "views": {},
            "models": {"m": {"ready": False, "reason": "why"}},
        }
        found["body"] = json.dumps(page).encode()
        assert (await ask_frontend(url, timeout_s=60)).models["m"].reason == "why"
        assert (await ask_frontend(f"{url}/health", timeout_s=60)).log.state == "ok"
        found["body"] = b"<html>"
        code = await asyncio.to_thread(main, ["diagnose", "--url", url])
        assert code == 2


def test_the_command_line(tmp_path, capsys):
    """From the log alone: exit codes, text and JSON; and what is no log is refused without making one."""
    url = f"embedded://{tmp_path}/log"
    assert main(["diagnose", "--log", url]) == 2
    assert not (tmp_path / "log").exists()
    assert main(["topics", "create", "--log", url]) == 0
    capsys.readouterr()
    assert main(["diagnose", "--log", url]) == 1
    assert capsys.readouterr().out.startswith("no-workers: ")
    assert main(["diagnose", "--log", url, "--json", "--model", "x"]) == 1
    (cause,) = json.loads(capsys.readouterr().out)["causes"]
    assert (cause["code"], cause["model"]) == ("no-model", "x")
    assert main(["diagnose", "--log", url, "--url", "http://127.0.0.1:9"]) == 1
    assert "frontend-away: " in capsys.readouterr().out
    assert main(["diagnose", "--url", "http://user@127.0.0.1:9"]) == 2
    assert "--api-key-file" in capsys.readouterr().err
