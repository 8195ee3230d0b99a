"""Dynamo's command line of the frontend (``dynamo.frontend.frontend_args``; spec/frontend.md 7, 8.3).

Flags, variables, defaults and errors are Dynamo's, for scripts that call ``parse_args``. What an option does is told
where the frontend's own options are declared (``dynamo_es.config``); ``dynamo_es.frontend.launch`` translates.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_es.frontend.frontend_arg_table import ARGUMENTS, TOKENIZERS, Argument

_MAX_U32 = 4_294_967_295
_YEAR_S = 31_536_000
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def validate_model_name(value: str) -> str:
    """The name without white space around it. Raises ``argparse.ArgumentTypeError`` if nothing is left."""
    if not isinstance(value, str) or not value.strip():
        raise argparse.ArgumentTypeError(f"model-name must be a non-empty string, got: {value}")
    return value.strip()


def validate_model_path(value: str) -> str:
    """The path of a directory. Raises ``argparse.ArgumentTypeError`` if it is none."""
    if not os.path.isdir(value):
        raise argparse.ArgumentTypeError(f"model-path must be a valid directory on disk, got: {value}")
    return value


def _nullable(text: str) -> float | None:
    return None if text.strip().lower() in ("", "none") else float(text)


def _strict_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise argparse.ArgumentTypeError("expected one of: true/false, 1/0, on/off, yes/no")
    return word in _TRUE


def _integer(text: str) -> int:
    return int(text)


_KINDS: Mapping[str, Callable[[str], Any]] = {
    "text": str,
    "int": _integer,
    "float": float,
    "threshold": _nullable,
    "bool": lambda text: text.strip().lower() in _TRUE,
    "strict_bool": _strict_bool,
    "list": str.split,
    "model_name": validate_model_name,
    "model_path": validate_model_path,
}
# argparse names the type in its message.
_integer.__name__ = "int"


class FrontendArgGroup:
    """Registers the frontend's arguments. The environment is read when they are added, as defaults."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """``environ``: by default the process's."""
        self._environ = os.environ if environ is None else environ

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add all of them.

        Raises:
            ValueError, argparse.ArgumentTypeError: A variable holds no value of its type.
        """
        group = parser.add_argument_group("Dynamo frontend options")
        for argument in ARGUMENTS:
            default = self._default(argument)
            if argument.kind in ("bool", "strict_bool"):
                group.add_argument(
                    *argument.flags, dest=argument.dest, action=argparse.BooleanOptionalAction, default=default
                )
            elif argument.kind == "list":
                group.add_argument(*argument.flags, dest=argument.dest, action=_Appended, default=default)
            else:
                group.add_argument(
                    *argument.flags, dest=argument.dest, type=_KINDS[argument.kind], default=default,
                    choices=argument.choices,
                )  # fmt: skip

    def _default(self, argument: Argument) -> Any:
        text = self._environ.get(argument.env, "")
        if not text.strip():
            return list(argument.default) if argument.kind == "list" else argument.default
        return _KINDS[argument.kind](text)


class _Appended(argparse.Action):
    """Flags replace what the variable says, and then add up."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        given = getattr(namespace, f"_{self.dest}", [])
        given = [*given, values]
        setattr(namespace, f"_{self.dest}", given)
        setattr(namespace, self.dest, given)


class FrontendConfig:
    """Parsed arguments as attributes (``dynamo.frontend.frontend_args``); ``ARGUMENTS`` lists them."""

    def __init__(self, **values: Any) -> None:
        for argument in ARGUMENTS:
            setattr(self, argument.dest, values.get(argument.dest, argument.default))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the frontend has no argument {name!r}")

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> FrontendConfig:
        """What was parsed; deprecated arguments that are set are warned about (FutureWarning)."""
        made = cls(**vars(namespace))
        for argument in ARGUMENTS:
            if argument.deprecated and getattr(made, argument.dest) != argument.default:
                warnings.warn(f"{argument.flags[0]} is deprecated", FutureWarning, stacklevel=2)
        return made

    def validate(self) -> None:
        """Check the arguments together, in Dynamo's order; ``load_aware`` sets the router's mode.

        Raises:
            ValueError: Names the flags.
        """
        if self.load_aware:
            self.router_mode = "kv"
        self._check_tls()
        self._check_extensions()
        self._check_ranges()
        if self.tokenizer_backend not in TOKENIZERS:
            raise ValueError(
                f"--tokenizer: invalid value {self.tokenizer_backend!r} (choose from {sorted(TOKENIZERS)})"
            )
        self._check_prefill_model()
        if self.serve_indexer and self.router_mode != "kv":
            raise ValueError("--serve-indexer requires --router-mode=kv")
        if self.serve_indexer and self.use_remote_indexer:
            raise ValueError("--serve-indexer and --use-remote-indexer are mutually exclusive")
        self._check_conditional_disagg()
        self._check_thresholds()

    def _check_tls(self) -> None:
        if (self.tls_cert_path is None) != (self.tls_key_path is None):
            raise ValueError("--tls-cert-path and --tls-key-path must be provided together")
        if self.tls_client_ca_cert_path is not None and self.tls_cert_path is None:
            raise ValueError("--tls-client-ca-cert-path requires --tls-cert-path and --tls-key-path")

    def _check_extensions(self) -> None:
        for is_other, flag in ((self.interactive, "--interactive"), (self.kserve_grpc_server, "--kserve-grpc-server")):
            if self.frontend_route_extensions and is_other:
                raise ValueError(
                    "--frontend-route-extension is only supported by the HTTP frontend, "
                    f"so it cannot be combined with {flag}"
                )

    def _check_ranges(self) -> None:
        if not 0 <= self.migration_limit <= _MAX_U32:
            raise ValueError(f"--migration-limit must be between 0 and {_MAX_U32} (0=disabled)")
        if self.migration_max_seq_len is not None and not 1 <= self.migration_max_seq_len <= _MAX_U32:
            raise ValueError(f"--migration-max-seq-len must be between 1 and {_MAX_U32}")
        if self.router_min_initial_workers < 0:
            raise ValueError("--router-min-initial-workers must be >= 0")
        ttl = self.router_session_affinity_ttl_secs
        if ttl is not None and not 1 <= ttl <= _YEAR_S:
            raise ValueError(f"--router-session-affinity-ttl-secs must be between 1 and {_YEAR_S}")

    def _check_prefill_model(self) -> None:
        given = [name for name in ("backend", "system", "model_path") if getattr(self, f"aic_{name}") is not None]
        if self.router_prefill_load_model == "none":
            if given:
                raise ValueError("AIS perf config requires --router-prefill-load-model=ais")
            return
        if self.router_mode != "kv":
            raise ValueError("--router-prefill-load-model=ais requires --router-mode=kv")
        if self.chat_processor != "dynamo":
            raise ValueError("--router-prefill-load-model=ais requires --dyn-chat-processor=dynamo")
        if len(given) < 3:
            raise ValueError("AIS perf config requires backend, system, model")
        if not self.router_track_prefill_tokens:
            raise ValueError("--router-prefill-load-model=ais requires --router-track-prefill-tokens")

    def _check_conditional_disagg(self) -> None:
        config = self.router_conditional_disagg_config
        if not self.router_conditional_disagg:
            if config is not None:
                raise ValueError("--router-conditional-disagg-config requires --router-conditional-disagg")
            return
        if self.router_mode != "kv":
            raise ValueError("--router-conditional-disagg requires --router-mode=kv")
        if not self.use_kv_events:
            raise ValueError("--router-conditional-disagg requires --router-kv-events")
        if config is not None and not isinstance(json.loads(config), dict):
            raise ValueError("--router-conditional-disagg-config must be a JSON object")

    def _check_thresholds(self) -> None:
        decode, tokens = self.active_decode_blocks_threshold, self.active_prefill_tokens_threshold
        fraction = self.active_prefill_tokens_threshold_frac
        if decode is not None and not 0 <= decode <= 1:
            raise ValueError("--active-decode-blocks-threshold must be between 0.0 and 1.0")
        if tokens is not None and tokens < 0:
            raise ValueError("--active-prefill-tokens-threshold must be >= 0")
        if fraction is not None and not (math.isfinite(fraction) and fraction >= 0):
            raise ValueError("--active-prefill-tokens-threshold-frac must be a finite value >= 0")
