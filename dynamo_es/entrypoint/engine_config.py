"""What a script serves (Dynamo's ``make_engine``; spec/services h.2): arguments checked against the files they name."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_es.config.options import load
from dynamo_es.config.router_options import RouterConfig as RouterOptions
from dynamo_es.engines.mock.args import MockEngineArgs
from dynamo_es.engines.mock.files import read_arguments
from dynamo_es.engines.mock_worker import Material, load_material
from dynamo_es.entrypoint.args import EngineType, EntrypointArgs
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.routing_plan import RoutingPlan, check_plan
from dynamo_es.models.errors import ModelError
from dynamo_es.models.fetch import Hub
from dynamo_es.models.registration import read_template
from dynamo_es.router.config_arguments import instance_of
from dynamo_es.router.config_routing import RouterConfig
from dynamo_es.router.kv_router import affinity_of
from dynamo_es.router.modes import RouterMode
from dynamo_es.runtime.model_card import BUILTIN_MODEL
from dynamo_es.runtime.runtime import DistributedRuntime

logger = logging.getLogger(__name__)

DEFAULT_NAME = "dynamo"
"""Of a model without name and path, as in Dynamo."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What ``make_engine`` made, for ``run_input``. Opaque, as in Dynamo.

    Attributes:
        kind: What answers.
        values: The arguments.
        name: Of the model that this process serves; of ``Dynamic``, of the model that a terminal asks; None: any.
        folder: Directory of its files, or the built-in model; None: it has none.
        plan: How to route; None: as the environment says.
        mock, material: The mock engine, and what it read; None: there is none.
        env: The environment, for what the arguments do not say.
        template: A chat template of ``read_template``; None: the model's own.
    """

    kind: EngineType
    values: Mapping[str, Any]
    env: Mapping[str, str]
    name: str | None = None
    folder: str | None = None
    plan: RoutingPlan | None = None
    mock: MockEngineArgs | None = None
    material: Material | None = None
    template: Mapping[str, Any] | None = None


def make_engine(
    distributed_runtime: DistributedRuntime,
    args: EntrypointArgs,
    *,
    hub: Hub | None = None,
    env: Mapping[str, str] | None = None,
) -> Awaitable[EngineConfig]:
    """Prepare an engine; await what it returns. Nothing is opened but files, and nothing is started.

    ``hub``: where models are fetched from; None: as the environment says. ``env``: the environment; None: this
    process's. Neither is in Dynamo.

    Raises:
        TypeError: An argument is of the wrong type.
        ModelFetchError: When awaited: ``model_path`` is no directory here and no model on the hub.
        ConfigError: When awaited: a file cannot be read, the mock engine cannot be made, or the routing contradicts
            itself or needs what is not installed.
    """
    instance_of("distributed_runtime", distributed_runtime, DistributedRuntime)
    instance_of("args", args, EntrypointArgs)
    return _make(args.values, hub or Hub(), os.environ if env is None else env)


async def _make(values: Mapping[str, Any], hub: Hub, env: Mapping[str, str]) -> EngineConfig:
    kind: EngineType = values["engine_type"]
    folder = await asyncio.to_thread(_folder, values["model_path"], hub)
    name = values["model_name"]
    config = EngineConfig(
        kind,
        values,
        env,
        name if kind is EngineType.Dynamic else name or values["model_path"] or DEFAULT_NAME,
        folder,
        template=await _template(values["template_file"]),
    )
    if kind is EngineType.Mocker:
        folder = folder or BUILTIN_MODEL
        args = await _mock(values)
        material = await asyncio.to_thread(load_material, folder, args)
        material = dataclasses.replace(material, template=config.template)
        return dataclasses.replace(config, folder=folder, mock=args, material=material)
    if kind is EngineType.Dynamic:
        return dataclasses.replace(config, plan=await _plan(values["router_config"], values["aic_perf_config"], env))
    return config


def _folder(path: str | None, hub: Hub) -> str | None:
    if path is None or path == BUILTIN_MODEL or Path(path).is_dir():
        return path
    return str(hub.download(path, ignore_weights=True))


async def _template(path: str | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    try:
        return await asyncio.to_thread(read_template, Path(path))
    except (OSError, ModelError) as error:
        why = f"{error.strerror} (os error {error.errno})" if isinstance(error, OSError) else str(error)
        raise ConfigError(f'Failed to read template_file "{path}": {why}') from error


async def _mock(values: Mapping[str, Any]) -> MockEngineArgs:
    """Given ones, or a file's, or the defaults; the stage and block size of the arguments only for the latter two."""
    args: MockEngineArgs | None = values["mocker_engine_args"]
    path = values["extra_engine_args"]
    if args is None and path is not None:
        args = MockEngineArgs.from_json(await asyncio.to_thread(read_arguments, path))
    if args is None:
        stage = "prefill" if values["is_prefill"] else "decode" if values["is_decode"] else None
        args = MockEngineArgs().with_overrides(worker_type=stage, block_size=values["kv_cache_block_size"] or None)
    args.engine_config()
    return args


async def _plan(config: RouterConfig | None, aic: Any, env: Mapping[str, str]) -> RoutingPlan | None:
    if config is None:
        if aic is not None:
            raise ConfigError("aic_perf_config needs a router_config, whose mode is KV and whose load model is aic")
        return None
    settings = config.kv_router_config.settings
    is_kv = config.router_mode is RouterMode.KV
    check_plan(settings, is_kv=is_kv)
    if (settings.router_prefill_load_model == "aic") != (aic is not None):
        raise ConfigError("router_prefill_load_model='aic' and aic_perf_config need each other")
    remote_timeout_s = load(RouterOptions, None, env).remote_indexer_timeout_ms / 1000
    plan = RoutingPlan(
        settings,
        affinity_of(config.session_affinity_ttl_secs, config.session_affinity_mode),
        aic,
        remote_timeout_s if is_kv and settings.use_remote_indexer else None,
    )
    return dataclasses.replace(plan, times=await plan.prefill_times())
