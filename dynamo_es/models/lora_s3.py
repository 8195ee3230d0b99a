"""Fetching a folder of an S3 bucket. Needs the extra ``s3``; credentials and endpoint are AWS's standard ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from dynamo_es.errors import ConfigError
from dynamo_es.models.errors import LoraError

MAX_FILES = 1_000
MAX_BYTES = 16 * 1024**3
SCHEME = "s3://"


class S3Client(Protocol):
    """What is used of boto3's S3 client; its calls block."""

    def get_paginator(self, operation_name: str) -> Any:
        """Pages of ``list_objects_v2``."""

    def download_file(self, Bucket: str, Key: str, Filename: str) -> None:  # noqa: N803 - boto3's names
        """Write one object to a file."""


def make_s3_client() -> S3Client:
    """A client by the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, profiles, roles, ...).

    Raises:
        ConfigError: boto3 is not installed, or the environment does not fit together.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise ConfigError("LoRAs on S3 need boto3: install dynamo-es[s3]") from error
    try:
        client: S3Client = boto3.client("s3")
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"S3 cannot be used: {error}") from error
    return client


def download_folder(client: S3Client, uri: str, folder: Path) -> int:
    """Fetch everything under ``s3://bucket/prefix/`` into ``folder``; returns how many files. Blocks.

    At most 1,000 files of 16 GiB in all.

    Raises:
        LoraError: No bucket, no access, an object whose key would lead out of the folder, or too much of them.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, path = uri.removeprefix(SCHEME).partition("/")
    prefix = f"{path.rstrip('/')}/" if path.strip("/") else ""
    try:
        found = [(key, inner_path(uri, key.removeprefix(prefix))) for key in _keys(client, uri, bucket, prefix)]
        for key, inner in found:
            target = folder / inner
            target.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(Bucket=bucket, Key=key, Filename=str(target))
    except (Boto3Error, BotoCoreError, ClientError, OSError) as error:
        raise LoraError(uri, f"Generic S3 error: {error}") from error
    return len(found)


def inner_path(uri: str, name: str) -> Path:
    """``name`` as a path that stays within its folder, whatever the bucket's owner called it. Pure.

    Raises:
        LoraError: It does not.
    """
    parts = name.split("/")
    if any(part in {"", ".", ".."} or "\\" in part or "\0" in part for part in parts):
        raise LoraError(uri, f"object {name!r} would be written outside of its folder")
    return Path(*parts)


def _keys(client: S3Client, uri: str, bucket: str, prefix: str) -> Iterator[str]:
    files, size = 0, 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", ()):
            # Consoles make empty objects that stand for folders.
            if item["Key"].endswith("/"):
                continue
            files, size = files + 1, size + item["Size"]
            if files > MAX_FILES or size > MAX_BYTES:
                raise LoraError(uri, f"more than {MAX_FILES} files or {MAX_BYTES} bytes; is it the right folder?")
            yield item["Key"]
