"""The file of API keys: reading it, and changing it so that no reader ever sees a part of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dynamo_es.errors import ConfigError
from dynamo_es.frontend.api_keys import KeyEntry, decode_keys, encode_keys

_MAX_BYTES = 64 * 1024 * 1024


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """The keys of the file.

    Raises:
        ConfigError: It cannot be read, or is no list of keys.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        remedy = "; dynamo-es keys add makes it" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the API keys in {path}: {error.strerror or error}{remedy}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} is too large for a list of API keys")
    try:
        return decode_keys(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def change_keys(path: Path, change: Callable[[tuple[KeyEntry, ...]], tuple[KeyEntry, ...]]) -> None:
    """Replace the list by what ``change`` makes of it; a file that is not there is an empty list.

    One process at a time; the new file takes the old one's place at once, and is its owner's alone (mode 0600) if it
    is new.

    Raises:
        ConfigError: The file cannot be read or written, is no list of keys, or what ``change`` raises.
    """
    try:
        with _locked(path):
            there = path.exists()
            changed = encode_keys(change(read_keys(path) if there else ()))
            _write(path, changed, path.stat().st_mode & 0o777 if there else 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write the API keys to {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes, mode: int) -> None:
    # A link (as mounted secrets are) keeps pointing to where the file is.
    target = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
