"""KServe v2 over gRPC: what was recorded from Dynamo's service, and PROTO-22."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

grpc = pytest.importorskip("grpc", reason="grpcio is not installed")
from google.protobuf import json_format  # noqa: E402

from dynamo_es.clock import SystemClock  # noqa: E402
from dynamo_es.errors import DynamoException  # noqa: E402
from dynamo_es.frontend.kserve.messages import SERVICE, Messages  # noqa: E402
from dynamo_es.llm import (  # noqa: E402
    EngineType,
    EntrypointArgs,
    HttpError,
    KserveGrpcService,
    MockEngineArgs,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    PythonAsyncEngine,
    WorkerType,
    make_engine,
    register_model,
    run_input,
)
from dynamo_es.log.memory import MemoryLog  # noqa: E402
from tests.kafka.broker import free_port  # noqa: E402
from tests.support.runtimes import PATIENT, SharedLog, make_runtime, running  # noqa: E402

GOLDEN = json.loads((Path(__file__).parents[1] / "data/golden/services/kserve_rpcs.json").read_text())["cases"]
LIMIT_S = 60.0
CONFIG = {
    "name": "t1",
    "inputs": [
        {"name": "a", "data_type": "Int32", "shape": [-1]},
        {"name": "b", "data_type": "Bytes", "shape": [1]},
    ],
    "outputs": [{"name": "o", "data_type": "Float32", "shape": [-1, 2]}],
}
INT32 = {"name": "a", "datatype": "INT32", "shape": [1], "contents": {"int_contents": [1]}}


class Client:
    """Calls by the protocol's JSON mapping."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._messages = Messages()

    async def call(self, rpc: str, request: Any) -> Any:
        """A response, or a list of them; a refusal as it was recorded."""
        try:
            if rpc == "ModelStreamInfer":
                return await self._stream(request)
            kind = getattr(self._messages, f"{rpc}Request", None)
            if kind is None:
                answer = await self._channel.unary_unary(f"/{SERVICE}/{rpc}")(b"", timeout=LIMIT_S)
                return answer
            response = getattr(self._messages, f"{rpc}Response")
            method = self._channel.unary_unary(f"/{SERVICE}/{rpc}", kind.SerializeToString, response.FromString)
            return shown(await method(json_format.ParseDict(request, kind()), timeout=LIMIT_S))
        except grpc.aio.AioRpcError as error:
            return refusal(error)

    async def _stream(self, requests: list[Any]) -> list[Any]:
        messages = self._messages
        method = self._channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            messages.ModelInferRequest.SerializeToString,
            messages.ModelStreamInferResponse.FromString,
        )
        told = [json_format.ParseDict(request, messages.ModelInferRequest()) for request in requests]
        found: list[Any] = []
        try:
            async for answer in method(iter(told), timeout=LIMIT_S):
                found.append(shown(answer))
        except grpc.aio.AioRpcError as error:
            found.append(refusal(error))
        return found


def shown(message: Any) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def refusal(error: Any) -> dict[str, str]:
    return {"grpc_code": error.code().name, "details": error.details()}


class Engines:
    """Those of the recording; remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.ended = 0

    async def echo(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        parameters = request.get("parameters", {})
        answer = {name: request[name] for name in ("model", "tensors", "parameters", "id") if request.get(name)}
        try:
            yield {"tensors": [], **answer}
            if "multi" in parameters:
                yield {"tensors": [], **answer}
            while "forever" in parameters:
                await asyncio.sleep(0.001)
                yield {"tensors": [], **answer}
        finally:
            self.ended += 1

    async def boom(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        raise ValueError("tensor boom")
        yield {}

    async def http(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        raise HttpError(404, "no such tensor")
        yield {}

    async def complete(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.requests.append(request)
        for text, finish in (("Hel", None), ("lo", "stop")):
            yield {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Client, Engines, KserveGrpcService]]:
    runtime, engines, loop = make_runtime(), Engines(), asyncio.get_running_loop()
    service = KserveGrpcService(0, "127.0.0.1")
    service.add_tensor_model("t1", "sum", PythonAsyncEngine(engines.echo, loop), tensor_model_config=CONFIG)
    service.add_tensor_model("t2", "sum", PythonAsyncEngine(engines.echo, loop), runtime_config=ModelRuntimeConfig())
    service.add_tensor_model("terr", "sum", PythonAsyncEngine(engines.boom, loop))
    service.add_tensor_model("thttp", "sum", PythonAsyncEngine(engines.http, loop))
    service.add_completions_model("cm", "sum", PythonAsyncEngine(engines.complete, loop))
    service.add_chat_completions_model("ch", "sum", PythonAsyncEngine(engines.complete, loop))
    ready: asyncio.Future[int] = loop.create_future()
    task = asyncio.create_task(service.run(runtime, on_ready=ready.set_result))
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready.result()}") as channel:
            yield Client(channel), engines, service
    finally:
        service.shutdown()
        async with asyncio.timeout(LIMIT_S):
            assert await task == ()
        await runtime.close()


async def test_answers_are_those_recorded() -> None:
    async with serving() as (client, _, _):
        differences = []
        for case in GOLDEN:
            found = await client.call(case["rpc"], case["request"])
            if found != case["response"]:
                differences.append(f"{case['case']} {case['rpc']}: {found}\n  recorded {case['response']}")
        assert not differences, "\n".join(differences)


async def test_proto_22_metadata_has_protocol_names_and_errors_reach_streams() -> None:
    """PROTO-22."""
    async with serving() as (client, _, _):
        metadata = await client.call("ModelMetadata", {"name": "t1"})
        assert [tensor["datatype"] for part in ("inputs", "outputs") for tensor in metadata[part]] == [
            "INT32", "BYTES", "FP32",
        ]  # fmt: skip
        config = (await client.call("ModelConfig", {"name": "t1"}))["config"]
        assert [tensor["data_type"] for tensor in config["input"]] == ["TYPE_INT32", "TYPE_STRING"]
        assert config["backend"] == "dynamo"
        failing = {"model_name": "terr", "inputs": [INT32]}
        assert await client.call("ModelStreamInfer", [failing, {"model_name": "t1", "inputs": [INT32]}]) == [
            {"error_message": "BackendInvalidArgument: ValueError: tensor boom"},
            {
                "infer_response": {
                    "model_name": "t1", "model_version": "1",
                    "outputs": [{**INT32, "shape": ["1"]}],
                },
            },
        ]  # fmt: skip
        told = await client.call("ModelInfer", {"model_name": "thttp", "inputs": [INT32]})
        assert told["details"].startswith("Failed to fold completions stream: BackendInvalidArgument: {")


async def test_what_an_engine_gets() -> None:
    async with serving() as (client, engines, _):
        wide = {"name": "a", "datatype": "UINT16", "shape": [2], "contents": {"uint_contents": [70000, 1]}}
        texts = {"name": "b", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": ["eHl6"]}}
        request = {"model_name": "t1", "id": "i", "inputs": [wide, texts], "parameters": {"p": {"int64_param": 3}}}
        await client.call("ModelInfer", request)
        assert engines.requests[0] == {
            "id": "i", "model": "t1", "parameters": {"p": {"int64": 3}},
            "tensors": [
                {"metadata": {"name": "a", "data_type": "Uint16", "shape": [2]},
                 "data": {"data_type": "Uint16", "values": [4464, 1]}},
                {"metadata": {"name": "b", "data_type": "Bytes", "shape": [1]},
                 "data": {"data_type": "Bytes", "values": [[120, 121, 122]]}},
            ],
        }  # fmt: skip
        text = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "contents": {"bytes_contents": ["YQ=="]}}
        await client.call("ModelInfer", {"model_name": "cm", "id": "u", "inputs": [text]})
        assert engines.requests[1] == {"model": "cm", "prompt": "a", "stream": True, "user": "u"}
        short = {"name": "a", "datatype": "BYTES", "shape": [1]}
        cut = await client.call(
            "ModelInfer", {"model_name": "t1", "inputs": [short], "raw_input_contents": ["CQAAAGE="]}
        )
        assert "Invalid length-prefixed BYTES input for 'a', length exceeds raw input size" in cut["details"]
        few = {"name": "a", "datatype": "INT32", "shape": [3], "contents": {"int_contents": [1, 2]}}
        wrong = await client.call("ModelInfer", {"model_name": "t1", "inputs": [few]})
        assert "tensors[0].shape: shape implies 3 elements but data has 2" in wrong["details"]


async def test_a_client_that_leaves_ends_its_engine() -> None:
    async with serving() as (client, engines, _):
        messages = Messages()
        method = client._channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            messages.ModelInferRequest.SerializeToString,
            messages.ModelStreamInferResponse.FromString,
        )
        request = {"model_name": "t1", "parameters": {"forever": {"bool_param": True}}}
        call = method(iter([json_format.ParseDict(request, messages.ModelInferRequest())]), timeout=LIMIT_S)
        await anext(aiter(call))
        call.cancel()
        async with asyncio.timeout(LIMIT_S):
            while not engines.ended:
                await asyncio.sleep(0.01)


async def test_what_is_refused() -> None:
    service, loop = KserveGrpcService(), asyncio.get_running_loop()
    engine = PythonAsyncEngine(Engines().echo, loop)
    service.add_tensor_model("m", "sum", engine)
    assert service.list_tensor_models() == ["m"]
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: KserveGrpcService(70000), OverflowError, "out of range integral type conversion attempted"),
        (lambda: KserveGrpcService(0, 5), TypeError,
         "argument 'host': 'int' object cannot be converted to 'PyString'"),
        (lambda: service.add_tensor_model("m", "sum", engine), DynamoException, "Model already exists: m"),
        (lambda: service.remove_completions_model("zz"), DynamoException, "Model not found: zz"),
        (lambda: service.add_completions_model("n", "sum", 5), TypeError,
         "argument 'engine': 'int' object cannot be converted to 'PythonAsyncEngine'"),
        (lambda: service.add_tensor_model("n", "sum", engine, tensor_model_config={"name": "n"}), DynamoException,
         "Failed to convert tensor_model_config: missing field `inputs`"),
    ]  # fmt: skip
    for call, kind, text in calls:
        with pytest.raises(kind) as told:
            call()
        assert str(told.value) == text
    service.remove_tensor_model("m")
    assert (service.list_tensor_models(), service.list_chat_completions_models()) == ([], [])


# -- the input grpc ----------------------------------------------------------------------------------------------------


async def test_a_fleet_behind_grpc() -> None:
    """Completions of a mock worker through the frontend's pipeline, and a tensor model of another worker."""
    log = SharedLog(MemoryLog("test", SystemClock(), random.Random(1)))
    await log._log.start()
    env = {"DYN_HTTP_HOST": "127.0.0.1"}
    engines, metrics_port = Engines(), free_port()
    mock = EntrypointArgs(
        EngineType.Mocker, model_name="m", mocker_engine_args=MockEngineArgs(num_gpu_blocks=512, speedup_ratio=0.0)
    )
    front = EntrypointArgs(EngineType.Dynamic, http_port=0, http_metrics_port=metrics_port)
    runtimes = [make_runtime(log, runtime=PATIENT) for _ in range(3)]

    async def tensor_worker() -> None:
        endpoint = runtimes[1].endpoint("ns.tensor.generate")
        await register_model(
            ModelInput.Tensor, ModelType.TensorBased, endpoint, "t1", worker_type=WorkerType.Aggregated,
            tensor_model_config=CONFIG,
        )  # fmt: skip
        await endpoint.serve_endpoint(engines.echo)

    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    try:
        mocker = run_input(runtimes[0], "dyn://ns.mock.generate", await make_engine(runtimes[0], mock, env=env))
        gate = run_input(
            runtimes[2], "grpc", await make_engine(runtimes[2], front, env=env), on_grpc_ready=ready.set_result
        )
        async with (
            running(runtimes[0], mocker), running(runtimes[1], tensor_worker()), running(runtimes[2], gate) as task,
        ):  # fmt: skip
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{ready.result()}") as channel:
                client = Client(channel)
                async with asyncio.timeout(LIMIT_S):
                    for name in ("m", "t1"):
                        while await client.call("ModelReady", {"name": name}) != {"ready": True}:
                            await asyncio.sleep(0.01)
                assert await client.call("ModelReady", {"name": "other"}) == {}
                metadata = await client.call("ModelMetadata", {"name": "m"})
                assert [tensor["name"] for tensor in metadata["inputs"]] == ["text_input", "streaming"]
                text = {
                    "name": "text_input",
                    "datatype": "BYTES",
                    "shape": [1],
                    "contents": {"bytes_contents": ["YQ=="]},
                }
                answer = await client.call("ModelInfer", {"model_name": "m", "inputs": [text]})
                assert [tensor["name"] for tensor in answer["outputs"]] == ["text_output", "finish_reason"]
                flag = {"name": "streaming", "datatype": "BOOL", "shape": [1], "contents": {"bool_contents": [True]}}
                streamed = await client.call("ModelStreamInfer", [{"model_name": "m", "inputs": [text, flag]}])
                parts = [part["infer_response"]["outputs"][0]["contents"]["bytes_contents"][0] for part in streamed]
                assert len(parts) > 1
                tensors = await client.call("ModelInfer", {"model_name": "t1", "inputs": [INT32]})
                assert tensors["outputs"] == [{**INT32, "shape": ["1"]}]
                assert (await client.call("ModelMetadata", {"name": "t1"}))["outputs"][0]["datatype"] == "FP32"
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{metrics_port}") as http:
                assert (await http.get("/health")).json()["models"]["m"]["ready"] is True
                assert "dynamo_frontend_requests_total" in (await http.get("/metrics")).text
                assert (await http.get("/v1/models")).status_code == 404
    finally:
        await log._log.close()


async def test_an_echo_behind_grpc_and_what_it_has_not() -> None:
    env = {"DYN_HTTP_HOST": "127.0.0.1", "DYN_TOKEN_ECHO_DELAY_MS": "0"}
    runtime, ready = make_runtime(), asyncio.get_running_loop().create_future()
    engine = await make_engine(runtime, EntrypointArgs(EngineType.Echo, http_port=0), env=env)
    keyed = await make_engine(
        runtime, EntrypointArgs(EngineType.Echo, http_port=0), env={**env, "DYN_ES_API_KEYS_FILE": "/keys"}
    )
    with pytest.raises(DynamoException, match="without TLS and API keys"):
        await run_input(runtime, "grpc", keyed)
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": ["aGV5"]}}
    async with (
        running(runtime, run_input(runtime, "grpc", engine, on_grpc_ready=ready.set_result)),
        grpc.aio.insecure_channel(f"127.0.0.1:{await asyncio.wait_for(ready, LIMIT_S)}") as channel,
    ):
        answer = await Client(channel).call("ModelInfer", {"model_name": "dynamo", "inputs": [text]})
        assert [tensor["contents"]["bytes_contents"] for tensor in answer["outputs"]] == [["aGV5"], ["c3RvcA=="]]
