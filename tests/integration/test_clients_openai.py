"""OpenAI's own client against a frontend on a socket, its worker behind the request plane: all that it offers here."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image
from pydantic import BaseModel

from tests.support.client_server import WEATHER, ClientServer, calls, client_server, says
from tests.support.runtimes import wait_for

TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}
FLAT: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
THOUGHT = "<think>hm</think>"


class Answer(BaseModel):
    steps: list[str]
    final: int


class GetWeather(BaseModel):
    """Weather of a city."""

    city: str


ANSWER = Answer(steps=["a", "b"], final=3)


@pytest.fixture(scope="module")
def server() -> Iterator[ClientServer]:
    with client_server() as running:
        yield running


@pytest.fixture
def client(server: ClientServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def user(text: str, **script: Any) -> Any:
    return [{"role": "user", "content": says(text, **script)}]


def picture() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# -- chat --------------------------------------------------------------------------------------------------------------


def test_a_chat_whole_and_streamed_with_all_common_options(client: openai.OpenAI, server: ClientServer) -> None:
    options: Any = {
        "temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 0.1, "frequency_penalty": 0.1, "stop": ["zz"],
        "max_completion_tokens": 50, "logit_bias": {"5": 1}, "user": "u", "metadata": {"a": "b"}, "store": False,
        "service_tier": "auto", "modalities": ["text"],
    }  # fmt: skip
    whole = client.chat.completions.create(model="m", messages=user("Héllo"), **options)
    stream = client.chat.completions.create(
        model="m", messages=user("Héllo"), stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    assert whole.choices[0].message.content == "Héllo"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Héllo"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    sampling = server.requests[-1]["sampling_options"]
    assert (sampling["seed"], sampling["logit_bias"]) == (3, {"5": 1.0})


def test_responses_tell_an_id_to_ask_about_and_echo_the_clients_own(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="m", messages=user("Hi"))
    assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"
    assert raw.parse()._request_id == raw.headers["x-request-id"]
    named = client.chat.completions.with_raw_response.create(
        model="m", messages=user("Hi"), extra_headers={"x-request-id": "mine"}
    )
    assert named.request_id == "mine"
    with client.chat.completions.with_streaming_response.create(model="m", messages=user("Hi"), stream=True) as stream:
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["x-request-id"]
        assert list(stream.iter_lines())[-2:] == ["data: [DONE]", ""]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="m", messages=[])
    assert refused.value.request_id


def test_structured_output_is_parsed_from_either_form(client: openai.OpenAI, server: ClientServer) -> None:
    messages = user(THOUGHT + ANSWER.model_dump_json(), chunk=3)
    whole = client.chat.completions.parse(model="m", messages=messages, response_format=Answer)
    with client.chat.completions.stream(model="m", messages=messages, response_format=Answer) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    assert whole.choices[0].message.parsed == streamed.choices[0].message.parsed == ANSWER
    assert {"content.delta", "content.done"} <= kinds
    schema = server.requests[-1]["sampling_options"]["guided_decoding"]["json"]
    assert schema["properties"].keys() == {"steps", "final"}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="m", messages=messages, response_format=Answer, max_tokens=5)
    function = openai.pydantic_function_tool(GetWeather)
    text = calls("Paris").replace("get_weather", "GetWeather")
    called = client.chat.completions.parse(model="m", messages=user(text), tools=[function])
    found = (called.choices[0].message.tool_calls or [])[0]
    assert found.function.parsed_arguments == GetWeather(city="Paris")


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_parallel_calls_go_round_trip(chunk: int, client: openai.OpenAI, server: ClientServer) -> None:
    ask = user(f"{THOUGHT}I look. {calls('Paris', 'Zürich')}", chunk=chunk)
    with client.chat.completions.stream(model="m", messages=ask, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    found = message.tool_calls or []
    assert [call.function.parsed_arguments for call in found] == [{"city": "Paris"}, {"city": "Zürich"}]
    # Of a call that comes whole and with the finish reason, as Dynamo sends it, the client tells no end.
    assert kinds.count("tool_calls.function.arguments.done") == (1 if chunk == 1000 else 2)
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in found]
    for given in (message, message.model_dump(exclude_none=True)):
        history: Any = [*user("x"), given, *results, *user("Done")]
        answer = client.chat.completions.create(model="m", messages=history, tools=[TOOL])
        assert answer.choices[0].message.content == "Done"
        assert server.prompts()[-1].count("sunny") == 2


def test_forced_calls_and_calls_one_at_a_time(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    listed = json.dumps([{"name": "get_weather", "parameters": {"city": "Rome"}}])
    for choice, text in (("required", listed), (named, '{"city": "Rome"}')):
        with client.chat.completions.stream(
            model="m", messages=user(text, chunk=4), tools=[TOOL], tool_choice=choice
        ) as stream:
            choices = stream.get_final_completion().choices
        assert choices[0].finish_reason == "tool_calls"
        assert [call.function.parsed_arguments for call in choices[0].message.tool_calls or []] == [{"city": "Rome"}]
    alone = client.chat.completions.create(
        model="m", messages=user(calls("A", "B")), tools=[TOOL], parallel_tool_calls=False
    )
    assert len(alone.choices[0].message.tool_calls or []) == 1


def test_logprobs_of_chat_and_completions(client: openai.OpenAI) -> None:
    ask: Any = {"model": "m", "messages": user("H€"), "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**ask)
    with client.chat.completions.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    for found in (whole.choices[0].logprobs, streamed.choices[0].logprobs):
        assert found is not None
        tokens = found.content or []
        assert tokens[0].token == "H"
        assert [len(token.top_logprobs) for token in tokens] == [2] * 4
    assert "logprobs.content.done" in kinds
    plain = client.completions.create(model="m", prompt=says("Hi"), logprobs=2)
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.tokens == ["H", "i"]


def test_completions_of_several_prompts(client: openai.OpenAI) -> None:
    prompts = [says("one"), says("two")]
    whole = client.completions.create(model="m", prompt=prompts, echo=False, best_of=2)
    chunks = list(client.completions.create(model="m", prompt=prompts, stream=True))
    assert [choice.text for choice in whole.choices] == ["one", "two"]
    for index, text in enumerate(("one", "two")):
        assert "".join(one.choices[0].text for one in chunks if one.choices[0].index == index) == text


def test_pictures_reach_the_worker_by_url_or_as_pixels(client: openai.OpenAI, server: ClientServer) -> None:
    url = picture()
    parts: Any = [{"type": "text", "text": says("A cat")}, {"type": "image_url", "image_url": {"url": url}}]
    for model in ("m", "seen"):
        answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": parts}])
        assert answer.choices[0].message.content == "A cat"
    passed, decoded = (request["multi_modal_data"]["image_url"] for request in server.requests[-2:])
    assert passed == [{"Url": url}]
    assert decoded == [{"Decoded": {"shape": [2, 3, 3], "dtype": "UINT8", "data": bytes((1, 2, 3)) * 6}}]
    parts[1]["image_url"]["url"] = "http://127.0.0.1/cat.png"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="seen", messages=[{"role": "user", "content": parts}])
    assert (refused.value.code, refused.value.param) == ("media_refused", "messages")
    asked: Any = [
        {"role": "user", "content": [
            {"type": "input_text", "text": says("A dog")}, {"type": "input_image", "image_url": url, "detail": "auto"}]}
    ]  # fmt: skip
    assert client.responses.create(model="m", input=asked).output_text == "A dog"


def test_models_and_embeddings(client: openai.OpenAI) -> None:
    assert {"m", "claude-m", "seen", "e"} == {model.id for model in client.models.list()}
    assert client.models.retrieve("m").object == "model"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("zz")
    assert missing.value.code == "model_not_found"
    floats = client.embeddings.create(model="e", input=["a", "b"], encoding_format="float")
    coded = client.embeddings.create(model="e", input=["a", "b"])
    for one, other in zip(floats.data, coded.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [503, 529])
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_asks_again_when_there_is_no_room(code: int, stream: bool, server: ClientServer) -> None:
    """It waits as ``Retry-After`` says; what fails before a stream's first token is its worker's, told inside."""
    before = len(server.requests)
    ask: Any = {"model": "m", "messages": user("Hi", fails=1, code=code, of=stream)}
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=2, timeout=60) as client:
        if stream:
            with pytest.raises(openai.APIError) as told:
                list(client.chat.completions.create(**ask, stream=True))
            assert told.value.code == str(code)
        else:
            assert client.chat.completions.create(**ask).choices[0].message.content == "Hi"
    assert len(server.requests) - before == (1 if stream else 2)


def test_errors_are_of_the_clients_classes(client: openai.OpenAI) -> None:
    expected: list[tuple[dict[str, Any], type[openai.APIStatusError]]] = [
        ({"model": "zz"}, openai.NotFoundError),
        ({"temperature": 3}, openai.BadRequestError),
        ({"temperature": "a"}, openai.BadRequestError),
        ({"messages": user("", **{"raise": "http", "code": 429})}, openai.RateLimitError),
        ({"messages": user("", **{"raise": "http", "code": 500})}, openai.InternalServerError),
        ({"messages": user("", **{"raise": "value"})}, openai.BadRequestError),
    ]
    for members, kind in expected:
        with pytest.raises(kind):
            client.chat.completions.create(**{"model": "m", "messages": user("Hi"), **members})
    stream = client.chat.completions.create(
        model="m", messages=user("", **{"raise": "http", "code": 500, "after": "Hel"}), stream=True
    )
    with pytest.raises(openai.APIError) as cut:
        list(stream)
    assert cut.value.message == "Internal server error"
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="m", messages=user("x" * 50, delay=0.1))


async def test_closing_a_stream_stops_the_worker(server: ClientServer) -> None:
    over = len(server.stopped)
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=user("x" * 2000, delay=0.05), stream=True)
        async for _ in stream:
            break
        await stream.close()
        await wait_for(lambda: len(server.stopped) > over)
    assert server.stopped[-1]


async def test_many_streams_at_a_time_do_not_mix(server: ClientServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:

        async def one(number: int) -> None:
            text = f"answer {number} " * 5
            stream = await client.chat.completions.create(model="m", messages=user(text), stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text

        await asyncio.gather(*map(one, range(20)))


# -- responses ---------------------------------------------------------------------------------------------------------


def test_responses_parse_structured_output(client: openai.OpenAI) -> None:
    text = says(ANSWER.model_dump_json(), chunk=3)
    whole = client.responses.parse(model="m", input=text, text_format=Answer)
    with client.responses.stream(model="m", input=text, text_format=Answer) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert whole.output_parsed == streamed.output_parsed == ANSWER
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    function: Any = {"type": "function", "name": "GetWeather", "parameters": WEATHER, "strict": True}
    called = client.responses.parse(model="m", input=says(calls("Rome").replace("get_w", "GetW")), tools=[function])
    assert [item.type for item in called.output] == ["function_call"]


def test_responses_go_round_trip_with_thoughts_and_calls(client: openai.OpenAI, server: ClientServer) -> None:
    ask: Any = {"model": "m", "tools": [FLAT], "reasoning": {"effort": "low", "summary": "auto"}, "store": False}
    text = says(f"{THOUGHT}I look. {calls('Paris', 'Rome')}", chunk=4)
    with client.responses.stream(input=text, **ask) as stream:
        kinds = {event.type for event in stream}
        response = stream.get_final_response()
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in response.output
        if item.type == "function_call"
    ]
    history: Any = [{"role": "user", "content": "x"}, *response.output, *results, *user("Done")]
    assert client.responses.create(input=history, **ask).output_text == "Done"
    assert "hm" in server.prompts()[-1]
    assert server.prompts()[-1].count("sunny") == 2


def test_what_would_need_stored_responses_says_so(client: openai.OpenAI) -> None:
    """As clients that take it for granted ask: by reference, by id, in the background."""
    reference: Any = [{"type": "item_reference", "id": "fc_1"}, *user("Hi")]
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="m", input=reference)
    assert refused.value.param == "input"
    assert "responses are not stored here, send the item itself" in refused.value.message
    for members in ({"previous_response_id": "resp_1"}, {"background": True}):
        with pytest.raises(openai.InternalServerError) as unknown:
            client.responses.create(model="m", input="x", **members)
        assert unknown.value.status_code == 501
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask("resp_1")
