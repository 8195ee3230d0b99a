"""The chat processors on the real libraries: what Dynamo's gave for the same frames, and requests over HTTP.

Each library is an extra; where it is not installed, its tests are skipped. The recordings are of ai-dynamo 1.6.1 with
SGLang 0.5.21 and vLLM 0.31.0, each chunk's parts put together.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.config.processor_options import ChatProcessorConfig
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.frontend.chat_processors import ProcessorSettings, chat_processors
from dynamo_es.frontend.extras import import_extra
from dynamo_es.frontend.python_engine import PythonAsyncEngine, TokenRoutedEngine
from dynamo_es.frontend.sglang_processor import SglangEngineFactory, SglangProcessor
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.frontend.vllm_processor import VllmProcessor, finish_reason_name, map_finish_reason
from dynamo_es.models.deployment_card import ModelCardInstanceId, ModelDeploymentCard
from tests.support.served_fleet import CHAT, served_fleet
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, card, says, served

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
DATA = Path(__file__).parents[1] / "data"
MODEL = str(DATA / "models" / "smollm2-135m-instruct")
LIBRARIES = [
    pytest.param(name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"the extra {name} is not installed"))
    for name in ("sglang", "vllm")
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'Sure. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BETTER = {
    "vllm": {
        "tools_required": "Dynamo leaves the list that it asked for as content where the model has a parser of calls",
        "tools_required_s": "the same",
        "req_qwen3_coder": "the same",
        "req_kimi_k2": "the same, and binds nothing",
        "tools_named0p": "Dynamo does not bind to {} where the model has a parser of calls, and leaves it as content",
        "tools_named_s": "Dynamo leaves the arguments as content where the model has a parser of calls",
        "tools_named": "a list is no arguments of a function: it stays content, as on the default way",
        "n2t": "Dynamo drops the last token of an output that a worker stops, even if no stop token",
        "think_tool": "vLLM's reading of a whole output leaves out the line end between a thought and a call",
        "strict": "here the text of a call in another format stays content",
    }
}
"""Recorded cases that differ on purpose."""


@functools.cache
def tokenizer_of_model() -> Tokenizer:
    return load_tokenizer(MODEL)[0]


def recorded(library: str) -> list[Any]:
    cases = json.loads((DATA / "golden" / "frontend" / f"chat_processor_{library}.json").read_text())
    mark = pytest.mark.skipif(find_spec(library) is None, reason=f"the extra {library} is not installed")
    return [
        pytest.param(library, case, id=f"{library}-{case['name']}", marks=mark)
        for case in cases
        if case["name"] not in BETTER.get(library, ())
    ]


@dataclass
class Made:
    """Processors that were made before; a model's files are read once."""

    threads: ThreadPoolExecutor
    sglang: SglangProcessor | None = None
    vllm: VllmProcessor | None = None

    def processor(self, library: str, engine: ScriptedEngine, case: Mapping[str, Any], interval: int = 1) -> Any:
        routed = TokenRoutedEngine(engine)
        tools, thoughts = case.get("tool_parser"), case.get("reasoning_parser")
        return self._sglang(routed, tools, thoughts, interval) if library == "sglang" else self._vllm(
            routed, tools, thoughts, interval
        )  # fmt: skip

    def _sglang(self, routed: TokenRoutedEngine, tools: str | None, thoughts: str | None, interval: int) -> Any:
        if self.sglang is None:
            self.sglang = self._build("sglang")
        tokenizer = self.sglang._tokenizer
        return SglangProcessor(tokenizer, routed, tools, thoughts, [2], stream_interval=interval)

    def _vllm(self, routed: TokenRoutedEngine, tools: str | None, thoughts: str | None, interval: int) -> Any:
        if self.vllm is None:
            self.vllm = self._build("vllm")
        calls = import_extra("vllm.tool_parsers", "vllm").ToolParserManager
        reasons = import_extra("vllm.reasoning", "vllm").ReasoningParserManager
        outputs = type(self.vllm._outputs)(self.vllm.tokenizer, log_stats=False, stream_interval=interval)
        return VllmProcessor(
            self.vllm.tokenizer,
            self.vllm._inputs,
            outputs,
            calls.get_tool_parser(tools) if tools else None,
            reasons.get_reasoning_parser(thoughts) if thoughts else None,
            routed,
            enable_auto_tool_choice=tools is not None,
        )

    def _build(self, library: str) -> Any:
        made = chat_processors(
            ChatProcessorConfig(chat_processor=library), ProcessorSettings(), self.threads, lambda: 0
        )
        assert made is not None
        engine = ScriptedEngine(says())
        return asyncio.run(made.build(card(source_path=MODEL), engine, None))


@pytest.fixture(scope="session")
def made() -> Iterator[Made]:
    with ThreadPoolExecutor(2) as pool:
        yield Made(pool)


def frames_of(text: str, *ids: int) -> list[dict[str, Any]]:
    """The text's tokens one by one, then ``ids`` with the end."""
    tokens = tokenizer_of_model().encode(text, False)
    return [*({"token_ids": [token]} for token in tokens), {"token_ids": list(ids), "finish_reason": "stop"}]


def folded(envelopes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All chunks of an answer as one."""
    result: dict[str, Any] = {}
    for envelope in envelopes:
        data = envelope.get("data") or {}
        if envelope.get("event") == "error":
            result["error"] = envelope["comment"]
        for name in ("usage", "nvext"):
            if name in data:
                result[name] = data[name]
        for choice in data.get("choices", ()):
            _fold(result.setdefault(str(choice["index"]), {"content": "", "reasoning": "", "calls": {}}), choice)
    return result


def _fold(into: dict[str, Any], choice: Mapping[str, Any]) -> None:
    delta = choice["delta"]
    into["content"] += delta.get("content") or ""
    into["reasoning"] += delta.get("reasoning_content") or ""
    for one in delta.get("tool_calls") or ():
        call_ = into["calls"].setdefault(str(one["index"]), {"name": "", "args": ""})
        call_["name"] += one["function"].get("name") or ""
        call_["args"] += one["function"].get("arguments") or ""
    if choice["finish_reason"]:
        into["finish"] = choice["finish_reason"]
    if choice["logprobs"]:
        into["lp"] = len(choice["logprobs"]["content"])


@pytest.mark.parametrize(("library", "case"), [*recorded("sglang"), *recorded("vllm")])
async def test_as_dynamo(made: Made, library: str, case: dict[str, Any]) -> None:
    engine = ScriptedEngine(says(*case["frames"]))
    processor = await asyncio.to_thread(made.processor, library, engine, case, 3 if case["name"] == "interval" else 1)
    if case["raises"]:
        with pytest.raises(Exception, match=r".") as raised:
            [_ async for _ in processor.generator(dict(case["request"]))]
        assert [type(raised.value).__name__, str(raised.value)] == case["raises"]
        return
    output = folded([envelope async for envelope in processor.generator(dict(case["request"]))])
    expected = case["output"]
    if library == "vllm":  # it counts thoughts of requests that have none, and no output that ends here
        output.pop("usage", None), expected.pop("usage", None)
    assert output == expected
    worker = engine.requests[0]
    assert tokenizer_of_model().decode(worker["token_ids"], False) == case["prompt"]
    assert worker["sampling_options"]["guided_decoding"] == case["guided_decoding"]


@pytest.mark.parametrize("library", LIBRARIES)
async def test_calls_that_are_demanded_are_read(made: Made, library: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    listed, alone = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', '{"city": "Paris"}'
    texts = [("required", listed), (named, listed if library == "sglang" else alone)]
    for choice, text in texts:
        engine = ScriptedEngine(says(*frames_of(text, 2)))
        processor = await asyncio.to_thread(made.processor, library, engine, {"tool_parser": "hermes"})
        request = {"model": "m", "messages": [], "tools": [TOOL], "tool_choice": choice, "stream": True}
        request["messages"] = [{"role": "user", "content": "hi"}]
        output = folded([envelope async for envelope in processor.generator(request)])["0"]
        assert (output["finish"], output["content"]) == ("tool_calls", "")
        assert {name: json.loads(one["args"]) for name, one in output["calls"].items()} == {"0": {"city": "Paris"}}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_over_http(made: Made, library: str, stream: bool) -> None:
    """From the client's bytes by the processor to the worker, and back."""
    engine = ScriptedEngine(says(*frames_of(CALL, 2)))
    processor = await asyncio.to_thread(made.processor, library, engine, {"tool_parser": "hermes"})
    tokenizer = tokenizer_of_model()
    model = replace(served(engine, tokenizer=tokenizer), processor=processor)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "stream": stream}
    reply = await call(application(model, executor=made.threads), CHAT, json.dumps(body).encode())
    assert reply.status == 200
    if stream:
        lines = [line[6:] for line in reply.text.split("\n") if line.startswith("data: {")]
        output = folded([{"data": json.loads(line)} for line in lines])["0"]
        assert (output["content"].strip(), output["finish"]) == ("Sure.", "tool_calls")
        assert output["calls"] == {"0": {"name": "get_weather", "args": '{"city": "Paris"}'}}
    else:
        choice = reply.json()["choices"][0]
        assert (choice["message"]["content"].strip(), choice["finish_reason"]) == ("Sure.", "tool_calls")
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    assert tokenizer.decode(engine.requests[0]["token_ids"], False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("more", "part"),
    [({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice forces a tool call")],
)
async def test_a_refusal_over_http(made: Made, library: str, more: dict[str, Any], part: str) -> None:
    engine = ScriptedEngine(says())
    processor = await asyncio.to_thread(made.processor, library, engine, {})
    model = replace(served(engine, tokenizer=tokenizer_of_model()), processor=processor)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    reply = await call(application(model, executor=made.threads), CHAT, json.dumps(body).encode())
    assert (reply.status, part in reply.json()["message"], engine.requests) == (400, True, [])


@pytest.mark.parametrize("library", LIBRARIES)
async def test_a_fleet_behind_it(made: Made, library: str) -> None:
    """A worker registers, its model gets a processor, and a request goes through router and worker."""
    processors = chat_processors(
        ChatProcessorConfig(chat_processor=library), ProcessorSettings(), made.threads, lambda: 0
    )
    async with asyncio.timeout(120), served_fleet(processors=processors) as fleet:
        await fleet.mock_worker(WorkerConfig(model_name="m", model_path=MODEL), wait=False)
        while not (status := fleet.models.statuses().get("m")) or not status.ready:
            await asyncio.sleep(0.05)
        assert fleet.models.find("m").processor is not None
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        reply = await call(fleet.app, CHAT, json.dumps(body).encode())
        assert (reply.status, reply.json()["usage"]["completion_tokens"]) == (200, 5)


@pytest.mark.skipif(find_spec("sglang") is None, reason="the extra sglang is not installed")
async def test_preprocess_workers(made: Made) -> None:
    """Processes of their own prepare; the engine is Dynamo's, an async generator."""
    factory = SglangEngineFactory(ProcessorSettings(preprocess_workers=1), False, "hermes", None)
    described = card(source_path=MODEL)
    engine = ScriptedEngine(says(*frames_of(CALL, 2)))
    processor = await factory.build_processor(ModelDeploymentCard.of(described), TokenRoutedEngine(engine))
    try:
        request = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
        output = folded([envelope async for envelope in processor.generator(request)])["0"]
        assert output["calls"] == {"0": {"name": "get_weather", "args": '{"city": "Paris"}'}}
    finally:
        processor.close()


@pytest.mark.parametrize("library", LIBRARIES)
async def test_the_factory_makes_dynamos_engine(made: Made, library: str) -> None:
    processors = chat_processors(
        ChatProcessorConfig(chat_processor=library), ProcessorSettings(), made.threads, lambda: 0
    )
    assert processors is not None
    described = card(source_path=MODEL)
    factory: Any = processors._factory
    made_engine = await factory.chat_engine_factory(
        ModelCardInstanceId.of(described),
        ModelDeploymentCard.of(described),
        TokenRoutedEngine(ScriptedEngine(says(*frames_of("Hello", 2)))),
    )
    assert isinstance(made_engine, PythonAsyncEngine)
    request = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer: Any = made_engine.generate(request)
    assert isinstance(answer, AsyncGenerator)
    assert folded([envelope async for envelope in answer])["0"]["content"] == "Hello"
    with pytest.raises(RuntimeError, match="no directory"):
        other = ModelDeploymentCard.of(card(source_path="no/such/folder"))
        await factory.chat_engine_factory(ModelCardInstanceId.of(described), other, TokenRoutedEngine(answer))


@pytest.mark.skipif(find_spec("vllm") is None, reason="the extra vllm is not installed")
def test_finish_reasons_are_vllms() -> None:
    for raw in ("stop", "eos", "length", "error: x", "abort", "cancelled", "content_filter"):
        found = map_finish_reason(raw)
        assert found is not None
        assert found.name == finish_reason_name(raw)
