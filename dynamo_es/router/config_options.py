"""From the router's options, or an environment alone, to its settings. Reads the policy file, if one is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from dynamo_es.config.options import load
from dynamo_es.config.router_options import RouterConfig
from dynamo_es.errors import ConfigError
from dynamo_es.router.config_settings import KvRouterSettings, check_settings, with_legacy_weight
from dynamo_es.router.policy_config_file import with_policy

_OLD_NAMES = {
    "DYN_USE_KV_EVENTS": "DYN_ROUTER_USE_KV_EVENTS",
    "DYN_OVERLAP_SCORE_WEIGHT": "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
}
# Of the frontend and the standalone router, which share an environment with services that have no such thing.
_NOT_FOR_SERVICES = ("DYN_SERVE_INDEXER", "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG")
_DISAGG_FLAG = "--router-conditional-disagg-config"
_MAX_TOKENS = 1_000_000_000  # as of the option of that name


class _ConditionalDisagg(msgspec.Struct, forbid_unknown_fields=True):
    """The object of ``--router-conditional-disagg-config``."""

    policy: str | UnsetType = UNSET
    eff_isl_threshold: Annotated[int, Meta(ge=0, le=_MAX_TOKENS)] | UnsetType = UNSET
    eff_isl_ratio_threshold: float | UnsetType = UNSET
    prefill_busy_threshold: float | UnsetType | None = UNSET
    decode_busy_threshold: float | UnsetType | None = UNSET


def settings_of(options: RouterConfig) -> KvRouterSettings:
    """The settings that options stand for, checked, with the policy file read.

    Raises:
        ConfigError: Options contradict each other, or a file that they name cannot be used; says what is wrong.
    """
    names = {field.name for field in fields(KvRouterSettings)} & {field.name for field in fields(RouterConfig)}
    values = {name: getattr(options, name) for name in names} | _conditional_disagg(options)
    try:
        settings = with_legacy_weight(KvRouterSettings(**values), options.overlap_score_weight)
        return with_policy(check_settings(settings))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def settings_from_environment(env: Mapping[str, str]) -> KvRouterSettings:
    """The settings of a service that is configured by ``DYN_ROUTER_…`` variables alone. Empty ones count as unset.

    Dynamo takes what it cannot read for unset, without a word; here it is refused.

    Raises:
        ConfigError: A variable is wrong (named with its value and what is accepted), or they contradict each other.
    """
    known = {name: value for name, value in env.items() if name not in _NOT_FOR_SERVICES}
    settings = settings_of(load(RouterConfig, None, with_new_names(known)))
    if settings.router_prefill_load_model != "none":
        raise ConfigError(
            "DYN_ROUTER_PREFILL_LOAD_MODEL=aic is for frontends and routers: a service is told of no deployment whose "
            "times could be predicted; use none"
        )
    return settings


def with_new_names(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` where a variable that is only set under its old name is set under the new one."""
    result = dict(env)
    for old, new in _OLD_NAMES.items():
        if not result.get(new, "").strip() and result.get(old, "").strip():
            result[new] = result[old]
    return result


def _conditional_disagg(options: RouterConfig) -> dict[str, object]:
    text = options.conditional_disagg_config
    if text is None:
        return {}
    if not options.conditional_disagg_enabled:
        raise ConfigError(f"{_DISAGG_FLAG} requires --router-conditional-disagg")
    try:
        given = msgspec.json.decode(text, type=_ConditionalDisagg)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{_DISAGG_FLAG} must be a JSON object of its fields: {error}") from error
    values = msgspec.structs.asdict(given)
    return {f"conditional_disagg_{name}": value for name, value in values.items() if value is not UNSET}
