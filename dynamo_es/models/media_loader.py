"""Having the media that requests name: fetched, or read from ``data:`` URLs, checked, and decoded if asked."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from dynamo_es.errors import DynamoException
from dynamo_es.models.image_decode import DecodedImage, decode_image
from dynamo_es.models.media_config import MediaDecoder, MediaFetcher, image_limits
from dynamo_es.models.media_rules import FetchRules, MediaRefused
from dynamo_es.models.media_types import MediaKind, check_kind, read_data_url, too_large

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 64
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 64 * 1024


class MediaUnavailable(DynamoException):
    """A medium could not be fetched just now: no answer, an error of its server, or too slow."""

    retriable = True


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Longest media, in bytes as they are sent."""

    image_bytes: int = 32 * 1024 * 1024
    video_bytes: int = 256 * 1024 * 1024

    def of(self, kind: MediaKind) -> int:
        """That of a kind."""
        return self.image_bytes if kind == "image" else self.video_bytes


@dataclass(frozen=True, slots=True)
class LoadedMedium:
    """A medium as it came (``data``, of type ``mime``), and decoded if it is an image and the decoder does those."""

    kind: MediaKind
    mime: str
    data: bytes
    image: DecodedImage | None = None


class GuardedResolver(AbstractResolver):
    """Resolves names, and refuses those of which any address may not be connected to.

    The connection is made to the addresses that were looked at: a name that changes its mind in between gains nothing.
    """

    def __init__(self, rules: FetchRules, inner: AbstractResolver) -> None:
        self._rules = rules
        self._inner = inner

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Raises MediaRefused; OSError if there is no such name."""
        found = await self._inner.resolve(host, port, family)
        if not found:
            raise OSError(f"{host} has no address")
        for each in found:
            self._rules.check_address(host, each["host"])
        return found

    async def close(self) -> None:
        await self._inner.close()


class MediaLoader:
    """Loads media for one model, as its card's ``MediaFetcher`` and ``MediaDecoder`` say.

    Use it as an async context manager, or ``close`` it. Belongs to one event loop. At most 64 connections.
    """

    def __init__(
        self,
        fetcher: MediaFetcher,
        decoder: MediaDecoder,
        *,
        limits: MediaLimits | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """``resolver``: how names are looked up, before the guard; by default as the machine does."""
        self._rules = FetchRules.of_card(fetcher.card_body())
        self._image_limits = image_limits(decoder)
        self._limits = limits or MediaLimits()
        guard = GuardedResolver(self._rules, resolver or aiohttp.ThreadedResolver())
        connector = aiohttp.TCPConnector(resolver=guard, limit=MAX_CONNECTIONS, use_dns_cache=False)
        # No proxy, no cookies, nothing decompressed: what is counted is what is kept.
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"User-Agent": self._rules.user_agent, "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Safe to call twice."""
        await self._session.close()

    async def load(self, url: str, kind: MediaKind) -> LoadedMedium:
        """A medium by ``http:``, ``https:`` or ``data:`` URL.

        Raises:
            MediaRefused: The URL leads where none may go, or the medium is too large, of another kind, or broken.
            MediaUnavailable: It could not be fetched in time.
            ConfigError: Images are to be decoded, and Pillow is not installed.
        """
        max_bytes = self._limits.of(kind)
        if url[:5].lower() == "data:":
            data = read_data_url(url, max_bytes)
        else:
            data = await self._fetch(url, max_bytes)
        mime = check_kind(data, kind)
        if kind != "image" or self._image_limits is None:
            return LoadedMedium(kind, mime, data)
        image = await asyncio.to_thread(decode_image, data, self._image_limits)
        return LoadedMedium(kind, mime, data, image)

    async def _fetch(self, text: str, max_bytes: int) -> bytes:
        url = self._rules.check_url(text)
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._request(url, max_bytes)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError as error:
            raise MediaUnavailable(f"media host {url.host} took longer than {self._rules.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise MediaUnavailable(f"media host {url.host} cannot be reached: {type(error).__name__}") from error
        raise MediaRefused(f"media URL leads on more than {MAX_REDIRECTS} times")

    async def _request(self, url: URL, max_bytes: int) -> bytes | URL:
        """The content, or where it is said to be."""
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status in _REDIRECTS:
                return self._rules.check_url(response.headers.get("Location", ""), before=url)
            if response.status != 200:
                raise MediaUnavailable(f"media host {url.host} answers with status {response.status}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise MediaRefused("medium is compressed though it was not asked for so")
            if response.content_length is not None and response.content_length > max_bytes:
                raise too_large(max_bytes)
            data = bytearray()
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                data += chunk
                if len(data) > max_bytes:
                    raise too_large(max_bytes)
            return bytes(data)
