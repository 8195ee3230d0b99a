"""Parts of preprocessed requests and of their answers that adapters of engines share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.errors import InvalidArgument


def section(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A member that is a map; an empty one if it is missing."""
    value = request.get(name)
    return value if isinstance(value, dict) else {}


def lora_name_of(routing: Mapping[str, Any]) -> str | None:
    """The adapter that a request is for; None: the model itself. Raises ``InvalidArgument``."""
    name = routing.get("lora_name")
    if name is not None and not isinstance(name, str):
        raise InvalidArgument("routing.lora_name must be a string")
    return name


def given(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """What is set of these members."""
    return {name: values[name] for name in names if values.get(name) is not None}


def stop_token_ids(request: Mapping[str, Any]) -> list[int]:
    """Ids that end an answer, the client's and the model's, in order."""
    stop = section(request, "stop_conditions")
    return sorted({*(stop.get("stop_token_ids") or ()), *(stop.get("stop_token_ids_hidden") or ())})


def completion_usage(prompt: Any, completion: Any, cached: Any) -> dict[str, Any]:
    """Token counts as frames carry them; ``cached`` None: not known."""
    prompt, completion = int(prompt or 0), int(completion or 0)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if isinstance(cached, int):
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
