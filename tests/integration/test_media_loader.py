"""Fetching media from servers of the test's own, friendly and hostile."""

from __future__ import annotations

import base64
import io
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image

from dynamo_es.llm import MediaDecoder, MediaFetcher
from dynamo_es.models.media_loader import MediaLimits, MediaLoader, MediaUnavailable
from dynamo_es.models.media_rules import MediaRefused

MAX_BYTES = 4096
VIDEO = b"\0\0\0\x18ftypisom" + bytes(1000)


def png(width: int = 4, height: int = 2) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (255, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


class Names(AbstractResolver):
    """Names and the addresses that they have; ``asked``: what was looked up."""

    def __init__(self, **names: list[str]) -> None:
        self.names = {name.replace("_", "."): addresses for name, addresses in names.items()}
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        if host not in self.names:
            raise OSError(f"no such name: {host}")
        return [
            ResolveResult(hostname=host, host=each, port=port, family=socket.AF_INET, proto=0, flags=0)
            for each in self.names[host]
        ]

    async def close(self) -> None:
        return None


class MediaServer:
    """Answers by path; ``seen``: paths and user agents of the requests that reached it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.redirects: dict[str, str] = {}
        self.port = 0

    def url(self, path: str, host: str = "media.test") -> str:
        return f"http://{host}:{self.port}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.lstrip("/")
        self.seen.append((name, request.headers["User-Agent"]))
        if name in self.redirects:
            return web.Response(status=302, headers={"Location": self.redirects[name]})
        if name == "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(png() + bytes(65536))
        bodies: dict[str, Callable[[], web.Response]] = {
            "image": lambda: web.Response(body=png(), content_type="text/plain"),
            "video": lambda: web.Response(body=VIDEO),
            "page": lambda: web.Response(text="<html>", content_type="image/png"),
            "gone": lambda: web.Response(status=404),
            "large": lambda: web.Response(body=png() + bytes(5000)),
            "zipped": lambda: web.Response(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
        }
        return bodies[name]()


@pytest.fixture
async def server() -> AsyncIterator[MediaServer]:
    server = MediaServer()
    app = web.Application()
    app.router.add_get("/{name}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    yield server
    await runner.cleanup()


def open_fetcher(**settings: object) -> MediaFetcher:
    """One that may reach the test's servers."""
    fetcher = MediaFetcher()
    fetcher.allow_private_ips(True)
    fetcher.allow_direct_port(True)
    for name, value in settings.items():
        getattr(fetcher, name)(value)
    return fetcher


def loader(
    fetcher: MediaFetcher, names: Names | None = None, *, decode: bool = False, limit: int = 4096
) -> MediaLoader:
    decoder = MediaDecoder()
    if decode:
        decoder.enable_image({})
    names = names or Names(media_test=["127.0.0.1"])
    return MediaLoader(fetcher, decoder, limits=MediaLimits(MAX_BYTES, MAX_BYTES), resolver=names)


async def test_images_and_videos_are_fetched_and_images_decoded(server: MediaServer) -> None:
    async with loader(open_fetcher(user_agent="ua/1"), decode=True) as media:
        image = await media.load(server.url("image"), "image")
        assert (image.mime, image.data) == ("image/png", png())
        assert image.image is not None
        assert (image.image.width, image.image.height) == (4, 2)
        video = await media.load(server.url("video"), "video")
        assert (video.mime, video.data, video.image) == ("video/mp4", VIDEO, None)
        data = await media.load(f"data:image/png;base64,{base64.b64encode(png()).decode()}", "image")
        assert data.image == image.image
    assert server.seen == [("image", "ua/1"), ("video", "ua/1")]
    async with loader(open_fetcher()) as media:
        assert (await media.load(server.url("image"), "image")).image is None


@pytest.mark.parametrize(
    ("path", "kind", "error", "text"),
    [
        ("video", "image", MediaRefused, "this is no image"),
        ("image", "video", MediaRefused, "this is no video"),
        ("page", "image", MediaRefused, "this is no image"),
        ("large", "image", MediaRefused, "more than 4096 bytes"),
        ("endless", "image", MediaRefused, "more than 4096 bytes"),
        ("zipped", "image", MediaRefused, "compressed"),
        ("gone", "image", MediaUnavailable, "answers with status 404"),
    ],
)
async def test_what_a_server_sends_is_not_trusted(
    server: MediaServer, path: str, kind: str, error: type[Exception], text: str
) -> None:
    async with loader(open_fetcher()) as media:
        with pytest.raises(error, match=text):
            await media.load(server.url(path), kind)  # type: ignore[arg-type]


async def test_a_host_that_is_slow_or_away_can_be_tried_again(server: MediaServer) -> None:
    async with loader(open_fetcher(timeout_ms=0)) as media:
        with pytest.raises(MediaUnavailable, match=r"media host media\.test took longer than 0 s"):
            await media.load(server.url("image"), "image")
    async with loader(open_fetcher()) as media:
        for url in ("http://unknown.test/x", "http://media.test:1/x"):
            with pytest.raises(MediaUnavailable, match="cannot be reached") as caught:
                await media.load(url, "image")
            assert caught.value.retriable


async def test_SEC_02_redirects_are_followed_within_bounds(server: MediaServer) -> None:
    server.redirects = {"a": "/b", "b": server.url("image"), "loop": "/loop"}
    async with loader(open_fetcher()) as media:
        assert (await media.load(server.url("a"), "image")).data == png()
        with pytest.raises(MediaRefused, match="more than 5 times"):
            await media.load(server.url("loop"), "image")
    assert [path for path, _ in server.seen].count("loop") == 6


@pytest.mark.parametrize(
    "target",
    [
        "http://evil.test/x", "http://127.0.0.1/image", "http://169.254.169.254/latest", "http://[::1]/x",
        "http://0x7f000001/", "file:///etc/hostname", "ftp://media.test/x", "http://user@media.test/",
    ],
)  # fmt: skip
async def test_SEC_02_no_redirect_leads_where_no_url_may(server: MediaServer, target: str) -> None:
    server.redirects = {"a": target}
    names = Names(media_test=["127.0.0.1"], evil_test=["127.0.0.1"])
    async with loader(open_fetcher(allowed_media_domains=["media.test"]), names) as media:
        with pytest.raises(MediaRefused):
            await media.load(server.url("a"), "image")
    assert [path for path, _ in server.seen] == ["a"]
    assert names.asked == ["media.test"]


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"]]
)
async def test_SEC_01_a_name_with_an_address_that_is_not_public_is_not_connected_to(
    server: MediaServer, addresses: list[str]
) -> None:
    fetcher = MediaFetcher()
    fetcher.allow_direct_port(True)
    async with loader(fetcher, Names(media_test=addresses)) as media:
        with pytest.raises(MediaRefused, match=r"media host media\.test has an address that is not public"):
            await media.load(server.url("image"), "image")
    assert server.seen == []


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/image", "http://169.254.169.254/", "http://[::1]/", "http://[::ffff:10.0.0.1]/",
        "http://0x7f000001/", "file:///etc/hostname", "ftp://media.test/",
    ],
)  # fmt: skip
async def test_SEC_01_urls_of_a_request_reach_nothing_within(server: MediaServer, url: str) -> None:
    """With the settings that a model has if it says nothing, and with a list of hosts that is empty."""
    names = Names(media_test=["127.0.0.1"])
    nobody = open_fetcher(allowed_media_domains=[])
    for fetcher in (MediaFetcher(), nobody):
        async with loader(fetcher, names) as media:
            for each in (url.format(port=server.port), server.url("image")):
                with pytest.raises(MediaRefused):
                    await media.load(each, "image")
    assert (server.seen, names.asked) == ([], [])


async def test_an_image_above_the_decoders_limits_is_refused(server: MediaServer) -> None:
    decoder = MediaDecoder()
    decoder.enable_image({"limits": {"max_image_width": 3}})
    async with MediaLoader(open_fetcher(), decoder, resolver=Names(media_test=["127.0.0.1"])) as media:
        with pytest.raises(MediaRefused, match="image is 4 pixels wide, at most 3"):
            await media.load(server.url("image"), "image")
