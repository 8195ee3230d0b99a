"""What a relay is configured by, and which endpoints it watches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_es.errors import ConfigError
from schemas.dc_relay import SNAPSHOTS_WITHIN_MS
from schemas.registry import ModelCard

MAX_DC_ID_BYTES = 256
MAX_SNAPSHOT_INTERVAL_S = SNAPSHOTS_WITHIN_MS / 2000


@dataclass(frozen=True, slots=True)
class RelayScope:
    """Which endpoints are watched.

    Attributes:
        namespaces: Exact names; None: all.
        endpoint_prefixes: Leading parts of ``namespace.component.endpoint``, whole parts only; empty: all.
    """

    namespaces: Sequence[str] | None = None
    endpoint_prefixes: Sequence[str] = ()

    def includes(self, card: ModelCard) -> bool:
        """Whether the endpoint of a model card is watched."""
        if self.namespaces is not None and card.namespace not in self.namespaces:
            return False
        path = f"{card.namespace}.{card.component}.{card.endpoint}."
        return not self.endpoint_prefixes or any(path.startswith(f"{prefix}.") for prefix in self.endpoint_prefixes)

    def check(self) -> None:
        """Raises ``ConfigError`` in Dynamo's words."""
        for name in self.namespaces or ():
            _check_text("discovery namespaces", name)
        for prefix in self.endpoint_prefixes:
            _check_text("endpoint prefixes", prefix)
            if self.namespaces is not None and not any(_is_within(prefix, name) for name in self.namespaces):
                raise ConfigError(f"KV DC Relay endpoint prefix {prefix} is outside the configured namespaces")


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Of one relay (Dynamo's names).

    Attributes:
        dc_id: The data centre; stays the same over restarts.
        scope: Which endpoints are watched.
        publication_threshold: Changed blocks that are published at once.
        publication_delay_ms: How long fewer of them wait for more.
        recovery_attempt_timeout_ms: How long a rank may take to announce itself anew before it is asked again, and
            fenced.
        expected_unique_blocks: Blocks that a pool is expected to have. Of more changes than that the relay keeps no
            list, but compares the whole pool; a pool with more blocks is told in a warning.
        load_window_ms: Time from one status to the next.
        snapshot_interval_s: Time from one snapshot of a pool to the next.
    """

    dc_id: str
    scope: RelayScope = RelayScope()
    publication_threshold: int = 16
    publication_delay_ms: int = 1
    recovery_attempt_timeout_ms: int = 30_000
    expected_unique_blocks: int = 1_048_576
    load_window_ms: int = 1_000
    snapshot_interval_s: float = 300.0

    def check(self) -> None:
        """Raises ``ConfigError`` in Dynamo's words, and for an id of more than 256 bytes."""
        if not self.dc_id:
            raise ConfigError("KV DC Relay dc_id must not be empty")
        if self.dc_id != self.dc_id.strip():
            raise ConfigError("KV DC Relay dc_id must not contain leading or trailing whitespace")
        if len(self.dc_id.encode("utf-8", "replace")) > MAX_DC_ID_BYTES or not self.dc_id.isprintable():
            raise ConfigError(f"KV DC Relay dc_id must be printable text of at most {MAX_DC_ID_BYTES} bytes")
        self.scope.check()
        for name in ("publication_threshold", "publication_delay_ms", "recovery_attempt_timeout_ms"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"KV DC Relay {name} must be positive")


def _check_text(what: str, text: str) -> None:
    if not text.strip():
        raise ConfigError(f"KV DC Relay {what} must not be empty")
    if text != text.strip():
        raise ConfigError(f"KV DC Relay {what} must not contain surrounding whitespace")


def _is_within(prefix: str, namespace: str) -> bool:
    return f"{prefix}.".startswith(f"{namespace}.")
