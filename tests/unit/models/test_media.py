from __future__ import annotations

import base64
import ipaddress
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from dynamo_es.errors import InvalidArgument
from dynamo_es.models.errors import ModelError
from dynamo_es.models.media_config import MediaDecoder, MediaFetcher
from dynamo_es.models.media_rules import FetchRules, MediaRefused, is_public
from dynamo_es.models.media_types import check_kind, read_data_url, sniff

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/services/media_decoder_fetcher.json").read_text())


def play(call: str) -> Any:
    """A recorded call such as ``enable_image({'limits':{}})``."""
    name, _, argument = call.partition("(")
    if call == "dir":
        return [name for name in dir(MediaFetcher()) if not name.startswith("_") and name != "card_body"]
    target: Any = MediaDecoder() if name.startswith("enable") else MediaFetcher()
    return getattr(target, name)(eval(argument.removesuffix(")"), {}))


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["case"])
def test_settings_are_taken_and_refused_as_recorded(case: dict[str, Any]) -> None:
    expected = case["result"]
    if "ok" in expected:
        assert repr(play(case["call"])) == expected["ok"]
        return
    with pytest.raises(Exception) as caught:
        play(case["call"])
    kind = "Exception" if isinstance(caught.value, ModelError) else type(caught.value).__name__
    text = expected["msg"].replace("builtins.MediaDecoder", "MediaDecoder")
    assert (kind, str(caught.value)) == (expected["err"], text)


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (None, "unexpected type: 'NoneType' object cannot be converted to 'Mapping'"),
        ({"max_alloc": -1}, "OverflowError: can't convert negative int to unsigned"),
        ({"max_image_width": 2**32}, "OverflowError: out of range integral type conversion attempted"),
        ({5: 1}, "dict keys must have type str"),
    ],
)
def test_limits_that_are_none(limits: Any, text: str) -> None:
    """As ai-dynamo-runtime 1.5.1 answers."""
    with pytest.raises(ModelError, match=f"^Failed to parse image decoder config: {re.escape(text)}$"):
        MediaDecoder().enable_image({"limits": limits})


def rules(**allowed: Any) -> FetchRules:
    fetcher = MediaFetcher()
    for name, value in allowed.items():
        getattr(fetcher, name)(value)
    return FetchRules.of_card(fetcher.card_body())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "255.255.255.255", "198.18.0.1", "240.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "2002:a00:1::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1", "nonsense",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)
    with pytest.raises(MediaRefused, match="has an address that is not public"):
        rules().check_address("h", address)
    rules(allow_private_ips=True).check_address("h", address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("ftp://h.test/x", "scheme 'ftp'"), ("file:///etc/passwd", "scheme 'file'"), ("gopher://h.test", "scheme"),
        ("//h.test/x", "scheme ''"), ("/x", "scheme ''"), ("", "scheme ''"), ("http:///x", "names no host"),
        ("http://[::1", "cannot be read"), ("http://h.test:99999/", "cannot be read"),
        ("http://user@h.test/", "user name"), ("http://user:pw@h.test/", "user name"),
        ("http://h.test:8080/", "names port 8080"), ("https://h.test:80/", "names port 80"),
        ("http://127.0.0.1/", "is an address"), ("http://[::1]/", "is an address"), ("http://127.1/", "is an address"),
        ("http://2130706433/", "is an address"), ("http://0x7f000001/", "is an address"),
        ("http://0x7f.1/", "is an address"), ("http://127.0.0.1./", "is an address"),
        ("http://８.8.8.8/", "is an address"),
    ],
)  # fmt: skip
def test_SEC_01_urls_that_lead_where_none_may_go(url: str, text: str) -> None:
    with pytest.raises(MediaRefused, match=text) as caught:
        rules().check_url(url)
    assert isinstance(caught.value, InvalidArgument)
    assert "pw" not in str(caught.value)


def test_urls_that_may_be_fetched() -> None:
    for url in ("http://h.test/x?y", "https://h.test:443/", "http://h.test:80/", "HTTPS://H.TEST/x"):
        assert rules().check_url(url)
    assert rules(allow_direct_port=True).check_url("http://h.test:8080/")
    assert rules(allow_direct_ip=True).check_url("http://8.8.8.8/")
    for url in ("http://10.0.0.1/", "http://127.1/", "http://[::ffff:10.0.0.1]/"):
        with pytest.raises(MediaRefused, match="not public"):
            rules(allow_direct_ip=True).check_url(url)


def test_only_the_hosts_that_are_named_if_any_are() -> None:
    few = rules(allowed_media_domains=["Good.test", "b.test."])
    for url in ("http://good.test/x", "http://GOOD.test./x", "http://b.test"):
        assert few.check_url(url)
    for url in ("http://evil.test/", "http://a.good.test/", "http://good.test.evil.test/"):
        with pytest.raises(MediaRefused, match="is not among those allowed"):
            few.check_url(url)


def test_SEC_02_every_hop_is_looked_at() -> None:
    first = rules().check_url("https://h.test/a/b")
    assert rules().check_url("../c", before=first) == URL("https://h.test/c")
    for where in ("http://h.test/", "//169.254.169.254/latest", "https://localhost:22/", "file:///etc/passwd"):
        with pytest.raises(MediaRefused):
            rules().check_url(where, before=first)


def data_url(data: bytes, head: str = "data:image/png;base64") -> str:
    return f"{head},{base64.b64encode(data).decode()}"


def test_data_urls() -> None:
    assert read_data_url(data_url(b"abc"), 3) == b"abc"
    assert read_data_url("data:,a%20b", 3) == b"a b"
    assert read_data_url(data_url(b"", "DATA:;BASE64"), 0) == b""
    for url, text in (
        ("data:abc", "without a comma"), ("data:;base64,a", "no base64"), ("data:;base64,!!!!", "no base64"),
        (data_url(b"abcd"), "more than 3 bytes"), (data_url(b"x" * 10_000), "more than 3 bytes"),
        ("data:,abcd", "more than 3 bytes"), ("data:," + "a" * 1000, "more than 3 bytes"),
    ):  # fmt: skip
        with pytest.raises(MediaRefused, match=text):
            read_data_url(url, 3)


@pytest.mark.parametrize(
    ("data", "mime"),
    [
        (b"\x89PNG\r\n\x1a\n...", "image/png"), (b"\xff\xd8\xff\xe0", "image/jpeg"), (b"GIF89a", "image/gif"),
        (b"RIFF....WEBPVP8 ", "image/webp"), (b"BM", "image/bmp"), (b"\0\0\0\x18ftypisom", "video/mp4"),
        (b"RIFF....AVI LIST", "video/x-msvideo"), (b"\x1a\x45\xdf\xa3", "video/webm"), (b"\0\0\0\x18ftypavif", None),
        (b"<svg/>", None), (b"%PDF", None), (b"", None), (b"RIFF....WAVE", None),
    ],
)  # fmt: skip
def test_files_are_known_by_their_first_bytes(data: bytes, mime: str | None) -> None:
    assert sniff(data) == mime
    for kind in ("image", "video"):
        if mime is not None and mime.startswith(kind):
            assert check_kind(data, kind) == mime  # type: ignore[arg-type]
        else:
            with pytest.raises(MediaRefused, match=f"this is no {kind}"):
                check_kind(data, kind)  # type: ignore[arg-type]


URLS = st.one_of(
    st.text(max_size=60),
    st.builds(
        "{}://{}{}/{}".format,
        st.sampled_from(["http", "https", "HTTP", "file", "data", ""]),
        st.text(alphabet="a0x.:@[]%-_é１", max_size=20),
        st.sampled_from(["", ":80", ":", ":x", ":99999999"]),
        st.text(max_size=10),
    ),
    st.builds("http://{}/".format, st.ip_addresses()),
    st.builds("http://[{}]/".format, st.ip_addresses(v=6)),
)


@given(URLS)
def test_no_url_breaks_the_guard_and_what_passes_names_no_address(text: str) -> None:
    try:
        url = rules().check_url(text)
    except MediaRefused:
        return
    assert url.scheme in {"http", "https"}
    assert url.host
    with pytest.raises(ValueError, match="does not appear to be"):
        ipaddress.ip_address(url.host)


@given(st.text(max_size=60), st.integers(0, 20))
def test_no_data_url_breaks_the_reader_or_exceeds_the_limit(text: str, max_bytes: int) -> None:
    for url in (f"data:{text}", f"data:;base64,{text}"):
        try:
            assert len(read_data_url(url, max_bytes)) <= max_bytes
        except MediaRefused:
            continue


@given(st.binary(max_size=64))
def test_no_bytes_break_the_telling_of_types(data: bytes) -> None:
    for head in (b"", b"RIFF", b"\0\0\0\0ftyp"):
        assert (sniff(head + data) or "image/").startswith(("image/", "video/"))
