"""Dumping the KV index of an endpoint's model: the view says what is held, the log how it hangs together."""

from __future__ import annotations

from dynamo_es.log.base import TopicPartition
from dynamo_es.router.index_chains import Chains, dump_state, learn_chains
from dynamo_es.router.radix_model import DumpedBlocks
from dynamo_es.runtime.core import RuntimeCore
from schemas.codec import SchemaError, TopicCodec
from schemas.kv_events import KV_EVENTS, KvEvents, Tier
from streams.kv_index_state import KvIndexState
from streams.runner import FoldRunner

_POLL_RECORDS = 1024


async def dump_index(
    core: RuntimeCore, index: FoldRunner[KvIndexState], model: str, block_size: int
) -> list[tuple[Tier, DumpedBlocks]]:
    """What the view holds of a model. Reads ``kv-events`` from its beginning: time and memory grow with the log.

    Raises:
        LogError: The log cannot be read.
    """
    topic = KV_EVENTS.qualified(core.settings.log.namespace)
    codec = TopicCodec(KV_EVENTS)
    bounds = await core.log.bounds(topic)
    ends = {TopicPartition(topic, partition): found.end for partition, found in bounds.items()}
    chains: Chains = {}
    reader = core.log.reader({TopicPartition(topic, partition): found.start for partition, found in bounds.items()})
    try:
        while any(reader.positions()[position] < end for position, end in ends.items()):
            batches = await reader.poll(max_records=_POLL_RECORDS, timeout_s=1.0)
            if not batches:
                break
            for records in batches.values():
                for record in records:
                    try:
                        value = None if record.value is None else codec.decode(record.value, record.headers)
                    except SchemaError:
                        continue
                    if isinstance(value, KvEvents) and value.model == model:
                        learn_chains(chains, value)
    finally:
        await reader.close()
    return list(dump_state(index.state, model, block_size, chains))
