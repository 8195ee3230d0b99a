"""Settings of the Kafka log: what a ``kafka://`` URL and the environment may say, checked in one place."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from dynamo_es.errors import ConfigError

SCHEME = "kafka"
DEFAULT_PORT = 9092
USERNAME_VARIABLE = "DYN_ES_KAFKA_SASL_USERNAME"
PASSWORD_VARIABLE = "DYN_ES_KAFKA_SASL_PASSWORD"  # noqa: S105
KEY_PASSWORD_VARIABLE = "DYN_ES_KAFKA_SSL_KEY_PASSWORD"  # noqa: S105
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
# GSSAPI and OAUTHBEARER need objects that a URL cannot carry.
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_SECRETS = ("sasl_plain_username", "sasl_plain_password")


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How to reach a cluster. Every field but ``servers`` and ``ssl_key_password`` is an option of the URL.

    Attributes:
        servers: ``host:port`` of brokers to ask first; one that answers is enough.
        security_protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        sasl_mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.
        sasl_plain_username: Better given as ``DYN_ES_KAFKA_SASL_USERNAME``: a URL ends up in process lists.
        sasl_plain_password: Better given as ``DYN_ES_KAFKA_SASL_PASSWORD``.
        ssl_cafile: PEM file of the authority that signed the brokers' certificates; None: the system's.
        ssl_certfile: PEM file of the client certificate, for mutual TLS.
        ssl_keyfile: Its key; the password, if any, comes from ``DYN_ES_KAFKA_SSL_KEY_PASSWORD``.
        client_id: Name in the brokers' logs, metrics and quotas.
        client_rack: Rack or zone of this process: reads go to a replica there, if the brokers are set up for it.
        request_timeout_ms: How long one request, and one append, may take.
        connect_timeout_ms: How long ``start`` and every new connection look for a broker.
        metadata_max_age_ms: How long the client trusts what it knows of brokers and leaders.
        linger_ms: How long an append waits for others to share its batch.
    """

    servers: tuple[str, ...]
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_plain_username: str | None = field(default=None, repr=False)
    sasl_plain_password: str | None = field(default=None, repr=False)
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_key_password: str | None = field(default=None, repr=False)
    client_id: str = "dynamo-es"
    client_rack: str | None = None
    request_timeout_ms: int = 10_000
    connect_timeout_ms: int = 5_000
    metadata_max_age_ms: int = 60_000
    linger_ms: int = 0

    @property
    def bootstrap(self) -> str:
        """The servers as people write them: ``h1:9092,h2:9092``."""
        return ",".join(self.servers)

    @property
    def url(self) -> str:
        """The URL, without secrets and without options that have their default."""
        shown = [
            f"{item.name}={quote(str(value), safe='/')}"
            for item in fields(self)
            if item.name in OPTIONS and item.name not in _SECRETS
            if (value := getattr(self, item.name)) != item.default
        ]
        return f"{SCHEME}://{self.bootstrap}" + (f"?{'&'.join(shown)}" if shown else "")


_NOT_OPTIONS = {"servers", "ssl_key_password"}
OPTIONS: tuple[str, ...] = tuple(item.name for item in fields(KafkaSettings) if item.name not in _NOT_OPTIONS)
_INTEGERS = {item.name for item in fields(KafkaSettings) if item.type == "int"}


def parse_kafka_url(url: str, environment: Mapping[str, str]) -> KafkaSettings:
    """Settings from ``kafka://host:port[,host:port][?option=value&...]`` and the environment.

    Raises:
        ConfigError: Names the part that is wrong and what is accepted; never repeats a secret.
    """
    parts = urlsplit(url)
    if parts.scheme != SCHEME:
        raise ConfigError(f"log URL with scheme {parts.scheme!r}: expected {SCHEME}://host:port[,host:port]")
    if "@" in parts.netloc:
        raise ConfigError(
            f"a {SCHEME}:// URL carries no user and password before the host; set {USERNAME_VARIABLE} and "
            f"{PASSWORD_VARIABLE} in the environment"
        )
    if parts.path not in ("", "/") or parts.fragment:
        raise ConfigError(f"{SCHEME}:// URL with a path ({parts.path}): expected {SCHEME}://host:port[,host:port]")
    settings: dict[str, Any] = {"servers": _servers(parts.netloc)}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in OPTIONS:
            raise ConfigError(f"unknown option {name!r} in the {SCHEME}:// URL; accepted: {', '.join(OPTIONS)}")
        if name in settings:
            raise ConfigError(f"option {name!r} is given twice in the {SCHEME}:// URL")
        settings[name] = _integer(name, value) if name in _INTEGERS else _text(name, value)
    _check_choice(settings, "security_protocol", SECURITY_PROTOCOLS)
    _check_choice(settings, "sasl_mechanism", SASL_MECHANISMS)
    _add_credentials(settings, environment)
    return KafkaSettings(**settings)


def _servers(netloc: str) -> tuple[str, ...]:
    servers = []
    for text in netloc.split(","):
        bare = text.rpartition("]")[2] if text.startswith("[") else text
        host, colon, port = bare.rpartition(":")
        if not colon:
            host, port, text = bare, str(DEFAULT_PORT), f"{text}:{DEFAULT_PORT}"  # noqa: PLW2901
        if (not host and not text.startswith("[")) or not port.isdigit() or not 0 < int(port) < 65_536:
            raise ConfigError(f"{SCHEME}:// URL: {text!r} is not host:port")
        servers.append(text)
    return tuple(servers)


def _integer(name: str, value: str) -> int:
    if not value.isdigit() or (int(value) == 0 and name != "linger_ms"):
        raise ConfigError(f"option {name}={value!r} of the {SCHEME}:// URL: expected a number of milliseconds")
    return int(value)


def _text(name: str, value: str) -> str:
    if not value:
        raise ConfigError(f"option {name!r} of the {SCHEME}:// URL is empty")
    return value


def _check_choice(settings: Mapping[str, Any], name: str, accepted: tuple[str, ...]) -> None:
    if name in settings and settings[name] not in accepted:
        raise ConfigError(f"option {name}={settings[name]!r} of the {SCHEME}:// URL: accepted: {', '.join(accepted)}")


def _add_credentials(settings: dict[str, Any], environment: Mapping[str, str]) -> None:
    protocol = settings.get("security_protocol", "PLAINTEXT")
    if protocol.startswith("SASL_"):
        for name, variable in zip(_SECRETS, (USERNAME_VARIABLE, PASSWORD_VARIABLE), strict=True):
            settings.setdefault(name, environment.get(variable))
            if not settings[name]:
                raise ConfigError(f"security_protocol={protocol} needs {variable} in the environment")
    elif any(name.startswith("sasl_") for name in settings):
        raise ConfigError(
            f"sasl_… options with security_protocol={protocol}, which does not log in: add "
            "security_protocol=SASL_SSL (or SASL_PLAINTEXT)"
        )
    if protocol in ("SSL", "SASL_SSL"):
        settings["ssl_key_password"] = environment.get(KEY_PASSWORD_VARIABLE)
    elif any(name.startswith("ssl_") for name in settings):
        raise ConfigError(
            f"ssl_… options with security_protocol={protocol}, which does not encrypt: add "
            "security_protocol=SSL (or SASL_SSL)"
        )
    if settings.get("ssl_keyfile") and not settings.get("ssl_certfile"):
        raise ConfigError("option ssl_keyfile of the kafka:// URL needs ssl_certfile as well")


def client_arguments(settings: KafkaSettings) -> dict[str, Any]:
    """Arguments that every aiokafka client takes. Reads the certificate files.

    Raises:
        ConfigError: A certificate or key file is missing, unreadable or wrong.
    """
    arguments: dict[str, Any] = {
        "bootstrap_servers": list(settings.servers),
        "client_id": settings.client_id,
        "request_timeout_ms": settings.request_timeout_ms,
        "metadata_max_age_ms": settings.metadata_max_age_ms,
        "security_protocol": settings.security_protocol,
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_plain_username,
        "sasl_plain_password": settings.sasl_plain_password,
    }
    if settings.security_protocol in ("SSL", "SASL_SSL"):
        arguments["ssl_context"] = _ssl_context(settings)
    return arguments


def _ssl_context(settings: KafkaSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
        if settings.ssl_certfile is not None:
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_key_password or "")
    except (OSError, ssl.SSLError) as error:
        files = [name for name in (settings.ssl_cafile, settings.ssl_certfile, settings.ssl_keyfile) if name]
        raise ConfigError(
            f"cannot use the TLS files {', '.join(files)}: {error}; they must be readable PEM files, and a key with a "
            f"password needs {KEY_PASSWORD_VARIABLE}"
        ) from error
    return context
