"""Options of the frontend's security: TLS, API keys, and the command that keeps these."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_model_names, check_name, check_path


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS of the frontend's HTTP server. Files are PEM; ``dynamo_es.frontend.tls`` checks and reads them."""

    cert_path: str | None = option(
        None, flag="--tls-cert-path", env="DYN_TLS_CERT_PATH", check=check_path,
        help="Certificate of the HTTP server, followed by those between it and the authority; with --tls-key-path the "
        "port speaks HTTPS only. Read again when the file changes, and at SIGHUP.",
    )  # fmt: skip
    key_path: str | None = option(
        None, flag="--tls-key-path", env="DYN_TLS_KEY_PATH", check=check_path,
        help="Its private key.",
    )  # fmt: skip
    key_password_file: str | None = option(
        None, flag="--tls-key-password-file", env="DYN_ES_TLS_KEY_PASSWORD_FILE", check=check_path,
        help="File with the password of an encrypted private key, one line.",
    )  # fmt: skip
    client_ca_cert_path: str | None = option(
        None, flag="--tls-client-ca-cert-path", env="DYN_TLS_CLIENT_CA_CERT_PATH", check=check_path,
        help="Authorities of clients (mutual TLS): only clients with a certificate of one of them are let in.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ApiKeysConfig:
    """The file of API keys."""

    file: str | None = option(
        None, flag="--api-keys-file", env="DYN_ES_API_KEYS_FILE", check=check_path,
        help="File of API keys, as dynamo-es keys writes it (hashes only); with it every request needs a key. Read "
        "again when it changes.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class NewKeyConfig:
    """``dynamo-es keys add``: what the new key may do."""

    name: str | None = option(
        None, flag="--name", env=None, check=check_name,
        help="Whose key it is, for people; shown in lists.",
    )  # fmt: skip
    models: str | None = option(
        None, flag="--models", env=None, check=check_model_names,
        help="Names of the models that it may ask and see, joined by commas; unset: all.",
    )  # fmt: skip
    requests_per_minute: int | None = option(
        None, flag="--requests-per-minute", env=None, unit="requests", minimum=1, maximum=10_000_000,
        help="Requests that it may make in the long run, counted by each frontend process; unset: any number.",
    )  # fmt: skip
    burst: int | None = option(
        None, flag="--burst", env=None, unit="requests", minimum=1, maximum=10_000_000,
        help="Requests that it may make at once after a pause; unset: those of ten seconds.",
    )  # fmt: skip
    max_concurrent: int | None = option(
        None, flag="--max-concurrent", env=None, unit="requests", minimum=1, maximum=10_000_000,
        help="Requests that it may have in progress at a time, streams included, with each frontend process; unset: "
        "any number.",
    )  # fmt: skip
    admin: bool = option(
        False, flag="--admin", env=None,
        help="It may see and change busy thresholds.",
    )  # fmt: skip
