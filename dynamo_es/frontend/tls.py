"""TLS of the HTTP server: from files to an ``ssl.SSLContext``, with what is wrong in one line (spec/frontend.md 6.7).

TLS 1.2 at least, HTTP/1.1 by ALPN. With authorities of clients, a client without a certificate of theirs gets no
further than the handshake.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from dynamo_es.config.security_options import TlsConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.secret_files import read_secret

_MAX_BYTES = 4 * 1024 * 1024
"""Bundles of all public authorities have a few hundred kilobytes."""


def tls_files(config: TlsConfig) -> list[Path]:
    """The files that ``tls_context`` reads."""
    paths = (config.cert_path, config.key_path, config.key_password_file, config.client_ca_cert_path)
    return [Path(path) for path in paths if path is not None]


def tls_context(config: TlsConfig) -> ssl.SSLContext | None:
    """The server's context; None without certificate and key. Reads files.

    Raises:
        ConfigError: Options that do not go together, or a file that cannot be read or does not fit; says which.
    """
    if (config.cert_path is None) != (config.key_path is None):
        raise ConfigError("--tls-cert-path and --tls-key-path must be provided together")
    if config.cert_path is None or config.key_path is None:
        for flag, value in (
            ("--tls-client-ca-cert-path", config.client_ca_cert_path),
            ("--tls-key-password-file", config.key_password_file),
        ):
            if value is not None:
                raise ConfigError(f"{flag} requires --tls-cert-path and --tls-key-path")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load_pair(context, config.cert_path, config.key_path, config.key_password_file)
    if config.client_ca_cert_path is not None:
        _load_authorities(context, config.client_ca_cert_path)
    return context


def _load_pair(context: ssl.SSLContext, cert: str, key: str, password_file: str | None) -> None:
    _check_pem("--tls-cert-path", cert, b"CERTIFICATE-----")
    _check_pem("--tls-key-path", key, b"PRIVATE KEY-----")
    password = None if password_file is None else read_secret(Path(password_file))
    asked = False

    def give() -> str:
        # Without this, OpenSSL would ask for the password on the terminal.
        nonlocal asked
        asked = True
        return password or ""

    try:
        context.load_cert_chain(cert, key, give)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(_pair_problem(error, cert, key, password_file if asked else None, asked=asked)) from error


def _pair_problem(error: Exception, cert: str, key: str, password_file: str | None, *, asked: bool) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"the private key in {key} (--tls-key-path) does not belong to the certificate in {cert}"
    if asked and password_file is None:
        return f"the private key in {key} is encrypted; give its password with --tls-key-password-file"
    if asked:
        return f"the password in {password_file} does not open the private key in {key}"
    reason = (error.reason if isinstance(error, ssl.SSLError) else str(error)) or "not understood"
    return f"cannot use the certificate in {cert} with the private key in {key}: {reason}"


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    text = _check_pem("--tls-client-ca-cert-path", path, b"CERTIFICATE-----")
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        reason = (error.reason if isinstance(error, ssl.SSLError) else str(error)) or "not understood"
        raise ConfigError(f"cannot use the certificates in {path} (--tls-client-ca-cert-path): {reason}") from error
    if not context.cert_store_stats()["x509_ca"]:
        raise ConfigError(f"{path} (--tls-client-ca-cert-path) holds no certificate of an authority")
    context.verify_mode = ssl.CERT_REQUIRED


def _check_pem(flag: str, path: str, mark: bytes) -> str:
    """The file's text, if it looks like what it should be."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read {path} ({flag}): {reason}") from error
    if len(content) > _MAX_BYTES or mark not in content:
        what = "private key" if mark.startswith(b"PRIVATE") else "certificate"
        raise ConfigError(f"{path} ({flag}) holds no {what} in PEM form")
    return content.decode("ascii", "replace")
