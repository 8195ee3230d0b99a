from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.errors import ConfigError
from dynamo_es.models.errors import LoraError
from dynamo_es.models.lora import LoRADownloader
from dynamo_es.models.lora_s3 import inner_path
from dynamo_es.router.hashing import lora_name_to_id

GOLDEN = Path(__file__).parents[2] / "data/golden/services"
RULES = json.loads((GOLDEN / "lora_cache_rules.json").read_text())["cases"]
KEYS = [  # but those whose path the recording hides
    case
    for case in json.loads((GOLDEN / "lora_uri_to_cache_key.json").read_text())["cases"]
    if "$PATH" not in case["uri"]
]
IDS = json.loads((GOLDEN / "lora_name_to_id.json").read_text())["cases"]
CONFIG, SAFE = "adapter_config.json", "adapter_model.safetensors"
# What the recording's folders hold.
FOLDERS = {
    "empty": (), "cfg": (CONFIG,), "w": (SAFE,), "both": (CONFIG, SAFE), "bin": (CONFIG, "adapter_model.bin"),
    "badjson": (CONFIG, SAFE), "zero": (CONFIG, SAFE), "other": (CONFIG, "model.safetensors"),
    "pt": (CONFIG, "adapter_model.pt"), "s3__bkt_lora": (CONFIG, SAFE),
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for folder, files in FOLDERS.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).write_text("{" if folder == "badjson" else "")
    (tmp_path / "afile").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    "case", [case for case in KEYS if "$PATH" not in case["uri"]], ids=lambda case: case["uri"] + "=" + case["key"]
)
def test_keys_are_the_references(case: dict[str, str]) -> None:
    assert LoRADownloader.uri_to_cache_key(case["uri"]) == case["key"]


@pytest.mark.parametrize("case", IDS, ids=lambda case: case["case"][:8])
def test_ids_are_the_references(case: dict[str, Any]) -> None:
    assert lora_name_to_id(case["name"]) == case["id"]


@pytest.mark.parametrize("case", RULES, ids=lambda case: case["case"])
async def test_cache_rules_are_the_references(case: dict[str, Any], cache: Path) -> None:
    downloader = LoRADownloader(str(cache))

    def place(text: str) -> str:
        return text.replace("$CACHE", str(cache)).replace("$HOME", str(Path.home()))

    kind, _, _ = case["case"].partition(":")
    if kind == "path":
        assert downloader.get_cache_path(case["arg"]) == place(case["ok"])
    elif kind == "val":
        assert downloader.is_cached(case["arg"]) is case["is_cached"]
        assert downloader.validate_cached(case["arg"]) is case["validate_cached"]
    elif case["case"] == "uri_is_cached":
        key = downloader.uri_to_cache_key(case["uri"])
        assert [downloader.is_cached(case["uri"]), downloader.is_cached(key)] == case["both"]
    elif case["case"] == "env2":
        assert LoRADownloader(env={}).get_cache_path("k") == place(case["ok"])
    elif "ok" in case:
        assert await downloader.download_if_needed(place(case["arg"])) == place(case["ok"])
    else:
        with pytest.raises(RuntimeError) as caught:
            await downloader.download_if_needed(place(case["arg"]))
        assert str(caught.value) == place(case["msg"])


async def test_what_is_cached_is_not_fetched(cache: Path) -> None:
    def no_client() -> Any:
        raise AssertionError("nobody needs S3 here")

    downloader = LoRADownloader(str(cache), s3=no_client)
    assert await downloader.download_if_needed("s3://bkt/lora") == str(cache / "s3__bkt_lora")
    assert downloader.get_cache_path("") == f"{cache}/"
    assert LoRADownloader(env={"DYN_LORA_PATH": "/x"}).get_cache_path("k") == "/x/k"


@pytest.mark.parametrize("text", ["x" * 5_000, "a\0b", "é ~?#@", ""])
def test_strange_names_are_just_not_there(text: str, cache: Path) -> None:
    assert LoRADownloader(str(cache)).is_cached(text) is False


async def test_s3_without_boto3_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"install dynamo-es\[s3\]"):
        await LoRADownloader(str(cache)).download_if_needed("s3://b/x")


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/abs", "a//b", ".", "a/./b", "..\\x", "a\0", ""])
def test_object_names_that_lead_out_of_the_folder_are_refused(name: str) -> None:
    with pytest.raises(LoraError, match="would be written outside of its folder"):
        inner_path("s3://b/x", name)
    assert inner_path("s3://b/x", "a/b.bin") == Path("a/b.bin")


def test_arguments_are_checked(cache: Path) -> None:
    for call in (LoRADownloader, LoRADownloader(str(cache)).is_cached, LoRADownloader.uri_to_cache_key):
        with pytest.raises(TypeError, match="object cannot be converted to 'PyString'"):
            call(5)  # type: ignore[arg-type]
