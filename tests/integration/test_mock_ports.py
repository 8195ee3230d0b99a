"""The mock engine's own sockets: KV events as an engine tells them, with replay, and where prompts are handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count, repeat
from typing import Any

import pytest
from prometheus_client import generate_latest

from dynamo_es.clock import SystemClock
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.engine import MockEngine
from dynamo_es.engines.mock.event_sockets import EventSockets
from dynamo_es.engines.mock.rendezvous import HandoverServer, fetch_handover
from dynamo_es.engines.mock.text import PlainTokens
from dynamo_es.errors import CannotConnect, ConfigError, ConnectionTimeout, InvalidArgument, StreamIncomplete
from dynamo_es.publishers.kv_events import KvEventPublisher
from tests.support.served_fleet import COMPLETIONS, served_fleet
from tests.unit.publishers.support import Reader, Scope

DEADLINE_S = 60.0
HOST = "127.0.0.1"
PROMPT = list(range(18))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def engine_on_ports(**config: Any) -> AsyncIterator[tuple[MockEngine, EventSockets, Scope]]:
    """An engine that tells its events in both ways: by itself to a scope, and over ZMQ."""
    settings = {"num_gpu_blocks": 64, "block_size": 4, "speedup_ratio": 0.0} | config
    engine = MockEngine(MockEngineConfig(**settings), clock=SystemClock(), output_tokens=PlainTokens())
    scope = Scope(dp_size=engine.config.dp_size)
    engine.publish_to(scope)
    sockets = engine.publish_over_zmq(HOST, 0, 0)
    await engine.start()
    try:
        yield engine, sockets, scope
    finally:
        await engine.close()


async def ask(engine: MockEngine, tokens: list[int], max_tokens: int, **fields: Any) -> list[dict[str, Any]]:
    request = {"token_ids": tokens, "stop_conditions": {"max_tokens": max_tokens}, **fields}
    return [frame async for frame in engine.generate(request)]


def blocks(scope: Scope) -> set[tuple[int, int]]:
    """Rank and sequence hash of every block that a scope was told of."""
    reader = Reader().apply_all(scope.sink.kv)
    assert not reader.gaps
    return {(rank, block) for (rank, _), held in reader.blocks.items() for block in held}


async def agree(engine: MockEngine, direct: Scope, relayed: Scope) -> None:
    """A subscriber that came late sees what it missed with the next message: send some until it has it all."""
    async with asyncio.timeout(DEADLINE_S):
        for number in count(1000):
            await ask(engine, [number] * 5, 1)
            for _ in range(40):
                if blocks(relayed) == blocks(direct):
                    return
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("engine_type", ["vllm", "sglang", "trtllm"])
async def test_a_relay_reads_from_the_socket_what_the_engine_itself_tells(engine_type: str) -> None:
    """Blocks of plain requests, of an adapter and of a tenant, their removal by eviction, and a clear."""
    relayed = Scope()
    async with engine_on_ports(engine_type=engine_type, num_gpu_blocks=24) as (engine, sockets, direct):
        publisher = KvEventPublisher(
            relayed, kv_block_size=4, zmq_endpoint=sockets.endpoints[0], zmq_topic="kv",
            zmq_replay_endpoint=sockets.replay_endpoints[0],
        )  # fmt: skip
        try:
            await ask(engine, PROMPT, 9)
            await ask(engine, PROMPT, 3, routing={"lora_name": "adapter"})
            await ask(engine, PROMPT, 3, routing={"cache_salt": "tenant"})
            assert len(blocks(direct)) >= 12
            await agree(engine, direct, relayed)
            for number in range(6):
                await ask(engine, [number] * 40, 5)
            await ask(engine, PROMPT, 9)
            await agree(engine, direct, relayed)
            assert engine.reset_prefix_cache()
            await until(lambda: not blocks(relayed))
        finally:
            publisher.shutdown()
    await relayed.close()
    await direct.close()


async def test_each_rank_has_its_own_socket_and_says_who_it_is() -> None:
    relayed = Scope(dp_size=2)
    async with engine_on_ports(dp_size=2) as (engine, sockets, direct):
        publishers = [
            KvEventPublisher(
                relayed, kv_block_size=4, dp_rank=rank, zmq_endpoint=sockets.endpoints[rank],
                zmq_replay_endpoint=sockets.replay_endpoints[rank],
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            await ask(engine, PROMPT, 1, dp_rank=1)
            await ask(engine, PROMPT, 1, dp_rank=0)
            await agree(engine, direct, relayed)
            assert {rank for rank, _ in blocks(relayed)} == {0, 1}
        finally:
            for publisher in publishers:
                publisher.shutdown()
    await relayed.close()
    await direct.close()


async def test_a_port_that_is_taken_is_told() -> None:
    async with engine_on_ports() as (engine, sockets, direct):
        port = int(sockets.endpoints[0].rpartition(":")[2])
        other = MockEngine(engine.config, clock=SystemClock(), output_tokens=PlainTokens())
        with pytest.raises(ConfigError, match=f"--zmq-kv-events-ports: rank 0 cannot listen at tcp://{HOST}:{port}"):
            other.publish_over_zmq(HOST, port)
    await direct.close()


@asynccontextmanager
async def handovers(timeout_s: float = DEADLINE_S) -> AsyncIterator[HandoverServer]:
    server = HandoverServer(timeout_s)
    await server.open(HOST, 0)
    try:
        yield server
    finally:
        await server.close()


def room(server: HandoverServer, number: int = 1) -> dict[str, Any]:
    return {"bootstrap_host": HOST, "bootstrap_port": server.port, "bootstrap_room": number}


@pytest.mark.parametrize("prefill_first", [True, False])
async def test_both_sides_meet_whoever_comes_first(prefill_first: bool) -> None:
    async with handovers() as server:
        if prefill_first:
            server.answer(1, {"x": 1})
        fetching = asyncio.create_task(fetch_handover(room(server), DEADLINE_S))
        if not prefill_first:
            await until(lambda: server.rooms == 1)
            server.answer(1, {"x": 1})
        assert await fetching == {"x": 1}
        await until(lambda: server.rooms == 0)


async def test_a_hand_over_that_fails_says_so() -> None:
    async with handovers() as server:
        server.answer(1, None)
        with pytest.raises(StreamIncomplete):
            await fetch_handover(room(server), DEADLINE_S)
        with pytest.raises(ConnectionTimeout, match=r"within 0\.05 s"):
            await fetch_handover(room(server, 2), 0.05)
        for bad in (None, {}, room(server) | {"bootstrap_room": "1"}):
            with pytest.raises(InvalidArgument, match="bootstrap_info must have"):
                await fetch_handover(bad, 1)
        port = server.port
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"[]\n")
        assert await reader.read() == b""
        writer.close()
    with pytest.raises(CannotConnect):
        await fetch_handover({"bootstrap_host": HOST, "bootstrap_port": port, "bootstrap_room": 1}, DEADLINE_S)


async def test_rooms_that_nobody_enters_are_given_up() -> None:
    async with handovers(0.05) as server:
        server.answer(1, {"x": 1})
        assert server.rooms == 1
        await until(lambda: server.rooms == 0)


async def test_a_fleet_hands_prompts_over_at_the_bootstrap_port() -> None:
    async with served_fleet() as fleet:
        await fleet.mock_worker(worker_type="prefill", wait=False, bootstrap_ports="0")
        await fleet.mock_worker(
            worker_type="decode", kv_transfer_bandwidth=1.0, kv_bytes_per_token=1000, zmq_kv_events_ports="0"
        )
        reply = await fleet.ask(COMPLETIONS, prompt="one two three " * 30, max_tokens=5)
        assert reply.status == 200
        assert reply.json()["usage"]["completion_tokens"] == 5
        cards = fleet.core.registry.state.models.values()
        bootstrap = {card.worker_type: "disaggregated_endpoint" in card.runtime_config for card in cards}
        assert bootstrap == {"prefill": True, "decode": False}
        page = generate_latest(fleet.metrics.registry).decode()
        assert 'dynamo_es_disagg_requests_total{model="m",way="bootstrap"} 1.0' in page


async def test_a_transfer_takes_the_time_of_its_bytes() -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    for mode, tokens in (("full_prompt", 18), ("destination_missing", 2)):
        config = MockEngineConfig(
            num_gpu_blocks=64, block_size=4, speedup_ratio=2.0, worker_type="decode", kv_bytes_per_token=10**6,
            kv_transfer_bandwidth=0.5, kv_transfer_timing_mode=mode,
        )  # fmt: skip
        prompts = MockEngineConfig(worker_type="prefill", speedup_ratio=0)
        prefill = MockEngine(prompts, clock=SystemClock(), output_tokens=lambda *_: repeat(1))
        decode = MockEngine(config, clock=SystemClock(), output_tokens=lambda *_: repeat(1), sleep=sleep)
        await prefill.start()
        await decode.start()
        try:
            params = (await ask(prefill, PROMPT, 1))[0]["disaggregated_params"]
            await ask(decode, PROMPT, 1)
            slept.clear()
            await ask(decode, PROMPT, 1, prefill_result={"disaggregated_params": params})
        finally:
            await prefill.close()
            await decode.close()
        assert slept[0] == pytest.approx(tokens * 10**6 / 0.5e9 / 2)
