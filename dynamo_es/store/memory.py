"""A state store in memory: for tests, for tools that fold once, and for processes without a state folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dynamo_es.log.base import TopicPartition
from dynamo_es.store.base import Change, Delete, Put
from dynamo_es.store.errors import StoreClosed


class MemoryStore:
    """A ``StateStore`` that is gone with its process."""

    def __init__(self, path: str = "memory://") -> None:
        self._path = path
        self._families: dict[str, dict[bytes, bytes]] = {}
        self._positions: dict[str, dict[TopicPartition, int]] = {}
        self._identity: dict[str, dict[str, str]] = {}
        self._closed = False

    @property
    def path(self) -> str:
        return self._path

    def get(self, family: str, key: bytes) -> bytes | None:
        self._check_open()
        return self._families.get(family, {}).get(key)

    def scan(self, family: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        self._check_open()
        rows = sorted(item for item in self._families.get(family, {}).items() if item[0].startswith(prefix))
        return iter(rows)

    def positions(self, owner: str) -> Mapping[TopicPartition, int]:
        self._check_open()
        return dict(self._positions.get(owner, {}))

    def identity(self, owner: str) -> Mapping[str, str]:
        self._check_open()
        return dict(self._identity.get(owner, {}))

    def commit(
        self,
        owner: str,
        changes: Sequence[Change],
        positions: Mapping[TopicPartition, int],
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self._check_open()
        for change in changes:
            rows = self._families.setdefault(change.family, {})
            if isinstance(change, Put):
                rows[change.key] = change.value
            elif isinstance(change, Delete):
                rows.pop(change.key, None)
            else:
                for key in [key for key in rows if change.start <= key < change.end]:
                    del rows[key]
        self._positions.setdefault(owner, {}).update(positions)
        self._identity.setdefault(owner, {}).update(identity or {})

    def wipe(self, owner: str, families: Sequence[str]) -> None:
        self._check_open()
        for family in families:
            self._families.pop(family, None)
        self._positions.pop(owner, None)
        self._identity.pop(owner, None)

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(self._path, "used after close")
