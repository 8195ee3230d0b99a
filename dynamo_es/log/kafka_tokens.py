"""Where bearer tokens for OAUTHBEARER come from: a file that somebody keeps fresh, or an endpoint that gives them.

aiokafka asks for a token at each new connection. A broker with ``connections.max.reauth.ms`` ends a connection with its
token; the client then connects again, with a new one.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import re
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus, urlencode, urlsplit

import msgspec
from aiokafka import errors as kafka
from aiokafka.abc import AbstractTokenProvider

from dynamo_es.errors import ConfigError
from dynamo_es.log.kafka_config import KafkaSettings
from dynamo_es.log.secret_files import read_secret

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 1 << 20
_MAX_SHOWN = 200
# Of a token's life it is used for this much, so that it does not end on the way.
_USED = 0.8
# A token whose life the endpoint does not tell.
_UNTOLD_LIFE_S = 60.0
# RFC 6750: what a bearer token is made of. Anything else could end the field that it is sent in.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")


class TokenUnavailable(kafka.KafkaConnectionError):  # type: ignore[misc]
    """No token at the moment; a later try may get one."""


class TokenRefused(kafka.SaslAuthenticationFailed):  # type: ignore[misc]
    """The endpoint refuses the client's id or secret."""


class FileTokens(AbstractTokenProvider):  # type: ignore[misc]
    """The token that the file holds now."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        """Raises ``TokenUnavailable``."""
        try:
            return _checked(await asyncio.to_thread(read_secret, self._path), str(self._path))
        except ConfigError as error:
            raise TokenUnavailable(str(error)) from error


class _Answer(msgspec.Struct):
    access_token: str
    expires_in: float | str | None = None


class EndpointTokens(AbstractTokenProvider):  # type: ignore[misc]
    """Tokens for a client's id and secret: RFC 6749, section 4.4. Belongs to one event loop.

    A token is kept for four fifths of its life and asked for once, however many connections want it. No redirect is
    followed, and no proxy used: the secret goes to the configured URL or nowhere.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        assert settings.sasl_oauth_token_url is not None
        self._settings = settings
        self._url = settings.sasl_oauth_token_url
        self._asking = asyncio.Lock()
        self._token = ""
        self._used_until = 0.0

    async def token(self) -> str:
        """Raises ``TokenUnavailable``, ``TokenRefused``."""
        loop = asyncio.get_running_loop()
        async with self._asking:
            if loop.time() >= self._used_until:
                asked_at = loop.time()
                try:
                    self._token, life_s = await asyncio.to_thread(self._ask)
                except (OSError, http.client.HTTPException, ConfigError) as error:
                    raise TokenUnavailable(f"{self._url} gives no token: {error}") from error
                self._used_until = asked_at + life_s * _USED
            return self._token

    def _ask(self) -> tuple[str, float]:
        settings = self._settings
        secret = settings.sasl_oauth_client_secret
        if settings.sasl_oauth_client_secret_file is not None:
            secret = read_secret(Path(settings.sasl_oauth_client_secret_file))
        # Id and secret are encoded as in forms first: RFC 6749, 2.3.1.
        pair = f"{quote_plus(settings.sasl_oauth_client_id or '')}:{quote_plus(secret or '')}"
        form = {"grant_type": "client_credentials"}
        if settings.sasl_oauth_scope is not None:
            form["scope"] = settings.sasl_oauth_scope
        headers = {
            "Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        }
        parts = urlsplit(self._url)
        connection = _connection(parts.scheme, parts.hostname or "", parts.port, settings.sasl_oauth_cafile)
        try:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", path, urlencode(form), headers)
            with connection.getresponse() as response:
                return self._read(response.status, response.read(_MAX_ANSWER_BYTES + 1))
        finally:
            connection.close()

    def _read(self, status: int, content: bytes) -> tuple[str, float]:
        if status in (400, 401, 403):
            raise TokenRefused(f"{self._url} refuses the client: status {status}{_error_in(content)}")
        if status != 200 or len(content) > _MAX_ANSWER_BYTES:
            raise TokenUnavailable(f"{self._url} gives no token: status {status}, {len(content)} bytes")
        try:
            answer = msgspec.json.decode(content, type=_Answer)
            life_s = _UNTOLD_LIFE_S if answer.expires_in is None else float(answer.expires_in)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            # The message of a decoder names a field and a type, never a value.
            raise TokenUnavailable(f"{self._url} gives no token: the answer is none of RFC 6749: {error}") from error
        return _checked(answer.access_token, self._url), max(0.0, life_s)


def build_tokens(settings: KafkaSettings) -> AbstractTokenProvider:
    """The source of tokens that the settings name. Does no I/O."""
    if settings.sasl_oauth_token_file is not None:
        return FileTokens(Path(settings.sasl_oauth_token_file))
    return EndpointTokens(settings)


def _connection(scheme: str, host: str, port: int | None, cafile: str | None) -> http.client.HTTPConnection:
    if scheme == "http":
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)
    context = ssl.create_default_context(cafile=cafile)
    return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)


def _error_in(content: bytes) -> str:
    """The error code of RFC 6749, 5.2, if the answer has one."""
    try:
        answer: Any = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    code = answer.get("error") if isinstance(answer, dict) else None
    return f" ({code[:_MAX_SHOWN]})" if isinstance(code, str) and code.isprintable() else ""


def _checked(token: str, source: str) -> str:
    if not _TOKEN.fullmatch(token):
        raise TokenUnavailable(f"{source} does not hold a bearer token (RFC 6750)")
    return token
