from __future__ import annotations

import random

import pytest

from dynamo_es.errors import ConfigError
from dynamo_es.router import tracking
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.hashing_tracking import TrackingScope
from dynamo_es.router.tracking import TrackingIdentities, load_tracking

TOKENS = list(range(16))
HASHES = hash_prompt(TOKENS, 4)[1]
SCOPE = TrackingScope("m", "default", 4)


def identities(made: TrackingIdentities, scope=SCOPE, assume_reuse=True):
    return list(made.identities(TOKENS, HASHES, scope, assume_reuse=assume_reuse))


def test_public_identities_are_the_sequence_hashes():
    made = TrackingIdentities(None, "", random.Random(1))
    assert identities(made) == HASHES
    assert not made.is_keyed


def test_keyed_identities_depend_on_key_id_and_scope_and_on_nothing_else():
    made = TrackingIdentities(b"k" * 32, "a", random.Random(1))
    assert identities(made) == identities(TrackingIdentities(b"k" * 32, "a", random.Random(2)))
    others = [
        identities(TrackingIdentities(b"l" * 32, "a", random.Random(1))),
        identities(TrackingIdentities(b"k" * 32, "b", random.Random(1))),
        identities(made, TrackingScope("n", "default", 4)),
        identities(made, TrackingScope("m", "default", 4, lora_name="x")),
        HASHES,
    ]
    assert len({tuple(other) for other in [identities(made), *others]}) == 6


def test_without_reuse_identities_are_never_the_same_twice():
    for key in (None, b"k" * 32):
        made = TrackingIdentities(key, "a", random.Random(1))
        assert not set(identities(made, assume_reuse=False)) & set(identities(made, assume_reuse=False))


def test_scopes_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(tracking, "MAX_SCOPES", 3)
    made = TrackingIdentities(b"k" * 32, "a", random.Random(1))
    first = identities(made)
    for number in range(10):
        identities(made, TrackingScope("m", "default", 4, cache_namespace=str(number)))
    assert len(made._seeds) == 3
    assert identities(made) == first


def keyed(path) -> KvRouterSettings:
    return KvRouterSettings(
        router_tracking_hash="keyed-xxh3-v1", router_tracking_key_file=str(path), router_tracking_key_id="a"
    )


def test_the_key_file_holds_the_key(tmp_path):
    (tmp_path / "key").write_bytes(b"k" * 32)
    made = load_tracking(keyed(tmp_path / "key"), random.Random(1))
    assert identities(made) == identities(TrackingIdentities(b"k" * 32, "a", random.Random(1)))
    assert not load_tracking(KvRouterSettings(), random.Random(1)).is_keyed


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "cannot be read: No such file"), (b"k" * 31, "32 raw bytes"), (b"k" * 33, "32 raw bytes")],
)
def test_a_key_file_that_holds_none_is_refused(tmp_path, content, text):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        load_tracking(keyed(tmp_path / "key"), random.Random(1))
