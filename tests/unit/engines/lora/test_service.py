"""The adapters of one worker: order, undoing, bounds, and callers that go away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_es.engines.lora import service
from dynamo_es.engines.lora.errors import AdapterConflict, AdapterMissing, TooManyOperations
from dynamo_es.engines.lora.service import AdapterService
from dynamo_es.engines.lora.turns import MAX_WAITING
from dynamo_es.errors import EngineShutdown, InvalidArgument
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.models.errors import LoraError
from dynamo_es.models.lora import LoRADownloader
from dynamo_es.models.lora_sources import LoraSources, SourceRefused
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from schemas.registry import ModelCard, key_model
from tests.support.runtimes import wait_for

WHERE = ("dynamo", "backend", "generate")


class Worker:
    """An endpoint with its registrations, and an engine that notes what it is told."""

    def __init__(self, root: Path, limit: int = 3) -> None:
        card = make_card(
            read_model_facts(BUILTIN_MODEL), WHERE, 7, name="m", block_size=16, runtime_config={"total_kv_blocks": 9}
        )
        self.rows: dict[bytes, ModelCard] = {key_model(*WHERE, 7): card}
        self.told: list[str] = []
        self.log_is_away = False
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.shutdown_event = asyncio.Event()
        core = SimpleNamespace(registration=self, instance_id=7, shutdown_event=self.shutdown_event)
        self.service = AdapterService(
            cast(Endpoint, SimpleNamespace(parts=WHERE, core=core)), self,
            sources=LoraSources([f"file://{root}"]), downloader=LoRADownloader(str(root / "cache")), limit=limit,
        )  # fmt: skip

    def row(self, key: bytes) -> ModelCard | None:
        return self.rows.get(key)

    async def register(self, key: bytes, card: ModelCard) -> None:
        if self.log_is_away:
            raise LogUnavailable("the log is away")
        self.told.append(f"register {card.display_name}")
        self.rows[key] = card

    async def unregister(self, key: bytes) -> bool:
        card = self.rows.pop(key, None)
        self.told.append(f"unregister {card.display_name if card else None}")
        return card is not None

    async def load_adapter(self, name: str, folder: str) -> None:
        await self.go_on.wait()
        if "misfit" in folder:
            raise InvalidArgument("it does not fit")
        self.told.append(f"load {name}")

    async def unload_adapter(self, name: str) -> None:
        self.told.append(f"unload {name}")


def folder(root: Path, name: str) -> str:
    made = root / name
    made.mkdir()
    (made / "adapter_config.json").write_text("{}")
    (made / "adapter_model.bin").write_bytes(b"")
    return f"file://{made}"


async def test_it_is_loaded_before_it_is_known_and_forgotten_before_it_goes(tmp_path: Path) -> None:
    worker, uri = Worker(tmp_path), folder(tmp_path, "poet")
    await worker.service.load("poet", uri)
    await worker.service.unload("poet")
    assert worker.told == ["load poet", "register poet", "unregister poet", "unload poet"]
    with pytest.raises(AdapterMissing, match=r"'poet' not found. Available LoRAs: \[\]"):
        await worker.service.unload("poet")


async def test_its_card_is_the_models_with_the_adapters_names(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    await worker.service.load("Org/Poet", folder(tmp_path, "poet"))
    card = worker.rows[key_model(*WHERE, 7, "org_poet")]
    assert (card.display_name, card.lora_name, card.suffix) == ("Org/Poet", "Org/Poet", "org_poet")
    assert card.runtime_config == {"total_kv_blocks": 9}
    assert card.user_data == {"lora_adapter": True, "lora_id": worker.service.names()["Org/Poet"]}


async def test_what_cannot_be_loaded_or_registered_leaves_nothing(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    with pytest.raises(InvalidArgument, match="does not fit"):
        await worker.service.load("x", folder(tmp_path, "misfit"))
    with pytest.raises(LoraError, match="not found"):
        await worker.service.load("x", f"file://{tmp_path}/none")
    assert worker.told == []
    worker.log_is_away = True
    uri = folder(tmp_path, "poet")
    with pytest.raises(LogUnavailable):
        await worker.service.load("x", uri)
    assert worker.told == ["load x", "unload x"]
    assert not worker.service.names()
    worker.log_is_away = False
    assert (await worker.service.load("x", uri))["status"] == "success"


@pytest.mark.parametrize("name", ["", "a b", "a\n", "a\0", "x" * 201])
async def test_a_name_is_one_of_a_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="lora_name"):
        await Worker(tmp_path).service.load(name, "file:///x")


async def test_operations_come_one_by_one_and_not_too_many_wait(tmp_path: Path) -> None:
    worker = Worker(tmp_path, limit=2)
    uris = [folder(tmp_path, f"a{number}") for number in range(3)]
    worker.go_on.clear()
    tasks = [asyncio.create_task(worker.service.load(f"a{number}", uri)) for number, uri in enumerate(uris)]
    more = [asyncio.create_task(worker.service.unload("none")) for _ in range(MAX_WAITING - 3)]
    await wait_for(lambda: worker.service._turns.waiting == MAX_WAITING)
    with pytest.raises(TooManyOperations):
        await worker.service.load("x", uris[0])
    worker.go_on.set()
    results: list[Any] = await asyncio.gather(*tasks, *more, return_exceptions=True)
    assert worker.told == ["load a0", "register a0", "load a1", "register a1"]
    assert isinstance(results[2], AdapterConflict)
    assert {type(result) for result in results[3:]} == {AdapterMissing}


async def test_a_caller_that_goes_away_does_not_leave_half_an_adapter(tmp_path: Path) -> None:
    worker, uri = Worker(tmp_path), folder(tmp_path, "poet")
    worker.go_on.clear()
    task = asyncio.create_task(worker.service.load("poet", uri))
    await wait_for(lambda: worker.service._turns.waiting)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    worker.go_on.set()
    await wait_for(lambda: "poet" in worker.service.names())
    await worker.service.close()
    assert worker.told == ["load poet", "register poet"]
    worker.shutdown_event.set()
    with pytest.raises(EngineShutdown):
        await worker.service.unload("poet")


async def test_a_folder_that_is_exchanged_while_it_is_looked_at_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, uri = Worker(tmp_path / "allowed"), folder(tmp_path, "secret")
    real, looked = service.is_adapter, tmp_path / "allowed/poet"
    looked.mkdir(parents=True)

    def exchange(place: str) -> bool:
        looked.rmdir()
        looked.symlink_to(uri.removeprefix("file://"))
        return real(place)

    monkeypatch.setattr(service, "is_adapter", exchange)
    with pytest.raises(SourceRefused):
        await worker.service.load("poet", f"file://{looked}")
    assert worker.told == []
