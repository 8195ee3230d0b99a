"""The options of AIC's performance model: Dynamo's ``--aic-…`` flags (spec: services i)."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_name, check_path

_MAX_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class AicConfig:
    """The deployment whose prefill times ``--router-prefill-load-model aic`` predicts.

    Names and meanings are those of ``AicPerfConfig``.
    """

    aic_backend: str | None = option(
        None, flag="--aic-backend", env="DYN_AIC_BACKEND", check=check_name,
        help="Engine of the workers: vllm, sglang or trtllm.",
    )  # fmt: skip
    aic_system: str | None = option(
        None, flag="--aic-system", env="DYN_AIC_SYSTEM", check=check_name,
        help="Kind of their machines, such as h200_sxm.",
    )  # fmt: skip
    aic_model_path: str | None = option(
        None, flag="--aic-model-path", env="DYN_AIC_MODEL_PATH", check=check_path,
        help="Their model, by its name on the hub or its directory.",
    )  # fmt: skip
    aic_backend_version: str | None = option(
        None, flag="--aic-backend-version", env="DYN_AIC_BACKEND_VERSION", check=check_name,
        help="Version of the engine; unset: the current one that the model knows.",
    )  # fmt: skip
    aic_tp_size: int = option(
        1, flag="--aic-tp-size", env="DYN_AIC_TP_SIZE", unit="ranks", minimum=1, maximum=_MAX_RANKS,
        help="Tensor-parallel ranks of a worker.",
    )  # fmt: skip
    aic_moe_tp_size: int | None = option(
        None, flag="--aic-moe-tp-size", env="DYN_AIC_MOE_TP_SIZE", unit="ranks", minimum=1, maximum=_MAX_RANKS,
        help="Tensor-parallel ranks of the experts.",
    )  # fmt: skip
    aic_moe_ep_size: int | None = option(
        None, flag="--aic-moe-ep-size", env="DYN_AIC_MOE_EP_SIZE", unit="ranks", minimum=1, maximum=_MAX_RANKS,
        help="Expert-parallel ranks.",
    )  # fmt: skip
    aic_attention_dp_size: int | None = option(
        None, flag="--aic-attention-dp-size", env="DYN_AIC_ATTENTION_DP_SIZE", unit="ranks",
        minimum=1, maximum=_MAX_RANKS,
        help="Data-parallel ranks of attention.",
    )  # fmt: skip
    aic_nextn: int | None = option(
        None, flag="--aic-nextn", env="DYN_AIC_NEXTN", unit="tokens", minimum=1, maximum=5,
        help="Tokens that speculative decoding drafts; unset: it is off.",
    )  # fmt: skip
    aic_nextn_accept_rates: str | None = option(
        None, flag="--aic-nextn-accept-rates", env="DYN_AIC_NEXTN_ACCEPT_RATES",
        help="How often each of them is accepted: up to five numbers of 0 to 1, separated by commas.",
    )  # fmt: skip
    aic_gemm_dtype: str | None = option(
        None, flag="--aic-gemm-dtype", env="DYN_AIC_GEMM_DTYPE", check=check_name,
        help="Number format of matrix products; unset or auto: the model's own, as of the four below.",
    )  # fmt: skip
    aic_moe_dtype: str | None = option(
        None, flag="--aic-moe-dtype", env="DYN_AIC_MOE_DTYPE", check=check_name, help="Of the experts."
    )
    aic_fmha_dtype: str | None = option(
        None, flag="--aic-fmha-dtype", env="DYN_AIC_FMHA_DTYPE", check=check_name, help="Of attention."
    )
    aic_kv_cache_dtype: str | None = option(
        None, flag="--aic-kv-cache-dtype", env="DYN_AIC_KV_CACHE_DTYPE", check=check_name, help="Of the KV cache."
    )
    aic_comm_dtype: str | None = option(
        None, flag="--aic-comm-dtype", env="DYN_AIC_COMM_DTYPE", check=check_name, help="Of what ranks tell each other."
    )
