"""Under which identities the blocks of a prompt are booked (spec: router-core A.3, A.4).

By default a booked block is its sequence hash. A keyed hash keeps who reads bookings from relating them to prompts;
with reuse not assumed every block gets an identity of its own, so that no two requests share one. Never used to look
something up in an index.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from dynamo_es.errors import ConfigError
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.hashing_tracking import (
    KEY_BYTES,
    TRACKING_ALGORITHM,
    TrackingScope,
    TrackingSeeds,
    compute_tracking_hashes,
    derive_tracking_seeds,
    draw_unshared_hashes,
)

# Scopes (an adapter and a cache namespace each) whose seeds are remembered; deriving them takes microseconds.
MAX_SCOPES = 4096


class TrackingIdentities:
    """Makes identities for one router or service. Not safe for several threads."""

    def __init__(self, key: bytes | None, key_id: str, rng: random.Random) -> None:
        """``key``: 32 raw bytes; None: public identities."""
        self._key = key
        self._key_id = key_id
        self._rng = rng
        self._seeds: OrderedDict[TrackingScope, TrackingSeeds] = OrderedDict()

    @property
    def key(self) -> bytes | None:
        """32 bytes that all routers of the fleet share; None: public identities."""
        return self._key

    @property
    def is_keyed(self) -> bool:
        """Whether identities are other than sequence hashes also where reuse is assumed."""
        return self._key is not None

    def identities(
        self,
        tokens: Sequence[int],
        sequence_hashes: Sequence[int],
        scope: TrackingScope,
        *,
        assume_reuse: bool,
        mm_hashes: Sequence[Sequence[int]] = (),
    ) -> Sequence[int]:
        """One identity for each of ``sequence_hashes``, the complete blocks of ``tokens`` in ``scope``.

        ``mm_hashes``: for block i the u64 hashes of its multimodal objects; may be shorter than the blocks.
        """
        if not assume_reuse:
            return draw_unshared_hashes(len(sequence_hashes), self._rng)
        if self._key is None:
            return sequence_hashes
        return compute_tracking_hashes(tokens, scope, self._seeds_of(self._key, scope), mm_hashes)

    def _seeds_of(self, key: bytes, scope: TrackingScope) -> TrackingSeeds:
        seeds = self._seeds.get(scope)
        if seeds is None:
            seeds = self._seeds[scope] = derive_tracking_seeds(key, self._key_id, scope)
            if len(self._seeds) > MAX_SCOPES:
                self._seeds.popitem(last=False)
        return seeds


def load_tracking(settings: KvRouterSettings, rng: random.Random) -> TrackingIdentities:
    """The identities that ``settings`` ask for; reads the key file if they are keyed.

    Raises:
        ConfigError: The key file cannot be read, or has no 32 bytes.
    """
    path = settings.router_tracking_key_file
    if settings.router_tracking_hash != TRACKING_ALGORITHM or path is None:
        return TrackingIdentities(None, "", rng)
    try:
        with Path(path).open("rb") as file:
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"router_tracking_key_file {path} cannot be read: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(f"router_tracking_key_file {path} must hold {KEY_BYTES} raw bytes")
    return TrackingIdentities(key, settings.router_tracking_key_id or "", rng)
