"""How a prompt's KV cache gets from a prefill worker to a decode worker, by vLLM's connector. Pure: imports no vLLM.

A connector of the first kind is told of it: the prefill request asks it to keep the blocks, its answer says where they
are, and the decode request says so to the other side's connector. One of the second kind keeps prompts where all
workers find them; nothing is handed over. What a connector says is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_es.errors import ConfigError, InvalidArgument

TOLD = frozenset({"NixlConnector", "NixlPullConnector", "MultiConnector"})
SHARED = frozenset({"ExampleConnector", "LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector"})
_KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_PARAMS = "kv_transfer_params"


def check_connector(name: str | None, stage: str) -> None:
    """Raises ``ConfigError``: a worker of this stage cannot hand over with such a connector (None: there is none)."""
    if stage == "aggregated" or name in TOLD or name in SHARED:
        return
    taken = ", ".join(sorted(TOLD | SHARED))
    said = "is missing" if name is None else f"has the connector {name}"
    raise ConfigError(f"--kv-transfer-config {said}: a {stage} worker hands over with one of {taken}")


def prefill_arguments(arguments: Mapping[str, Any], connector: str | None) -> dict[str, Any]:
    """Sampling arguments of a prompt that is to be handed over: one token, which nothing but its number ends."""
    kept = {name: value for name, value in arguments.items() if name not in ("stop_token_ids", "logprobs")}
    told = {"extra_args": {_PARAMS: dict(_KEEP)}} if connector in TOLD else {}
    return {**kept, "n": 1, "max_tokens": 1, "min_tokens": 1, "ignore_eos": True, **told}


def handed_over(params: Any) -> dict[str, Any]:
    """``disaggregated_params`` of a prefill answer; ``params``: what its connector said."""
    return {_PARAMS: params}


def decode_arguments(arguments: Mapping[str, Any], request: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Sampling arguments of an answer, and whether its prompt comes from another worker.

    Raises:
        InvalidArgument: ``prefill_result`` is not of such a worker.
    """
    result = request.get("prefill_result")
    if result is None:
        return dict(arguments), False
    given = result.get("disaggregated_params") if isinstance(result, dict) else None
    params = given.get(_PARAMS, ...) if isinstance(given, dict) else ...
    if params is not None and not isinstance(params, dict):
        raise InvalidArgument("prefill_result is not of a vLLM worker")
    told = {"extra_args": {_PARAMS: params}} if params else {}
    return {**arguments, **told}, True
