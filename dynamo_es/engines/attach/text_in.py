"""Passing requests on as clients wrote them, and chunks back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_es.engines.attach.refusals import failure_in_stream
from dynamo_es.engines.frame_stream import MAX_CHOICES, checked_choice_count
from dynamo_es.errors import EngineShutdown, InvalidArgument

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
# Members that say something to the fleet, not to a server.
_OURS = frozenset(("routing", "nvext", "router", "router_config_override", "model", "stream"))


def text_path(request: Mapping[str, Any]) -> str:
    """Where a request goes. Raises ``InvalidArgument``: it is neither a chat nor a completion."""
    if isinstance(request.get("messages"), list):
        return CHAT_PATH
    if request.get("prompt") is not None:
        return COMPLETIONS_PATH
    raise InvalidArgument("the attached server gets text: the request must have `messages` or a `prompt`")


def text_body(request: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The body: the request, under the model's name at the server, always as a stream."""
    return {name: value for name, value in request.items() if name not in _OURS} | {"model": model, "stream": True}


def text_choices(request: Mapping[str, Any]) -> int:
    """How many choices the answer has, of all prompts. Raises ``InvalidArgument``: too many, or no number."""
    count, prompt = checked_choice_count(request.get("n")), request.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if count * prompts > MAX_CHOICES:
        raise InvalidArgument(f"{prompts} prompts with n={count}: at most {MAX_CHOICES} choices")
    return count * prompts


class TextReader:
    """Reads the chunks of one answer; they are handed on under the model's name in the fleet."""

    def __init__(self, model: str, choices: int) -> None:
        """``choices``: in all, of all prompts."""
        self._model = model
        self._left = set(range(choices))

    @property
    def finished(self) -> bool:
        """Every choice came to its end."""
        return not self._left

    def read(self, event: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chunk to hand on. Raises as ``Reader.read``."""
        if event.get("error") is not None:
            raise failure_in_stream(event["error"])
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            reason = choice.get("finish_reason") if isinstance(choice, dict) else None
            if reason == "abort":
                raise EngineShutdown("the upstream gave the request up")
            index = choice.get("index") or 0 if reason is not None else None
            if isinstance(index, int):
                self._left.discard(index)
        return [{**event, "model": self._model}]
