"""The options of the Transformers engine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo_es.config.options import option

_GIB = 1024**3
_LORA = re.compile(r"[^=\s]{1,200}=\S+")


def check_lora(text: str) -> None:
    """A name and where it is."""
    if not _LORA.fullmatch(text):
        raise ValueError("expected NAME=URI, such as poet=file:///models/poet or poet=s3://bucket/poet")


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """The Transformers engine (extra ``transformers-engine``): small models on a CPU or one GPU, without vLLM."""

    device: str = option(
        "auto", flag="--device", env="DYN_ES_TRANSFORMERS_DEVICE",
        help="Where the model computes, as torch names it: cpu, cuda, cuda:1. auto: a GPU if there is one.",
    )  # fmt: skip
    dtype: str = option(
        "auto", flag="--dtype", env="DYN_ES_TRANSFORMERS_DTYPE", choices=("auto", "float32", "bfloat16", "float16"),
        help="Number format of weights and KV cache. auto: float32 on a CPU, else the model's own.",
    )  # fmt: skip
    threads: int | None = option(
        None, flag="--threads", env="DYN_ES_TRANSFORMERS_THREADS", unit="threads", minimum=1, maximum=1024,
        help="Threads that torch computes with on a CPU; unset: its own choice, one a core.",
    )  # fmt: skip
    block_size: int = option(
        16, flag="--block-size", env="DYN_ES_TRANSFORMERS_BLOCK_SIZE", unit="tokens", minimum=2, maximum=4096,
        help="Tokens a KV block.",
    )  # fmt: skip
    kv_cache_bytes: int = option(
        _GIB, flag="--kv-cache-bytes", env="DYN_ES_TRANSFORMERS_KV_CACHE_BYTES", unit="bytes",
        minimum=1024 * 1024, maximum=1024 * _GIB,
        help="Memory of the KV pool. A request that can never fit it is refused; one that does not fit now waits.",
    )  # fmt: skip
    num_blocks: int | None = option(
        None, flag="--num-gpu-blocks-override", env="DYN_ES_TRANSFORMERS_NUM_BLOCKS", unit="blocks",
        minimum=1, maximum=100_000_000,
        help="Size of the KV pool in blocks, instead of --kv-cache-bytes.",
    )  # fmt: skip
    max_num_seqs: int = option(
        32, flag="--max-num-seqs", env="DYN_ES_TRANSFORMERS_MAX_NUM_SEQS", unit="requests", minimum=1, maximum=10_000,
        help="Requests that run at a time.",
    )  # fmt: skip
    max_num_batched_tokens: int = option(
        512, flag="--max-num-batched-tokens", env="DYN_ES_TRANSFORMERS_MAX_NUM_BATCHED_TOKENS", unit="tokens",
        minimum=1, maximum=1_000_000,
        help="Tokens that one pass computes at most; longer prompts are spread over passes, and a request can only "
        "come, go or be cancelled between two.",
    )  # fmt: skip
    max_model_len: int | None = option(
        None, flag="--max-model-len", env="DYN_ES_TRANSFORMERS_MAX_MODEL_LEN", unit="tokens",
        minimum=1, maximum=100_000_000,
        help="Longest prompt with its answer; unset: the model's context.",
    )  # fmt: skip
    enable_prefix_caching: bool = option(
        True, flag="--enable-prefix-caching", env="DYN_ES_TRANSFORMERS_ENABLE_PREFIX_CACHING",
        help="Reuse blocks of earlier requests, and tell routers of them.",
    )  # fmt: skip
    loras: tuple[str, ...] = option(
        (), flag="--lora", env="DYN_ES_TRANSFORMERS_LORAS", many=True, check=check_lora,
        help="A LoRA adapter as NAME=URI (file://, s3://, hf://), served under its name beside the model; needs peft. "
        "May be repeated.",
    )  # fmt: skip
