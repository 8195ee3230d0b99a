"""LoRAs from an S3-compatible server, and from a hub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from moto.server import ThreadedMotoServer

from dynamo_es.llm import LoRADownloader
from dynamo_es.models import lora_s3
from dynamo_es.models.errors import LoraError
from dynamo_es.models.fetch import Hub
from tests.support.fake_hub import COMMIT, FakeHub

ADAPTER = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"w" * 1000, "sub/more.txt": b"x"}


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def client(s3_url: str) -> Iterator[Any]:
    client = boto3.client(
        "s3", endpoint_url=s3_url, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s",
        config=Config(retries={"max_attempts": 1}),
    )  # fmt: skip
    yield client
    client.close()


@pytest.fixture
def bucket(client: Any) -> str:
    name = f"bucket-{len(client.list_buckets()['Buckets'])}"
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def put(client: Any, bucket: str) -> Callable[[str, dict[str, bytes]], None]:
    def put(prefix: str, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            client.put_object(Bucket=bucket, Key=f"{prefix}{name}", Body=data)

    return put


@pytest.fixture
def downloader(tmp_path: Path, client: Any) -> LoRADownloader:
    return LoRADownloader(str(tmp_path / "loras"), s3=lambda: client)


def tree(folder: str | Path) -> dict[str, bytes]:
    root = Path(folder)
    files = (file for file in root.rglob("*") if file.is_file() and file.name != ".dynamo-es-origin")
    return {str(file.relative_to(root)): file.read_bytes() for file in files}


async def test_an_adapter_is_fetched_once_with_all_its_files(
    downloader: LoRADownloader, bucket: str, put: Any, client: Any
) -> None:
    put("team/lora/", ADAPTER | {"": b"", "sub/": b""})
    put("team/lora2/", {"adapter_config.json": b"other"})
    uri = f"s3://{bucket}/team/lora"
    folders = await asyncio.gather(*(downloader.download_if_needed(uri) for _ in range(5)))
    assert set(folders) == {downloader.get_cache_path(downloader.uri_to_cache_key(uri))}
    assert tree(folders[0]) == ADAPTER
    assert downloader.is_cached(uri)
    client.delete_object(Bucket=bucket, Key="team/lora/adapter_config.json")
    assert await downloader.download_if_needed(uri) == folders[0], "what is there is not asked for again"
    assert [path.name for path in Path(folders[0]).parent.iterdir()] == [Path(folders[0]).name]


async def test_a_whole_bucket_and_the_standard_environment(
    tmp_path: Path, bucket: str, put: Any, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("", ADAPTER)
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_url), ("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert tree(await LoRADownloader(str(tmp_path)).download_if_needed(f"s3://{bucket}")) == ADAPTER


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "not found in any source"),
        ({"adapter_config.json": b"{}"}, "is not complete: it needs adapter_config.json and one of"),
        (ADAPTER | {"../../evil": b"x"}, "would be written outside of its folder"),
    ],
    ids=["nothing", "incomplete", "traversal"],
)
async def test_what_is_no_adapter_leaves_nothing_behind(
    downloader: LoRADownloader, bucket: str, put: Any, files: dict[str, bytes], text: str, tmp_path: Path
) -> None:
    put("x/", files)
    with pytest.raises(LoraError, match=text) as caught:
        await downloader.download_if_needed(f"s3://{bucket}/x")
    assert isinstance(caught.value, RuntimeError)
    assert tree(tmp_path) == {}


async def test_a_folder_that_is_too_large_is_not_begun(
    downloader: LoRADownloader, bucket: str, put: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put("x/", ADAPTER)
    monkeypatch.setattr(lora_s3, "MAX_BYTES", 100)
    with pytest.raises(LoraError, match="more than 1000 files or 100 bytes"):
        await downloader.download_if_needed(f"s3://{bucket}/x")
    assert tree(tmp_path) == {}


async def test_adapters_whose_uris_have_one_key_are_kept_apart(
    downloader: LoRADownloader, bucket: str, put: Any, tmp_path: Path, client: Any
) -> None:
    uris = [f"s3://{bucket}/loras/{name}" for name in ("team/poet", "team_poet", "team.poet")]
    assert len({downloader.uri_to_cache_key(uri) for uri in uris}) == 1
    for uri in uris:
        put(uri.removeprefix(f"s3://{bucket}/") + "/", ADAPTER | {"sub/more.txt": uri.encode()})
    assert await downloader.download_if_needed(uris[0])
    assert [downloader.is_cached(uri) for uri in uris] == [True, False, False]
    # Another process that does not know of this one, all at once, and then from the disk alone.
    other = LoRADownloader(str(tmp_path / "loras"), s3=lambda: client)
    folders = await asyncio.gather(*(one.download_if_needed(uri) for one in (downloader, other) for uri in uris))
    assert folders[:3] == folders[3:]
    assert [tree(folder)["sub/more.txt"].decode() for folder in folders[:3]] == uris
    assert all(other.is_cached(uri) for uri in uris)
    assert await other.download_if_needed(uris[1]) == folders[1]


def leave_half(folder: str) -> None:
    Path(folder).mkdir(parents=True)
    Path(folder, "adapter_config.json").write_text("half")


async def test_a_leftover_is_replaced_by_the_whole(downloader: LoRADownloader, bucket: str, put: Any) -> None:
    put("x/", ADAPTER)
    uri = f"s3://{bucket}/x"
    leave_half(downloader.get_cache_path(downloader.uri_to_cache_key(uri)))
    assert tree(await downloader.download_if_needed(uri)) == ADAPTER


async def test_a_bucket_that_is_not_there(downloader: LoRADownloader) -> None:
    with pytest.raises(LoraError, match=r"^Download failed: Generic S3 error: .*NoSuchBucket"):
        await downloader.download_if_needed("s3://nobody-has-this/x")


async def test_an_adapter_on_the_hub_stays_in_the_hubs_cache(tmp_path: Path) -> None:
    with FakeHub("org/lora", ADAPTER) as server:
        downloader = LoRADownloader(str(tmp_path / "loras"), hub=Hub(server.url, tmp_path / "hub"))
        folder = await downloader.download_if_needed("hf://org/lora")
        assert folder.endswith(COMMIT)
        assert tree(folder) == ADAPTER
        assert await downloader.download_if_needed(f"hf://org/lora@{COMMIT}") == folder
        with pytest.raises(LoraError, match="Download failed: Failed to fetch model 'org/none'"):
            await downloader.download_if_needed("hf://org/none")
