"""What chat processors share (``dynamo.frontend.utils``): ids, errors, media of messages, template files."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

ChatProcessorBackend = Literal["vllm", "sglang"]
_MEDIA = ("image_url", "audio_url", "video_url")
_WITH_MEDIA = ("user", "tool")


class PreprocessError(Exception):
    """A request that cannot be preprocessed, for the client. It is sent between processes: its text is all it has."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


def random_uuid() -> str:
    """16 hex digits: half of a random UUID."""
    return uuid.uuid4().hex[:16]


def random_call_id() -> str:
    """An id for a tool call: ``call_`` and 16 hex digits."""
    return f"call_{random_uuid()}"


def worker_warmup() -> bool:
    """What a preprocess worker is asked first, so that it is known to run."""
    return True


def make_backend_error(engine_response: Mapping[str, Any]) -> dict[str, Any]:
    """The error that an engine's answer tells."""
    message = engine_response.get("message") or "unknown backend error"
    return {"error": {"message": message, "type": "backend_error"}}


def make_internal_error(request_id: str, detail: str | None = None) -> dict[str, Any]:
    """An error for an answer that is none."""
    message = detail or f"Invalid engine response for request {request_id}"
    return {"error": {"message": message, "type": "internal_error"}}


def handle_engine_error(engine_response: Any, request_id: str, logger: logging.Logger) -> dict[str, Any]:
    """The error for an engine's answer that is not output. Its text may quote the prompt, so it is not logged."""
    if isinstance(engine_response, dict) and engine_response.get("status") == "error":
        logger.error("the engine answered request %s with an error", request_id)
        return make_backend_error(engine_response)
    logger.error("the engine's answer to request %s is no output", request_id)
    return make_internal_error(request_id)


def nvext_extra_field_requested(request: Mapping[str, Any], field: str) -> bool:
    """Whether ``nvext.extra_fields`` asks for a field of the response."""
    extension = request.get("nvext")
    fields = extension.get("extra_fields") if isinstance(extension, dict) else None
    return isinstance(fields, list) and field in fields


def extract_mm_urls(
    messages: Sequence[Any],
) -> tuple[dict[str, list[dict[str, str]]] | None, dict[str, list[str | None]] | None]:
    """Media of user and tool messages by kind, and the cache UUIDs of their parts.

    Returns:
        Each part as ``{"Url": ...}``, or ``{"UuidOnly": ...}`` for a picture that the engine has; UUIDs slot by slot,
        None where a part has none. None for either if there are none at all.

    Raises:
        ValueError: A part without what it needs.
    """
    found: dict[str, list[dict[str, str]]] = {}
    uuids: dict[str, list[str | None]] = {}
    for kind, part in _media_parts(messages):
        slot, part_uuid = media_slot(kind, part)
        found.setdefault(kind, []).append(slot)
        uuids.setdefault(kind, []).append(part_uuid)
    has_uuids = any(one is not None for slots in uuids.values() for one in slots)
    return found or None, uuids if has_uuids else None


def _media_parts(messages: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in _WITH_MEDIA:
            continue
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in _MEDIA:
                yield part["type"], part


def media_slot(kind: str, part: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """One part of this kind as ``extract_mm_urls`` gives it, and its UUID. Raises ValueError likewise."""
    value = part.get(kind)
    url = value.get("url") if isinstance(value, Mapping) else None
    part_uuid = part.get("uuid")
    if part_uuid is not None and not (isinstance(part_uuid, str) and part_uuid):
        raise ValueError(f"{kind} uuid must be a non-empty string")
    if isinstance(url, str) and url:
        return {"Url": url}, part_uuid
    if part_uuid is None:
        raise ValueError(f"{kind} part must contain a non-empty URL or uuid")
    if kind != "image_url":
        raise ValueError(f"UUID-only cache reuse is not supported for media modality `{kind}`; provide a media URL")
    return {"UuidOnly": part_uuid}, part_uuid


def read_jinja_chat_template(template_path: str, *, backend: ChatProcessorBackend) -> str:
    """A template file's text. SGLang's has no line ends around it, and its ``\\\\n`` are line ends.

    Raises:
        FileNotFoundError: There is none.
    """
    text = Path(template_path).read_text(encoding="utf-8")
    return text.strip("\n").replace("\\n", "\n") if backend == "sglang" else text


def resolve_chat_template(source_path: str, *, backend: ChatProcessorBackend = "vllm") -> str | None:
    """The template that a model directory has in a file of its own; None if it has none.

    Raises:
        ValueError: chat_template.json is no JSON.
    """
    directory = Path(source_path)
    file = directory / "chat_template.jinja"
    if file.is_file():
        return read_jinja_chat_template(str(file), backend=backend)
    listed = directory / "chat_template.json"
    if not listed.is_file():
        return None
    try:
        settings: dict[str, Any] = json.loads(listed.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"Malformed JSON in {listed}: {error}") from error
    template: str | None = settings.get("chat_template")
    return template
