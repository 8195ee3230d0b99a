"""Recorded answers of Dynamo to requests whose worker is lost, and whose frontend is told to stop.

As in ``test_golden_transcripts``: byte for byte but for ids and times. The engine is the real one over a real router;
only the request plane is not there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.errors import Disconnected
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.engine import RoutedTokenEngine
from dynamo_es.frontend.migration import MigrationSettings
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.choosers import RoundRobinChooser
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.lane import Lane
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import application, card
from tests.unit.frontend.golden_replay import MODEL_DIR, flat, masked, recorded, request_bytes
from tests.unit.frontend.golden_worker import GoldenWorker

SETTINGS = {
    "migration/limit3_stream": MigrationSettings(3),
    "migration/limit0_stream": MigrationSettings(0),
    "migration/maxseqlen50_prompt51_stream": MigrationSettings(3, 50),
}
PINNED = (
    *("nvext/backend_instance_id_unknown", "nvext/token_data_with_instance", "nvext/h_worker", "nvext/h_worker_alias"),
)
ModelFiles = tuple[Tokenizer, ChatRenderer | None]
LOST_AFTER = 4
SCRIPT = "one two three four five six seven eight"


class Sink:
    def offer(self, topic: str, key: bytes, value: object) -> bool:
        return True


class GoldenPlane:
    """Two workers; the first that is asked is killed after it sent four tokens."""

    def __init__(self, worker: GoldenWorker) -> None:
        self._worker = worker
        self.requests: list[dict[str, Any]] = []

    async def stream(
        self, request: dict[str, Any], instance_id: int, context: Context, lane: Lane | None = None
    ) -> AsyncGenerator[Any, None]:
        self.requests.append(request)
        sent, lost = 0, len(self.requests) == 1
        async for frames in self._worker.generate(request, context):
            if lost and sent == LOST_AFTER:
                raise Disconnected("killed")
            yield frames
            sent += 1


def router_over(plane: GoldenPlane) -> RequestRouter:
    return RequestRouter(
        RoundRobinChooser(),
        ActiveSequences(),
        plane,  # type: ignore[arg-type]
        lambda: [WorkerRank(1_000, 0), WorkerRank(2_000, 0)],
        Sink(),  # type: ignore[arg-type]
        router_id=1,
        model=lambda: "s-plain",
        block_size=16,
        positions=dict,
        clock=SystemClock(),
    )


@pytest.fixture(scope="module")
def model_files() -> ModelFiles:
    return load_tokenizer(str(MODEL_DIR))


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "item"), [pytest.param(name, item, id=name) for name, item in recorded(["migration"])]
)
async def test_a_stream_whose_worker_is_killed_is_that_of_dynamo(
    name: str, item: dict[str, Any], executor: ThreadPoolExecutor, model_files: ModelFiles
) -> None:
    tokenizer, renderer = model_files
    plane = GoldenPlane(GoldenWorker(tokenizer))
    router = router_over(plane)
    engine = RoutedTokenEngine(router, migration=SETTINGS[name])
    app = application(ServedModel("s-plain", card("s-plain"), tokenizer, renderer, engine, 0), executor=executor)
    body = request_bytes(item["body"]).replace(b'"delay\\":0.4', b'"delay\\":0.0')
    reply = await call(app, item["path"], body)
    assert reply.status == item["status"]
    assert masked(reply.text) == masked(item["response_body"])
    sizes = [(len(one["token_ids"]), one["stop_conditions"]["max_tokens"]) for one in plane.requests]
    assert sizes == ([(51, 20), (55, 16)] if name == "migration/limit3_stream" else [(51, 20)])
    assert router.open_requests == 0


@pytest.mark.parametrize(
    ("name", "item"), [pytest.param(name, item, id=name) for name, item in recorded(["nvext"]) if name in PINNED]
)
async def test_a_pin_to_nobody_is_refused_as_by_dynamo(
    name: str, item: dict[str, Any], executor: ThreadPoolExecutor, model_files: ModelFiles
) -> None:
    tokenizer, renderer = model_files
    plane = GoldenPlane(GoldenWorker(tokenizer))
    engine = RoutedTokenEngine(router_over(plane))
    app = application(ServedModel("s-plain", card("s-plain"), tokenizer, renderer, engine, 0), executor=executor)
    reply = await call(app, item["path"], request_bytes(item["body"]), headers=item["headers"])
    assert (reply.status, flat(reply.text)) == (item["status"], item["response_body"])
    assert not plane.requests


async def test_PROTO_24_a_stream_under_way_at_sigterm_is_that_of_dynamo(
    executor: ThreadPoolExecutor, model_files: ModelFiles
) -> None:
    ((_, item),) = recorded(["shutdown"])
    tokenizer, renderer = model_files
    model = ServedModel("s-plain", card("s-plain"), tokenizer, renderer, GoldenWorker(tokenizer), 0)
    app = application(model, executor=executor)
    script = f"<<<{json.dumps({'text': SCRIPT, 'delay': 0.01})}>>>"
    body = {"model": "s-plain", "messages": [{"role": "user", "content": script}], "stream": True}
    asking = asyncio.create_task(call(app, item["path"], json.dumps(body).encode()))
    async with asyncio.timeout(60):
        while not app.service.running:
            await asyncio.sleep(0)
    app.service.drain()
    refused = await call(app, item["path"], json.dumps(body).encode())
    assert (refused.status, json.loads(flat(refused.text))["message"]) == (503, "Service is not ready")
    health, live = [await call(app, path, method="GET") for path in ("/health", "/live")]
    assert (health.status, health.json()["stage"]) == (503, "draining")
    assert (live.status, live.json()["status"]) == (503, "shutting_down")
    assert masked((await asking).text) == masked(item["response_body"])
    assert app.service.idle.is_set()
