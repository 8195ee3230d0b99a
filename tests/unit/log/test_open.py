from __future__ import annotations

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import ConfigError
from dynamo_es.log.embedded import EmbeddedLog
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.memory import MemoryLog
from dynamo_es.log.open import open_log


def options(url: str) -> EmbeddedOptions:
    log = open_log(url, ManualClock())
    assert isinstance(log, EmbeddedLog)
    return log._options


def test_embedded_url_names_a_folder():
    assert open_log("embedded:///var/lib/x%20y", ManualClock()).url == "embedded:///var/lib/x y"


def test_embedded_url_may_be_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert open_log("embedded:some/dir", ManualClock()).url == f"embedded://{tmp_path}/some/dir"


def test_embedded_options():
    assert options("embedded:///d") == EmbeddedOptions()
    found = options("embedded:///d?durability=fsync&segment_bytes=100000&segment_ms=5000")
    assert found == EmbeddedOptions(durability="fsync", segment_bytes=100_000, segment_ms=5000)
    assert found.synchronous == "FULL"
    assert EmbeddedOptions().synchronous == "NORMAL"


def test_memory_url():
    log = open_log("memory://name", ManualClock())
    assert isinstance(log, MemoryLog)
    assert log.url == "memory://name"
    assert open_log("memory://", ManualClock()).url == "memory://"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://x", r"scheme 'redis': expected embedded:///dir.*kafka://.*memory://"),
        ("/var/lib/log", r"no scheme: expected embedded:///dir"),
        ("embedded:///d?fsync=1", r"unknown option 'fsync'; expected durability, segment_bytes, segment_ms"),
        ("memory://?durability=fsync", r"unknown option 'durability'; it takes none"),
        ("embedded:///d?durability=maybe", r"durability=maybe: expected os or fsync"),
        ("embedded:///d?segment_bytes=1MB", r"segment_bytes=1MB: expected a whole number \(bytes\)"),
        ("embedded:///d?segment_bytes=5", r"segment_bytes=5: must be at least 16384 \(bytes\)"),
        ("embedded:///d?segment_ms=0", r"segment_ms=0: must be at least 1000 \(ms\)"),
        ("embedded://var/log", r"three slashes \(embedded:///var/log\)"),
        ("embedded://", r"names no folder"),
        ("embedded:///", r"names no folder"),
    ],
)
def test_a_wrong_url_says_what_is_accepted(url, said):
    with pytest.raises(ConfigError, match=said):
        open_log(url, ManualClock())
