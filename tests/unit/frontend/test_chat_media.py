"""Media in chats: what the template sees, what the worker gets, from where they may come, and decoding."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend import media_decoding
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.chat_media import MAX_MEDIA
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import BytesTokenizer
from dynamo_es.llm import MediaDecoder, MediaFetcher
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served
from tests.unit.frontend.test_security_cases import INSIDE, MEDIA, REDIRECTS

CHAT = "/v1/chat/completions"
FAR = "https://pictures.example/cat.png"
VISION = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}<|assistant|>"
)


def png(width: int = 3, height: int = 2, color: tuple[int, int, int] = (255, 0, 7)) -> str:
    """As a ``data:`` URL."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), color).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def vision(engine: ScriptedEngine, **card: Any) -> ServedModel:
    return dataclasses.replace(served(engine, "v", **card), renderer=ChatRenderer(VISION, {}))


def decoding(fetcher: MediaFetcher | None = None, **limits: int) -> dict[str, Any]:
    """Members of the card of a model whose pictures are decoded."""
    decoder = MediaDecoder()
    decoder.enable_image({"limits": limits} if limits else {})
    found = {"media_decoder": decoder.card_body()}
    return {"details": found if fetcher is None else {**found, "media_fetcher": fetcher.card_body()}}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(frame("A cat", "stop")))


def app_of(engine: ScriptedEngine, executor: ThreadPoolExecutor, **card: Any) -> FrontendApp:
    return application(vision(engine, **card), executor=executor, config=FrontendConfig(enable_anthropic_api=True))


async def ask(app: FrontendApp, *parts: dict[str, Any], **members: Any) -> Reply:
    body = {"model": "v", "messages": [{"role": "user", "content": list(parts)}], **members}
    return await call(app, CHAT, json.dumps(body).encode())


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def prompt_of(request: dict[str, Any]) -> str:
    return BytesTokenizer().decode(request["token_ids"], False)


# -- URLs --------------------------------------------------------------------------------------------------------------


async def test_the_worker_gets_urls_by_kind_and_the_template_placeholders(
    engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    app = app_of(engine, executor)
    inline = png()
    video = {"type": "video_url", "video_url": {"url": "https://x.example/v.mp4"}}
    audio = {"type": "audio_url", "audio_url": {"url": "https://x.example/a.wav"}}
    reply = await ask(app, text("See "), image(FAR), text(" and "), image(inline), video, audio)
    assert reply.status == 200
    request = engine.requests[0]
    assert prompt_of(request) == "<|user|>See <image> and <image><video><audio><|assistant|>"
    assert request["multi_modal_data"] == {
        "image_url": [{"Url": FAR}, {"Url": inline}],
        "video_url": [{"Url": "https://x.example/v.mp4"}],
        "audio_url": [{"Url": "https://x.example/a.wav"}],
    }
    assert "multi_modal_uuids" not in request


async def test_parts_are_counted_by_kind_as_in_dynamo(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = app_of(engine, executor)
    film = {"type": "video_url", "video_url": {"url": "https://pictures.example/cat.mp4"}}
    for parts in ([image(FAR), text("a"), image(FAR), film], [text("b")]):
        assert (await ask(app, *parts)).status == 200
    plain = {"model": "v", "messages": [{"role": "user", "content": "c"}]}
    assert (await call(app, CHAT, json.dumps(plain).encode())).status == 200
    page = (await call(app, "/metrics", method="GET")).text.splitlines()
    for kind, total in (("images", 2), ("videos", 1), ("audio", 0)):
        name = f"dynamo_frontend_{kind}_per_request"
        assert f'{name}_sum{{model="v"}} {total}.0' in page
        assert f'{name}_count{{model="v"}} 3.0' in page


async def test_uuids_name_pictures_that_the_engine_keeps(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = app_of(engine, executor)
    kept = {"type": "image_url", "image_url": None, "uuid": "cat-1"}
    assert (await ask(app, image(FAR), kept, image(FAR, uuid="cat-2"))).status == 200
    assert engine.requests[0]["multi_modal_data"] == {"image_url": [{"Url": FAR}, {"UuidOnly": "cat-1"}, {"Url": FAR}]}
    assert engine.requests[0]["multi_modal_uuids"] == {"image_url": [None, "cat-1", "cat-2"]}


async def test_a_text_request_has_no_trace_of_media(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    assert (await ask(app_of(engine, executor), text("Hi"))).status == 200
    assert not {"multi_modal_data", "multi_modal_uuids", "mm_routing_info"} & set(engine.requests[0])


async def test_other_pictures_are_another_prompt_to_the_router_and_the_text_before_them_is_not(
    engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    app = app_of(engine, executor)
    for url in (FAR, FAR, "https://pictures.example/dog.png"):
        await ask(app, text("What is this? "), image(url), text(" Say it."))
    first, again, other = (request["mm_routing_info"]["routing_token_ids"] for request in engine.requests)
    before = len(BytesTokenizer().encode("<|user|>What is this? ", False))
    assert first == again != other
    assert first[:before] == other[:before] == engine.requests[0]["token_ids"][:before]
    assert first[before] != other[before]
    assert first[before + 1 :] == other[before + 1 :] == engine.requests[0]["token_ids"][before:]


BAD_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "image_url", "image_url": "https://x/y.png"}, "image 1: image_url part must contain"),
    ({"type": "image_url", "image_url": {"url": ""}}, "image 1: image_url part must contain"),
    ({"type": "image_url", "image_url": {"url": FAR}, "uuid": ""}, "image 1: image_url uuid must be"),
    ({"type": "video_url", "video_url": {}, "uuid": "x"}, "video 1: UUID-only cache reuse is not supported"),
    ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio 1: `input_audio` does not reach"),
    ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/x"}}, "image 1: media host 169.254.169.254"),
]


@pytest.mark.parametrize(("part", "message"), BAD_PARTS, ids=range(len(BAD_PARTS)))
async def test_a_part_that_cannot_be_used_is_named(
    part: dict[str, Any], message: str, engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    reply = await ask(app_of(engine, executor), text("See"), part)
    told = reply.json()["error"]
    assert (reply.status, told["param"]) == (400, "messages")
    assert message in told["message"]
    assert engine.requests == []


async def test_too_many_media_are_refused(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    reply = await ask(app_of(engine, executor), *[image(FAR)] * (MAX_MEDIA + 1))
    assert (reply.status, reply.json()["error"]["code"]) == (400, "too_many_media")


async def test_a_text_model_says_that_it_takes_no_pictures(
    engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    """Its template takes content for text: no Python list may become part of a prompt."""
    app = application(served(engine, "v"), executor=executor)
    reply = await ask(app, text("See"), image(FAR))
    assert (reply.status, reply.json()["message"]) == (400, "Invalid request")
    assert reply.json()["error"]["code"] == "unsupported_content"
    assert "model `v` takes text only" in reply.json()["error"]["message"]
    assert engine.requests == []


async def test_pictures_come_through_every_dialect_and_in_results_of_tools(
    engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    app = app_of(engine, executor)
    inline = png()
    data = inline.partition(",")[2]
    source = {"type": "base64", "media_type": "image/png", "data": data}
    call_of = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bodies: list[tuple[str, dict[str, Any], list[str], str]] = [
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "y", "tool_calls": [call_of]},
                    {"role": "tool", "tool_call_id": "c", "content": [text("z"), image(inline)]},
                ]
            },
            [inline],
            "<|tool|>z<image>",
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": [
                        {"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": inline}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": [
                        {"type": "input_text", "text": "z"}, {"type": "input_image", "image_url": FAR}]},
                ]
            },
            [inline, FAR],
            "<|tool|>z<image>",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": [text("See"), {"type": "image", "source": source}]},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [
                            text("z"), {"type": "image", "source": {"type": "url", "url": FAR}}]}]},
                ],
            },
            [inline, FAR],
            "<|tool|>z<image>",
        ),
    ]  # fmt: skip
    for path, body, urls, prompt in bodies:
        reply = await call(app, path, json.dumps({"model": "v", **body}).encode())
        assert reply.status == 200, reply.text
        assert engine.requests[-1]["multi_modal_data"] == {"image_url": [{"Url": url} for url in urls]}, path
        assert prompt in prompt_of(engine.requests[-1])


async def test_bad_pictures_of_other_dialects_are_named(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = app_of(engine, executor)
    for source in ({"type": "file", "file_id": "x"}, {"type": "base64", "media_type": "text/html", "data": ""}, {}):
        block = {"type": "image", "source": source}
        body = {"model": "v", "max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}
        reply = await call(app, "/v1/messages", json.dumps(body).encode())
        assert (reply.status, reply.json()["type"]) == (400, "error")
        assert "messages[0]: the source of an image must" in reply.json()["error"]["message"]
    body = {"model": "v", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}
    reply = await call(app, "/v1/responses", json.dumps(body).encode())
    assert (reply.status, reply.json()["error"]["param"]) == (400, "input")
    body["input"] = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://10.0.0.1/"}]}]
    reply = await call(app, "/v1/responses", json.dumps(body).encode())
    assert (reply.status, reply.json()["error"]["param"]) == (400, "input")
    assert engine.requests == []


@pytest.mark.parametrize("decoded", [False, True])
async def test_SEC_01_SEC_02_a_model_that_takes_pictures_gets_none_from_inside(
    decoded: bool, engine: ScriptedEngine, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither this process nor a worker is sent there, whoever would fetch; redirects are the fetcher's to follow."""
    opened: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: opened.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: [])
    app = app_of(engine, executor, **(decoding() if decoded else {}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for url in (*INSIDE, "http://localhost/", "http://a.localhost/"):
            if url == REDIRECTS and not decoded:
                continue
            for make in MEDIA:
                path, body = make(url.replace("{port}", str(port)))
                reply = await call(app, path, json.dumps({**body, "model": "v"}).encode())
                assert reply.status == 400, (url, path)
    assert opened == []
    assert engine.requests == []


async def test_an_empty_list_of_media_domains_denies_all_and_a_fetcher_may_allow_more(
    engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    """SEC-01: a model's card says from where its media may come."""
    closed, opened = MediaFetcher(), MediaFetcher()
    closed.allowed_media_domains([])
    opened.allow_direct_ip(True)
    opened.allow_direct_port(True)
    opened.allow_private_ips(True)
    inside = "http://10.0.0.1:9000/cat.png"
    for fetcher, url, status in ((closed, FAR, 400), (closed, png(), 200), (opened, inside, 200)):
        app = app_of(engine, executor, details={"media_fetcher": fetcher.card_body()})
        assert (await ask(app, image(url))).status == status


async def test_a_worker_that_gets_text_gets_parts_as_they_are_within_its_fetchers_rules(
    engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    inside = image("http://10.0.0.1/cat.png", uuid="u")
    app = app_of(engine, executor, model_input="Text")
    await ask(app, inside)
    assert engine.requests[0]["messages"][0]["content"] == [inside]
    fetcher = {"media_fetcher": MediaFetcher().card_body()}
    reply = await ask(app_of(engine, executor, model_input="Text", details=fetcher), inside)
    assert (reply.status, reply.json()["error"]["code"]) == (400, "media_refused")


# -- decoding ----------------------------------------------------------------------------------------------------------


async def test_a_models_decoder_hands_the_worker_pixels(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = app_of(engine, executor, **decoding())
    reply = await ask(app, text("See "), image(png()), image(png(2, 3, (1, 2, 3))))
    assert reply.status == 200, reply.text
    first, second = engine.requests[0]["multi_modal_data"]["image_url"]
    assert first == {"Decoded": {"shape": [2, 3, 3], "dtype": "UINT8", "data": bytes((255, 0, 7)) * 6}}
    assert second == {"Decoded": {"shape": [3, 2, 3], "dtype": "UINT8", "data": bytes((1, 2, 3)) * 6}}


async def test_one_picture_in_two_files_is_routed_alike(engine: ScriptedEngine, executor: ThreadPoolExecutor) -> None:
    app = app_of(engine, executor, **decoding())
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), (255, 0, 7)).save(buffer, "BMP")
    bitmap = f"data:image/bmp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    for url in (png(), bitmap, png(2, 3)):
        assert (await ask(app, image(url))).status == 200
    first, again, other = (request["mm_routing_info"] for request in engine.requests)
    assert first == again != other


async def test_pictures_are_fetched_for_the_decoder_where_the_fetcher_allows(
    engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    content = base64.b64decode(png().partition(",")[2])
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        found = b"200 OK" if b"/cat.png" in asked[-1] else b"404 Not Found"
        writer.write(
            b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (found, len(content)) + content
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    fetcher = MediaFetcher()
    for allow in (fetcher.allow_direct_ip, fetcher.allow_direct_port, fetcher.allow_private_ips):
        allow(True)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        app = app_of(engine, executor, **decoding(fetcher))
        reply = await ask(app, image(f"{base}/cat.png"))
        missing = await ask(app, image(f"{base}/secret-name"))
    assert reply.status == 200, reply.text
    assert engine.requests[0]["multi_modal_data"]["image_url"][0]["Decoded"]["shape"] == [2, 3, 3]
    assert b"User-Agent: dynamo-ai/dynamo" in asked[0]
    assert (missing.status, missing.json()["error"]["code"]) == (400, "media_unavailable")
    assert "image 1: media host 127.0.0.1 answers with status 404" in missing.text
    assert "secret-name" not in missing.text


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (image("data:image/png;base64,xx"), "image 1: data: URL is no base64"),
        (image("data:image/png;base64,eHh4"), "image 1: this is no image"),
        (image(png(9, 1)), "image 1: image is 9 pixels wide, at most 8 are taken"),
        ({"type": "video_url", "video_url": {"url": FAR}}, "video 1: this model takes images only"),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, "image 1: images of this model are decoded here"),
    ],
)
async def test_what_cannot_be_decoded_is_refused_before_a_worker_gets_it(
    part: dict[str, Any], message: str, engine: ScriptedEngine, executor: ThreadPoolExecutor
) -> None:
    reply = await ask(app_of(engine, executor, **decoding(max_image_width=8)), text("See"), part, stream=True)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "messages")
    assert message in reply.json()["error"]["message"]
    assert engine.requests == []


async def test_decoded_pictures_of_a_request_are_bounded(
    engine: ScriptedEngine, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_decoding, "MAX_DECODED_BYTES", 40)
    app = app_of(engine, executor, **decoding())
    assert (await ask(app, image(png()), image(png()))).status == 200
    several = await ask(app, *[image(png())] * 3)
    large = await ask(app, image(png(7, 2)))
    assert "decoded images of a request have at most 40 bytes in all" in several.text
    assert "image is 42 bytes when decoded, at most 40 are taken" in large.text
    assert len(engine.requests) == 1


async def test_a_card_that_says_nonsense_of_its_media_is_not_the_clients_fault(
    engine: ScriptedEngine, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    for details in ({"media_decoder": {"image": 3}}, {"media_fetcher": {"timeout": {"nanos": 1}}}):
        reply = await ask(app_of(engine, executor, details=details), image(png()))
        assert reply.status == 500
    assert engine.requests == []
