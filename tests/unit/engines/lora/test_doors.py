"""The routes of the system server: all workers of a process, whoever calls meanwhile and whatever is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from starlette.applications import Starlette

from dynamo_es.engines.lora.doors import adapter_routes
from tests.support.runtimes import wait_for
from tests.unit.engines.lora.test_service import Worker, folder


def client(*workers: Worker) -> httpx.AsyncClient:
    app = Starlette(routes=adapter_routes([worker.service for worker in workers]))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://system")


async def test_a_name_that_is_loaded_and_unloaded_at_once_is_the_same_everywhere(tmp_path: Path) -> None:
    first, second = Worker(tmp_path), Worker(tmp_path)
    body = {"lora_name": "poet", "source": {"uri": folder(tmp_path, "poet")}}
    second.go_on.clear()
    async with client(first, second) as http:
        loading = asyncio.create_task(http.post("/v1/loras", json=body))
        await wait_for(lambda: "poet" in first.service.names() and second.service._turns.waiting)
        unloading = asyncio.create_task(http.delete("/v1/loras/poet"))
        done, _ = await asyncio.wait([unloading], timeout=0.1)
        assert not done, "the first of them is not over"
        second.go_on.set()
        assert [(await loading).status_code, (await unloading).status_code] == [200, 200]
    assert first.service.names() == second.service.names() == {}


async def test_json_that_is_nested_very_deep_is_refused(tmp_path: Path) -> None:
    async with client(Worker(tmp_path)) as http:
        refused = await http.post("/v1/loras", content=b"[" * 200_000)
    assert (refused.status_code, refused.json()["error"]) == (400, "Invalid JSON")
