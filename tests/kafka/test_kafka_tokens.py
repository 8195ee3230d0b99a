"""Bearer tokens from files and endpoints; no Kafka is needed."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import trustme

from dynamo_es.log.kafka_config import KafkaSettings
from dynamo_es.log.kafka_tokens import EndpointTokens, FileTokens, TokenRefused, TokenUnavailable
from tests.support.token_endpoint import CLIENT_ID, CLIENT_SECRET, TokenEndpoint


@pytest.fixture
def endpoint():
    endpoint = TokenEndpoint()
    yield endpoint
    endpoint.close()


def tokens(endpoint, **changes):
    options = {"sasl_oauth_client_id": CLIENT_ID, "sasl_oauth_client_secret": CLIENT_SECRET} | changes
    return EndpointTokens(KafkaSettings(("a:1",), sasl_oauth_token_url=endpoint.url, **options))


async def test_a_token_is_asked_for_once_for_all_connections(endpoint):
    endpoint.gives("abc.def-1")
    source = tokens(endpoint, sasl_oauth_scope="kafka logs")
    assert set(await asyncio.gather(*(source.token() for _ in range(20)))) == {"abc.def-1"}
    assert endpoint.asked == [{"grant_type": ["client_credentials"], "scope": ["kafka logs"]}]


@pytest.mark.parametrize("life", [0, "0", -1])
async def test_a_token_that_is_old_is_replaced(endpoint, life):
    endpoint.gives("first", life)
    source = tokens(endpoint)
    assert await source.token() == "first"
    endpoint.gives("second", "3600")
    assert await source.token() == "second"
    assert await source.token() == "second"
    assert len(endpoint.asked) == 2


async def test_a_secret_file_is_read_for_each_token(endpoint, tmp_path):
    path = tmp_path / "secret"
    path.write_text("wrong")
    endpoint.gives("abc")
    source = tokens(endpoint, sasl_oauth_client_secret=None, sasl_oauth_client_secret_file=str(path))
    with pytest.raises(TokenRefused, match=r"refuses the client: status 401 \(invalid_client\)") as caught:
        await source.token()
    assert "wrong" not in str(caught.value)
    path.write_text(CLIENT_SECRET + "\n")
    assert await source.token() == "abc"
    path.unlink()
    assert await source.token() == "abc"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, b"oops"), "status 500, 4 bytes"),
        ((200, b"not json"), "the answer is none of RFC 6749"),
        ((200, b"\xff"), "the answer is none of RFC 6749"),
        ((200, b'{"token":"x"}'), "the answer is none of RFC 6749.*access_token"),
        ((200, b'{"access_token":"abc","expires_in":"soon"}'), "the answer is none of RFC 6749"),
        ((200, b'{"access_token":"abc\\u0001auth=x"}'), "does not hold a bearer token"),
        ((200, b'{"access_token":""}'), "does not hold a bearer token"),
        ((200, b" " * (1 << 21)), "status 200, 1048577 bytes"),
        ((302, b""), "status 302"),
    ],
)
async def test_other_answers_are_no_token(endpoint, answer, message):
    endpoint.answer = answer
    endpoint.location = endpoint.url if answer[0] == 302 else ""
    with pytest.raises(TokenUnavailable, match=message) as caught:
        await tokens(endpoint).token()
    assert endpoint.url in str(caught.value)
    assert CLIENT_SECRET not in str(caught.value)
    # No redirect was followed with the secret.
    assert len(endpoint.asked) == 1


async def test_an_endpoint_that_is_away_is_told():
    endpoint = TokenEndpoint()
    endpoint.close()
    with pytest.raises(TokenUnavailable, match=r"gives no token: .*refused"):
        await tokens(endpoint).token()


async def test_an_endpoint_is_trusted_by_its_authority_only(tmp_path):
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    endpoint = TokenEndpoint(context)
    endpoint.gives("abc")
    try:
        for name, signer in (("right", authority), ("wrong", other)):
            signer.cert_pem.write_to_path(str(tmp_path / name))
        assert await tokens(endpoint, sasl_oauth_cafile=str(tmp_path / "right")).token() == "abc"
        for cafile in (str(tmp_path / "wrong"), None):
            with pytest.raises(TokenUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await tokens(endpoint, sasl_oauth_cafile=cafile).token()
    finally:
        endpoint.close()


async def test_a_token_file_is_read_each_time(tmp_path):
    path = tmp_path / "token"
    path.write_text("abc.def.ghi=\n")
    source = FileTokens(path)
    assert await source.token() == "abc.def.ghi="
    path.write_text("jkl")
    assert await source.token() == "jkl"
    for content in ("a b", "a\x01b", ""):
        path.write_text(content)
        with pytest.raises(TokenUnavailable, match=str(path)):
            await source.token()
    path.unlink()
    with pytest.raises(TokenUnavailable, match="No such file"):
        await source.token()
