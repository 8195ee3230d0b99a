"""The scheduler of the engine that is mimicked. Pure."""

from __future__ import annotations

from dynamo_es.engines.mock.block_manager import BlockManager
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.scheduler import MockScheduler
from dynamo_es.engines.mock.sglang_scheduler import SglangScheduler
from dynamo_es.engines.mock.timing import TimingModel


def build_scheduler(config: MockEngineConfig, timing: TimingModel | None = None) -> MockScheduler:
    """One rank with an empty cache."""
    kind = SglangScheduler if config.engine_type == "sglang" else MockScheduler
    return kind(config, BlockManager(config.num_gpu_blocks), timing)
