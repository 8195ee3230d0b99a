"""Taking over what another indexer knows, at start: ``GET <peer>/dump`` (spec: services f.1)."""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.router.engine_index import EngineIndex
from dynamo_es.router.hashing import to_unsigned
from dynamo_es.router.radix_model import BlockMismatch
from schemas.kv_events import Tier

logger = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
_MAX_DUMP_BYTES = 1024 * 1024 * 1024


class _Block(msgspec.Struct):
    block_hash: int
    tokens_hash: int


class _Stored(msgspec.Struct):
    blocks: list[_Block]
    parent_hash: int | None = None


class _Data(msgspec.Struct):
    stored: _Stored


class _Event(msgspec.Struct):
    data: _Data
    dp_rank: int = 0


class _RouterEvent(msgspec.Struct):
    worker_id: int
    event: _Event
    storage_tier: Tier = "device"


class PartitionDump(msgspec.Struct):
    """What a peer knows of one partition."""

    block_size: int
    events: list[_RouterEvent]

    def apply(self, index: EngineIndex, worker_id: int) -> None:
        """Store the blocks of one worker. What does not fit is left out."""
        for item in self.events:
            if item.worker_id != worker_id:
                continue
            stored = item.event.data.stored
            parent = None if stored.parent_hash is None else to_unsigned(stored.parent_hash)
            try:
                index.store(
                    (worker_id, item.event.dp_rank),
                    item.storage_tier,
                    parent,
                    [to_unsigned(block.block_hash) for block in stored.blocks],
                    [to_unsigned(block.tokens_hash) for block in stored.blocks],
                )
            except BlockMismatch as error:
                logger.debug("a peer's dump does not fit: %s", error)


_DECODER = msgspec.json.Decoder(dict[str, PartitionDump])


async def fetch_dump(peers: Sequence[str]) -> Mapping[str, PartitionDump] | None:
    """The dump, by ``model:group``, of the first peer that answers; None if none does. Never raises for a peer."""
    for peer in peers:
        try:
            return _DECODER.decode(await asyncio.to_thread(_get, peer.rstrip("/") + "/dump"))
        except (OSError, ValueError, urllib.error.URLError, msgspec.MsgspecError) as error:
            logger.warning("no index from peer %s: %s", peer, error)
    return None


def _get(url: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an http URL")
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 - the scheme was checked
        data = response.read(_MAX_DUMP_BYTES + 1)
    if len(data) > _MAX_DUMP_BYTES:
        raise ValueError(f"its dump is larger than {_MAX_DUMP_BYTES} bytes")
    return data
