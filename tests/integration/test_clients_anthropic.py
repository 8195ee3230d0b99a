"""Anthropic's own client against a frontend on a socket, its worker behind the request plane."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from tests.integration.test_clients_openai import picture
from tests.support.client_server import WEATHER, ClientServer, calls, client_server, says
from tests.support.runtimes import wait_for

TOOLS: Any = [{"name": "get_weather", "description": "w", "input_schema": WEATHER}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
THOUGHT = "<think>hm</think>"
ASK: Any = {"model": "m", "max_tokens": 2000}


class Answer(BaseModel):
    final: int


@pytest.fixture(scope="module")
def server() -> Iterator[ClientServer]:
    with client_server() as running:
        yield running


@pytest.fixture
def client(server: ClientServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def user(text: str, **script: Any) -> Any:
    return [{"role": "user", "content": says(text, **script)}]


def test_a_message_whole_and_streamed_with_all_common_options(
    client: anthropic.Anthropic, server: ClientServer
) -> None:
    options: Any = {
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
        "stop_sequences": ["STOP"], "metadata": {"user_id": "u"}, "service_tier": "auto",
        "extra_body": {"temperature": 0.5, "top_p": 0.9, "top_k": 5},
    }  # fmt: skip
    whole = client.messages.create(**ASK, messages=user("HelloSTOPx"), **options)
    with client.messages.stream(**ASK, messages=user("HelloSTOPx"), **options) as stream:
        assert "".join(stream.text_stream) == "Hello"
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert whole.usage.output_tokens == streamed.usage.output_tokens
    assert server.requests[-1]["sampling_options"]["top_k"] == 5
    assert server.prompts()[-1].startswith("<|system|>Be brief")


def test_answers_and_errors_tell_an_id_to_ask_about(client: anthropic.Anthropic) -> None:
    raw = client.messages.with_raw_response.create(**ASK, messages=user("Hi"))
    assert raw.headers["request-id"] == raw.parse()._request_id == raw.headers["x-request-id"]
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(**ASK, messages=[])
    assert refused.value.request_id
    assert refused.value.type == "invalid_request_error"


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_thoughts_and_parallel_calls_go_round_trip(
    chunk: int, client: anthropic.Anthropic, server: ClientServer
) -> None:
    ask = {**ASK, "tools": TOOLS, "thinking": THINKING}
    with client.messages.stream(messages=user(f"{THOUGHT}I look.{calls('Paris', 'Rome')}", chunk=chunk), **ask) as got:
        kinds = {event.type for event in got}
        message = got.get_final_message()
    used = [block for block in message.content if block.type == "tool_use"]
    assert [block.input for block in used] == [{"city": "Paris"}, {"city": "Rome"}]
    assert message.content[0].type == "thinking"
    assert (message.stop_reason, {"thinking", "signature", "input_json"} <= kinds) == ("tool_use", True)
    results: Any = [
        {"type": "tool_result", "tool_use_id": used[0].id, "content": "sunny"},
        {"type": "tool_result", "tool_use_id": used[1].id, "content": [{"type": "text", "text": "off"}],
         "is_error": True},
    ]  # fmt: skip
    history: Any = [
        *user("x"), {"role": "assistant", "content": message.content},
        {"role": "user", "content": [*results, {"type": "text", "text": says("Done")}]},
    ]  # fmt: skip
    assert client.messages.create(messages=history, **ask).content[0].text == "Done"  # type: ignore[union-attr]
    prompt = server.prompts()[-1]
    assert prompt.index("hm") < prompt.index("Paris") < prompt.index("sunny") < prompt.index("off")


def test_the_clients_own_tool_loop_runs(client: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city."""
        asked.append(city)
        return says("It is sunny")

    runner = client.beta.messages.tool_runner(
        **ASK, tools=[get_weather], messages=user(calls("Paris")), max_iterations=3
    )
    last = list(runner)[-1]
    assert (asked, last.content[0].text) == (["Paris"], "It is sunny")  # type: ignore[union-attr]


def test_choices_of_tools(client: anthropic.Anthropic) -> None:
    listed = json.dumps([{"name": "get_weather", "parameters": {"city": "Rome"}}])
    for choice, text in (({"type": "any"}, listed), ({"type": "tool", "name": "get_weather"}, '{"city": "Rome"}')):
        answer = client.messages.create(**ASK, messages=user(text), tools=TOOLS, tool_choice=choice)  # type: ignore[call-overload]
        assert [block.input for block in answer.content] == [{"city": "Rome"}]
    alone = client.messages.create(
        **ASK, messages=user(calls("A", "B")), tools=TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert [block.type for block in alone.content].count("tool_use") == 1


def test_structured_output_is_parsed(client: anthropic.Anthropic, server: ClientServer) -> None:
    whole = client.messages.parse(**ASK, messages=user('{"final": 3}'), output_format=Answer)
    with client.messages.stream(**ASK, messages=user('{"final": 3}', chunk=2), output_format=Answer) as stream:
        streamed = stream.get_final_message()
    assert whole.parsed_output == streamed.parsed_output == Answer(final=3)
    assert "final" in server.requests[-1]["sampling_options"]["guided_decoding"]["json"]["properties"]


def test_pictures_reach_the_worker(client: anthropic.Anthropic, server: ClientServer) -> None:
    url = picture()
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": says("A cat")}]
    for model in ("m", "seen"):
        client.messages.create(**{**ASK, "model": model}, messages=[{"role": "user", "content": blocks}])
    passed, decoded = (request["multi_modal_data"]["image_url"] for request in server.requests[-2:])
    assert passed == [{"Url": url}]
    assert decoded[0]["Decoded"]["shape"] == [2, 3, 3]


def test_counts_and_models(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "hello"}], tools=TOOLS)
    assert counted.input_tokens > 10
    assert {"m", "claude-m"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("m").display_name == "m"


def test_the_client_asks_again_when_there_is_no_room(server: ClientServer) -> None:
    before = len(server.requests)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=2, timeout=60) as client:
        answer = client.messages.create(**ASK, messages=user("Hi", fails=1, code=529))
    assert answer.content[0].text == "Hi"  # type: ignore[union-attr]
    assert len(server.requests) == before + 2


def test_errors_are_of_the_clients_classes(client: anthropic.Anthropic) -> None:
    expected: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str]] = [
        ({"model": "zz"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": user("", **{"raise": "http", "code": 429})}, anthropic.RateLimitError, "rate_limit_error"),
        ({"messages": user("", fails=9, code=529)}, anthropic.InternalServerError, "overloaded_error"),
    ]
    for members, kind, name in expected:
        with pytest.raises(kind) as told:
            client.messages.create(**{**ASK, "messages": user("Hi"), **members})
        assert told.value.type == name
    broken = user("", **{"raise": "http", "code": 500, "after": "Hel"})
    with client.messages.stream(**ASK, messages=broken) as stream, pytest.raises(anthropic.APIStatusError) as cut:
        stream.get_final_message()
    assert "Internal server error" in str(cut.value)


async def test_leaving_a_stream_stops_the_worker(server: ClientServer) -> None:
    over = len(server.stopped)
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        async with client.messages.stream(**ASK, messages=user("x" * 2000, delay=0.05)) as stream:
            async for _ in stream.text_stream:
                break
        await wait_for(lambda: len(server.stopped) > over)
    assert server.stopped[-1]
