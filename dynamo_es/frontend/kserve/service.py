"""KServe's gRPC over Python engines of the same process (Dynamo's ``KserveGrpcService``; spec/services e.1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from dynamo_es.frontend.engine_service import EngineService
from dynamo_es.frontend.kserve.models import OwnModels
from dynamo_es.frontend.python_engine import PythonAsyncEngine
from dynamo_es.models.runtime_config import ModelRuntimeConfig
from dynamo_es.models.tensor_config import check_tensor_config
from dynamo_es.router.config_arguments import instance_of, optional, to_text, to_u16
from dynamo_es.runtime.runtime import DistributedRuntime

DEFAULT_PORT = 8787
_DEFAULT_HOST = "0.0.0.0"  # noqa: S104 - as in Dynamo
GRACE_S = 30.0
"""How long calls may go on after the end was asked for."""


class KserveGrpcService(EngineService):
    """Serves Python engines as models of the KServe v2 protocol, without TLS: no fleet, no log.

    Belongs to one event loop; ``shutdown`` may be called from any thread. A model of chat is ready but cannot be asked:
    the protocol has no form for it, as in Dynamo.
    """

    def __init__(self, port: int | None = None, host: str | None = None) -> None:
        """``port``: 0 takes a free one, None is 8787; ``host``: None is all addresses.

        Raises:
            TypeError, OverflowError: An argument is of the wrong type or out of range.
        """
        given = optional(to_u16)("port", port)
        self._port = DEFAULT_PORT if given is None else given
        self._host = optional(to_text)("host", host) or _DEFAULT_HOST
        self._models = OwnModels()
        super().__init__(self._models)

    def add_completions_model(self, model: str, checksum: str, engine: PythonAsyncEngine) -> None:
        """``engine`` completes texts: it gets ``{"model", "prompt", "stream": True}`` and yields OpenAI's chunks.

        ``checksum`` is accepted for Dynamo's sake.

        Raises:
            TypeError: An argument is of the wrong type.
            ModelError: There is one of this name.
        """
        self._models.add_text("completions", *_model(model, checksum, engine))

    def add_chat_completions_model(self, model: str, checksum: str, engine: PythonAsyncEngine) -> None:
        """The same for chat."""
        self._models.add_text("chat", *_model(model, checksum, engine))

    def add_tensor_model(
        self,
        model: str,
        checksum: str,
        engine: PythonAsyncEngine,
        *,
        runtime_config: ModelRuntimeConfig | None = None,
        tensor_model_config: dict[str, Any] | None = None,
    ) -> None:
        """``engine`` gets and yields ``{"model", "tensors": [...], "parameters": {...}}`` (``tensors``).

        ``tensor_model_config``: its inputs and outputs, for whoever asks; ``runtime_config`` is checked and not used.

        Raises:
            TypeError, ModelError: As above, or ``tensor_model_config`` is refused.
        """
        if runtime_config is not None:
            instance_of("runtime_config", runtime_config, ModelRuntimeConfig)
        config = None if tensor_model_config is None else check_tensor_config(tensor_model_config)
        self._models.add_tensor(*_model(model, checksum, engine), config)

    def remove_tensor_model(self, model: str) -> None:
        """Calls that run go on. Raises ``ModelError``: there is none."""
        self._models.remove("tensor", to_text("model", model))

    def list_tensor_models(self) -> list[str]:
        """Names, in the order in which they came."""
        return self._models.names("tensor")

    async def run(
        self, runtime: DistributedRuntime, *, on_ready: Callable[[int], None] = lambda port: None
    ) -> tuple[()]:
        """Serve until ``shutdown``, or the runtime's; calls may end within 30 s. The runtime is not closed. Once.

        ``on_ready``: told the port. Not in Dynamo.

        Raises:
            TypeError: It is no runtime.
            AddressUnavailable: The address cannot be used.
        """
        # gRPC is slow to import, and only this needs it.
        from dynamo_es.frontend.kserve.server import KserveServer

        core = instance_of("runtime", runtime, DistributedRuntime).core
        self._loop = asyncio.get_running_loop()
        ends = asyncio.ensure_future(self._end_with(core))
        server = KserveServer(self._models)
        try:
            await server.start(self._host, self._port)
            on_ready(server.port)
            await self._stop.wait()
        finally:
            ends.cancel()
            await server.stop(GRACE_S)
            await asyncio.gather(ends, return_exceptions=True)
        return ()


def _model(model: Any, checksum: Any, engine: Any) -> tuple[str, PythonAsyncEngine]:
    name = to_text("model", model)
    to_text("checksum", checksum)
    return name, instance_of("engine", engine, PythonAsyncEngine)
