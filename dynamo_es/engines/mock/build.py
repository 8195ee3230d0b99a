"""The scheduler of the engine that is mimicked. Pure."""

from __future__ import annotations

from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.sglang_scheduler import SglangScheduler
from dynamo_es.engines.mock.timing import DefaultTiming, PrefillTiming
from dynamo_es.engines.mock.trtllm_scheduler import TrtllmScheduler
from dynamo_es.engines.scheduling.block_manager import BlockManager
from dynamo_es.engines.scheduling.scheduler import Scheduler
from dynamo_es.engines.scheduling.timing import TimingModel


def build_scheduler(config: MockEngineConfig, timing: TimingModel | None = None) -> Scheduler:
    """One rank with an empty cache. ``timing``: of the modelled GPU; None: Dynamo's polynomials."""
    blocks = BlockManager(config.num_gpu_blocks)
    timing = timing or DefaultTiming()
    if config.worker_type == "prefill":
        timing = PrefillTiming(timing)
    if config.engine_type == "sglang":
        return SglangScheduler(config, blocks, timing)
    return (TrtllmScheduler if config.engine_type == "trtllm" else Scheduler)(config, blocks, timing)
