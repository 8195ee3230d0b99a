"""Mistakes in TLS options and files: one line that says which file, and nothing asked on the terminal."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_es.clock import ManualClock
from dynamo_es.config.security_options import TlsConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.tls import tls_context
from dynamo_es.frontend.tls_handshakes import QUIET_S, HandshakeCollector, HandshakeWatch
from tests.support.tls_files import Pair, authority_file, issue


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def pair(tmp_path: Path, authority: trustme.CA) -> Pair:
    return issue(tmp_path, authority)


def test_without_certificate_there_is_no_tls() -> None:
    assert tls_context(TlsConfig()) is None


def test_a_pair_makes_a_modern_context(pair: Pair) -> None:
    context = tls_context(TlsConfig(str(pair.cert), str(pair.key)))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_NONE


def test_authorities_of_clients_make_certificates_of_clients_mandatory(
    tmp_path: Path, pair: Pair, authority: trustme.CA
) -> None:
    path = authority_file(tmp_path, authority, trustme.CA())
    context = tls_context(TlsConfig(str(pair.cert), str(pair.key), client_ca_cert_path=str(path)))
    assert context is not None
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert len(context.get_ca_certs()) == 2


def test_an_encrypted_key_with_its_password(tmp_path: Path, authority: trustme.CA) -> None:
    pair = issue(tmp_path, authority, password="open sesame")
    (tmp_path / "password").write_text("open sesame\n")
    password = str(tmp_path / "password")
    assert tls_context(TlsConfig(str(pair.cert), str(pair.key), key_password_file=password)) is not None


Make = Callable[[Path, Pair, trustme.CA], TlsConfig]


def _other_key(folder: Path, pair: Pair, authority: trustme.CA) -> TlsConfig:
    return TlsConfig(str(pair.cert), str(issue(folder, authority, "other").key))


def _encrypted(folder: Path, pair: Pair, authority: trustme.CA) -> TlsConfig:
    pair = issue(folder, authority, password="open sesame")
    return TlsConfig(str(pair.cert), str(pair.key))


def _wrong_password(folder: Path, pair: Pair, authority: trustme.CA) -> TlsConfig:
    pair = issue(folder, authority, password="open sesame")
    (folder / "password").write_text("guess")
    return TlsConfig(str(pair.cert), str(pair.key), key_password_file=str(folder / "password"))


def _empty_password(folder: Path, pair: Pair, authority: trustme.CA) -> TlsConfig:
    (folder / "password").write_text("")
    return TlsConfig(str(pair.cert), str(pair.key), key_password_file=str(folder / "password"))


def _broken(folder: Path, pair: Pair, authority: trustme.CA) -> TlsConfig:
    text = pair.cert.read_text()
    pair.cert.write_text(text[:100] + "\n" + text[-30:])
    return TlsConfig(str(pair.cert), str(pair.key))


def _leaf_as_authority(folder: Path, pair: Pair, authority: trustme.CA) -> TlsConfig:
    return TlsConfig(str(pair.cert), str(pair.key), client_ca_cert_path=str(pair.key))


MISTAKES: list[tuple[Make, str]] = [
    (lambda f, p, a: TlsConfig(cert_path=str(p.cert)), "--tls-cert-path and --tls-key-path must be provided together"),
    (lambda f, p, a: TlsConfig(key_path=str(p.key)), "--tls-cert-path and --tls-key-path must be provided together"),
    (lambda f, p, a: TlsConfig(client_ca_cert_path="x"), "--tls-client-ca-cert-path requires --tls-cert-path"),
    (lambda f, p, a: TlsConfig(key_password_file="x"), "--tls-key-password-file requires --tls-cert-path"),
    (lambda f, p, a: TlsConfig(f"{f}/no", str(p.key)), "/no (--tls-cert-path): No such file"),
    (lambda f, p, a: TlsConfig(str(f), str(p.key)), "(--tls-cert-path): Is a directory"),
    (lambda f, p, a: TlsConfig(str(p.key), str(p.key)), "server.key (--tls-cert-path) holds no certificate in PEM"),
    (lambda f, p, a: TlsConfig(str(p.cert), str(p.cert)), "server.crt (--tls-key-path) holds no private key in PEM"),
    (
        lambda f, p, a: TlsConfig(str(p.cert), str(p.key), client_ca_cert_path=f"{f}/no"),
        "/no (--tls-client-ca-cert-path): No such file",
    ),
    (_other_key, "other.key (--tls-key-path) does not belong to the certificate in"),
    (_encrypted, "server.key is encrypted; give its password with --tls-key-password-file"),
    (_wrong_password, "password does not open the private key in"),
    (_empty_password, "password does not hold a secret"),
    (_broken, "cannot use the certificate in"),
    (_leaf_as_authority, "server.key (--tls-client-ca-cert-path) holds no certificate"),
]


@pytest.mark.parametrize(("make", "text"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_one_line(make: Make, text: str, tmp_path: Path, pair: Pair, authority: trustme.CA) -> None:
    with pytest.raises(ConfigError) as caught:
        tls_context(make(tmp_path, pair, authority))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "sesame" not in str(caught.value)
    assert "guess" not in str(caught.value)


def test_failed_handshakes_are_counted_by_reason_and_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock, registry = ManualClock(), CollectorRegistry()
    watch = HandshakeWatch(clock)
    registry.register(HandshakeCollector(watch, "p"))
    context = watch.over(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    for sent, reason in ((b"GET / HTTP/1.1\r\n\r\n", "plain_http"), (b"\x16\x03\x01nonsense", "other")):
        incoming = ssl.MemoryBIO()
        incoming.write(sent)
        with pytest.raises(ssl.SSLError):
            context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
        assert watch.failures[reason] == 1
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True).do_handshake()
    assert sum(watch.failures.values()) == 2
    clock.advance(QUIET_S)
    incoming = ssl.MemoryBIO()
    incoming.write(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ssl.SSLError):
        context.wrap_bio(incoming, ssl.MemoryBIO(), server_side=True).do_handshake()
    said = [record.message for record in caplog.records]
    assert said == [f"{count} TLS handshakes failed; the last: the client spoke HTTP without TLS" for count in (1, 2)]
    page = generate_latest(registry).decode()
    assert 'p_tls_handshake_failures_total{reason="plain_http"} 2.0' in page
    assert 'p_tls_handshake_failures_total{reason="client_alert"} 0.0' in page
