"""``dynamo-es keys``: the file of API keys. A key is printed once, when it is made; the file has only its hash."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from dynamo_es.config.options import add_flags, load
from dynamo_es.config.security_options import ApiKeysConfig, NewKeyConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.api_keys import KeyEntry, digest_of, new_key
from dynamo_es.frontend.key_file import change_keys, read_keys


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("keys", help="add, list and revoke the API keys of a frontend")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text, run in (
        ("add", "make a key and print it, this once; makes the file if there is none", _run_add),
        ("list", "list the keys, without their secrets", _run_list),
        ("revoke", "make a key invalid; frontends see it at their next look at the file", _run_revoke),
    ):
        sub = actions.add_parser(name, help=text)
        add_flags(sub, ApiKeysConfig)
        if run is _run_add:
            add_flags(sub, NewKeyConfig)
        if run is _run_revoke:
            sub.add_argument("id", help="its id in the list, or the key itself")
        sub.set_defaults(run=run)


def _run_add(flags: argparse.Namespace) -> int:
    wanted, path = load(NewKeyConfig, flags, {}), _path(flags)
    if wanted.name is None:
        raise ConfigError("keys add needs --name: whose key it is")
    if wanted.burst is not None and wanted.requests_per_minute is None:
        raise ConfigError("--burst needs --requests-per-minute")
    models = None
    if wanted.models is not None:
        models = tuple(dict.fromkeys(name.strip() for name in wanted.models.split(",")))
    made = _NewKey(wanted, models)
    change_keys(path, made.added)
    print(made.key)
    print(f"key {made.key_id} for {wanted.name} is in {path}; it cannot be shown again", file=sys.stderr)
    return 0


class _NewKey:
    """Makes the entry under the file's lock, so that its id is new there."""

    def __init__(self, wanted: NewKeyConfig, models: tuple[str, ...] | None) -> None:
        self._wanted = wanted
        self._models = models
        self.key_id = self.key = ""

    def added(self, keys: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
        taken = {entry.id for entry in keys}
        self.key_id, self.key = new_key()
        while self.key_id in taken:
            self.key_id, self.key = new_key()
        wanted = self._wanted
        entry = KeyEntry(
            id=self.key_id,
            sha256=digest_of(self.key),
            name=str(wanted.name),
            created=_now(),
            models=self._models,
            requests_per_minute=wanted.requests_per_minute,
            burst=wanted.burst,
            max_concurrent=wanted.max_concurrent,
            admin=wanted.admin,
        )
        return (*keys, entry)


def _run_list(flags: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [("ID", "NAME", "MODELS", "RATE", "RUNNING", "ADMIN", "CREATED", "REVOKED")]
    rows += [_row(entry) for entry in read_keys(_path(flags))]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _row(entry: KeyEntry) -> tuple[str, ...]:
    rate = "any"
    if entry.requests_per_minute is not None:
        rate = f"{entry.requests_per_minute}/min, {entry.burst_size} at once"
    running = "any" if entry.max_concurrent is None else str(entry.max_concurrent)
    models = "all" if entry.models is None else ",".join(entry.models)
    admin = "yes" if entry.admin else "no"
    cells = (entry.id, entry.name, models, rate, running, admin, entry.created, entry.revoked or "-")
    return tuple("".join(letter if letter.isprintable() else "?" for letter in cell) for cell in cells)


def _run_revoke(flags: argparse.Namespace) -> int:
    path = _path(flags)
    # Whoever has only the key need not look up its id.
    key_id = flags.id[3:11] if flags.id.startswith("dk-") else flags.id

    def revoked(keys: tuple[KeyEntry, ...]) -> tuple[KeyEntry, ...]:
        found = next((entry for entry in keys if entry.id == key_id), None)
        if found is None:
            raise ConfigError(f"there is no key {key_id[:40]!r} in {path}; see dynamo-es keys list")
        if found.revoked is not None:
            raise ConfigError(f"key {found.id} of {found.name} was revoked at {found.revoked}")
        return tuple(msgspec.structs.replace(entry, revoked=_now()) if entry.id == key_id else entry for entry in keys)

    change_keys(path, revoked)
    print(f"key {key_id} is revoked", file=sys.stderr)
    return 0


def _path(flags: argparse.Namespace) -> Path:
    config = load(ApiKeysConfig, flags, os.environ)
    if config.file is None:
        raise ConfigError("which file of API keys? give --api-keys-file or DYN_ES_API_KEYS_FILE")
    return Path(config.file)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
