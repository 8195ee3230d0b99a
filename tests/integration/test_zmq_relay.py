"""The ZMQ relay against real sockets, fed with what vLLM 0.32 sent."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.router.hashing import hash_prompt
from schemas.columns import unpack_u64
from schemas.kv_events import AllBlocksCleared, BlocksStored
from tests.support.wire_golden import CASES, as_message, expected, needs_sockets, parents_of, reachable
from tests.unit.publishers.support import Reader, Scope, chain

RELAY_MODES = Path(__file__).parents[1] / "data/golden/services/zmq_relay_modes.json"
RECORDING = Path(__file__).parents[1] / "data" / "vllm-0.32.0-chat.jsonl"
BLOCK_SIZE = 32
DEADLINE_S = 60.0
SOCKET_CASES = [case for case in CASES if needs_sockets(case)]
# An older vLLM's answers, without the topic, fill the gap here; the reference drops them and what hangs under them.
DEPARTURES = {"replay_3frame_legacy"}
OTHER_RANK = 9


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


class EnginePublisher:
    """Publishes as vLLM's ZmqEventPublisher does. XPUB is PUB that also shows who subscribed."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._socket = context.socket(zmq.XPUB)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    async def subscribed(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            assert (await self._socket.recv())[:1] == b"\x01"

    async def send(self, seq: int, payload: bytes, topic: bytes = b"kv") -> None:
        await self._socket.send_multipart([topic, seq.to_bytes(8, "big"), payload])

    async def send_frames(self, frames: list[bytes]) -> None:
        await self._socket.send_multipart(frames)


class ReplayServer:
    """An engine's replay socket with the batches it still has."""

    def __init__(self, context: zmq.asyncio.Context, batches: dict[int, bytes], *, with_topic: bool) -> None:
        self._socket = context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.batches = batches
        self.requests: list[int] = []
        self._topic = [b"kv"] if with_topic else []
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self._socket.recv_multipart()
            self.requests.append(int.from_bytes(start, "big"))
            for seq in sorted(self.batches):
                if seq >= self.requests[-1]:
                    frames = [client, empty, *self._topic, seq.to_bytes(8, "big"), self.batches[seq]]
                    await self._socket.send_multipart(frames)
            await self._socket.send_multipart([client, empty, *self._topic, b"\xff" * 8, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


class RecordedReplay:
    """A replay socket that gives recorded answers to every question after ``open``, and before it has nothing."""

    def __init__(self, context: zmq.asyncio.Context, answers: list[list[bytes]]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self.requests: list[list[str]] = []
        self.open = False
        self._answers = answers
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            client, *question = await self._socket.recv_multipart()
            self.requests.append([frame.hex() for frame in question])
            for answer in self._answers if self.open else [[b"", b"", b"\xff" * 8, b""]]:
                await self._socket.send_multipart([client, *answer])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def scope() -> AsyncIterator[Scope]:
    scope = Scope()
    yield scope
    await scope.close()


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, block_size: int = 4) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": block_size,
    }  # fmt: skip


def batch(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


async def test_predicts_what_vllm_found_in_its_cache_for_every_recorded_request(
    context: zmq.asyncio.Context, scope: Scope
) -> None:
    engine = EnginePublisher(context)
    publisher = KvEventPublisher(scope, kv_block_size=BLOCK_SIZE, zmq_endpoint=engine.address, zmq_topic="kv")
    await engine.subscribed()
    reader, read = Reader(), 0
    requests = hits = frames = 0
    for line in RECORDING.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        if item["kind"] == "frame":
            await engine.send(item["seq"], base64.b64decode(item["payload_b64"]), item["topic"].encode())
            frames += 1
        elif item["kind"] == "request":
            await until(lambda sent=frames: publisher.counters()["relay_messages"] == sent)
            reader.apply_all(scope.sink.kv[read:])
            read = len(scope.sink.kv)
            prompt = item["prompt_token_ids"]
            depth = reader.depth(hash_prompt(prompt, BLOCK_SIZE)[1])
            predicted = min(depth * BLOCK_SIZE, (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)
            assert predicted == item["cached_tokens"], f"request {requests}"
            requests += 1
            hits += predicted > 0
    assert (requests, frames) == (33, 58)
    assert hits > 10
    assert reader.gaps == 0
    assert sum(isinstance(event, AllBlocksCleared) for record in scope.sink.kv for event in record.events) == 1
    assert publisher.counters()["orphan_events"] == 0
    assert len({record.incarnation for record in scope.sink.kv}) == 1


async def test_EVT_04_a_restarted_engine_is_a_new_incarnation(context: zmq.asyncio.Context, scope: Scope) -> None:
    engine = EnginePublisher(context)
    publisher = KvEventPublisher(scope, kv_block_size=4, zmq_endpoint=engine.address)
    await engine.subscribed()
    for seq, (name, first) in enumerate([(1, 0), (2, 10), (3, 20)]):
        await engine.send(seq, batch(stored([name], list(range(first, first + 4)))))
    await engine.send(0, batch(stored([1], [90, 91, 92, 93])))
    await until(lambda: publisher.counters()["relay_messages"] == 4)
    reader = Reader().apply_all(scope.sink.kv)
    assert reader.held() == set(chain([90, 91, 92, 93]))
    incarnations = [record.incarnation for record in scope.sink.kv]
    assert len(set(incarnations)) == 2
    assert incarnations == sorted(incarnations, key=incarnations.index), "the old one never comes back"


async def test_a_gap_without_replay_withdraws_all_blocks_until_they_are_proved_again(
    context: zmq.asyncio.Context, scope: Scope
) -> None:
    engine = EnginePublisher(context)
    publisher = KvEventPublisher(scope, kv_block_size=4, zmq_endpoint=engine.address)
    await engine.subscribed()
    await engine.send(0, batch(stored([1, 2], list(range(8))), stored([9], [50, 51, 52, 53])))
    await engine.send(2, batch(stored([3], [8, 9, 10, 11], parent=2)))
    await until(lambda: publisher.counters()["relay_messages"] == 2)
    reader = Reader().apply_all(scope.sink.kv)
    assert reader.held() == set(chain(range(12))), "the chain is proved by its child, the other block is not"
    assert publisher.counters()["relay_gaps"] == 1
    assert publisher.counters()["lost_batches"] == 1
    assert publisher.counters()["incarnations"] == 2


@pytest.mark.parametrize("with_topic", [True, False], ids=["with-topic", "older-vllm"])
async def test_replay_fills_a_gap_and_the_source_stays_exact(
    context: zmq.asyncio.Context, scope: Scope, with_topic: bool
) -> None:
    engine = EnginePublisher(context)
    replay = ReplayServer(context, {}, with_topic=with_topic)
    publisher = KvEventPublisher(
        scope, kv_block_size=4, zmq_endpoint=engine.address, zmq_replay_endpoint=replay.address
    )
    await engine.subscribed()
    await until(lambda: replay.requests == [0])
    await engine.send(0, batch(stored([1], [0, 1, 2, 3])))
    await until(lambda: publisher.counters()["relay_messages"] == 1)
    replay.batches = {
        1: batch(stored([2], [4, 5, 6, 7], parent=1)),
        2: batch(stored([3], [8, 9, 10, 11], parent=2)),
        3: batch({"type": "BlockRemoved", "block_hashes": [3]}),
    }
    await engine.send(2, replay.batches[2])
    await engine.send(3, replay.batches[3])
    await engine.send(4, batch(stored([4], [20, 21, 22, 23])))
    await until(lambda: publisher.counters()["relay_messages"] == 4)
    reader = Reader().apply_all(scope.sink.kv)
    assert reader.held() == set(chain(range(8))) | set(chain([20, 21, 22, 23]))
    counters = publisher.counters()
    assert (counters["relay_gaps"], counters["relay_restarts"], counters["incarnations"]) == (0, 0, 1)
    assert replay.requests == [0, 1]
    await replay.close()


@pytest.mark.parametrize("case", SOCKET_CASES, ids=lambda case: case["name"])
async def test_recorded_frames_and_replays_leave_the_blocks_that_the_reference_holds(
    context: zmq.asyncio.Context, scope: Scope, case: dict[str, Any]
) -> None:
    engine = EnginePublisher(context)
    answers = as_message(case["replay_server_frames"])
    replay = RecordedReplay(context, answers) if answers is not None else None
    KvEventPublisher(
        scope,
        kv_block_size=case["register"]["block_size"],
        dp_rank=case["register"]["dp_rank"],
        zmq_endpoint=engine.address,
        zmq_replay_endpoint=replay.address if replay is not None else None,
    )
    await engine.subscribed()
    if replay is not None:
        await until(lambda: len(replay.requests) == 1)
        replay.open = True
    for item in case["batches"]:
        if "raw_frames" in item:
            await engine.send_frames(as_message(item["raw_frames"]))
        else:
            await engine.send(item["seq"], msgspec.msgpack.encode(as_message(item["batch"])))

    # A message of another rank behind them shows when all are taken.
    last = max(item.get("seq", 0) for item in case["batches"])
    await engine.send(last + 1, batch(stored([1], [0, 1, 2, 3]), rank=OTHER_RANK))

    def read() -> dict[tuple[int, str], set[int]]:
        return Reader().apply_all(scope.sink.kv).blocks

    await until(lambda: bool(read().get((OTHER_RANK, "device"))))
    parents = parents_of(scope.sink.kv)
    found = {key: held for key, blocks in read().items() if (held := reachable(blocks, parents, key[1]))}
    del found[OTHER_RANK, "device"]
    assert (found == expected(case["dump_events"])) is (case["name"] not in DEPARTURES)
    if replay is not None:
        assert replay.requests[1:] == case["replay_requests_hex"], "asked again only for the gap"
        await replay.close()


async def test_relayed_and_manual_events_come_as_the_reference_relays_them(
    context: zmq.asyncio.Context, scope: Scope
) -> None:
    """golden/services/zmq_relay_modes.json. A block under an unknown parent (its fifth event) waits for that here."""
    recorded = [each[0] for each in json.loads(RELAY_MODES.read_text())["kv_relay_router_events"]]
    engine = EnginePublisher(context)
    publisher = KvEventPublisher(scope, kv_block_size=4, dp_rank=2, zmq_endpoint=engine.address)
    await engine.subscribed()
    one, two = [1, 2, 3, 4], [5, 6, 7, 8]
    messages = [
        ["BlockStored", [11, 12], None, [*one, *two], 4, None],
        ["BlockRemoved", [12]],
        ["AllBlocksCleared"],
        ["BlockStored", [14], None, one, 4, None, "CPU", "lo"],
    ]
    for seq, message in enumerate(messages):
        await engine.send(seq, batch(message))
        # One by one, or what cancels out would never be told.
        await until(lambda seen=seq: sum(len(record.events) for record in scope.sink.kv) > seen)
    await engine.send(4, batch(["BlockStored", [-3], -2, one, 4, None]))
    await until(lambda: publisher.counters()["relay_messages"] == 5)
    publisher.publish_stored(two, [4], [77])
    events = [(record.dp_rank, event) for record in scope.sink.kv for event in record.events]
    assert [type(event).__name__ for _, event in events] == [
        "BlocksStored", "BlocksRemoved", "AllBlocksCleared", "BlocksStored", "BlocksStored",
    ]  # fmt: skip
    for (rank, event), told in zip(events, [*recorded[:4], recorded[5]], strict=True):
        if isinstance(event, BlocksStored):
            assert (rank, event.tier) == (told["event"]["dp_rank"], told["storage_tier"])
            hashes = [block["tokens_hash"] for block in told["event"]["data"]["stored"]["blocks"]]
            assert list(unpack_u64(event.tokens_hashes)) == hashes


async def test_an_engine_that_restarts_after_replay_is_noticed(context: zmq.asyncio.Context, scope: Scope) -> None:
    engine = EnginePublisher(context)
    replay = ReplayServer(context, {seq: batch(stored([seq], [seq] * 4)) for seq in range(5)}, with_topic=True)
    publisher = KvEventPublisher(
        scope, kv_block_size=4, zmq_endpoint=engine.address, zmq_replay_endpoint=replay.address
    )
    await engine.subscribed()
    await until(lambda: publisher.counters()["relay_replayed"] == 5)
    await engine.send(0, batch(stored([100], [100] * 4)))
    await until(lambda: publisher.counters()["relay_messages"] == 1)
    assert Reader().apply_all(scope.sink.kv).held() == set(chain([100] * 4))
    assert publisher.counters()["relay_restarts"] == 1
    await replay.close()


async def test_malformed_messages_and_batches_cost_only_themselves(context: zmq.asyncio.Context, scope: Scope) -> None:
    engine = EnginePublisher(context)
    publisher = KvEventPublisher(scope, kv_block_size=4, zmq_endpoint=engine.address)
    await engine.subscribed()
    await engine.send_frames([b"kv", b"\x00" * 8])
    await engine.send_frames([b"kv", b"\x00" * 4, batch()])
    await engine.send(0, batch(["Nonsense", 1], stored([1], [0, 1, 2, 3])))
    await until(lambda: publisher.counters()["relay_messages"] == 1)
    assert Reader().apply_all(scope.sink.kv).held() == set(chain(range(4)))
    assert publisher.counters()["relay_malformed"] == 2
    assert [letter.reason for letter in scope.sink.dead_letters] == ["rejected"]
    assert scope.sink.dead_letters[0].value is None


async def test_an_address_that_is_none_leaves_the_worker_without_events(
    scope: Scope, caplog: pytest.LogCaptureFixture
) -> None:
    KvEventPublisher(scope, kv_block_size=4, zmq_endpoint="nonsense")
    await until(lambda: "no KV events from nonsense" in caplog.text)
    assert len(scope.sink.kv) == 1
    assert scope.sink.kv[0].reset
