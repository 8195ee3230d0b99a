"""LoRA adapters that come and go while a worker serves: over HTTP, over the request plane, behind a whole frontend."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.tree import FrontendConfig, LogConfig, MockConfig, StateConfig, SystemConfig, WorkerConfig
from dynamo_es.engines.mock_worker import MockWorkerSettings
from dynamo_es.router.hashing import block_seed, hash_prompt, lora_name_to_id
from dynamo_es.runtime.core import RuntimeSettings
from tests.support.mock_process import mock_process
from tests.support.runtimes import PATIENT, wait_for
from tests.support.served_fleet import COMPLETIONS, served_fleet

PROMPT = list(range(1, 65))
LORAS = "/v1/loras"


def adapter(root: Path, name: str) -> str:
    """URI of a folder that looks like an adapter."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return f"file://{folder}"


@asynccontextmanager
async def workers(fleet, lora: LoraConfig, **mock):
    """Mock workers of one process with a system status server, whose client this is."""
    settings = MockWorkerSettings(
        RuntimeSettings(
            LogConfig(url="memory://"), StateConfig(flush_interval_s=0.2), PATIENT, "worker",
            SystemConfig(port=0, host="127.0.0.1"),
        ),
        WorkerConfig(model_name="m"), MockConfig(**{"speedup_ratio": 0.0, **mock}), lora,
    )  # fmt: skip
    async with mock_process(settings, fleet.log) as core, httpx.AsyncClient(base_url=core.system.url) as http:
        yield http


async def load(http, name, uri):
    return await http.post(LORAS, json={"lora_name": name, "source": {"uri": uri}})


async def asked(fleet, model):
    reply = await fleet.ask(COMPLETIONS, model=model, prompt=PROMPT, max_tokens=2)
    return reply.status, reply.json()


async def listed(fleet):
    return {entry["id"] for entry in (await fleet.get("/v1/models")).json()["data"]}


async def test_an_adapter_is_loaded_served_and_unloaded(tmp_path):
    uri = adapter(tmp_path, "poet")
    config = LoraConfig(enabled=True, sources=(f"file://{tmp_path}",), max_gpu_lora_count=2)
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        workers(fleet, config, num_workers=2) as http,
    ):
        await wait_for(lambda: "m" in fleet.models.statuses())
        answer = await load(http, "Org/Poet-1.5", uri)
        number = lora_name_to_id("Org/Poet-1.5")
        assert answer.json() == {
            "status": "success", "message": "LoRA adapter 'Org/Poet-1.5' loaded successfully",
            "lora_name": "Org/Poet-1.5", "lora_id": number,
        }  # fmt: skip
        again = await load(http, "Org/Poet-1.5", uri)
        assert (again.status_code, again.json()["message"]) == (200, "LoRA adapter 'Org/Poet-1.5' already loaded")
        shown = (await http.get(LORAS)).json()
        assert shown == {"status": "success", "loras": {"Org/Poet-1.5": number}, "count": 1}
        await wait_for(lambda: "Org/Poet-1.5" in fleet.models.statuses())
        adapters = fleet.models._adapters._known
        await wait_for(lambda: len(adapters_of(fleet)["Org/Poet-1.5"].holders) == 2)
        card = adapters["Org/Poet-1.5"].card
        assert (card.suffix, card.lora_name) == ("org_poet-1_5", "Org/Poet-1.5")
        assert card.details["lora"] == {"max_gpu_lora_count": 2}
        assert (await asked(fleet, "Org/Poet-1.5"))[0] == 200
        # Its blocks are its own, and go with it.
        own = hash_prompt(PROMPT, 16, block_seed("Org/Poet-1.5"))[1]
        await wait_for(lambda: indexed(fleet, own) == 1)
        gone = await http.delete(f"{LORAS}/Org/Poet-1.5")
        assert (gone.status_code, gone.json()["message"]) == (200, "LoRA adapter 'Org/Poet-1.5' unloaded successfully")
        await wait_for(lambda: "Org/Poet-1.5" not in fleet.models.statuses())
        await wait_for(lambda: indexed(fleet, own) == 0)
        status, body = await asked(fleet, "Org/Poet-1.5")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert (await http.delete(f"{LORAS}/Org/Poet-1.5")).status_code == 404
        assert (await asked(fleet, "m"))[0] == 200


def adapters_of(fleet):
    return fleet.models._adapters._known


def indexed(fleet, hashes):
    """How many workers the frontend takes to hold a prompt's beginning."""
    return len(fleet.views.kv_index.state.match("m", hashes, 16))


async def test_disc_12_what_is_not_there_is_refused_and_never_answered_by_the_base(tmp_path):
    """DISC-12, and other sources that cannot or must not be read."""
    root, outside = tmp_path / "loras", adapter(tmp_path / "other", "poet")
    adapter(root, "poet")
    (root / "empty").mkdir()
    (root / "link").symlink_to(tmp_path / "other" / "poet")
    config = LoraConfig(enabled=True, sources=(f"file://{root}",))
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        workers(fleet, config, num_workers=2) as http,
    ):
        await wait_for(lambda: "m" in fleet.models.statuses())
        for uri, status, reason in (
            (f"file://{root}/missing", 404, "Local LoRA not found"),
            (f"file://{root}/empty", 404, "no adapter_config.json"),
            (outside, 403, "no --lora-source"),
            (f"file://{root}/../other/poet", 403, "no --lora-source"),
            (f"file://{root}/link", 403, "no --lora-source"),
            ("s3://bucket/poet", 403, "no --lora-source"),
            ("/etc", 403, "no --lora-source"),
        ):
            refused = await load(http, "x", uri)
            assert (refused.status_code, refused.json()["status"]) == (status, "error"), uri
            assert reason in refused.json()["message"]
        for body in (
            {},
            {"lora_name": "x"},
            {"lora_name": 1, "source": {"uri": "file:///x"}},
            [],
            {"lora_name": "a b"},
        ):
            assert (await http.post(LORAS, json=body)).status_code == 400
        assert (await http.post(LORAS, content=b"{")).status_code == 400
        assert (await http.get(LORAS)).json()["count"] == 0
        assert await listed(fleet) == {"m"}
        status, answer = await asked(fleet, "x")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        # Nor by a worker that is asked directly.
        client = await fleet.frontend.endpoint("dynamo.backend.generate").client()
        request = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 1}, "routing": {"lora_name": "x"}}
        with pytest.raises(ValueError, match="BackendStreamIncomplete: this worker has no LoRA adapter 'x'"):
            [item async for item in await client.random(request, annotated=False)]


async def test_what_is_in_the_way_is_told(tmp_path):
    first, second = adapter(tmp_path, "first"), adapter(tmp_path, "second")
    config = LoraConfig(enabled=True, sources=(f"file://{tmp_path}",), max_gpu_lora_count=1)
    async with served_fleet(runtime=PATIENT) as fleet, workers(fleet, config) as http:
        assert (await load(http, "poet", first)).status_code == 200
        for name, uri, reason in (
            ("poet", second, "another source"),
            ("m", second, "the model itself"),
            ("POET", second, "cannot be told"),
            ("other", second, "1 adapters are loaded"),
        ):
            refused = await load(http, name, uri)
            assert (refused.status_code, refused.json()["status"]) == (409, "error")
            assert reason in refused.json()["message"]
        assert (await http.delete(f"{LORAS}/poet")).status_code == 200
        assert (await load(http, "other", second)).status_code == 200


async def test_the_endpoints_answer_as_the_routes_do(tmp_path):
    uri = adapter(tmp_path, "poet")
    config = LoraConfig(enabled=True, sources=(f"file://{tmp_path}",))
    async with served_fleet(runtime=PATIENT) as fleet, workers(fleet, config) as http:

        async def call(name, request):
            client = await fleet.frontend.endpoint(f"dynamo.backend.{name}").client()
            await client.wait_for_instances()
            (answer,) = [item async for item in await client.random(request, annotated=False)]
            return answer

        source = {"lora_name": "poet", "source": {"uri": uri}}
        assert (await call("load_lora", source))["status"] == "success"
        assert await call("list_loras", {}) == (await http.get(LORAS)).json()
        wrong = await call("load_lora", {"lora_name": "x", "source": {"uri": f"{uri}-not"}})
        assert wrong["status"] == "error"
        assert "not found" in wrong["message"]
        assert (await call("unload_lora", {"lora_name": "poet"}))["status"] == "success"
        assert (await call("unload_lora", {"lora_name": "poet"}))["status"] == "error"


async def test_it_is_off_unless_it_is_asked_for(tmp_path):
    uri = adapter(tmp_path, "poet")
    async with served_fleet(runtime=PATIENT) as fleet, workers(fleet, LoraConfig(sources=(uri,))) as http:
        assert (await load(http, "poet", uri)).status_code == 404
        assert (await http.get(LORAS)).status_code == 404
        instances = {item.endpoint for item in fleet.core.registry.state.instances.values()}
        assert "load_lora" not in instances
