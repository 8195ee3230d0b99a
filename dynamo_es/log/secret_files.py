"""Secrets in files, as Kubernetes and others mount them."""

from __future__ import annotations

from pathlib import Path

from dynamo_es.errors import ConfigError

_MAX_BYTES = 65_536


def read_secret(path: Path) -> str:
    """What the file holds, without the end of its line.

    Raises:
        ConfigError: It cannot be read, is empty, or holds something else than one line of text; never shows what.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the secret in {path}: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"the secret in {path} is longer than {_MAX_BYTES} bytes; is it the right file?")
    try:
        text = content.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        raise ConfigError(f"{path} does not hold a secret: expected one line of text")
    return text
