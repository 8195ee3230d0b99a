from __future__ import annotations

from typing import Any

import pytest

from dynamo_es.frontend import serde
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.headers import read_headers
from dynamo_es.frontend.reading import ClientGone, chat_kind, completion_kind, decode_request, read_body

CHAT = chat_kind()
COMPLETION = completion_kind()
HI = b'{"model":"m","messages":[{"role":"user","content":"%b"}]%b}'


def receiver(*messages: dict[str, Any]) -> Any:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    return receive


def part(size: int, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x" * size, "more_body": more}


async def test_body_in_parts_is_bounded_without_a_declared_length() -> None:
    assert await read_body(receiver(part(3, True), part(4, True), part(0, False)), None, 1) == b"x" * 7
    mib = 1024 * 1024
    for messages in ((part(mib + 1, False),), (part(mib, True), part(1, True)), ()):
        with pytest.raises(ApiError) as caught:
            await read_body(receiver(*messages), mib + 1 if not messages else None, 1)
        assert caught.value.status == 413


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
def test_a_field_that_comes_twice_is_refused_however_the_body_is_written(separators: tuple[str, str]) -> None:
    comma, colon = separators
    members = [("model", '"m"'), ("messages", '[{"role":"user","content":"Hi"}]'), ("max_tokens", "2")]
    text = comma.join(f'"{name}"{colon}{value}' for name, value in members)
    assert decode_request(f"{{{text}}}".encode(), CHAT)[0].max_tokens == 2
    for name, value in members:
        body = f'{{{text}{comma}"{name}"{colon}{value}}}'.encode()
        assert detail(body) == (f"duplicate field `{name}` at line 1 column {len(body)}", name)


def test_a_field_that_comes_twice_under_an_escaped_name_is_refused() -> None:
    body = HI % (b"Hi", b',"mod\\u0065l":"other"')
    assert detail(body)[0].startswith("duplicate field `model`")


@pytest.mark.parametrize(("value", "kind"), [("nvext", "struct NvExt"), ("chat_template_kwargs", "a map")])
def test_text_in_place_of_an_object_is_reported_at_its_end(value: str, kind: str) -> None:
    body = HI % (b"Hi", f',"{value}":"x","n":1'.encode())
    end = body.index(b'"x"') + 3
    assert detail(body) == (f'invalid type: string "x", expected {kind} at line 1 column {end}', value)


async def test_client_that_leaves_while_sending_is_gone() -> None:
    for messages in (({"type": "http.disconnect"},), (part(1, True), {"type": "http.disconnect"})):
        with pytest.raises(ClientGone):
            await read_body(receiver(*messages), None, 1)


def detail(body: bytes, kind: Any = CHAT) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as caught:
        decode_request(body, kind)
    assert caught.value.status == 400
    prefix = "Failed to deserialize the JSON body into the target type: "
    assert caught.value.message.startswith(prefix)
    return caught.value.message[len(prefix) :], caught.value.param


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "EOF while parsing a value at line 1 column 0"),
        (b"{", "EOF while parsing an object at line 1 column 1"),
        (b"[1,", "EOF while parsing a value at line 1 column 3"),
        (b'{"model":"m', "EOF while parsing a string at line 1 column 11"),
        (b'{"a":1 "b":2}', "expected `,` or `}` at line 1 column 8"),
        (b'{"a":[1 2]}', "expected `,` or `]` at line 1 column 9"),
        (b'{"a" 1}', "expected `:` at line 1 column 6"),
        (b"{1:2}", "key must be a string at line 1 column 2"),
        (b'{"a":1,}', "trailing comma at line 1 column 8"),
        (b'{"a":1}\n x', "trailing characters at line 2 column 2"),
        (b'{"a":"\\q"}', "invalid escape at line 1 column 8"),
        (b'{\n"a":-Infinity}', "expected value at line 2 column 5"),
        (b"\xef\xbb\xbf{}", "expected value at line 1 column 1"),
    ],
)
def test_syntax_errors_name_their_place(body: bytes, expected: str) -> None:
    assert detail(body)[0] == expected


@pytest.mark.parametrize(
    ("change", "expected", "field"),
    [
        (b',"top_p":true', "invalid type: boolean `true`, expected f32", "top_p"),
        (b',"seed":1.5', "invalid type: floating point `1.5`, expected i64", "seed"),
        (b',"stop":["a",5]', "data did not match any variant of untagged enum Stop", "stop"),
        (b',"nvext":{"foo":1}', "unknown field `foo`, expected one of `greed_sampling`", "nvext"),
        (b',"nvext":{"dp_rank":-1}', "Expected `int` >= 0 - at `$.nvext.dp_rank`", "nvext"),
    ],
)
def test_type_errors_name_their_field(change: bytes, expected: str, field: str) -> None:
    text, param = detail(HI % (b"x", change))
    assert text.startswith(expected)
    assert param == field


def test_long_text_is_cut_in_messages() -> None:
    text, field = detail(b'{"model":"m","messages":"' + b"secret " * 100 + b'"}')
    assert len(text) < 200
    assert field == "messages"


def test_large_bodies_are_refused_in_the_decoders_words() -> None:
    text, field = detail(HI % (b"x" * 1_100_000, b',"top_p":"x"'))
    assert "$.top_p" in text
    assert field == "top_p"


def test_control_characters_and_bad_utf8_in_strings_are_taken() -> None:
    request, unknown = decode_request(HI % (b"a\nb\x00c\xff", b',"foo":1'), CHAT)
    assert request.messages[0].content == "a\nb\x00c�"
    assert unknown == ["foo"]
    assert decode_request(HI % (b"a\nb", b""), CHAT)[0].messages[0].content == "a\nb"


def test_prompts_must_be_of_one_kind() -> None:
    for prompt in (b'"a"', b'["a","b"]', b"[1,2]", b"[[1],[2]]"):
        assert decode_request(b'{"model":"m","prompt":%b}' % prompt, COMPLETION)[1] == []
    for prompt in (b'["a",1]', b"[[1],2]", b"5", b"null"):
        text, field = detail(b'{"model":"m","prompt":%b}' % prompt, COMPLETION)
        assert text.startswith("data did not match any variant of untagged enum Prompt")
        assert field == "prompt"


def test_brackets_in_strings_do_not_nest() -> None:
    assert serde.too_deep(HI % (b"[" * 500 + b'\\"[', b"")) is None
    assert serde.too_deep(b"[" * 127 + b"]" * 127) is None
    assert serde.too_deep(b"[" * 128) == 127


def test_headers_that_do_not_fit_are_not_echoed() -> None:
    assert read_headers([(b"x-request-id", b"a\x00b")]).echoed is None
    assert read_headers([(b"x-request-id", b"a" * 2000)]).echoed is None
    assert read_headers([(b"content-length", b"-5")]).content_length is None
    big = read_headers([(b"x-dynamo-meta-a", b"v" * 70_000)])
    assert big.metadata_error is not None
    assert big.metadata_error.status == 431
