"""Prefill times from AIC's performance model (NVIDIA's ``aiconfigurator``; spec: services i). The extra ``aic``.

The model comes with measurements of GPUs, engines and models and needs neither a GPU nor a network, except for a model
whose configuration it does not know and which is no local directory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dynamo_es.errors import ConfigError
from dynamo_es.router.config_aic import AicPerfConfig

logger = logging.getLogger(__name__)
_EXTRA = "times of AIC (router_prefill_load_model=aic, or aic_backend of a mock engine) need the extra aic: "
_INSTALL = "pip install 'dynamo-es[aic]'"
_WARM_UP_TOKENS = 16
_ACCEPT_RATES = 5
_DEFAULT_FORMATS = ("", "auto", "none", "null")
# Of the model's engine, the field of the configuration, and the enumeration of number formats there.
_FORMATS = (
    ("gemm_quant_mode", "aic_gemm_dtype", "GEMMQuantMode"),
    ("moe_quant_mode", "aic_moe_dtype", "MoEQuantMode"),
    ("fmha_quant_mode", "aic_fmha_dtype", "FMHAQuantMode"),
    ("kvcache_quant_mode", "aic_kv_cache_dtype", "KVCacheQuantMode"),
    ("comm_quant_mode", "aic_comm_dtype", "CommQuantMode"),
)


class AicEngine(Protocol):
    """What is used of ``aiconfigurator_core``'s ``EngineHandle``."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Milliseconds; ``isl`` includes the prefix. Raises ValueError, RuntimeError."""

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """Milliseconds from the first token to the last of ``osl``, ``isl`` tokens of each request being there before.

        Raises ValueError, RuntimeError.
        """


class AicPrefillTimes:
    """``PrefillTimes`` of one deployment. ``failures`` counts prompts for which the model has no answer."""

    def __init__(self, engine: AicEngine) -> None:
        self._engine = engine
        self.failures = 0

    def predict_s(self, tokens: int, prefix: int = 0, batch: int = 1) -> float | None:
        if tokens <= 0:
            return None
        try:
            return self._engine.predict_prefill_latency(batch, tokens + prefix, prefix) / 1000
        except (ValueError, RuntimeError) as error:
            self.failures += 1
            if self.failures == 1:
                logger.warning("AIC predicts nothing for %d tokens behind %d: %s (told once)", tokens, prefix, error)
            return None


def load_aic_times(config: AicPerfConfig) -> AicPrefillTimes:
    """The prefill times of a deployment. Blocks. Raises ``ConfigError`` as ``load_aic_engine``."""
    return AicPrefillTimes(load_aic_engine(config))


def load_aic_engine(config: AicPerfConfig) -> AicEngine:
    """The model of a deployment. Reads the model's data, which takes a second or two, on the calling thread.

    Raises:
        ConfigError: The extra is missing, or the model knows no such deployment; says which and what to do.
    """
    try:
        from aiconfigurator_core.sdk import common
        from aiconfigurator_core.sdk.engine import EngineHandle
        from aiconfigurator_core.sdk.utils import HuggingFaceDownloadError
    except ImportError as error:
        raise ConfigError(_EXTRA + _INSTALL) from error
    values = config.values()
    _check_accept_rates(values["aic_nextn_accept_rates"])
    arguments = _engine_arguments(values, lambda name: getattr(common, name).__members__)
    deployment = tuple(values[name] for name in ("aic_model_path", "aic_system", "aic_backend"))
    try:
        engine: AicEngine = EngineHandle.compile(*deployment, **arguments)
        # Its tables are read at the first question.
        engine.predict_prefill_latency(1, _WARM_UP_TOKENS, 0)
    except (ValueError, KeyError, AssertionError, RuntimeError, OSError, HuggingFaceDownloadError) as error:
        raise ConfigError(
            f"AIC has no performance model for {' / '.join(deployment)}: {error}; check aic_model_path, aic_system, "
            "aic_backend and aic_backend_version"
        ) from error
    return engine


def _engine_arguments(values: Mapping[str, Any], known_formats: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments of the engine: what was given, by its names there."""
    arguments: dict[str, Any] = {
        "backend_version": values["aic_backend_version"],
        "tp_size": values["aic_tp_size"],
        "moe_tp_size": values["aic_moe_tp_size"],
        "moe_ep_size": values["aic_moe_ep_size"],
        "attention_dp_size": values["aic_attention_dp_size"],
        "nextn": values["aic_nextn"],
    }
    for argument, field, enumeration in _FORMATS:
        given = values[field]
        if given is None or given in _DEFAULT_FORMATS:
            continue
        mode = "int4_wo" if given == "int4" else given
        known = known_formats(enumeration)
        if mode not in known:
            raise ConfigError(f"unsupported AIC {field} quant mode {given!r}; use one of {', '.join(known)}, auto")
        arguments[argument] = mode
    return {name: value for name, value in arguments.items() if value is not None}


def _check_accept_rates(text: str | None) -> None:
    """Of drafted tokens; they change how fast decoding is, so that prefill only asks that they are well formed."""
    for part in (text.split(",") if text else [])[:_ACCEPT_RATES]:
        try:
            rate = float(part)
        except ValueError as error:
            raise ConfigError(
                f'invalid aic_nextn_accept_rates value "{part.strip()}": invalid float literal'
            ) from error
        if not 0 <= rate <= 1:
            raise ConfigError(f'invalid aic_nextn_accept_rates value "{part.strip()}": must be between 0 and 1')
