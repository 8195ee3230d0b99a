"""Registering models, beside what the reference writes (golden/services/register_model.json, mdc_and_taints.json)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.discovery import RegistryModels
from dynamo_es.frontend.errors import ModelNotFound
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.llm import (
    FpmDirectPublisher,
    KvEventPublisher,
    KvRouter,
    KvRouterConfig,
    LoRADownloader,
    MediaDecoder,
    MediaFetcher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    WorkerType,
    register_model,
    unregister_model,
    update_model_taints,
)
from dynamo_es.log.memory import MemoryLog
from dynamo_es.models.card_json import card_body, custom_template
from dynamo_es.models.errors import CardNotFound, LoraError, ModelError, ModelFetchError
from dynamo_es.models.fetch import Hub
from dynamo_es.models.kinds import parse_model_type
from dynamo_es.models.taint_route import taints_route
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.runtime.runtime import DistributedRuntime
from dynamo_es.runtime.views import RoutingViews
from schemas.registry import ModelCard
from tests.support.open_things import open_things
from tests.support.runtimes import make_runtime, wait_for

SERVICES = Path(__file__).parents[1] / "data/golden/services"
MODEL = Path(__file__).parents[1] / "data/models/smollm2-135m-instruct"
CASES = {case["case"]: case for case in json.loads((SERVICES / "register_model.json").read_text())["cases"]}
TAINTS = json.loads((SERVICES / "mdc_and_taints.json").read_text())
WRITTEN = [name for name, case in CASES.items() if case["discovery_files"]]
FILES = ("model_info", "tokenizer", "prompt_formatter", "chat_template_file", "gen_config")
DEADLINE_S = 60.0
AGGREGATED: dict[str, Any] = {"worker_type": WorkerType.Aggregated}
TENSOR_INPUT = {"name": "a", "data_type": "Bogus", "shape": [1]}


class Worker:
    """A process with endpoints, and the fleet's view of what it registered."""

    def __init__(self, runtime: DistributedRuntime) -> None:
        self.runtime = runtime

    def endpoint(self, component: str = "c") -> Any:
        return self.runtime.endpoint(f"ns.{component}.generate")

    def cards(self) -> list[ModelCard]:
        return list(self.runtime.core.registry.state.models.values())

    async def card(self) -> ModelCard:
        await wait_for(self.cards, DEADLINE_S)
        (card,) = self.cards()
        return card


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    runtime = make_runtime(log)
    yield Worker(runtime)
    await runtime.close()
    await log.close()


def full_config() -> ModelRuntimeConfig:
    config = ModelRuntimeConfig()
    config.context_length = 1024
    config.total_kv_blocks, config.max_num_seqs, config.max_num_batched_tokens = 100, 8, 2048
    config.tool_call_parser, config.reasoning_parser, config.tokenizer_backend = "hermes", "qwen3", "fastokens"
    config.set_structural_tag_mode("on")
    config.data_parallel_size = 2
    config.kv_event_publishing_enabled, config.kv_event_source_mode = True, "direct"
    config.kv_state_endpoint = "ns.kv.state"
    config.set_engine_specific("k", '"v"')
    config.set_engine_specific("obj", '{"x":[1,2]}')
    config.set_disaggregated_endpoint("h", 9)
    config.enable_eagle = True
    config.taints = {"a", "gpu=h100", "dynamo.topology/zone=spoofed"}
    config.stable_routing_id = "sid"
    config.topology_domains = {"zone": "z1", "rack": "r1"}
    config.kv_transfer_domain, config.kv_transfer_enforcement = "zone", "preferred"
    config.kv_transfer_preferred_weight = 0.5
    return config


def full_arguments() -> dict[str, Any]:
    decoder, fetcher = MediaDecoder(), MediaFetcher()
    decoder.enable_image({"limits": {"max_image_width": 100, "max_alloc": 5}})
    fetcher.user_agent("ua")
    fetcher.allow_direct_ip(True)
    fetcher.allowed_media_domains(["b.com", "a.com"])
    fetcher.timeout_ms(500)
    return {
        "runtime_config": full_config(), "media_decoder": decoder, "media_fetcher": fetcher,
        "router_config": RouterConfig(RouterMode.KV, KvRouterConfig()), "max_gpu_lora_count": 4,
        "user_data": {"a": [1, {"b": None}]},
    }  # fmt: skip


EXTRA: dict[str, Callable[[], dict[str, Any]]] = {
    "full": full_arguments,
    "md_default": lambda: {"media_decoder": MediaDecoder(), "media_fetcher": MediaFetcher()},
    "self_host": lambda: {"self_host_metadata": True},
    "self_host_f": lambda: {"self_host_metadata": False},
    "ignore_w": lambda: {"ignore_weights": True},
}


def arguments_of(name: str, card: dict[str, Any]) -> dict[str, Any]:
    """The call that stands behind a recorded card."""
    arguments: dict[str, Any] = {
        "model_input": ModelInput[card["model_input"]],
        "model_type": parse_model_type(card["model_type"]),
        "model_path": str(MODEL),
        "model_name": card["display_name"],
        "worker_type": WorkerType[card["worker_type"].title()],
        "needs": [[WorkerType[kind.title()] for kind in each] for each in card["needs"]] or None,
        "model_aliases": card.get("aliases"),
        "kv_cache_block_size": card["kv_cache_block_size"] if card["kv_cache_block_size"] != 16 else None,
    }
    if "lora" in card:
        arguments |= {"model_name": None, "lora_name": card["lora"]["name"], "base_model_path": str(MODEL)}
    return arguments | EXTRA.get(name, dict)()


def comparable(card: dict[str, Any], directory: str) -> dict[str, Any]:
    """A card without what only its model's files decide."""
    text = json.dumps({name: part for name, part in card.items() if name in FILES})
    found = {**card, **json.loads(text.replace(directory, "$MODEL_DIR"))}
    for part in walk({name: found[name] for name in FILES if name in found}):
        if "checksum" in part:
            assert part["checksum"].startswith("blake3:")
            assert len(part["checksum"]) == len("blake3:") + 64
            assert part["size"] > 0
            del part["checksum"], part["size"]
    found["source_path"] = found.get("source_path", "").replace(directory, "$MODEL_DIR")
    config = found["runtime_config"]
    found["runtime_config"] = {**config, "taints": sorted(config.get("taints", ()))}
    return found


def walk(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for item in list(part.values()):
            yield from walk(item)


@pytest.mark.parametrize("name", WRITTEN)
async def test_cards_are_the_references(worker: Worker, name: str) -> None:
    (recorded,) = CASES[name]["discovery_files"].values()
    await register_model(endpoint=worker.endpoint(), **arguments_of(name, recorded["card_json"]))
    card = await worker.card()
    assert comparable(card_body(card), str(MODEL)) == comparable(recorded["card_json"], "$MODEL_DIR")
    assert (card.suffix or None) == recorded.get("model_suffix")
    lora = card.lora_name
    await unregister_model(worker.endpoint(), lora)
    await wait_for(lambda: not worker.cards(), DEADLINE_S)
    with pytest.raises(CardNotFound, match=r"^Could not find key 'ns/c/generate/"):
        await unregister_model(worker.endpoint(), lora)


def with_config(**values: Any) -> dict[str, Any]:
    config = ModelRuntimeConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return AGGREGATED | {"runtime_config": config}


REFUSED: dict[str, dict[str, Any]] = {
    "decode_noneeds": {"worker_type": WorkerType.Decode},
    "no_wt": {},
    "tensor_bad2": AGGREGATED | {
        "tensor_model_config": {"name": "t", "inputs": [TENSOR_INPUT], "outputs": []},
    },
    "tmpl_missing": AGGREGATED | {"custom_template_path": "/nonexistent.jinja"},
    "lora_only_name": AGGREGATED | {"lora_name": "l"},
    "lora_only_base": AGGREGATED | {"base_model_path": str(MODEL)},
    "rc_dom_missing": with_config(kv_transfer_domain="zone", kv_transfer_enforcement="required"),
    "rc_topo_empty": with_config(topology_domains={"": "a"}),
    "rc_topo_ws": with_config(topology_domains={"zone": " a"}),
    "rc_pref_now": with_config(
        topology_domains={"zone": "a"}, kv_transfer_domain="zone", kv_transfer_enforcement="preferred"
    ),
    "rc_pref_w2": with_config(
        topology_domains={"zone": "a"}, kv_transfer_domain="zone", kv_transfer_enforcement="preferred",
        kv_transfer_preferred_weight=2.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_arguments_are_refused_before_anything_is_awaited(worker: Worker, name: str) -> None:
    expected = CASES[name]["result"]
    with pytest.raises(Exception) as caught:
        register_model(ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m", **REFUSED[name])
    kind = "Exception" if isinstance(caught.value, ModelError) else type(caught.value).__name__
    assert (kind, str(caught.value)) == (expected["err"], expected["msg"])
    assert not worker.runtime.core.started


def test_every_recorded_case_is_played() -> None:
    elsewhere = {"missing_path", "dupB", "dup_other_name"}
    assert {*WRITTEN, *REFUSED, *elsewhere} == CASES.keys()


async def test_a_path_that_is_none_is_taken_for_a_name_on_the_hub(worker: Worker) -> None:
    with pytest.raises(ModelFetchError) as caught:
        await register_model(
            ModelInput.Tokens, ModelType.Chat, worker.endpoint(), "/nonexistent/model",
            hub=Hub("http://127.0.0.1:9"), **AGGREGATED,
        )  # fmt: skip
    recorded = CASES["missing_path"]["result"]["msg"]
    assert str(caught.value).split("Error:")[0] == recorded.split("Error:")[0]


async def test_an_update_may_change_nothing_but_taints(worker: Worker) -> None:
    async def register(name: str = "m", **values: Any) -> None:
        config = with_config(**values)
        await register_model(ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), name, **config)

    await register()
    await register()
    await register(taints={"b"})
    await wait_for(lambda: worker.cards() and worker.cards()[0].runtime_config.get("taints") == ["b"], DEADLINE_S)
    for change in ({"name": "other"}, {"data_parallel_size": 2}):
        with pytest.raises(ModelError) as caught:
            await register(**change)  # type: ignore[arg-type]
        assert str(caught.value) == CASES["dup_other_name"]["result"]["msg"]
    assert (await worker.card()).display_name == "m"


async def test_taints_are_replaced_and_topology_stays(worker: Worker) -> None:
    recorded = TAINTS["taints"]
    for call, case in (({"dynamo.topology/zone=a"}, "reserved"), (["a"], "list")):
        with pytest.raises((ModelError, TypeError)) as caught:
            update_model_taints(worker.endpoint(), call)  # type: ignore[arg-type]
        assert str(caught.value) == recorded[case]["msg"]
    with pytest.raises(CardNotFound, match=r"^Could not find key 'ns/none/generate/[0-9a-f]+'$"):
        await update_model_taints(worker.endpoint("none"), {"a"})
    await register_model(
        ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m",
        **with_config(topology_domains={"zone": "z"}, taints={"old"}),
    )  # fmt: skip

    def taints() -> list[str] | None:
        return worker.cards()[0].runtime_config.get("taints") if worker.cards() else None

    for given, shown in (({"b", "a"}, ["a", "b"]), ({"", " "}, ["", " "]), (set(), [])):
        await update_model_taints(worker.endpoint(), given)
        await wait_for(lambda shown=shown: taints() == sorted([*shown, "dynamo.topology/zone=z"]), DEADLINE_S)


async def test_a_lora_stands_beside_its_base(worker: Worker) -> None:
    """golden/services/register_model.json ``dup_lora``, mdc_and_taints.json ``unregister``."""
    where = worker.endpoint()
    await register_model(ModelInput.Tokens, ModelType.Chat, where, str(MODEL), "m", **AGGREGATED)
    await register_model(
        ModelInput.Tokens, ModelType.Chat, where, str(MODEL), lora_name="My.LoRA", base_model_path=str(MODEL),
        max_gpu_lora_count=3, **AGGREGATED,
    )  # fmt: skip
    await wait_for(lambda: len(worker.cards()) == 2, DEADLINE_S)
    lora = next(card for card in worker.cards() if card.suffix)
    assert card_body(lora)["lora"] == {"name": "My.LoRA", "max_gpu_lora_count": 3}
    assert (lora.suffix, lora.display_name) == ("my_lora", "My.LoRA")
    with pytest.raises(CardNotFound):
        await unregister_model(where, "nope")
    with pytest.raises(CardNotFound):
        await unregister_model(where, "/")  # Whose key would be the model's.
    with pytest.raises(ValueError, match="lora_name '/'"):
        register_model(
            ModelInput.Tokens,
            ModelType.Chat,
            where,
            str(MODEL),
            lora_name="/",
            base_model_path=str(MODEL),
            **AGGREGATED,
        )
    await unregister_model(where, "My.LoRA")
    await wait_for(lambda: [card.suffix for card in worker.cards()] == [""], DEADLINE_S)


async def test_a_custom_template_reaches_frontends_on_other_machines(worker: Worker, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("Say: {{ messages[0].content }}")
    call = dict(AGGREGATED, custom_template_path=str(template))
    await register_model(ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m", **call)
    card = await worker.card()
    told = card_body(card)["chat_template_file"]["hf_chat_template"]
    assert (told["is_custom"], told["file"]["path"], told["file"]["size"]) == (True, str(template), 30)
    assert told["file"].keys() == {"path", "checksum", "size"}
    template.unlink()
    _, renderer = load_tokenizer(card.source_path, custom_template(card))
    assert renderer is not None
    assert renderer.render([{"role": "user", "content": "x"}]) == "Say: x"


@pytest.mark.parametrize(
    ("data", "text"),
    [(b" " * (256 * 1024 + 1), "262145 bytes long, at most 262144"), (b"\xff", "is no UTF-8 text")],
    ids=["huge", "bytes"],
)
async def test_a_custom_template_that_is_none(worker: Worker, tmp_path: Path, data: bytes, text: str) -> None:
    template = tmp_path / "own.jinja"
    template.write_bytes(data)
    call = dict(AGGREGATED, custom_template_path=str(template))
    with pytest.raises(ModelError, match=text):
        await register_model(ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m", **call)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"needs": 5}, TypeError, "argument 'needs': 'int' object cannot be converted to 'Sequence'"),
        ({"needs": [5]}, TypeError, "argument 'needs': 'int' object cannot be converted to 'Sequence'"),
        ({"needs": [[5]]}, TypeError, "argument 'needs': 'int' object cannot be converted to 'WorkerType'"),
        ({"model_aliases": "ab"}, TypeError, "argument 'model_aliases': Can't extract `str` to `Vec`"),
        ({"user_data": 5}, TypeError, "argument 'user_data': 'int' object cannot be converted to 'PyDict'"),
        ({"user_data": {"a": object()}}, ModelError, "Failed to convert user_data"),
        ({"kv_cache_block_size": -1}, OverflowError, "out of range integral type conversion attempted"),
        ({"runtime_config": 5}, TypeError, "'int' object cannot be converted to 'ModelRuntimeConfig'"),
        ({"router_config": 5}, TypeError, "'int' object cannot be converted to 'RouterConfig'"),
        ({"worker_type": 5}, TypeError, "argument 'worker_type': 'int' object cannot be converted to 'WorkerType'"),
        ({"model_input": 5}, TypeError, "argument 'model_input': 'int' object cannot be converted to 'ModelInput'"),
        ({"tensor_model_config": 5}, TypeError, "argument 'tensor_model_config': 'int' object"),
        ({"tensor_model_config": {}}, ModelError, "Failed to convert tensor_model_config: missing field `name`"),
        (
            {"tensor_model_config": {"name": "x", "inputs": [], "outputs": [], "bogus": 1}}, ModelError,
            "unknown field `bogus`, expected one of `name`, `inputs`, `outputs`, `triton_model_config`",
        ),
        ({"router_config": RouterConfig(RouterMode.KV), "router_mode": RouterMode.KV}, ValueError, "give one of them"),
    ],
)  # fmt: skip
async def test_wrong_arguments(worker: Worker, change: dict[str, Any], error: type[Exception], text: str) -> None:
    """Texts as ai-dynamo-runtime 1.5.1 gives them, where it has them."""
    call: dict[str, Any] = {
        "model_input": ModelInput.Tensor, "model_type": ModelType.TensorBased, "model_path": "t", **AGGREGATED,
    }  # fmt: skip
    with pytest.raises(error) as caught:
        register_model(endpoint=worker.endpoint(), **(call | change))
    assert text in str(caught.value)


async def test_a_tensor_model_has_a_minimal_card(worker: Worker) -> None:
    config = {"name": "x", "inputs": [], "outputs": []}
    await register_model(
        ModelInput.Tensor, ModelType.TensorBased, worker.endpoint(), "t", tensor_model_config=config,
        router_mode=RouterMode.RoundRobin, **AGGREGATED,
    )  # fmt: skip
    body = card_body(await worker.card())
    assert body["tensor_model_config"] == config
    assert (body["model_info"], body["context_length"], body["kv_cache_block_size"]) == (None, 0, 0)
    assert "source_path" not in body
    assert body["router_config"]["router_mode"] == "round_robin"


async def test_registering_from_many_tasks_is_one_registration(worker: Worker) -> None:
    calls = [
        register_model(ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m", **AGGREGATED)
        for _ in range(5)
    ]
    await asyncio.gather(*calls)
    assert (await worker.card()).display_name == "m"


async def test_what_is_registered_is_served_under_all_its_names(worker: Worker, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("Say: {{ messages[0].content }}")
    core = worker.runtime.core
    await core.start()
    views = RoutingViews(core)
    await views.start()
    models = RegistryModels(core, views, FrontendConfig(router_mode="round-robin"), KvRouterSettings())
    core.registry.add_listener(models.refresh)

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield {"token_ids": [1], "finish_reason": "stop"}

    serving = asyncio.create_task(worker.endpoint().serve_endpoint(answer))
    await register_model(
        ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m", kv_cache_block_size=0,
        model_aliases=["other"], custom_template_path=str(template), **AGGREGATED,
    )  # fmt: skip
    await wait_for(lambda: [name for name, _ in models.models()] == ["m", "other"], DEADLINE_S)
    served = models.find("other")
    assert served.name == "m"
    assert served.renderer is not None
    assert served.renderer.render([{"role": "user", "content": "x"}]) == "Say: x"
    await unregister_model(worker.endpoint())
    await wait_for(lambda: not models.models(), DEADLINE_S)
    await models.close()
    worker.runtime.shutdown()
    await serving


async def test_taints_are_changed_over_http_as_well(worker: Worker) -> None:
    route = taints_route([worker.endpoint()])
    for body in ({}, [], {"taints": "a"}, {"taints": [1]}):
        with pytest.raises(ValueError, match=r"^'taints' must be a JSON array of strings$"):
            await route(body)
    with pytest.raises(CardNotFound):
        await route({"taints": ["a"]})
    await register_model(ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m", **AGGREGATED)
    assert await route({"taints": ["b", "a", "b"]}) == {"status": "ok", "taints": ["a", "b"]}
    await wait_for(lambda: [card.runtime_config.get("taints") for card in worker.cards()] == [["a", "b"]], DEADLINE_S)


async def test_DISC_12_an_adapter_that_is_not_there_is_not_registered(worker: Worker, tmp_path: Path) -> None:
    await register_model(ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), "m", **AGGREGATED)
    views = RoutingViews(worker.runtime.core)
    await views.start()
    models = RegistryModels(worker.runtime.core, views, FrontendConfig(router_mode="round-robin"), KvRouterSettings())
    missing = f"file://{tmp_path}/missing"
    with pytest.raises(LoraError, match="Local LoRA not found"):
        await LoRADownloader(str(tmp_path)).download_if_needed(missing)
    hub = Hub("http://127.0.0.1:9", tmp_path)
    with pytest.raises(ModelFetchError):
        await register_model(
            ModelInput.Tokens, ModelType.Chat, worker.endpoint(), str(MODEL), lora_name="x",
            base_model_path=str(tmp_path / "missing"), hub=hub, **AGGREGATED,
        )  # fmt: skip
    await worker.card()
    models.refresh()
    assert set(models.statuses()) == {"m"}
    with pytest.raises(ModelNotFound):
        models.find("x")
    await models.close()


async def test_SCALE_03_adapters_and_workers_come_and_go_without_a_trace(worker: Worker) -> None:
    log = worker.runtime.core.log

    async def one_worker(number: int) -> None:
        runtime = make_runtime(log)
        where = runtime.endpoint("ns.churn.generate")
        await register_model(ModelInput.Text, ModelType.Images, where, f"model-{number}", **AGGREGATED)
        FpmDirectPublisher(where, str(runtime.core.instance_id))
        await runtime.close()

    async def one_adapter(number: int) -> None:
        where = worker.endpoint()
        await register_model(
            ModelInput.Text, ModelType.Images, where, "m", lora_name=f"l{number}", base_model_path="m", **AGGREGATED
        )
        await unregister_model(where, f"l{number}")

    await one_worker(0)
    await one_adapter(0)
    before = open_things()
    for number in range(500):
        await one_adapter(number)
    for number in range(30):
        await one_worker(number)
    await wait_for(lambda: not worker.cards(), DEADLINE_S)
    await wait_for(lambda: all(now <= then for now, then in zip(open_things(), before, strict=True)), DEADLINE_S)


@pytest.mark.parametrize(("eagle", "blocks"), [(True, 2), (False, 0)], ids=["eagle", "plain"])
async def test_prompts_are_hashed_as_a_model_for_speculative_decoding_hashes_them(
    worker: Worker, eagle: bool, blocks: int
) -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield {"token_ids": [1], "finish_reason": "stop"}

    where = worker.endpoint()
    serving = asyncio.create_task(where.serve_endpoint(answer))
    config = with_config(enable_eagle=eagle)
    await register_model(
        ModelInput.Tokens, ModelType.Chat, where, str(MODEL), "m", kv_cache_block_size=4, **config
    )  # fmt: skip
    publisher = KvEventPublisher(where, kv_block_size=4)
    tokens = list(range(9))
    publisher.publish_stored(tokens, [4, 4], [1, 2], is_eagle=True)
    publisher.publish_stored([7] * 4, [4], [3])
    router = KvRouter(where, 4)

    async def device_blocks(prompt: list[int]) -> int:
        rows = (await router.get_overlap_scores(prompt))["workers"]
        return sum(row["device_blocks"] for row in rows)

    marker = [7] * 4 if not eagle else tokens
    async with asyncio.timeout(DEADLINE_S):
        while not await device_blocks(marker):
            await asyncio.sleep(0.01)
    assert await device_blocks(tokens) == blocks
    worker.runtime.shutdown()
    await serving
