"""Large prompts are prepared on threads: the loop goes on, clients may leave, and what waits is bounded."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.preprocess_pool import PreprocessCollector, PreprocessPool
from dynamo_es.frontend.service import OFFLOAD_BYTES, TOKENIZE_APART_BYTES
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import BytesTokenizer, Tokenizer
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

DEADLINE_S = 60.0
COMPLETIONS = "/v1/completions"


class HeldTokenizer(BytesTokenizer):
    """Text that begins with ``hold`` is encoded when ``release`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Semaphore(0)
        self.release = threading.Event()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if text.startswith("hold"):
            self.began.release()
            assert self.release.wait(DEADLINE_S)
        return super().encode(text, add_special_tokens)


@pytest.fixture
def tokenizer() -> Iterator[HeldTokenizer]:
    made = HeldTokenizer()
    yield made
    made.release.set()


@pytest.fixture
def pool() -> Iterator[PreprocessPool]:
    made = PreprocessPool(1, 1)
    yield made
    made.shutdown()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def begun(tokenizer: HeldTokenizer) -> None:
    assert await asyncio.to_thread(tokenizer.began.acquire, timeout=DEADLINE_S)


def body(text: str, size: int = 0) -> bytes:
    return json.dumps({"model": "m", "prompt": text + "." * size, "max_tokens": 1}).encode()


def ask(app: FrontendApp, text: str, size: int = 0) -> asyncio.Task[Reply]:
    return asyncio.create_task(call(app, COMPLETIONS, body(text, size)))


@pytest.mark.parametrize("size", [TOKENIZE_APART_BYTES, OFFLOAD_BYTES, 400_000])
async def test_the_loop_goes_on_while_a_long_prompt_is_tokenized(
    tokenizer: HeldTokenizer, pool: PreprocessPool, size: int
) -> None:
    engine = ScriptedEngine(says(frame("x", "stop")))
    app = application(served(engine, tokenizer=tokenizer), executor=pool)
    long = ask(app, "hold", size)
    await begun(tokenizer)
    assert (pool.running, pool.waiting) == (1, 0)
    for _ in range(3):
        assert (await call(app, COMPLETIONS, body("short"))).status == 200
    assert not long.done()
    tokenizer.release.set()
    assert (await long).status == 200
    assert len(engine.requests[-1]["token_ids"]) == size + len("hold")


async def test_a_library_tokenizer_lets_the_loop_run(
    smollm: tuple[Tokenizer, ChatRenderer], pool: PreprocessPool
) -> None:
    """100,000 tokens; were the interpreter's lock held for all of them, the loop would not turn once meanwhile."""
    began, ended = threading.Event(), threading.Event()

    def encode(text: str) -> Sequence[int]:
        began.set()
        ids = smollm[0].encode(text, False)
        ended.set()
        return ids

    work = asyncio.get_running_loop().run_in_executor(pool, encode, " ".join(str(n) for n in range(25_000)))
    turns = 0
    while not ended.is_set():
        await asyncio.sleep(0)
        turns += began.is_set() and not ended.is_set()
    assert len(await work) > 100_000
    assert turns > 0


async def test_what_has_no_room_is_refused(tokenizer: HeldTokenizer, pool: PreprocessPool) -> None:
    engine, registry = ScriptedEngine(says(frame("x", "stop"))), CollectorRegistry()
    registry.register(PreprocessCollector(pool, "p"))
    app = application(served(engine, tokenizer=tokenizer), executor=pool, registry=registry)
    first = ask(app, "hold", OFFLOAD_BYTES)
    await begun(tokenizer)
    second = ask(app, "hold", OFFLOAD_BYTES)
    await until(lambda: pool.waiting == 1)
    states = [registry.get_sample_value("p_preprocess_requests", {"state": name}) for name in ("running", "waiting")]
    assert states == [1, 1]
    refused = await call(app, COMPLETIONS, body("hold", OFFLOAD_BYTES))
    assert (refused.status, refused.json()["error"]["code"]) == (529, "preprocess_queue_full")
    assert refused.headers["retry-after"] == "1"
    counted = {"class": "CapacityExhausted", "reason": "capacity.preprocess_queue_full"}
    assert registry.get_sample_value("dynamo_frontend_failures_total", counted) == 1
    assert (await call(app, COMPLETIONS, body("short"))).status == 200
    tokenizer.release.set()
    assert [(await one).status for one in (first, second)] == [200, 200]
    assert (await call(app, COMPLETIONS, body("hold", OFFLOAD_BYTES))).status == 200


async def test_clients_may_leave_while_their_prompts_are_tokenized_or_wait(
    tokenizer: HeldTokenizer, pool: PreprocessPool
) -> None:
    engine = ScriptedEngine(says(frame("x", "stop")))
    app = application(served(engine, tokenizer=tokenizer), executor=pool)
    working = ask(app, "hold", OFFLOAD_BYTES)
    await begun(tokenizer)
    waiting = ask(app, "hold", OFFLOAD_BYTES)
    await until(lambda: pool.waiting == 1)
    for exchange in list(app.service.running):
        exchange.interrupt("disconnect")
    await asyncio.gather(working, waiting)
    # The one that waited has left its place at once; the thread goes on with the other.
    assert (pool.running, pool.waiting) == (1, 0)
    assert not app.service.running
    third = ask(app, "hold", OFFLOAD_BYTES)
    await until(lambda: pool.waiting == 1)
    tokenizer.release.set()
    assert (await third).status == 200
    await until(lambda: pool.running == 0)
    assert len(engine.requests) == 1


class Payload:
    """Something that can be watched."""


def test_work_that_is_cancelled_lets_go_of_its_arguments(pool: PreprocessPool) -> None:
    release = threading.Event()
    held = pool.submit(release.wait, DEADLINE_S)
    payload = Payload()
    gone = weakref.ref(payload)
    waiting = pool.submit(lambda value: value, payload)
    with pytest.raises(ApiError):
        pool.submit(int)
    assert waiting.cancel()
    del payload
    gc.collect()
    assert gone() is None
    release.set()
    assert held.result(DEADLINE_S)


def test_errors_of_the_work_are_the_callers(pool: PreprocessPool) -> None:
    def fail(**given: Any) -> None:
        raise ValueError(given)

    for _ in range(5):
        with pytest.raises(ValueError, match="why"):
            pool.submit(fail, because="why").result(DEADLINE_S)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(int)
    assert pool.running == 0
