"""Forward passes from an engine's socket, through the log, to who follows them (golden/services/fpm_api.json)."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from dynamo_es.clock import SystemClock
from dynamo_es.llm import (
    FpmDirectPublisher,
    FpmEventRelay,
    FpmEventSubscriber,
    ModelInput,
    ModelType,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo_es.log.memory import MemoryLog
from dynamo_es.publishers.forward_pass_bytes import unpack_pass
from dynamo_es.publishers.forward_pass_reader import MAX_WAITING_MESSAGES, PassQueue
from dynamo_es.runtime.runtime import DistributedRuntime
from tests.support.runtimes import make_runtime, wait_for

GOLDEN = Path(__file__).parents[1] / "data/golden/services"
MODEL = Path(__file__).parents[1] / "data/models/smollm2-135m-instruct"
API = {case["case"]: case["result"] for case in json.loads((GOLDEN / "fpm_api.json").read_text())["cases"]}
RECORDED = [bytes.fromhex(c["hex"]) for c in json.loads((GOLDEN / "fpm_bytes.json").read_text())["cases"]]
PATH = "ns.worker.generate"
DEADLINE_S = 60.0
COUNTS = {
    "scheduled_num_prefill_requests": 1, "scheduled_sum_prefill_tokens": 2, "scheduled_sum_prefill_kv_tokens": 3,
    "scheduled_num_decode_requests": 4, "scheduled_sum_decode_kv_tokens": 5, "queued_num_prefill_requests": 6,
    "queued_sum_prefill_tokens": 7, "queued_num_decode_requests": 8, "queued_sum_decode_kv_tokens": 9,
}  # fmt: skip


class Site:
    """A worker and an observer on one log, each with a runtime of its own."""

    def __init__(self, log: MemoryLog) -> None:
        self.worker: DistributedRuntime = make_runtime(log)
        self.observer: DistributedRuntime = make_runtime(log, role="router")
        self.worker_id = str(self.worker.core.instance_id)

    async def register(self, **more: Any) -> None:
        await register_model(
            ModelInput.Tokens, ModelType.Chat, self.worker.endpoint(PATH), str(MODEL), "m",
            worker_type=WorkerType.Aggregated, **more,
        )  # fmt: skip

    def subscriber(self, path: str = "ns.worker.other") -> FpmEventSubscriber:
        return FpmEventSubscriber(self.observer.endpoint(path))

    def publisher(self, dp_size: int = 1, heartbeat_interval_s: float = 60.0) -> FpmDirectPublisher:
        return FpmDirectPublisher(self.worker.endpoint(PATH), self.worker_id, dp_size, heartbeat_interval_s)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    site = Site(log)
    yield site
    await site.observer.close()
    await site.worker.close()
    await log.close()


def refused(case: str) -> Any:
    expected = API[case]
    assert expected["err"] == "RuntimeError"
    return pytest.raises(RuntimeError, match=f"^{re.escape(expected['msg'])}$")


async def test_tracking_shows_the_newest_pass_of_each_rank_of_workers_with_a_card(site: Site) -> None:
    subscriber = site.subscriber()
    with refused("stats_before"):
        subscriber.get_recent_stats()
    await asyncio.to_thread(subscriber.start_tracking)
    with refused("track_recv"):
        await asyncio.to_thread(subscriber.recv)
    with pytest.raises(RuntimeError, match=r"^Tracking already started$"):
        subscriber.start_tracking()
    assert subscriber.get_recent_stats() == {}
    assert subscriber.get_model_cards() == {}
    await site.register()
    publisher = site.publisher(dp_size=2)
    for wall_time in (0.25, 0.5):
        for rank in (0, 1):
            publisher.publish(**COUNTS, wall_time_secs=wall_time, dp_rank=rank)

    def times() -> list[float]:
        stats = subscriber.get_recent_stats()
        assert {key[0] for key in stats} <= {site.worker_id}
        return [unpack_pass(data).wall_time for _, data in sorted(stats.items())]

    await wait_for(lambda: times() == [0.5, 0.5], DEADLINE_S)
    newest = unpack_pass(subscriber.get_recent_stats()[site.worker_id, 1])
    assert (newest.worker_id, newest.dp_rank, newest.counter_id) == (site.worker_id, 1, 2)
    assert msgspec.structs.astuple(newest.queued_requests) == (6, 7, 0.0, 8, 9, 0.0)
    cards = {worker: json.loads(text) for worker, text in subscriber.get_model_cards().items()}
    assert cards.keys() == {site.worker_id}
    assert sorted(cards[site.worker_id]) == API["cards"]["<WID>"]

    await site.register(lora_name="adapter", base_model_path=str(MODEL))
    await unregister_model(site.worker.endpoint(PATH), "adapter")
    await wait_for(lambda: len(site.observer.core.registry.state.models) == 1, DEADLINE_S)
    assert json.loads(subscriber.get_model_cards()[site.worker_id])["display_name"] == "m"
    assert times() == [0.5, 0.5]

    await unregister_model(site.worker.endpoint(PATH))
    await wait_for(lambda: not subscriber.get_model_cards(), DEADLINE_S)
    assert subscriber.get_recent_stats() == {}, "a worker that is gone takes its passes along"
    subscriber.shutdown()
    assert subscriber.get_recent_stats() == {}


async def test_recv_gives_what_comes_from_now_on_and_ends_at_shutdown(site: Site) -> None:
    await site.register()
    site.publisher().publish(**COUNTS, wall_time_secs=9.0, dp_rank=0)
    await site.worker.core.buffer.flush(DEADLINE_S)
    subscriber = site.subscriber()
    with pytest.raises(RuntimeError, match=r"asyncio\.to_thread"):
        subscriber.recv()
    waiting = asyncio.create_task(asyncio.to_thread(subscriber.recv))
    await wait_for(lambda: subscriber._tasks, DEADLINE_S)
    with refused("recv_then_track"):
        subscriber.start_tracking()
    publisher = site.publisher()
    publisher.publish(**COUNTS, wall_time_secs=0.5, dp_rank=0)
    async with asyncio.timeout(DEADLINE_S):
        data = await waiting
    assert data is not None
    assert unpack_pass(data).wall_time == 0.5
    waiting = asyncio.create_task(asyncio.to_thread(subscriber.recv))
    subscriber.shutdown()
    async with asyncio.timeout(DEADLINE_S):
        assert await waiting is None
        assert await asyncio.to_thread(subscriber.recv) is None


async def test_recv_leaves_out_workers_of_other_components_only(site: Site) -> None:
    await site.register()
    elsewhere, here = site.subscriber("ns.prefill.generate"), site.subscriber()
    heard = [asyncio.create_task(asyncio.to_thread(each.recv)) for each in (elsewhere, here)]
    await wait_for(lambda: elsewhere._tasks and here._tasks, DEADLINE_S)
    await wait_for(lambda: site.observer.core.registry.state.models, DEADLINE_S)
    site.publisher().publish(**COUNTS, wall_time_secs=0.5, dp_rank=0)
    async with asyncio.timeout(DEADLINE_S):
        assert await heard[1] is not None
    assert not heard[0].done()
    elsewhere.shutdown()
    async with asyncio.timeout(DEADLINE_S):
        assert await heard[0] is None


async def test_the_end_of_the_runtime_ends_a_recv_that_waits(site: Site) -> None:
    subscriber = site.subscriber()
    waiting = asyncio.create_task(asyncio.to_thread(subscriber.recv))
    await wait_for(lambda: subscriber._tasks, DEADLINE_S)
    await site.observer.close()
    async with asyncio.timeout(DEADLINE_S):
        assert await waiting is None


def test_a_reader_that_is_far_behind_misses_the_oldest() -> None:
    queue = PassQueue()
    for number in range(MAX_WAITING_MESSAGES + 3):
        queue.put(str(number).encode())
    assert queue.get() == b"3"
    assert queue.dropped == 3


async def test_the_relay_hands_on_what_an_engine_recorded_bit_for_bit(site: Site) -> None:
    """Unlike the reference's (zmq_relay_modes.json), which hands on any bytes, it refuses what is no pass."""
    await site.register()
    subscriber = site.subscriber()
    heard: list[bytes] = []

    def follow() -> None:
        while (data := subscriber.recv()) is not None:
            heard.append(data)

    following = asyncio.create_task(asyncio.to_thread(follow))
    await wait_for(lambda: subscriber._tasks, DEADLINE_S)
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.XPUB)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    relay = FpmEventRelay(site.worker.endpoint(PATH), f"tcp://127.0.0.1:{port}")
    async with asyncio.timeout(DEADLINE_S):
        assert (await engine.recv())[:1] == b"\x01"
    await engine.send_multipart([b"", b"two"])
    await engine.send_multipart([b"", b"\x00", b"any-bytes"])
    for seq, data in enumerate(RECORDED):
        await engine.send_multipart([b"", seq.to_bytes(8, "big"), data])
    await wait_for(lambda: len(heard) == len(RECORDED), DEADLINE_S)
    assert heard == RECORDED
    assert relay.counters() == {
        "forward_pass_forwarded": len(RECORDED), "forward_pass_dropped": 0, "forward_pass_malformed": 2,
    }  # fmt: skip
    relay.shutdown()
    relay.shutdown()
    subscriber.shutdown()
    async with asyncio.timeout(DEADLINE_S):
        await following
    context.destroy(linger=0)


async def test_a_relay_without_an_engine_harms_nobody(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    FpmEventRelay(site.worker.endpoint(PATH), "nonsense")
    await wait_for(lambda: "no forward passes from nonsense" in caplog.text, DEADLINE_S)
    FpmEventRelay(site.worker.endpoint(PATH), "tcp://127.0.0.1:1").shutdown()
    with pytest.raises(TypeError, match="argument 'zmq_endpoint'"):
        FpmEventRelay(site.worker.endpoint(PATH), 5)  # type: ignore[arg-type]
