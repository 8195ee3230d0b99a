"""What an engine is made from (Dynamo's ``EngineType`` and ``EntrypointArgs``; spec/services h.1). Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Self

from dynamo_es.engines.mock.args import MockEngineArgs
from dynamo_es.models.runtime_config import ModelRuntimeConfig, check_runtime_config, to_tokenizer_backend
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.config_arguments import (
    Reader,
    instance_of,
    optional,
    to_boolean,
    to_path,
    to_text,
    to_u16,
    to_u32,
)
from dynamo_es.router.config_routing import RouterConfig

DEFAULT_HTTP_PORT = 8080
"""Of ``EntrypointArgs``, as in Dynamo, if neither they nor ``DYN_HTTP_PORT`` say another."""


class EngineType(IntEnum):
    """What answers requests. Numbers and texts are Dynamo's; unlike Dynamo's it can be hashed.

    Attributes:
        Echo: Repeats what the user said last, a character at a time; needs no model.
        Dynamic: The workers of the fleet, as they come and go.
        Mocker: A mock engine of this process.
    """

    Echo = 1
    Dynamic = 2
    Mocker = 3

    def __repr__(self) -> str:
        return f"EngineType.{self.name}"

    __str__ = __repr__


def _instance(kind: type) -> Reader:
    return lambda argument, value: instance_of(argument, value, kind)


def _as_it_is(_argument: str, value: Any) -> Any:
    return value


_TEXT: Reader = optional(to_text)
_FLAG: Reader = optional(to_boolean)
_PORT: Reader = optional(to_u16)
_NUMBER: Reader = optional(to_u32)
_READERS: Mapping[str, Reader] = {
    "engine_type": _instance(EngineType),
    "model_path": optional(to_path),
    "template_file": optional(to_path),
    "tls_cert_path": optional(to_path),
    "tls_key_path": optional(to_path),
    "extra_engine_args": optional(to_path),
    "router_config": optional(_instance(RouterConfig)),
    "mocker_engine_args": optional(_instance(MockEngineArgs)),
    "runtime_config": optional(_instance(ModelRuntimeConfig)),
    "aic_perf_config": optional(_instance(AicPerfConfig)),
    "kv_cache_block_size": _NUMBER,
    "http_port": _PORT,
    "http_metrics_port": _PORT,
    "is_prefill": to_boolean,
    "is_decode": to_boolean,
    "migration_limit": to_u32,
    "migration_max_seq_len": _NUMBER,
    "enable_anthropic_api": _FLAG,
    "strip_anthropic_preamble": _FLAG,
    "enable_streaming_tool_dispatch": _FLAG,
    "enable_streaming_reasoning_dispatch": _FLAG,
    "tokenizer_fallback": _FLAG,
    "tokenizer_backend": optional(to_tokenizer_backend),
    "chat_engine_factory": _as_it_is,
}
_REASONING_FIELDS = ("reasoning", "reasoning_content")


class EntrypointArgs:
    """What to serve and how. Immutable; as in Dynamo it shows nothing but ``values``.

    Args:
        engine_type: What answers requests.
        model_path: Model directory, or a name on the Hugging Face hub; None: no model. ``Dynamic`` takes tokenizer and
            chat template from it, instead of where workers say.
        model_name: Name by which requests ask for an ``Echo`` or ``Mocker``; None: the path, or ``dynamo``. The inputs
            ``text`` and ``stdin`` ask the model of this name.
        endpoint_id: Accepted for Dynamo's sake: the input names the endpoint.
        template_file: Chat template instead of the model's own.
        router_config: How requests are routed; None: what the environment says, which is round robin unless it does.
        kv_cache_block_size: Tokens a block; None or 0: what workers say.
        http_host, http_port: Where HTTP or gRPC is served; None: ``DYN_HTTP_HOST`` and ``DYN_HTTP_PORT``, or all
            addresses and 8080.
        http_metrics_port: Where the input ``grpc`` serves probes and metrics; None: nowhere.
        tls_cert_path, tls_key_path: PEM files for HTTPS.
        extra_engine_args: JSON file of ``MockEngineArgs``; ``mocker_engine_args`` wins over it.
        mocker_engine_args: The mock engine; of neither, all defaults.
        runtime_config: What is told of a ``Mocker`` that becomes a worker: the names of its parsers.
        namespace, namespace_prefix: Whose workers are asked.
        is_prefill, is_decode: Stage of a ``Mocker`` that becomes a worker.
        migration_limit, migration_max_seq_len: How often a request moves on when its worker fails, and up to how many
            tokens.
        chat_engine_factory: Makes what answers chat requests of a model instead of the frontend: called with its
            ``ModelCardInstanceId``, ``ModelDeploymentCard`` and a ``RoutedEngine``, it returns a
            ``PythonAsyncEngine``, or an awaitable of one.
        aic_perf_config: The deployment whose prefill times the KV router goes by.
        metrics_prefix: First part of the names of metrics; blank counts as None.
        enable_anthropic_api, strip_anthropic_preamble, enable_streaming_tool_dispatch,
        enable_streaming_reasoning_dispatch, reasoning_field_name, tokenizer_backend, tokenizer_fallback: As the
            frontend's options of these names; None: what the environment says.

    Raises:
        TypeError, OverflowError: An argument is of the wrong type or out of range.
        ValueError: Half of a TLS pair, or a word that is not known; ``runtime_config`` does not agree with itself.
        RuntimeError: ``chat_engine_factory`` needs a running event loop.
    """

    __slots__ = ("_values",)
    _values: Mapping[str, Any]

    def __new__(
        cls,
        engine_type: EngineType,
        model_path: str | None = None,
        model_name: str | None = None,
        endpoint_id: str | None = None,
        template_file: str | None = None,
        router_config: RouterConfig | None = None,
        kv_cache_block_size: int | None = None,
        http_host: str | None = None,
        http_port: int | None = None,
        http_metrics_port: int | None = None,
        tls_cert_path: str | None = None,
        tls_key_path: str | None = None,
        extra_engine_args: str | None = None,
        mocker_engine_args: MockEngineArgs | None = None,
        runtime_config: ModelRuntimeConfig | None = None,
        namespace: str | None = None,
        namespace_prefix: str | None = None,
        is_prefill: bool = False,
        is_decode: bool = False,
        migration_limit: int = 0,
        migration_max_seq_len: int | None = None,
        chat_engine_factory: Callable[..., Any] | None = None,
        aic_perf_config: AicPerfConfig | None = None,
        *,
        metrics_prefix: str | None = None,
        enable_anthropic_api: bool | None = None,
        strip_anthropic_preamble: bool | None = None,
        enable_streaming_tool_dispatch: bool | None = None,
        enable_streaming_reasoning_dispatch: bool | None = None,
        reasoning_field_name: str | None = None,
        tokenizer_backend: str | None = None,
        tokenizer_fallback: bool | None = None,
    ) -> Self:
        given = locals()  # every argument, in the order in which Dynamo converts them
        values = {name: _READERS.get(name, _TEXT)(name, value) for name, value in given.items() if name != "cls"}
        _check(values)
        self = object.__new__(cls)
        self._values = values
        return self

    @property
    def values(self) -> Mapping[str, Any]:
        """Every argument by its name. Not in Dynamo."""
        return self._values


def _check(values: Mapping[str, Any]) -> None:
    if (values["tls_cert_path"] is None) != (values["tls_key_path"] is None):
        raise ValueError("tls_cert_path and tls_key_path must be provided together")
    field = values["reasoning_field_name"]
    if field is not None and field not in _REASONING_FIELDS:
        raise ValueError(f'reasoning field name "{field}" is not "reasoning" or "reasoning_content"')
    if values["runtime_config"] is not None:
        check_runtime_config(values["runtime_config"].card_body())
    factory = values["chat_engine_factory"]
    if factory is None:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        raise RuntimeError(f"Failed to get TaskLocals for chat_engine_factory: RuntimeError: {error}") from error
    if not callable(factory):
        raise TypeError(f"argument 'chat_engine_factory': '{type(factory).__name__}' object is not callable")
