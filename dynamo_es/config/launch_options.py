"""Options of how a frontend is started, as far as they are not about HTTP: its processes, terminal, extensions."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_name, check_path, check_word

DEFAULT_FD_TARGET = 8192


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """How a frontend is started."""

    workers: int = option(
        1, flag="--workers", env="DYN_ES_FRONTEND_WORKERS", unit="processes", minimum=1, maximum=256,
        help="Processes that share the port, each with its own views of the log; one that dies is started again. "
        "/metrics and /busy_threshold are of all of them.",
    )  # fmt: skip
    interactive: bool = option(
        False, flag="--interactive", env="DYN_INTERACTIVE", aliases=("-i",),
        help="Chat in this terminal instead of serving HTTP.",
    )  # fmt: skip
    model_name: str | None = option(
        None, flag="--model-name", env="DYN_MODEL_NAME", check=check_name,
        help="Model to chat with (--interactive); unset: the first that is ready.",
    )  # fmt: skip
    dump_config_to: str | None = option(
        None, flag="--dump-config-to", env="DYN_DUMP_CONFIG_TO", check=check_path,
        help="Write the values of all options, and where each comes from, to this file as JSON; secrets as ***.",
    )  # fmt: skip
    route_extensions: tuple[str, ...] = option(
        (), flag="--frontend-route-extension", env="DYN_FRONTEND_ROUTE_EXTENSIONS", many=True, check=check_word,
        help="Further routes: an entry point of the group dynamo.frontend.routes, or module:function. May be repeated.",
    )  # fmt: skip
    fd_limit_target: int = option(
        DEFAULT_FD_TARGET, flag="--fd-limit-target", env="DYN_FRONTEND_FD_LIMIT_TARGET", unit="files",
        minimum=-1, maximum=10_000_000,
        help="Open files that the process asks for, within the hard limit; 0 or less: what it has.",
    )  # fmt: skip
