"""API keys without HTTP: the document, the ring, rates, the file and its command."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import msgspec
import pytest

from dynamo_es.cli.main import main
from dynamo_es.clock import ManualClock
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.api_keys import KeyEntry, KeyRing, decode_keys, digest_of, encode_keys, new_key
from dynamo_es.frontend.key_file import change_keys, read_keys
from dynamo_es.frontend.key_gate import credentials
from dynamo_es.frontend.rate_limit import TokenBucket


def entry(key_id: str, key: str, **more: object) -> KeyEntry:
    return msgspec.structs.replace(KeyEntry(key_id, digest_of(key), "n", "2026-05-01T12:00:00Z"), **more)


# -- rate --------------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(60, 3, 0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0, 0, 0]
    assert bucket.take(0.0) == pytest.approx(1.0)
    assert bucket.take(0.75) == pytest.approx(0.25)
    assert bucket.take(1.0) == 0
    assert bucket.take(1.0) > 0
    assert [bucket.take(1000.0) == 0 for _ in range(4)] == [True, True, True, False]


def test_a_clock_that_stands_still_or_limits_that_change_give_nothing_away() -> None:
    bucket = TokenBucket(60, 10, 0.0)
    for _ in range(10):
        assert bucket.take(0.0) == 0
    bucket.change(600, 5, 0.0)
    assert bucket.take(0.0) == pytest.approx(0.1)
    assert bucket.take(0.1) == 0
    bucket.change(60, 1, 100.0)
    assert bucket.take(100.0) == 0
    assert bucket.take(100.0) == pytest.approx(1.0)


# -- the document ------------------------------------------------------------------------------------------------------


def test_a_document_comes_back_as_it_was() -> None:
    entries = (
        entry("00000001", "x", models=("a", "b"), requests_per_minute=60, burst=5, admin=True),
        entry("00000002", "y", revoked="2026-05-02T12:00:00Z"),
    )
    assert decode_keys(encode_keys(entries)) == entries


GOOD = json.loads(encode_keys([entry("00000001", "x")]))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "version 2"),
        ({"keys": [{**GOOD["keys"][0], "model": ["m"]}]}, "unknown field `model`"),  # a slip must not open all models
        ({"keys": [{**GOOD["keys"][0], "id": "1"}]}, "API key 1 of the list: its id is not"),
        ({"keys": [{**GOOD["keys"][0], "sha256": "dk-secret"}]}, "API key 1 of the list: its sha256 is not"),
        ({"keys": [{**GOOD["keys"][0], "burst": 0}]}, "at least 1"),
        ({"keys": [{**GOOD["keys"][0], "models": "m"}]}, "Expected `array"),
        ({"keys": GOOD["keys"] * 2}, "API key 2 of the list: its id is there twice"),
    ],
)
def test_a_document_that_is_wrong_is_refused_without_showing_it(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match="API key") as caught:
        decode_keys(json.dumps({**GOOD, **change}).encode())
    assert text in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"x", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_document_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="no list of API keys"):
        decode_keys(content)


# -- the ring ----------------------------------------------------------------------------------------------------------


def test_a_ring_finds_the_holder_of_the_whole_key_only() -> None:
    key_id, key = new_key()
    other_id, other = new_key()
    ring = KeyRing([entry(key_id, key), entry(other_id, other, revoked="2026-05-02T12:00:00Z")], ManualClock())
    found = ring.find(key.encode())
    assert found is not None
    assert found.entry.id == key_id
    wrong = (
        "", "dk-", key[:-1], key + "x", key.upper(), key.swapcase(), " " + key, f"dk-{key_id}-", f"dk-{key_id}",
        "dk-" + "0" * 8 + key[11:], other, digest_of(key), key * 50,
    )  # fmt: skip
    for text in wrong:
        assert ring.find(text.encode()) is None, text
    assert ring.find(b"\xff" * 40) is None


def test_a_key_is_long_and_never_the_same() -> None:
    keys = {new_key()[1] for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) == 3 + 8 + 1 + 43 for key in keys)


def test_a_new_list_keeps_what_was_used_of_a_rate() -> None:
    key_id, key = new_key()
    clock = ManualClock()
    ring = KeyRing([entry(key_id, key, requests_per_minute=60, burst=2)], clock)
    caller = ring.find(key.encode())
    assert caller is not None
    assert [ring.wait_s(caller), ring.wait_s(caller)] == [0, 0]
    ring.replace([entry(key_id, key, requests_per_minute=60, burst=2)])
    again = ring.find(key.encode())
    assert again is not None
    assert ring.wait_s(again) == pytest.approx(1.0)
    clock.advance(1)
    assert ring.wait_s(again) == 0
    ring.replace([])
    assert ring.find(key.encode()) is None
    assert len(ring) == 0


def test_a_caller_may_ask_the_models_of_its_list_by_any_of_their_names() -> None:
    ring = KeyRing([entry("00000001", "x"), entry("00000002", "y", models=("m", "alias"))], ManualClock())
    free, bound = (ring._callers[name][1] for name in (b"00000001", b"00000002"))
    assert free.may_ask("whatever")
    assert bound.may_ask("m", "m")
    assert bound.may_ask("nick", "m")
    assert bound.may_ask("alias", "n")
    assert not bound.may_ask("n", "n")


def test_credentials_come_in_either_header() -> None:
    assert credentials([(b"authorization", b"Bearer abc")]) == [b"abc"]
    assert credentials([(b"authorization", b"bearer   abc ")]) == [b"abc"]
    assert credentials([(b"x-api-key", b"abc"), (b"authorization", b"Basic eDp5")]) == [b"abc"]
    assert credentials([(b"authorization", b"abc"), (b"x-api-keys", b"abc")]) == []
    assert len(credentials([(b"x-api-key", b"abc")] * 1000)) == 4


# -- the file and its command ------------------------------------------------------------------------------------------


def test_the_file_is_made_for_its_owner_alone_and_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    change_keys(path, lambda keys: (*keys, entry("00000001", "x")))
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    change_keys(path, lambda keys: (*keys, entry("00000002", "y")))
    assert path.stat().st_mode & 0o777 == 0o640
    assert [item.id for item in read_keys(path)] == ["00000001", "00000002"]
    assert [item.name for item in tmp_path.iterdir()] == ["keys.json"]


def test_changes_at_the_same_time_do_not_lose_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add(first: int) -> None:
        for place in range(first, first + 10):
            change_keys(path, lambda keys, place=place: (*keys, entry(f"{place:08x}", "x")))  # type: ignore[misc]

    threads = [threading.Thread(target=add, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_keys(path)) == 40


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"keys\.json: no list of API keys"):
        change_keys(path, lambda keys: keys)
    assert path.read_text() == "{}"
    with pytest.raises(ConfigError, match=r"cannot write the API keys to .*: No such file"):
        change_keys(tmp_path / "no" / "keys.json", lambda keys: keys)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["keys", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_adds_lists_and_revokes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYN_ES_API_KEYS_FILE", str(tmp_path / "keys.json"))
    code, key, err = run(capsys, "add", "--name", "team a")
    assert code == 0
    key = key.strip()
    assert err.startswith(f"key {key[3:11]} for team a is in ")
    assert key not in (tmp_path / "keys.json").read_text()
    code, other, _ = run(
        capsys,
        *("add", "--name", "b", "--models", "m, n", "--requests-per-minute", "600", "--max-concurrent", "4", "--admin"),
    )
    assert code == 0
    code, out, _ = run(capsys, "list")
    head, first, second = out.splitlines()
    assert head.split() == ["ID", "NAME", "MODELS", "RATE", "RUNNING", "ADMIN", "CREATED", "REVOKED"]
    assert first.startswith(f"{key[3:11]}  team a  all")
    assert "m,n     600/min, 100 at once  4        yes" in second
    assert key not in out
    assert run(capsys, "revoke", key)[0] == 0
    assert run(capsys, "revoke", other.strip()[3:11])[0] == 0
    assert all(item.revoked for item in read_keys(tmp_path / "keys.json"))
    code, _, err = run(capsys, "revoke", key)
    assert code == 2
    assert "was revoked at" in err
    assert key not in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("add", "--name", "x"), "which file of API keys?"),
        (("list", "--api-keys-file", "nowhere"), "cannot read the API keys in nowhere: No such file or directory; dyn"),
        (("add", "--api-keys-file", "k"), "keys add needs --name"),
        (("add", "--api-keys-file", "k", "--name", "x", "--burst", "3"), "--burst needs --requests-per-minute"),
        (("revoke", "--api-keys-file", "k", "00000000"), "there is no key '00000000' in k"),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    arguments: tuple[str, ...],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DYN_ES_API_KEYS_FILE", raising=False)
    if arguments[0] == "revoke":
        change_keys(tmp_path / "k", lambda keys: keys)
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert text in err
    assert err.count("\n") == 1
