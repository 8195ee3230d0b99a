"""A frontend's ``/health``, over HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import aiohttp

from dynamo_es.diagnosis.facts import HealthPage, NoFrontend, read_health

MAX_PAGE_BYTES = 64 * 1024 * 1024


async def ask_frontend(
    url: str, *, timeout_s: float, tls: ssl.SSLContext | bool = True, headers: Mapping[str, str] | None = None
) -> HealthPage:
    """``url``: of the frontend, with or without ``/health``. No redirection is followed, no proxy used.

    Raises:
        NoFrontend: It cannot be reached, does not answer in time, or is none.
    """
    place = f"{url.rstrip('/').removesuffix('/health')}/health"
    try:
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls), trust_env=False) as session,
            session.get(place, headers=headers, allow_redirects=False) as response,
        ):
            if response.status in (401, 403):
                raise NoFrontend(f"{place} wants a key: give one with --api-key-file")
            body = await response.content.read(MAX_PAGE_BYTES)
            while not response.content.at_eof() and len(body) < MAX_PAGE_BYTES:
                body += await response.content.read(MAX_PAGE_BYTES - len(body))
    except TimeoutError as error:
        raise NoFrontend(f"{place} did not answer within {timeout_s:g} s (--timeout)") from error
    except (aiohttp.ClientError, OSError) as error:
        raise NoFrontend(f"{place} cannot be asked: {error}") from error
    # A frontend that is not ready answers 503, and tells as much.
    return read_health(body)
