"""Cost of an engine's KV events from raw ZMQ payload to record: ``python -m tests.bench.bench_kv_publisher``."""

from __future__ import annotations

import time
import tracemalloc

import msgspec

from dynamo_es.clock import SystemClock
from dynamo_es.publishers.kv_sources import KvSources, KvSourceSettings
from dynamo_es.publishers.rejections import RejectionReporter
from tests.bench.bench_mock_engine import EncodingSink

BLOCK_SIZE = 16


def payloads(chains: int, blocks: int) -> list[bytes]:
    """Stores of ``chains`` prompts, each one event of ``blocks`` blocks, as vLLM sends them."""
    made = []
    for number in range(chains):
        event = {
            "type": "BlockStored",
            "block_hashes": [hash((number, index)) & (2**64 - 1) for index in range(blocks)],
            "parent_block_hash": None,
            "token_ids": [(number * 31 + index) % 50_000 for index in range(blocks * BLOCK_SIZE)],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        made.append(msgspec.msgpack.encode([1.5, [event], 0]))
    return made


def measure(chains: int, blocks: int) -> None:
    sink, clock, numbers = EncodingSink(), SystemClock(), iter(range(10))
    settings = KvSourceSettings(sink, clock, lambda: "m", 7, BLOCK_SIZE, lambda: next(numbers), lambda: 1)
    sources = KvSources(settings, 0, RejectionReporter(sink, clock, "bench"))
    sources.flush()
    messages = payloads(chains, blocks)
    tracemalloc.start()
    sources.apply_payload(messages[0], 0)
    before = tracemalloc.get_traced_memory()[0]
    for seq, message in enumerate(messages[1 : chains // 4], 1):
        sources.apply_payload(message, seq)
    sources.flush()
    memory = (tracemalloc.get_traced_memory()[0] - before) / (blocks * (chains // 4 - 1))
    tracemalloc.stop()
    start = time.process_time()
    for seq, message in enumerate(messages[chains // 4 :], chains // 4):
        sources.apply_payload(message, seq)
        sources.flush()
    stored = time.process_time() - start
    start = time.process_time()
    sources.resync()
    resync = time.process_time() - start
    count = 3 * chains // 4
    print(
        f"{blocks} blocks a batch: {stored / count * 1e6:.0f} µs a batch, {stored / (count * blocks) * 1e6:.2f} µs a "
        f"block; {memory:.0f} bytes a block known; resync of {chains * blocks} blocks {resync * 1e3:.0f} ms"
    )


def main() -> None:
    for chains, blocks in ((20_000, 1), (2_000, 16), (1_000, 64)):
        measure(chains, blocks)


if __name__ == "__main__":
    main()
