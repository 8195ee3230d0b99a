"""The gRPC server of the KServe v2 protocol (spec/services e.2-e.4)."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any
from uuid import UUID

import grpc
import grpc.aio

from dynamo_es.frontend.kserve.messages import SERVICE, Messages
from dynamo_es.frontend.kserve.models import EngineFault, FrameEngine, KserveModels
from dynamo_es.frontend.kserve.tensors import PROTOCOL_NAMES, Refused, fill_response, read_request
from dynamo_es.frontend.kserve.texts import Folded, completion_request, read_text
from dynamo_es.http_listen import AddressUnavailable
from dynamo_es.runtime.context import Context

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_RPCS = 8192
"""Calls in progress at a time; the next one gets RESOURCE_EXHAUSTED."""
_OPTIONS = "http_host or http_port (KserveGrpcService: host or port)"
_PLATFORM = "dynamo"
_UNKNOWN = (
    "ServerMetadata", "ModelStatistics", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload",
    "SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister", "TraceSetting", "LogSettings",
)  # fmt: skip


class RpcRefusal(Exception):
    """A call ends with this status."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class KserveServer:
    """Serves models until ``stop``. Belongs to one event loop.

    Attributes:
        port: Where it listens; known after ``start``.
    """

    def __init__(self, models: KserveModels) -> None:
        self._models = models
        self._messages = Messages()
        self._server: Any = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen without TLS. Raises ``AddressUnavailable``."""
        limits = (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0))
        self._server = grpc.aio.server(options=limits, maximum_concurrent_rpcs=MAX_RPCS)
        self._server.add_generic_rpc_handlers((self._handlers(),))
        try:
            self.port = self._server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError as error:
            raise AddressUnavailable(host, port, "it is in use, or no address of this machine", _OPTIONS) from error
        await self._server.start()
        logger.info("serving KServe's gRPC on %s:%d", host, self.port)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and end those that are not over after ``grace_s``. Safe to call twice."""
        if self._server is not None:
            await self._server.stop(grace_s)
            self._server = None

    def _handlers(self) -> Any:
        unary: dict[str, Callable[..., Any]] = {
            "ServerLive": lambda request, answer: self._tell(answer, "live", value=True),
            "ServerReady": lambda request, answer: self._tell(answer, "ready", value=True),
            "ModelReady": lambda request, answer: self._tell(
                answer, "ready", value=self._models.is_ready(request.name)
            ),
            "ModelMetadata": self._metadata,
            "ModelConfig": self._config,
        }
        found = {name: self._simple(name, fill) for name, fill in unary.items()}
        messages = self._messages
        found["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
            self._infer, messages.ModelInferRequest.FromString, messages.ModelInferResponse.SerializeToString
        )
        found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream, messages.ModelInferRequest.FromString, messages.ModelStreamInferResponse.SerializeToString
        )
        found |= {name: grpc.unary_unary_rpc_method_handler(_not_there) for name in _UNKNOWN}
        return grpc.method_handlers_generic_handler(SERVICE, found)

    def _simple(self, name: str, fill: Callable[[Any, Any], None]) -> Any:
        """A call that is answered from what is known."""
        request_type = getattr(self._messages, f"{name}Request")
        answer_type = getattr(self._messages, f"{name}Response")

        async def handle(request: Any, call: Any) -> Any:
            answer = answer_type()
            try:
                fill(request, answer)
            except RpcRefusal as error:
                await call.abort(error.code, str(error))
            return answer

        return grpc.unary_unary_rpc_method_handler(handle, request_type.FromString, answer_type.SerializeToString)

    @staticmethod
    def _tell(answer: Any, name: str, *, value: bool) -> None:
        setattr(answer, name, value)

    def _metadata(self, request: Any, answer: Any) -> None:
        config = self._known(request.name)
        answer.name, answer.platform = request.name, _PLATFORM
        answer.versions.append("1")
        for part, told in (("inputs", answer.inputs), ("outputs", answer.outputs)):
            for tensor in config[part]:
                told.add(name=tensor["name"], datatype=PROTOCOL_NAMES[tensor["data_type"]], shape=list(tensor["shape"]))

    def _config(self, request: Any, answer: Any) -> None:
        config = self._known(request.name)
        about = answer.config
        about.name, about.platform, about.backend = request.name, _PLATFORM, _PLATFORM
        for part, told in (("inputs", about.input), ("outputs", about.output)):
            for tensor in config[part]:
                name = PROTOCOL_NAMES[tensor["data_type"]]
                kind = f"TYPE_{'STRING' if name == 'BYTES' else name}"
                told.add(name=tensor["name"], data_type=kind, dims=list(tensor["shape"]))

    def _known(self, name: str) -> Any:
        config = self._models.config(name)
        if config is None:
            raise _not_found(name)
        return config

    # -- inference -------------------------------------------------------------------------------------------------

    async def _infer(self, request: Any, call: Any) -> Any:
        try:
            tensor = self._models.tensor(request.model_name)
            if tensor is not None:
                return await self._infer_tensors(tensor.engine, request)
            return await self._infer_text(self._completions(request.model_name), request)
        except RpcRefusal as error:
            await call.abort(error.code, str(error))
        except EngineFault as error:
            await call.abort(grpc.StatusCode.INTERNAL, f"Failed to fold completions stream: {error}")

    async def _infer_tensors(self, engine: FrameEngine, request: Any) -> Any:
        frames = []
        async with aclosing(self._frames(engine, _read(read_request, request), request)) as found:
            async for frame in found:
                frames.append(frame)
                if len(frames) > 1:
                    raise EngineFault("Multiple responses in non-streaming mode")
        if not frames:
            raise EngineFault("no response")
        return self._filled(request, frames[0])

    async def _infer_text(self, engine: FrameEngine, request: Any) -> Any:
        asked = _read(read_text, request)
        if asked.streams:
            raise RpcRefusal(grpc.StatusCode.INVALID_ARGUMENT, "Streaming is not supported for this endpoint")
        return await self._folded(engine, request, completion_request(request, asked))

    async def _stream(self, requests: AsyncIterator[Any], call: Any) -> AsyncGenerator[Any, None]:
        """One request after the other; each frame of an engine is a message, and so is its failure."""
        answer_type = self._messages.ModelStreamInferResponse
        async for request in requests:
            try:
                async with aclosing(self._answers(request)) as answers:
                    async for answer in answers:
                        yield answer_type(infer_response=answer)
            except EngineFault as error:
                yield answer_type(error_message=str(error))
            except RpcRefusal as error:
                await call.abort(error.code, str(error))

    async def _answers(self, request: Any) -> AsyncGenerator[Any, None]:
        tensor = self._models.tensor(request.model_name)
        if tensor is not None:
            async with aclosing(self._frames(tensor.engine, _read(read_request, request), request)) as frames:
                async for frame in frames:
                    yield self._filled(request, frame)
            return
        engine = self._completions(request.model_name)
        asked = _read(read_text, request)
        body = completion_request(request, asked)
        if not asked.streams:
            yield await self._folded(engine, request, body)
            return
        async with aclosing(self._frames(engine, body, request)) as chunks:
            async for chunk in chunks:
                part = Folded()
                _take(part, chunk)
                if not part.is_empty:
                    yield self._text_answer(part, request)

    async def _folded(self, engine: FrameEngine, request: Any, body: dict[str, Any]) -> Any:
        whole = Folded()
        async with aclosing(self._frames(engine, body, request)) as chunks:
            async for chunk in chunks:
                _take(whole, chunk)
        return self._text_answer(whole, request)

    def _text_answer(self, folded: Folded, request: Any) -> Any:
        answer = self._messages.ModelInferResponse()
        folded.fill(answer, request)
        return answer

    def _filled(self, request: Any, frame: Any) -> Any:
        answer = self._messages.ModelInferResponse()
        try:
            fill_response(answer, request, frame)
        except Refused as error:
            raise EngineFault(str(error)) from error
        return answer

    def _completions(self, name: str) -> FrameEngine:
        engine = self._models.completions(name)
        if engine is None:
            raise _not_found(name)
        return engine

    @staticmethod
    async def _frames(engine: FrameEngine, body: dict[str, Any], request: Any) -> AsyncGenerator[Any, None]:
        """The engine's frames; a call that its client gives up stops it."""
        context = Context(_id_of(request.id))
        try:
            async with aclosing(engine.generate(body, context)) as frames:
                async for frame in frames:
                    yield frame
        finally:
            context.stop_generating()


def _take(folded: Folded, chunk: Any) -> None:
    try:
        folded.add(chunk)
    except Refused as error:
        raise EngineFault(str(error)) from error


def _read(read: Callable[[Any], Any], request: Any) -> Any:
    try:
        return read(request)
    except Refused as error:
        # The words of Dynamo's server around its own.
        shown = json.dumps(str(error), ensure_ascii=False)
        details = f"status: InvalidArgument, message: {shown}, details: [], metadata: MetadataMap {{ headers: {{}} }}"
        raise RpcRefusal(grpc.StatusCode.INVALID_ARGUMENT, f"Failed to parse request: {details}") from error


def _not_found(name: str) -> RpcRefusal:
    return RpcRefusal(grpc.StatusCode.NOT_FOUND, f"Model '{name}' not found")


def _id_of(given: str) -> str | None:
    """The request's id as the context's, if it is a UUID; None: a new one."""
    try:
        return str(UUID(given))
    except ValueError:
        return None


async def _not_there(request: bytes, call: Any) -> bytes:
    await call.abort(grpc.StatusCode.UNIMPLEMENTED, "")
    return b""
