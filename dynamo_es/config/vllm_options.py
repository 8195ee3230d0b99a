"""The options of the vLLM engine that are not vLLM's own flags."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """vLLM in this process (extra ``vllm``); its own flags follow ``--``."""

    worker_type: str = option(
        "aggregated", flag="--worker-type", env="DYN_ES_VLLM_WORKER_TYPE", aliases=("--disaggregation-mode",),
        choices=("aggregated", "agg", "prefill", "decode"),
        help="Whether it computes prompts and generates, computes prompts for others, or generates for their prompts; "
        "the last two need vLLM's --kv-transfer-config.",
    )  # fmt: skip
