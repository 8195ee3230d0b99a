"""vLLM's engine arguments from its own command line, and what a worker sets of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_es.engines.vllm_engine.handover import check_connector
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.extras import import_extra

INSTEAD = "dynamo-es worker attach, for a vLLM that runs in an environment of its own"


def engine_arguments(
    model_path: str, arguments: Sequence[str], socket_folder: Path, *, stage: str = "aggregated", lora: bool = False
) -> Any:
    """vLLM's ``AsyncEngineArgs`` from its own command line, with KV events on, and the figures of each pass.

    Args:
        model_path: The model.
        arguments: vLLM's flags, as for ``vllm serve``.
        socket_folder: Where the sockets of KV events are made, unless ``--kv-events-config`` says otherwise.
        stage: ``aggregated``, ``prefill`` or ``decode``.
        lora: Adapters are to be loaded.

    Raises:
        ConfigError: vLLM is not installed, or the arguments do not suit a worker.
        SystemExit: vLLM's parser refused a flag; it has told why.
    """
    arg_utils = import_extra("vllm.engine.arg_utils", "vllm", INSTEAD)
    parsers = import_extra("vllm.utils.argparse_utils", "vllm", INSTEAD)
    config = import_extra("vllm.config", "vllm", INSTEAD)
    parser = arg_utils.AsyncEngineArgs.add_cli_args(parsers.FlexibleArgumentParser(prog="dynamo-es worker vllm ... --"))
    made = arg_utils.AsyncEngineArgs.from_cli_args(parser.parse_args([*arguments, "--model", model_path]))
    transfer = made.kv_transfer_config
    check_connector(None if transfer is None else transfer.kv_connector, stage)
    if lora and not made.enable_lora:
        raise ConfigError("--lora-enabled needs vLLM's --enable-lora behind --")
    if made.kv_events_config is None:
        events, replay = event_addresses(socket_folder)
        made.kv_events_config = config.KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=events, replay_endpoint=replay
        )
    if not made.enable_logging_iteration_details:
        made.enable_logging_iteration_details = True
        # vLLM's own logger would write a line about each pass; the worker's metrics tell what its other lines do.
        made.disable_log_stats = True
    return made


def event_addresses(socket_folder: Path) -> tuple[str, str]:
    """Addresses of the first rank's event and replay sockets, which only this user reaches.

    vLLM makes others of them for further ranks: it knows a rule for addresses with ``tcp`` in them, and one for those
    with ``inproc``, which as the name of a file these have.
    """
    return f"ipc://{socket_folder}/inproc-kv-events", f"ipc://{socket_folder}/inproc-kv-replay"


def of_rank(address: str, rank: int) -> str:
    """Where a subscriber finds the socket of a rank, given the first one's address."""
    address = address.replace("*", "127.0.0.1")
    if not rank:
        return address
    if "inproc" in address:
        return f"{address}_dp{rank}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}"
