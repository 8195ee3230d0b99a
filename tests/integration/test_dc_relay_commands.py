"""``dynamo-es relay``: what its options come to, the processes of two data centres, and the view over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import signal
import sys
from pathlib import Path

import httpx
import pytest

from dynamo_es.cli.main import main
from dynamo_es.cli.relay import add_parser, relay_settings
from dynamo_es.clock import SystemClock
from dynamo_es.config.options import load
from dynamo_es.config.relay_options import RelayConfig
from dynamo_es.config.tree import LogConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.open import open_log
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.services.dc_relay.global_view import GlobalKvView, RelaySource
from dynamo_es.services.dc_relay.http import build_relay_app
from dynamo_es.services.dc_relay.process import RelayProcessSettings, health_endpoint, run_relay
from dynamo_es.services.dc_relay.ranking import PromptQuery
from dynamo_es.services.dc_relay.settings import RelayScope, RelaySettings
from tests.support.fleet import Fleet
from tests.support.relay_sites import Site, shared, site
from tests.support.runtimes import PATIENT, collect, make_runtime, wait_for

PROMPT = list(range(100, 132))


def settings_of(*arguments: str, env: dict[str, str] | None = None) -> RelaySettings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_parser(parser.add_subparsers())
    flags = parser.parse_args(["relay", "run", *arguments])
    return relay_settings(load(RelayConfig, flags, env or {}), flags, env or {})


@pytest.mark.parametrize(
    ("arguments", "env", "scope"),
    [
        ([], {}, RelayScope()),
        (["--namespaces", "a, b"], {}, RelayScope(("a", "b"))),
        (["--namespace-filter", "a"], {}, RelayScope(("a",))),
        (["--watch-all"], {"DYN_RELAY_NAMESPACES": "a"}, RelayScope()),
        ([], {"DYN_RELAY_NAMESPACES": "a,b"}, RelayScope(("a", "b"))),
        (["--namespaces", "c"], {"DYN_RELAY_WATCH_ALL": "true"}, RelayScope(("c",))),
        ([], {"DYN_RELAY_WATCH_ALL": "false"}, RelayScope()),
        (
            ["--endpoint-prefix", "a.b", "--endpoint-prefix=a.c"], {"DYN_RELAY_ENDPOINT_PREFIXES": "x"},
            RelayScope(None, ("a.b", "a.c")),
        ),
        ([], {"DYN_RELAY_ENDPOINT_PREFIXES": "a.b,a.c"}, RelayScope(None, ("a.b", "a.c"))),
    ],
)  # fmt: skip
def test_scopes_come_from_flags_before_variables(arguments, env, scope: RelayScope) -> None:
    assert settings_of(*arguments, env={"DYN_DC_ID": "x", **env}).scope == scope


def test_the_other_options_reach_the_relay() -> None:
    env = {"DYN_RELAY_PUBLICATION_DELAY_MS": "7", "DYN_RELAY_RECOVERY_ATTEMPT_TIMEOUT_MS": "8"}
    arguments = ["--dc-id", "x", "--expected-unique-blocks", "5", "--publication-threshold", "6"]
    arguments += ["--load-window-ms", "90", "--relay-snapshot-interval", "10"]
    assert settings_of(*arguments, env=env) == RelaySettings("x", RelayScope(), 6, 7, 8, 5, 90, 10.0)
    assert settings_of("--dc-id", "x") == RelaySettings("x")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "--dc-id or DYN_DC_ID is needed"),
        (["--dc-id", "x", "--namespaces", "a", "--watch-all"], "--namespaces and --watch-all exclude each other"),
        (["--dc-id", "x", "--namespaces", "a", "--namespace-filter", "b"], "exclude each other"),
        (["--dc-id", "x", "--namespaces", "a", "--endpoint-prefix", "b.c"], "b.c is outside the configured namespaces"),
    ],
)
def test_options_that_cannot_be_are_told(arguments, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_of(*arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--token-ids", "1"], "--model is needed"),
        (["--model", "m"], "the prompt is needed once"),
        (["--model", "m", "--token-ids", "1", "--token-ids-file", "x"], "the prompt is needed once"),
        (["--model", "m", "--token-ids-file", "{tmp}/none"], "cannot be read: No such file"),
        (["--model", "m", "--token-ids-file", "{tmp}/text"], "expected a JSON list of token ids"),
        (["--model", "m", "--token-ids-file", "{tmp}/large"], "a token id is from 0 to 4294967295"),
        (["--model", "m", "--token-ids", "1"], "there is no log at embedded://{tmp}/log"),
        (["--model", "m", "--token-ids", "1", "--relay-source", "memory://"], "is a log within one process"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_line(tmp_path: Path, capsys, arguments, text: str) -> None:
    (tmp_path / "text").write_text("{")
    (tmp_path / "large").write_text("[4294967296]")
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    assert main(["relay", "query", "--log", f"embedded://{tmp_path}/log", *given]) == 2
    error = capsys.readouterr().err
    assert text.format(tmp=tmp_path) in error
    assert error.count("\n") == 1


@pytest.fixture
async def east():
    async with site("east") as made:
        yield made


async def test_the_health_endpoint_is_where_dynamo_has_it(east: Site) -> None:
    stop = asyncio.Event()
    ready: list[str] = []
    settings = RelayProcessSettings(
        RuntimeSettings(LogConfig(url="memory://"), runtime=PATIENT, role="tool"), RelaySettings("east"), "ops"
    )
    task = asyncio.create_task(
        run_relay(
            settings, stop, clock=SystemClock(), rng=random.Random(1), log=shared(east.log), on_ready=ready.append
        )
    )
    await wait_for(lambda: ready or task.done())
    path = f"ops.kv_dc_relay_{hashlib.sha256(b'east').hexdigest()[:32]}.health"
    assert ready == [path]
    await east.worker()
    client = await east.runtime().endpoint(path).client()
    await client.wait_for_instances()
    (answer,) = await collect(client.generate({}, annotated=False))
    assert "'healthy': True" in answer
    assert "'fenced_endpoint_count': 0" in answer
    stop.set()
    async with asyncio.timeout(60):
        await task


async def test_the_view_answers_over_http(east: Site) -> None:
    worker = await east.worker()
    worker.store(PROMPT)
    relay = await east.relay()
    await wait_for(lambda: list(relay.pools().values()) == [8])
    view = GlobalKvView([RelaySource(shared(east.log), "dynamo")], clock=SystemClock(), rng=random.Random(1))
    await view.start(60)
    transport = httpx.ASGITransport(build_relay_app(view))
    async with httpx.AsyncClient(transport=transport, base_url="http://view") as client:
        await wait_for(lambda: view.topics()[0]["state"] == "live")
        health = (await client.get("/health")).json()
        assert health["status"] == "ok"
        assert [topic["topic"] for topic in health["topics"]] == ["dynamo.dc-relay at memory://east"]
        (centre,) = (await client.get("/data_centres")).json()["data_centres"]
        assert (centre["dc_id"], centre["models"], centre["known_pools"]) == ("east", {"ns/m": True}, 1)
        answer = await client.post("/query", json={"model": "m", "token_ids": PROMPT})
        assert [(each["dc_id"], each["matched_blocks"]) for each in answer.json()["candidates"]] == [("east", 8)]
        salted = await client.post("/query", json={"model": "m", "token_ids": PROMPT, "cache_salt": "tenant"})
        assert [each["matched_blocks"] for each in salted.json()["candidates"]] == [0]
        assert (await client.post("/query", json={"model": "x", "token_ids": []})).status_code == 404
        assert (await client.post("/query", json={"model": "m", "token_ids": [-1]})).status_code == 422
        assert (await client.post("/query", json={"model": "m"})).status_code == 422
        assert (
            await client.post("/query", content=b"{", headers={"content-type": "application/json"})
        ).status_code == 400
        page = (await client.get("/metrics")).text
    assert 'dynamo_es_global_data_centres{state="fresh"} 1.0' in page
    assert 'dynamo_es_global_pools{state="known"} 1.0' in page
    await view.close()


async def ask(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynamo_es.cli.main", "relay", "query", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode, (out or err).decode()


async def prefill(url: str) -> None:
    """A worker of the log computes the prompt, and caches its blocks."""
    runtime = make_runtime(url=url, runtime=PATIENT)
    client = await runtime.endpoint("dynamo.backend.generate").client()
    await client.wait_for_instances()
    await collect(client.generate({"token_ids": PROMPT, "stop_conditions": {"max_tokens": 4}}, annotated=False))
    await runtime.close()


async def test_processes_of_two_data_centres_and_a_relay_that_is_killed(tmp_path: Path) -> None:
    """Each has a log of its own; the question is asked of both."""
    fleets = {name: Fleet(f"embedded://{tmp_path}/{name}", tmp_path) for name in ("east", "west")}
    mock = ("worker", "mock", "--model-name", "m", "--block-size", "4", "--speedup-ratio", "100")
    try:
        relays = {}
        for name, fleet in fleets.items():
            await fleet.start(f"{name}-worker", *mock)
            relays[name] = await fleet.start(f"{name}-relay", "relay", "run", "--dc-id", name)
        for name, relay in relays.items():
            assert await relay.wait_ready() == health_endpoint("dynamo", name)
        await asyncio.gather(*(fleet.processes[0].wait_ready() for fleet in fleets.values()))
        logs = [open_log(fleet.url, SystemClock()) for fleet in fleets.values()]
        view = GlobalKvView([RelaySource(log, "dynamo") for log in logs], clock=SystemClock(), rng=random.Random(1))
        await view.start(60)

        def known() -> set[str]:
            return {each.dc_id for each in view.find(PromptQuery("m", PROMPT)) if each.known and each.ready}

        await wait_for(lambda: known() == {"east", "west"})
        await prefill(fleets["west"].url)

        def best() -> list[tuple[str, int]]:
            return [(each.dc_id, each.matched_blocks) for each in view.find(PromptQuery("m", PROMPT))]

        await wait_for(lambda: best() == [("west", 8), ("east", 0)])
        lives = {centre.dc_id: centre.relay for state in view.states for centre in state.centres.values()}
        assert await relays["east"].end(signal.SIGKILL) == -signal.SIGKILL
        again = await fleets["east"].start("east-again", "relay", "run", "--dc-id", "east")
        await again.wait_ready()

        def life_in_the_east() -> int:
            return next(state.centres["east"].relay for state in view.states if "east" in state.centres)

        await wait_for(lambda: life_in_the_east() != lives["east"] and known() == {"east", "west"})
        await view.close()
        sources = [f"--relay-source={fleet.url}" for fleet in fleets.values()]
        code, text = await ask(*sources, "--model", "m", "--token-ids", "1,2,3,4", "--relay-stale-after", "600")
        assert code == 0, text
        answer = json.loads(text)
        assert {(each["dc_id"], each["stale"], each["ready"]) for each in answer["candidates"]} == {
            ("east", False, True), ("west", False, True),
        }  # fmt: skip
        assert {each["dc_id"]: each["models"] for each in answer["data_centres"]} == {
            "east": {"dynamo/m": True}, "west": {"dynamo/m": True},
        }  # fmt: skip
        assert await again.end() == 0
    finally:
        for fleet in fleets.values():
            await asyncio.gather(*(process.end(signal.SIGKILL) for process in fleet.processes))
