"""LangChain's ``ChatOpenAI`` and its siblings against a frontend on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.support.client_server import ClientServer, calls, client_server, says

langchain = pytest.importorskip("langchain_openai", reason="needs langchain-openai")

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402

THOUGHT = "<think>hm</think>"


class Answer(BaseModel):
    """An answer."""

    final: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def server() -> Iterator[ClientServer]:
    with client_server() as running:
        yield running


@pytest.fixture
def options(server: ClientServer) -> Iterator[dict[str, Any]]:
    """Of every client; with a connection pool that the test closes, as LangChain closes none."""
    with httpx.Client(timeout=60) as http:
        yield {"base_url": server.v1, "api_key": "none", "max_retries": 0, "http_client": http}


def whole(chunks: Any) -> Any:
    """The message that chunks make together."""
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_messages_whole_and_streamed(responses: bool, options: dict[str, Any]) -> None:
    model = langchain.ChatOpenAI(
        model="m", use_responses_api=responses, temperature=0.1, stream_usage=True, max_tokens=100, **options
    )
    ask = [SystemMessage("Be brief"), HumanMessage(says(f"{THOUGHT}Hello"))]
    answer, streamed = model.invoke(ask), whole(model.stream(ask))
    assert answer.text == streamed.text == "Hello"
    assert answer.usage_metadata == streamed.usage_metadata
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
    assert [one.text for one in model.batch([says("A"), says("B")])] == ["A", "B"]


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_tools_go_round_trip(responses: bool, options: dict[str, Any], server: ClientServer) -> None:
    model = langchain.ChatOpenAI(model="m", use_responses_api=responses, **options).bind_tools([get_weather])
    question = HumanMessage(says(f"{THOUGHT}I look. {calls('Paris', 'Rome')}", chunk=3))
    for answer in (model.invoke([question]), whole(model.stream([question]))):
        assert [call["args"] for call in answer.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
        results = [get_weather.invoke(call) for call in answer.tool_calls]
        assert all(isinstance(result, ToolMessage) for result in results)
        last = model.invoke([question, answer, *results, HumanMessage(says("Done"))])
        assert last.text == "Done"
        assert "sunny in Rome" in server.prompts()[-1]


def test_choices_of_tools(options: dict[str, Any]) -> None:
    model = langchain.ChatOpenAI(model="m", **options)
    forced = model.bind_tools([get_weather], tool_choice="any", strict=True)
    assert forced.invoke(says('[{"name": "get_weather", "parameters": {"city": "X"}}]')).tool_calls[0]["args"] == {
        "city": "X"
    }
    named = model.bind_tools([get_weather], tool_choice="get_weather", parallel_tool_calls=False)
    assert named.invoke(says('{"city": "X"}')).tool_calls[0]["args"] == {"city": "X"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")  # of LangChain's own models
def test_structured_output(method: str, options: dict[str, Any]) -> None:
    model = langchain.ChatOpenAI(model="m", **options).with_structured_output(Answer, method=method)
    ask = says('{"final": 3}', chunk=2)
    assert model.invoke(ask) == Answer(final=3)
    assert list(model.stream(ask))[-1] == Answer(final=3)


def test_pictures_embeddings_and_completions(options: dict[str, Any], server: ClientServer) -> None:
    url = "https://pictures.example/cat.png"
    parts: Any = [{"type": "text", "text": says("A cat")}, {"type": "image_url", "image_url": {"url": url}}]
    assert langchain.ChatOpenAI(model="m", **options).invoke([HumanMessage(parts)]).text == "A cat"
    assert server.requests[-1]["multi_modal_data"] == {"image_url": [{"Url": url}]}
    embeddings = langchain.OpenAIEmbeddings(model="e", check_embedding_ctx_length=False, **options)
    assert [len(vector) for vector in embeddings.embed_documents(["a", "b"])] == [8, 8]
    assert "".join(langchain.OpenAI(model="m", **options).stream(says("Hello"))) == "Hello"
