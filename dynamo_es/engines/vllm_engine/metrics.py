"""What the vLLM worker tells the log of its engine: the load of each rank, and its forward passes."""

from __future__ import annotations

from dynamo_es.engines.vllm_engine.engine import EngineFacts
from dynamo_es.engines.vllm_engine.stats import EngineLoad
from dynamo_es.publishers.forward_pass import FpmDirectPublisher
from dynamo_es.publishers.worker_metrics import WorkerMetricsPublisher
from dynamo_es.runtime.endpoint import Endpoint


class EngineMetrics:
    """Belongs to the engine's event loop. Takes loads before ``publish_to`` as well; of passes it forgets those."""

    def __init__(self) -> None:
        self._load = WorkerMetricsPublisher()
        self._passes: FpmDirectPublisher | None = None
        self._first_rank = 0
        self._closed = False

    async def publish_to(self, endpoint: Endpoint, facts: EngineFacts) -> None:
        """Publish for the worker at ``endpoint``; heartbeats come for each rank of it."""
        await self._load.create_endpoint(endpoint)
        worker_id = str(endpoint.connection_id())
        self._first_rank = facts.first_rank
        self._passes = FpmDirectPublisher(endpoint, worker_id, facts.ranks, first_rank=facts.first_rank)
        endpoint.core.add_cleanup(self._stop)

    def on_load(self, load: EngineLoad) -> None:
        """A rank after a step."""
        if self._closed:
            return
        self._load.publish(
            load.rank,
            kv_used_blocks=load.kv_used_blocks,
            total_kv_blocks=load.total_kv_blocks,
            running=load.running,
            waiting=load.waiting,
        )
        done = load.computed
        if self._passes is None or done is None:
            return
        self._passes.publish(
            scheduled_num_prefill_requests=done.prefill_requests,
            scheduled_sum_prefill_tokens=done.prefill_tokens,
            # What follows as 0 vLLM does not tell: cached prefixes that were read, and lengths of what waits.
            scheduled_sum_prefill_kv_tokens=0,
            scheduled_num_decode_requests=done.decode_requests,
            scheduled_sum_decode_kv_tokens=done.decode_kv_tokens,
            queued_num_prefill_requests=load.waiting,
            queued_sum_prefill_tokens=0,
            queued_num_decode_requests=0,
            queued_sum_decode_kv_tokens=0,
            wall_time_secs=done.wall_time_s,
            dp_rank=load.rank - self._first_rank,
        )

    async def _stop(self) -> None:
        self._closed = True
