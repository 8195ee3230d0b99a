"""Text completions as tensors: ``text_input`` in, ``text_output`` and ``finish_reason`` out (spec/services e.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dynamo_es.frontend.kserve.tensors import Refused, read_inputs

_STREAM_NAMES = ("streaming", "stream")
_SHAPES: tuple[list[int], ...] = ([1], [1, 1])
METADATA: Mapping[str, Any] = {
    "inputs": [
        {"name": "text_input", "data_type": "Bytes", "shape": [1]},
        {"name": "streaming", "data_type": "Bool", "shape": [1]},
    ],
    "outputs": [
        {"name": "text_output", "data_type": "Bytes", "shape": [-1]},
        {"name": "finish_reason", "data_type": "Bytes", "shape": [-1]},
    ],
}
"""Inputs and outputs of every completions model that workers registered."""


class TextRequest(NamedTuple):
    """What is asked: a prompt, and whether its answer is to come in parts."""

    prompt: str
    streams: bool


def read_text(request: Any) -> TextRequest:
    """Raises ``Refused``."""
    prompt: str | None = None
    streams = False
    for name, datatype, shape, values in read_inputs(request):
        if name == "text_input":
            prompt = _prompt(datatype, shape, values)
        elif name in _STREAM_NAMES:
            if datatype != "BOOL" or shape != [1] or len(values) != 1:
                raise Refused(f"Expected '{name}' to be of type BOOL and shape [1]")
            streams = bool(values[0])
        else:
            raise Refused(f"Invalid input name: {name}, supported inputs are 'text_input', 'stream'")
    if prompt is None:
        raise Refused("Missing required input: 'text_input'")
    return TextRequest(prompt, streams)


def completion_request(request: Any, asked: TextRequest) -> dict[str, Any]:
    """The same as an OpenAI request; the protocol's parameters are dropped, as in Dynamo."""
    result: dict[str, Any] = {"model": request.model_name, "prompt": asked.prompt, "stream": True}
    return {**result, "user": request.id} if request.id else result


class Folded:
    """Texts and ends by choice."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._ends: dict[int, str] = {}

    def add(self, chunk: Any) -> None:
        """The next chunk. Raises ``Refused``: it is none."""
        choices = chunk.get("choices") if isinstance(chunk, Mapping) else None
        if not isinstance(choices, Iterable):
            raise Refused("the engine's answer is no chunk of a completion")
        for choice in choices:
            index = choice.get("index") or 0
            self._texts[index] = self._texts.get(index, "") + (choice.get("text") or "")
            if choice.get("finish_reason"):
                self._ends[index] = choice["finish_reason"]

    @property
    def is_empty(self) -> bool:
        """No choice was told of."""
        return not self._texts

    def fill(self, response: Any, request: Any) -> None:
        """Put what is there into a ``ModelInferResponse``."""
        response.model_name, response.model_version, response.id = request.model_name, "1", request.id
        order = sorted(self._texts)
        for name, values in (
            ("text_output", [self._texts[index] for index in order]),
            ("finish_reason", [self._ends.get(index, "") for index in order]),
        ):
            tensor = response.outputs.add(name=name, datatype="BYTES", shape=[len(order)])
            tensor.contents.bytes_contents.extend(value.encode() for value in values)


def _prompt(datatype: str, shape: list[int], values: list[Any]) -> str:
    if datatype != "BYTES":
        raise Refused(f"Expected 'text_input' to be of type BYTES for string input, got \"{datatype}\"")
    if shape not in _SHAPES:
        raise Refused(f"Expected 'text_input' to have shape [1], got {shape}")
    if len(values) != 1:
        raise Refused(f"Expected 'text_input' to have 1 element, got {len(values)}")
    try:
        return bytes(values[0]).decode()
    except UnicodeDecodeError as error:
        raise Refused("Expected 'text_input' to be UTF-8") from error
