"""Routes for pictures, videos and speech (spec/frontend.md 1.10): they are there while a text-input worker serves them.

The worker gets the body as the client sent it, but for the model's name, and answers with one item. Streams of videos
and ``/v1/realtime`` are only known by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_es.frontend import serde
from dynamo_es.frontend.contracts import Family, ServedModel
from dynamo_es.frontend.direct import DirectAnswer, DirectWork, read_item
from dynamo_es.frontend.errors import ApiError, OutputError
from dynamo_es.frontend.reading import RequestKind

IMAGES = "/v1/images/generations"
IMAGE_EDITS = "/v1/images/edits"
VIDEOS = "/v1/videos"
SPEECH = "/v1/audio/speech"
VIDEO_STREAM = "/v1/videos/stream"
REALTIME = "/v1/realtime"


class MediaRequest(msgspec.Struct):
    """A body: the model, what is to be made, and everything that the client sent."""

    model: str
    subject: str
    fields: dict[str, Any]


class PromptBody(msgspec.Struct):
    """A body of ``/v1/images/…`` and ``/v1/videos``; other members reach the worker, too."""

    model: str
    prompt: str


class SpeechBody(msgspec.Struct):
    """A body of ``/v1/audio/speech``; other members reach the worker, too."""

    model: str
    input: str


class _Decoder:
    """Decodes a body of which only ``model`` and one more member are looked at."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._decoder = msgspec.json.Decoder(dict[str, Any])

    def decode(self, body: bytes) -> MediaRequest:
        """Raises msgspec's errors."""
        fields = self._decoder.decode(body)
        for name in ("model", self._subject):
            if not isinstance(fields.get(name), str):
                raise msgspec.ValidationError(f"Expected `str` - at `$.{name}`")
        return MediaRequest(fields["model"], fields[self._subject], fields)


class Picture(msgspec.Struct, omit_defaults=True):
    """One picture, by URL or in base64."""

    url: str | None = None
    b64_json: str | None = None
    revised_prompt: str | None = None


class Pictures(msgspec.Struct):
    """The body of an answer with pictures."""

    created: int
    data: list[Picture]
    background: str | None = None
    output_format: str | None = None
    size: str | None = None
    quality: str | None = None
    usage: dict[str, Any] | None = None


class MediaRoute:
    """A ``DirectRoute``.

    Args:
        endpoint, family: See ``Speech``.
        subject: The member that says what is to be made.
    """

    def __init__(self, endpoint: str, family: Family, subject: str) -> None:
        self.endpoint = endpoint
        self.family = family
        self.kind: RequestKind[MediaRequest] = RequestKind(
            MediaRequest,
            _Decoder(subject),
            frozenset(("model", subject)),
            (),
            {"model": serde.typed(str, "a string", null=False), subject: serde.typed(str, "a string", null=False)},
            (subject, "model"),
            f"NvCreate{endpoint.capitalize()}Request",
            described=SpeechBody if subject == "input" else PromptBody,
        )

    def check(self, source: MediaRequest) -> None:
        """What is to be made is the worker's to judge."""

    def work(self, source: MediaRequest, model: ServedModel) -> DirectWork:
        return DirectWork({**source.fields, "model": model.name})

    def answer(self, source: MediaRequest, items: Sequence[Any], model: ServedModel) -> DirectAnswer:
        if self.family == "images":
            pictures = read_item(items[0], Pictures)
            for item in items[1:]:
                pictures.data += read_item(item, Pictures).data
            body = msgspec.to_builtins(pictures)
            body["data"] = [{**entry, "revised_prompt": entry.get("revised_prompt")} for entry in body["data"]]
            return DirectAnswer(msgspec.json.encode(body))
        if len(items) > 1:
            raise OutputError("several items where one was expected")
        return DirectAnswer(msgspec.json.encode(items[0]))

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.body(status)
