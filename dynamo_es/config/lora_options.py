"""The options of loading LoRA adapters while a worker serves."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.models.lora_sources import check_source


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """LoRA adapters that come and go while a worker serves. Whoever reaches it may load what is allowed here."""

    enabled: bool = option(
        False, flag="--lora-enabled", env="DYN_LORA_ENABLED",
        help="Offer load_lora, unload_lora and list_loras as endpoints beside the worker's own, and /v1/loras on the "
        "system status server.",
    )  # fmt: skip
    sources: tuple[str, ...] = option(
        (), flag="--lora-source", env="DYN_ES_LORA_SOURCES", many=True, check=check_source,
        help="Where adapters may be loaded from, as the beginning of their URIs: file:///srv/loras, s3://bucket/loras, "
        "hf://organisation. May be repeated; without it nothing can be loaded.",
    )  # fmt: skip
    max_gpu_lora_count: int = option(
        8, flag="--max-gpu-lora-count", env="DYN_ES_MAX_GPU_LORA_COUNT", unit="adapters", minimum=1, maximum=10_000,
        help="Adapters that a worker holds at a time; a further one is refused. A vLLM worker goes by vLLM's own "
        "--max-loras and --max-cpu-loras.",
    )  # fmt: skip
