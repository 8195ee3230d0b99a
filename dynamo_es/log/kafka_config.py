"""Settings of the Kafka log: what a ``kafka://`` URL and the environment may say, checked in one place."""

from __future__ import annotations

import ipaddress
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
CLIENT_SECRET_VARIABLE = "DYN_ES_KAFKA_OAUTH_CLIENT_SECRET"  # noqa: S105
ALLOWED_URLS_VARIABLE = "DYN_ES_KAFKA_OAUTH_ALLOWED_URLS"
SECURITY_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
OAUTHBEARER = "OAUTHBEARER"
# GSSAPI needs Kerberos libraries that are no dependency.
SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", OAUTHBEARER)
# Secrets, and where they belong instead of a URL, which ends up in process lists and shell histories.
_SECRETS = {
    "sasl_plain_password": f"{PASSWORD_VARIABLE} in the environment, or the option sasl_password_file",
    "ssl_key_password": f"{KEY_PASSWORD_VARIABLE} in the environment, or the option ssl_key_password_file",
    "sasl_oauth_client_secret": f"{CLIENT_SECRET_VARIABLE} in the environment, or the option "
    "sasl_oauth_client_secret_file",
}


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How to reach a cluster. Every field but ``servers`` and the secrets is an option of the URL.

    Secrets come from the environment or from files, which are read anew for each new client, so that they can be
    changed under a running process.

    Attributes:
        servers: ``host:port`` of brokers to ask first; one that answers is enough.
        security_protocol: PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL.
        sasl_mechanism: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER.
        sasl_plain_username: For PLAIN and SCRAM; or ``DYN_ES_KAFKA_SASL_USERNAME``.
        sasl_plain_password: ``DYN_ES_KAFKA_SASL_PASSWORD``.
        sasl_password_file: File of the password, instead.
        sasl_oauth_token_file: File of a bearer token that somebody keeps fresh; read for each new connection.
        sasl_oauth_token_url: Endpoint that gives tokens for a client's id and secret (RFC 6749, 4.4); it must be among
            ``DYN_ES_KAFKA_OAUTH_ALLOWED_URLS``, so that no URL of a log makes a process send its secret elsewhere.
        sasl_oauth_client_id: The client's id there.
        sasl_oauth_client_secret: ``DYN_ES_KAFKA_OAUTH_CLIENT_SECRET``.
        sasl_oauth_client_secret_file: File of the secret, instead.
        sasl_oauth_scope: Scope to ask for, or None.
        sasl_oauth_cafile: PEM file of the authority that signed the endpoint's certificate; None: the system's.
        ssl_cafile: PEM file of the authority that signed the brokers' certificates; None: the system's.
        ssl_certfile: PEM file of the client certificate and what it was signed with, for mutual TLS.
        ssl_keyfile: Its key.
        ssl_key_password: Password of an encrypted key: ``DYN_ES_KAFKA_SSL_KEY_PASSWORD``.
        ssl_key_password_file: File of that password, instead.
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
    sasl_password_file: str | None = None
    sasl_oauth_token_file: str | None = None
    sasl_oauth_token_url: str | None = None
    sasl_oauth_client_id: str | None = None
    sasl_oauth_client_secret: str | None = field(default=None, repr=False)
    sasl_oauth_client_secret_file: str | None = None
    sasl_oauth_scope: str | None = None
    sasl_oauth_cafile: str | None = None
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_key_password: str | None = field(default=None, repr=False)
    ssl_key_password_file: str | None = None
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
            f"{item.name}={quote(str(value), safe='/:')}"
            for item in fields(self)
            if item.name in OPTIONS and item.name != "sasl_plain_username"
            if (value := getattr(self, item.name)) != item.default
        ]
        return f"{SCHEME}://{self.bootstrap}" + (f"?{'&'.join(shown)}" if shown else "")


_NOT_OPTIONS = {"servers", *_SECRETS}
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
        if name in _SECRETS:
            raise ConfigError(
                f"{name} does not belong into a {SCHEME}:// URL, which others can see: use {_SECRETS[name]}"
            )
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
    if not protocol.startswith("SASL_") and any(name.startswith("sasl_") for name in settings):
        raise ConfigError(
            f"sasl_… options with security_protocol={protocol}, which does not log in: add "
            "security_protocol=SASL_SSL (or SASL_PLAINTEXT)"
        )
    if protocol.startswith("SASL_"):
        by_token = settings.get("sasl_mechanism") == OAUTHBEARER
        wrong = sorted(name for name in settings if name.startswith("sasl_oauth_")) if not by_token else []
        if wrong:
            raise ConfigError(f"option {wrong[0]} of the {SCHEME}:// URL needs sasl_mechanism={OAUTHBEARER}")
        (_add_tokens if by_token else _add_password)(settings, environment)
    if protocol in ("SSL", "SASL_SSL"):
        _add_secret(settings, environment, "ssl_key_password", "ssl_key_password_file", KEY_PASSWORD_VARIABLE)
    elif any(name.startswith("ssl_") for name in settings):
        raise ConfigError(
            f"ssl_… options with security_protocol={protocol}, which does not encrypt: add "
            "security_protocol=SSL (or SASL_SSL)"
        )
    if settings.get("ssl_keyfile") and not settings.get("ssl_certfile"):
        raise ConfigError("option ssl_keyfile of the kafka:// URL needs ssl_certfile as well")


def _add_password(settings: dict[str, Any], environment: Mapping[str, str]) -> None:
    needed = f"security_protocol={settings['security_protocol']} needs"
    settings.setdefault("sasl_plain_username", environment.get(USERNAME_VARIABLE))
    if not settings["sasl_plain_username"]:
        raise ConfigError(f"{needed} {USERNAME_VARIABLE} in the environment, or the option sasl_plain_username")
    if not _add_secret(settings, environment, "sasl_plain_password", "sasl_password_file", PASSWORD_VARIABLE):
        raise ConfigError(f"{needed} {_SECRETS['sasl_plain_password']}")


def _add_tokens(settings: dict[str, Any], environment: Mapping[str, str]) -> None:
    url = settings.get("sasl_oauth_token_url")
    if (url is None) == (settings.get("sasl_oauth_token_file") is None):
        raise ConfigError(
            f"sasl_mechanism={OAUTHBEARER} needs one of the options sasl_oauth_token_file and sasl_oauth_token_url"
        )
    endpoint_only = ("sasl_oauth_client_id", "sasl_oauth_client_secret_file", "sasl_oauth_scope", "sasl_oauth_cafile")
    if url is None:
        if wrong := [name for name in endpoint_only if name in settings]:
            raise ConfigError(f"option {wrong[0]} of the {SCHEME}:// URL needs sasl_oauth_token_url")
        return
    _check_token_url(url, environment)
    if not settings.get("sasl_oauth_client_id"):
        raise ConfigError("option sasl_oauth_token_url of the kafka:// URL needs sasl_oauth_client_id as well")
    names = ("sasl_oauth_client_secret", "sasl_oauth_client_secret_file")
    if not _add_secret(settings, environment, *names, CLIENT_SECRET_VARIABLE):
        raise ConfigError(f"sasl_oauth_token_url needs {_SECRETS['sasl_oauth_client_secret']}")


def _add_secret(
    settings: dict[str, Any], environment: Mapping[str, str], name: str, file_option: str, variable: str
) -> bool:
    """Is there such a secret? A file that is named wins over the environment."""
    if settings.get(file_option):
        return True
    settings[name] = environment.get(variable) or None
    return settings[name] is not None


def _check_token_url(url: str, environment: Mapping[str, str]) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"option sasl_oauth_token_url: not a URL: {error}") from error
    if "@" in parts.netloc or parts.fragment:
        raise ConfigError("option sasl_oauth_token_url: expected https://host[:port]/path without a user")
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and _is_this_machine(host))):
        raise ConfigError(f"option sasl_oauth_token_url={url}: a secret is sent there, so it must be https://host/path")
    allowed = [item.strip() for item in environment.get(ALLOWED_URLS_VARIABLE, "").split(",")]
    if url not in allowed:
        raise ConfigError(
            f"option sasl_oauth_token_url={url} is not among {ALLOWED_URLS_VARIABLE} of the environment: the client's "
            "secret is sent to URLs only that are written there, letter by letter, with commas between them"
        )


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
