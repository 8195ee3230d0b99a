"""Fetching models from a hub of the test's own."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.llm import ModelInput, ModelType, WorkerType, fetch_model, register_model
from dynamo_es.log.memory import MemoryLog
from dynamo_es.models.errors import ModelFetchError
from dynamo_es.models.fetch import Hub
from tests.support.fake_hub import COMMIT, FakeHub
from tests.support.runtimes import make_runtime, wait_for

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "models/smollm2-135m-instruct"
ERRORS = json.loads((DATA / "golden/services/mdc_and_taints.json").read_text())["fetch_model_errors"]
SMALL = {name: (MODEL / name).read_bytes() for name in ("config.json", "tokenizer_config.json")}


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub("org/model", SMALL | {"model.safetensors": b"weights"}) as fake:
        yield fake


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path) -> Hub:
    return Hub(server.url, tmp_path / "cache")


def names(folder: str) -> list[str]:
    return sorted(file.name for file in Path(folder).iterdir())


async def test_a_model_is_fetched_once_and_without_weights_if_asked(server: FakeHub, hub: Hub) -> None:
    lean = await fetch_model("org/model", ignore_weights=True, hub=hub)
    assert lean.endswith(COMMIT)
    assert names(lean) == sorted(SMALL)
    assert await fetch_model("org/model", hub=hub) == lean
    assert names(lean) == sorted([*SMALL, "model.safetensors"])
    fetched = [path for path in server.asked if "/resolve/" in path]
    await fetch_model("org/model", hub=hub)
    assert [path for path in server.asked if "/resolve/" in path] == fetched


async def test_a_name_on_the_hub_is_registered_with_what_is_fetched(hub: Hub) -> None:
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    runtime = make_runtime(log)
    await register_model(
        ModelInput.Tokens, ModelType.Chat, runtime.endpoint("ns.c.e"), "org/model",
        worker_type=WorkerType.Aggregated, ignore_weights=True, hub=hub,
    )  # fmt: skip
    models = runtime.core.registry.state.models
    await wait_for(lambda: models, 60)
    (card,) = models.values()
    assert (card.display_name, card.context_length) == ("org/model", 8192)
    assert names(card.source_path) == sorted(SMALL)
    assert card.details["file_sizes"] == {name: len(data) for name, data in SMALL.items()}
    await runtime.close()
    await log.close()


@pytest.mark.parametrize("case", ERRORS, ids=range(len(ERRORS)))
async def test_names_that_are_none_are_refused_as_recorded(hub: Hub, case: dict[str, str]) -> None:
    name = case["msg"].split("'")[1].replace("$MODEL_DIR", str(MODEL))
    with pytest.raises(ModelFetchError) as caught:
        await fetch_model(name, hub=hub)
    assert str(caught.value).split("Error:")[0] == case["msg"].replace("$MODEL_DIR", str(MODEL)).split("Error:")[0]


async def test_an_unknown_model_and_a_hub_that_is_away(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelFetchError, match="Failed to fetch model 'org/other' at revision 'main'") as caught:
        await fetch_model("org/other", hub=hub)
    assert (caught.value.model, caught.value.revision) == ("org/other", "main")
    with pytest.raises(ModelFetchError, match="at revision 'v2'"):
        hub.download("org/model", "v2")
    with pytest.raises(ModelFetchError):
        await fetch_model("org/model", hub=Hub("http://127.0.0.1:9", tmp_path))
    with pytest.raises(TypeError, match="argument 'remote_name': 'int' object"):
        await fetch_model(5)  # type: ignore[arg-type]
