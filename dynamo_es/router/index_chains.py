"""From the flat KV index back to chains of blocks, as dumps show them (spec: router-core B.7). Pure.

The index knows that a worker holds a sequence hash; what tokens hash that stands for, and behind which block, is the
same wherever it occurs, and is told by every event that ever stored it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dynamo_es.router.radix_model import DumpedBlocks, RadixModel, Worker
from schemas.columns import unpack_u64
from schemas.kv_events import TIERS, BlocksStored, KvEvents, Tier
from streams.kv_index_state import KvIndexState

Chains = dict[int, tuple[int | None, int]]
"""Sequence hash to that of the block before it (None: it is the first) and its tokens hash."""


def learn_chains(chains: Chains, batch: KvEvents) -> None:
    """Add what the batch tells."""
    for event in batch.events:
        if isinstance(event, BlocksStored):
            parent = event.parent
            for block, tokens in zip(unpack_u64(event.sequence_hashes), unpack_u64(event.tokens_hashes), strict=True):
                chains[block] = (parent, tokens)
                parent = block


def dump_state(state: KvIndexState, model: str, block_size: int, chains: Chains) -> Iterator[tuple[Tier, DumpedBlocks]]:
    """What the index counts for prompts of a model, as chains that can be stored in this order.

    Left out is what ``chains`` does not know, and what in device memory hangs under a block that is not there: it
    counts for nothing.
    """
    index = state.models.get(model)
    if index is None:
        return
    device = RadixModel()
    lower: list[tuple[Tier, DumpedBlocks]] = []
    for slot, source in sorted(index.by_slot.items()):
        if not source.exact or source.block_size != block_size:
            continue
        worker = (source.key.worker_id, source.key.dp_rank)
        _store_held(device, worker, set(index.blocks_of(slot, 0).tolist()), chains)
        for tier, name in enumerate(TIERS[1:], 1):
            held = index.blocks_of(slot, tier).tolist()
            lower.extend((name, blocks) for blocks in _single_blocks(worker, held, chains))
    for blocks in device.dump():
        yield "device", blocks
    yield from lower


def _store_held(
    model: RadixModel, worker: Worker, held: set[int], chains: Mapping[int, tuple[int | None, int]]
) -> None:
    stored: set[int] = set()
    for block in held:
        missing: list[int] = []
        at: int | None = block
        while at is not None and at not in stored:
            if at not in held or at not in chains:
                break
            missing.append(at)
            at = chains[at][0]
        else:
            for ancestor in reversed(missing):
                parent, tokens = chains[ancestor]
                model.store(worker, parent, [ancestor], [tokens])
                stored.add(ancestor)


def _single_blocks(
    worker: Worker, held: Iterable[int], chains: Mapping[int, tuple[int | None, int]]
) -> Iterator[DumpedBlocks]:
    for block in held:
        if block in chains:
            parent, tokens = chains[block]
            yield DumpedBlocks(worker, parent, [block], [tokens])
