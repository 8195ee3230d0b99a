"""API keys: their form, the document that lists them, and who holds a key. Pure.

A key is ``dk-<id>-<secret>``. The id is public and finds the entry; the secret has 256 random bits, so a plain SHA-256
of the whole key is enough to keep in a file (there is nothing to guess, as there is with passwords), and it is
compared in constant time. The document (JSON)::

    {"version": 1, "keys": [{"id": "3f9c2a71", "sha256": "<64 hex digits>", "name": "team-a", "models": ["m1"],
      "requests_per_minute": 60, "burst": 10, "max_concurrent": 8, "admin": false,
      "created": "2026-05-01T12:00:00Z", "revoked": null}]}

``models`` null: all. Unknown members are refused: a slip in a name must not open what it was to close.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.rate_limit import TokenBucket

VERSION = 1
MAX_KEYS = 100_000
MAX_KEY_BYTES = 256
_ID = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_DIGEST = bytes(32)


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key, without its secret. Members as in the document."""

    id: str
    sha256: str
    name: str
    created: str
    models: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    burst: int | None = None
    max_concurrent: int | None = None
    admin: bool = False
    revoked: str | None = None

    @property
    def burst_size(self) -> int:
        """Requests at once: as given, else what ten seconds bring."""
        return self.burst if self.burst is not None else max(1, (self.requests_per_minute or 0) // 6)


class KeyDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content."""

    version: int
    keys: tuple[KeyEntry, ...]


def decode_keys(content: bytes) -> tuple[KeyEntry, ...]:
    """The document's keys.

    Raises:
        ConfigError: It is none; says why, and never shows a value.
    """
    try:
        document = msgspec.json.decode(content, type=KeyDocument)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"no list of API keys: {error}") from error
    if document.version != VERSION:
        raise ConfigError(f"version {document.version} of the list of API keys is not known here, only {VERSION}")
    if len(document.keys) > MAX_KEYS:
        raise ConfigError(f"more than {MAX_KEYS} API keys")
    seen: set[str] = set()
    for place, entry in enumerate(document.keys):
        problem = _problem(entry)
        if problem is not None or entry.id in seen:
            raise ConfigError(f"API key {place + 1} of the list: {problem or 'its id is there twice'}")
        seen.add(entry.id)
    return document.keys


def encode_keys(keys: Iterable[KeyEntry]) -> bytes:
    """The document, for people as well."""
    return msgspec.json.format(msgspec.json.encode(KeyDocument(VERSION, tuple(keys))), indent=2) + b"\n"


def _problem(entry: KeyEntry) -> str | None:
    if not _ID.fullmatch(entry.id):
        return "its id is not 8 hexadecimal digits"
    if not _DIGEST.fullmatch(entry.sha256):
        return "its sha256 is not 64 hexadecimal digits"
    if any(value is not None and value < 1 for value in (entry.requests_per_minute, entry.burst, entry.max_concurrent)):
        return "requests_per_minute, burst and max_concurrent are at least 1"
    return None


def new_key() -> tuple[str, str]:
    """A fresh id, and the key itself."""
    key_id = secrets.token_hex(4)
    return key_id, f"dk-{key_id}-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    """What the document keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Usage:
    """What is used of a key; goes on when the list is read again.

    Attributes:
        bucket: Its rate; None: any.
        running: Requests in progress.
    """

    def __init__(self) -> None:
        self.bucket: TokenBucket | None = None
        self.running = 0


class Caller:
    """The holder of a valid key.

    Attributes:
        entry: What the key may do.
        usage: What it does.
    """

    def __init__(self, entry: KeyEntry, usage: Usage) -> None:
        self.entry = entry
        self.usage = usage
        self._models = None if entry.models is None else frozenset(entry.models)

    def may_ask(self, *names: str) -> bool:
        """Whether one of the names of a model is on the key's list."""
        return self._models is None or not self._models.isdisjoint(names)


class KeyRing:
    """The keys that are valid now. Belongs to one event loop."""

    def __init__(self, entries: Sequence[KeyEntry], clock: Clock) -> None:
        self._clock = clock
        self._callers: dict[bytes, tuple[bytes, Caller]] = {}
        self.replace(entries)

    def __len__(self) -> int:
        return len(self._callers)

    def replace(self, entries: Sequence[KeyEntry]) -> None:
        """From now on these keys. What a key has used of its rate stays used."""
        before = self._callers
        self._callers = {}
        for entry in entries:
            if entry.revoked is None:
                known = before.get(entry.id.encode())
                usage = Usage() if known is None else known[1].usage
                self._set_rate(usage, entry)
                self._callers[entry.id.encode()] = (bytes.fromhex(entry.sha256), Caller(entry, usage))

    def _set_rate(self, usage: Usage, entry: KeyEntry) -> None:
        now = self._clock.monotonic()
        if entry.requests_per_minute is None:
            usage.bucket = None
        elif usage.bucket is None:
            usage.bucket = TokenBucket(entry.requests_per_minute, entry.burst_size, now)
        else:
            usage.bucket.change(entry.requests_per_minute, entry.burst_size, now)

    def find(self, key: bytes) -> Caller | None:
        """Who holds this key; None: nobody. Takes as long for a wrong secret as for a right one."""
        if len(key) > MAX_KEY_BYTES:
            return None
        digest, caller = self._callers.get(key[3:11], (_NO_DIGEST, None))
        return caller if hmac.compare_digest(hashlib.sha256(key).digest(), digest) else None

    def wait_s(self, caller: Caller) -> float:
        """Count a request of ``caller``. 0 if it may go on, else the seconds after which to try again."""
        bucket = caller.usage.bucket
        return 0.0 if bucket is None else bucket.take(self._clock.monotonic())
