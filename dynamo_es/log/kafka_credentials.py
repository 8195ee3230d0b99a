"""Settings as aiokafka's clients take them: secrets and certificates are read here, from their files."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from dynamo_es.errors import ConfigError
from dynamo_es.log.kafka_config import KEY_PASSWORD_VARIABLE, OAUTHBEARER, KafkaSettings
from dynamo_es.log.kafka_tokens import build_tokens
from dynamo_es.log.secret_files import read_secret


def client_arguments(settings: KafkaSettings, tokens: Any = None) -> dict[str, Any]:
    """Arguments that every aiokafka client takes. Reads files: blocks for a moment.

    ``tokens``: where bearer tokens come from (``build_tokens``), for clients that shall share them; None: a source of
    their own.

    Raises:
        ConfigError: A certificate, key or secret's file is missing, unreadable or wrong.
    """
    arguments: dict[str, Any] = {
        "bootstrap_servers": list(settings.servers),
        "client_id": settings.client_id,
        "request_timeout_ms": settings.request_timeout_ms,
        "metadata_max_age_ms": settings.metadata_max_age_ms,
        "security_protocol": settings.security_protocol,
        "sasl_mechanism": settings.sasl_mechanism,
        "sasl_plain_username": settings.sasl_plain_username,
        "sasl_plain_password": _secret(settings.sasl_plain_password, settings.sasl_password_file),
    }
    if settings.sasl_mechanism == OAUTHBEARER:
        arguments["sasl_oauth_token_provider"] = tokens if tokens is not None else build_tokens(settings)
    if settings.security_protocol in ("SSL", "SASL_SSL"):
        arguments["ssl_context"] = _ssl_context(settings)
    return arguments


def _secret(value: str | None, path: str | None) -> str | None:
    return value if path is None else read_secret(Path(path))


def _ssl_context(settings: KafkaSettings) -> ssl.SSLContext:
    """Checks the brokers' certificates and the names in them; there is no setting that does not."""
    password = _secret(settings.ssl_key_password, settings.ssl_key_password_file)
    try:
        context = ssl.create_default_context(cafile=settings.ssl_cafile)
        if settings.ssl_certfile is not None:
            # A password is always given: without one OpenSSL asks for it on the terminal.
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password or "")
    except (OSError, ssl.SSLError) as error:
        files = [name for name in (settings.ssl_cafile, settings.ssl_certfile, settings.ssl_keyfile) if name]
        raise ConfigError(
            f"cannot use the TLS files {', '.join(files)}: {error}; they must be readable PEM files, and a key with a "
            f"password needs {KEY_PASSWORD_VARIABLE} or the option ssl_key_password_file"
        ) from error
    return context
