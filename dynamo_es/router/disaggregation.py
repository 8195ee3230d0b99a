"""A request in two hops: one worker computes the prompt, another one generates (Dynamo's disaggregated serving;
spec: services d.2, h.7). Pure: what either gets, and what it counts as.

The prefill worker gets the request with room for one token. How the decode worker comes to the KV blocks is one of two:

- *bootstrap*: the prefill worker registered an address (``disaggregated_endpoint`` of its runtime configuration).
  Both get ``bootstrap_info`` = ``{bootstrap_host, bootstrap_port, bootstrap_room}``, with a new room for each request,
  and both start at once.
- *result*: the prefill worker answers with ``disaggregated_params``, which belong to the engines and are not looked
  at. When it is done the decode worker gets them in ``prefill_result`` = ``{disaggregated_params,
  prompt_tokens_details}``.

The prefill rank is charged with the prompt's tokens until the first token and with no blocks at all; the decode rank
with blocks only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.errors import PrefillFailed

# Engines keep a room as a signed number.
_ROOM_BITS = 63


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where a decode worker fetches the KV blocks of one request."""

    host: str
    port: int
    room: int

    def value(self) -> dict[str, Any]:
        """As a request carries it."""
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def new_bootstrap(address: tuple[str, int], rng: random.Random) -> Bootstrap:
    """A room of its own at a prefill worker's address."""
    return Bootstrap(*address, rng.getrandbits(_ROOM_BITS))


def prefill_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What the prefill worker gets: the prompt once, and one token."""
    return {
        **payload,
        "stop_conditions": {**_section(payload, "stop_conditions"), "max_tokens": 1, "min_tokens": None},
        "sampling_options": {**_section(payload, "sampling_options"), "n": None, "best_of": None},
    }


class PrefillAnswer:
    """Reads the frames of a prefill worker. ``take`` each batch, then ``result``."""

    def __init__(self) -> None:
        self._params: Any = None
        self._details: Any = None

    def take(self, frames: Sequence[Any]) -> None:
        """Raises ``PrefillFailed``: the worker says that it failed, or contradicts itself."""
        for frame in frames:
            if not isinstance(frame, dict):
                continue
            reason = frame.get("finish_reason")
            if isinstance(reason, dict):
                # Its text may quote the prompt.
                raise PrefillFailed("the prefill worker refused the request")
            params = frame.get("disaggregated_params")
            if params is not None:
                if self._params is not None and params != self._params:
                    raise PrefillFailed("the prefill worker gave disaggregated_params that contradict each other")
                self._params = params
            usage = frame.get("completion_usage")
            if isinstance(usage, dict) and usage.get("prompt_tokens_details") is not None:
                self._details = usage["prompt_tokens_details"]

    def result(self) -> dict[str, Any]:
        """The decode request's ``prefill_result``. Raises ``PrefillFailed``: there were no parameters."""
        if self._params is None:
            raise PrefillFailed("the prefill worker ended without disaggregated_params")
        return {"disaggregated_params": self._params, "prompt_tokens_details": self._details}


def prefill_settings(settings: KvRouterSettings) -> KvRouterSettings:
    """For a router of workers that only compute prompts: no blocks stay active there."""
    return replace(settings, router_track_active_blocks=False, router_track_output_blocks=False)


def handed_over_settings(settings: KvRouterSettings) -> KvRouterSettings:
    """For a decode worker whose prompts are computed elsewhere: no prompt work, no cached prefix to look for, and
    blocks that arrive for each request anew. Where decode workers compute prompts too, what they have cached counts.
    """
    handed_over = replace(
        settings, router_track_prefill_tokens=False, router_prefill_load_model="none", serve_indexer=False
    )
    if settings.conditional_disagg_enabled:
        return handed_over
    return replace(handed_over, overlap_score_credit=0.0, router_assume_kv_reuse=False)


def _section(payload: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = payload.get(name)
    return value if isinstance(value, Mapping) else {}
