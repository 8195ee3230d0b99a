"""Writes the options that a process goes by to a file (``--dump-config-to``)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamo_es import __version__
from dynamo_es.config.options import options_of, origins, redacted
from dynamo_es.errors import ConfigError


def described(
    configs: Sequence[Any], flags: argparse.Namespace | None, env: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """By flag: the value in force (secrets as ``***``), the variable of the option, and where the value comes from."""
    found: dict[str, dict[str, Any]] = {}
    for config in configs:
        values, sources = redacted(config), origins(type(config), flags, env)
        for item in options_of(type(config)):
            found[item.spec.flag] = {"value": values[item.name], "env": item.spec.env, "source": sources[item.name]}
    return found


def dump_config(path: str, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Write them as JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    document = {"program": "dynamo-es", "version": __version__, "options": options}
    try:
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--dump-config-to {path} cannot be written: {error.strerror or error}") from error
