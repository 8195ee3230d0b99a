"""vLLM as far as the worker touches it: what it is asked is noted, what it answers is scripted."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class EngineDeadError(Exception):
    """vLLM's own of this name."""


class VLLMClientError(Exception):
    """The same."""


class GracefulHTTPError(Exception):
    """The same."""


class FakeLLM:
    """An ``AsyncLLM``: each request gets the scripted outputs, or waits for its abort if there are none."""

    def __init__(self, config: Any, loggers: list[Any]) -> None:
        self.vllm_config = config
        self.loggers = loggers
        self.outputs: list[Any] = []
        self.error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        """What calls fail with, by their name."""
        self.calls: list[tuple[Any, ...]] = []
        self.asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.misfit: str | None = None
        self.resets = True
        self.computes = asyncio.Event()
        self.computes.set()
        self._aborted: dict[str, asyncio.Event] = {}

    async def generate(self, given: Any, params: Any, name: str, **more: Any) -> Any:
        self.asked.append((vars(params), more))
        if self.error is not None:
            raise self.error
        await self.computes.wait()
        for output in self.outputs:
            yield output
        if not self.outputs:
            yield answer([5])
            aborted = self._aborted.setdefault(name, asyncio.Event())
            await aborted.wait()
            yield answer([], finish_reason="abort", finished=True)

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise self.errors[call]

    async def abort(self, name: str) -> None:
        self._fail("abort")
        self.calls.append(("abort",))
        self._aborted.setdefault(name, asyncio.Event()).set()

    async def add_lora(self, request: Any) -> bool:
        self._fail("add_lora")
        if self.misfit == request.lora_path:
            raise Exception("Call to add_lora method failed")
        self.calls.append(("add", request.lora_name, request.lora_path))
        return True

    async def remove_lora(self, number: int) -> bool:
        self._fail("remove_lora")
        self.calls.append(("remove", number))
        return True

    async def reset_prefix_cache(self) -> bool:
        self._fail("reset_prefix_cache")
        self.calls.append(("reset",))
        return self.resets

    async def check_health(self) -> None:
        return None

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


def answer(token_ids: list[int], *, finish_reason: str | None = None, finished: bool = False, **more: Any) -> Any:
    """A ``RequestOutput`` of one choice."""
    choice = SimpleNamespace(index=0, token_ids=token_ids, finish_reason=finish_reason, logprobs=None)
    return SimpleNamespace(
        **{"outputs": [choice], "finished": finished, "num_cached_tokens": 0, "kv_transfer_params": None, **more}
    )


def config(**parallel: Any) -> Any:
    """A ``VllmConfig``."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=100),
        model_config=SimpleNamespace(max_model_len=1_000, get_diff_sampling_param=dict),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        lora_config=SimpleNamespace(max_loras=2, max_cpu_loras=None),
        parallel_config=SimpleNamespace(
            **{
                "local_engines_only": False, "data_parallel_rank": 0, "data_parallel_size": 1,
                "data_parallel_size_local": 1, **parallel,
            }
        ),
    )  # fmt: skip


def arguments(connector: str | None = None) -> Any:
    """``AsyncEngineArgs``."""
    events = SimpleNamespace(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:7000", replay_endpoint="tcp://*:7100"
    )
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector)
    return SimpleNamespace(kv_events_config=events, kv_transfer_config=transfer)


def install(patch: pytest.MonkeyPatch, vllm_config: Any) -> list[FakeLLM]:
    """Put the modules in place; the engines that are made with them."""
    made: list[FakeLLM] = []

    def from_engine_args(_arguments: Any, stat_loggers: list[Any]) -> FakeLLM:
        made.append(FakeLLM(vllm_config, stat_loggers))
        return made[-1]

    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.metrics": {},
        "vllm.lora": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=from_engine_args)},
        "vllm.v1.engine.exceptions": {"EngineDeadError": EngineDeadError},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": object},
        "vllm.exceptions": {"VLLMClientError": VLLMClientError, "GracefulHTTPError": GracefulHTTPError},
        "vllm.sampling_params": {
            "SamplingParams": SimpleNamespace,
            "StructuredOutputsParams": SimpleNamespace,
            "RequestOutputKind": SimpleNamespace(DELTA="delta"),
        },
        "vllm.lora.request": {"LoRARequest": SimpleNamespace},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
    return made
