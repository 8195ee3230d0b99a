"""``EngineType`` and ``EntrypointArgs``: what a script may say, and how a mistake is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.llm import (
    AicPerfConfig,
    EngineType,
    EntrypointArgs,
    KvRouterConfig,
    ModelRuntimeConfig,
    RouterConfig,
    RouterMode,
)

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "data/golden/services/entrypoint_args_and_aic.json").read_text()
)["cases"]  # fmt: skip
AIC = {"aic_backend": "vllm", "aic_system": "h200_sxm", "aic_model_path": "Qwen/Qwen3-0.6B"}


def call(text: str) -> Any:
    """What a recorded call makes."""
    if text.startswith("aic_"):
        names = {"rates": "aic_nextn_accept_rates"}
        given = eval(f"dict({text})")
        return AicPerfConfig(**AIC, **{names.get(name, name): value for name, value in given.items()})
    kinds = {kind.name: kind for kind in EngineType}
    return eval(f"EntrypointArgs{text}", {"EntrypointArgs": EntrypointArgs, **kinds})


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["case"])
def test_recorded_calls(case: dict[str, Any]) -> None:
    result = case["result"]
    if "ok" in result:
        assert type(call(case["call"])).__name__ == result["ok"].strip("<>").rpartition(".")[2]
        return
    with pytest.raises(Exception) as raised:
        call(case["call"])
    assert type(raised.value).__name__ == result["err"]
    assert str(raised.value) == result["msg"]


def test_engine_types_are_numbers_with_names() -> None:
    assert [int(kind) for kind in (EngineType.Echo, EngineType.Dynamic, EngineType.Mocker)] == [1, 2, 3]
    assert str(EngineType.Echo) == repr(EngineType.Echo) == "EngineType.Echo"
    assert EngineType.Echo == 1 != EngineType.Mocker


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model_path": 5}, TypeError, "argument 'model_path': expected str, bytes or os.PathLike object, not int"),
    ({"http_port": "x"}, TypeError, "argument 'http_port': 'str' object cannot be interpreted as an integer"),
    ({"router_config": 5}, TypeError, "argument 'router_config': 'int' object cannot be converted to 'RouterConfig'"),
    ({"runtime_config": 5}, TypeError,
     "argument 'runtime_config': 'int' object cannot be converted to 'ModelRuntimeConfig'"),
    ({"mocker_engine_args": 5}, TypeError,
     "argument 'mocker_engine_args': 'int' object cannot be converted to 'MockEngineArgs'"),
    ({"aic_perf_config": 5}, TypeError,
     "argument 'aic_perf_config': 'int' object cannot be converted to 'AicPerfConfig'"),
    ({"is_prefill": 5}, TypeError, "argument 'is_prefill': 'int' object cannot be converted to 'PyBool'"),
    ({"enable_anthropic_api": 3}, TypeError,
     "argument 'enable_anthropic_api': 'int' object cannot be converted to 'PyBool'"),
    ({"namespace": 3}, TypeError, "argument 'namespace': 'int' object cannot be converted to 'PyString'"),
    ({"tokenizer_backend": 3}, TypeError,
     "argument 'tokenizer_backend': 'int' object cannot be converted to 'PyString'"),
    ({"bogus": 5}, TypeError, "EntrypointArgs.__new__() got an unexpected keyword argument 'bogus'"),
    ({"migration_limit": 2**32}, OverflowError, "out of range integral type conversion attempted"),
    ({"http_metrics_port": -1}, OverflowError, "out of range integral type conversion attempted"),
    ({"reasoning_field_name": "bogus"}, ValueError,
     'reasoning field name "bogus" is not "reasoning" or "reasoning_content"'),
    ({"chat_engine_factory": print}, RuntimeError,
     "Failed to get TaskLocals for chat_engine_factory: RuntimeError: no running event loop"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(given: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        EntrypointArgs(EngineType.Echo, **given)
    assert str(raised.value) == text


def test_the_engine_type_is_one() -> None:
    with pytest.raises(TypeError, match="argument 'engine_type': 'int' object cannot be converted to 'EngineType'"):
        EntrypointArgs(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes from 2 to 24 positional arguments but 32 were given"):
        EntrypointArgs(EngineType.Echo, *[None] * 30)  # type: ignore[misc]


def test_a_runtime_config_that_does_not_agree_with_itself() -> None:
    config = ModelRuntimeConfig()
    config.kv_transfer_domain = "zone"
    with pytest.raises(ValueError, match="__all__: kv_transfer_domain must reference a key in topology_domains"):
        EntrypointArgs(EngineType.Mocker, runtime_config=config)


def test_values_are_kept() -> None:
    routing = RouterConfig(RouterMode.KV, KvRouterConfig(router_temperature=0.5))
    values = EntrypointArgs(EngineType.Dynamic, "/m", router_config=routing, http_port=1, metrics_prefix=" ").values
    assert (values["engine_type"], values["model_path"], values["http_port"]) == (EngineType.Dynamic, "/m", 1)
    assert values["router_config"] is routing
    assert values["migration_limit"] == 0


async def test_a_factory_needs_a_loop_and_to_be_called() -> None:
    async def factory(*parts: Any) -> None: ...

    assert EntrypointArgs(EngineType.Dynamic, chat_engine_factory=factory).values["chat_engine_factory"] is factory
    with pytest.raises(TypeError, match="argument 'chat_engine_factory': 'int' object is not callable"):
        EntrypointArgs(EngineType.Dynamic, chat_engine_factory=5)  # type: ignore[arg-type]
    await asyncio.sleep(0)
