"""What a chat processor's generator yields: chunks and errors in Dynamo's envelopes (spec/frontend.md 8.4). Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.frontend.utils import nvext_extra_field_requested
from dynamo_es.http_error import HttpError

Envelope = dict[str, Any]
_INVALID = "BackendInvalidArgument: "


def as_error_envelope(error_payload: Mapping[str, Any]) -> Envelope:
    """The envelope that ends a stream with an error; ``error_payload`` is OpenAI's ``{"error": {"message": ...}}``."""
    error = error_payload.get("error")
    message = error.get("message") if isinstance(error, Mapping) else None
    return {"_dynamo_annotated": True, "event": "error", "comment": [message or "unknown error"]}


def backend_invalid_argument_to_http_error(error: Exception) -> HttpError | None:
    """The status that a backend asserts in an error's text, ``BackendInvalidArgument: <JSON>``; None: it asserts none.

    A text that is no JSON object, or has no code, is a 400.
    """
    _, marker, told = str(error).partition(_INVALID)
    if not marker:
        return None
    try:
        payload = json.loads(told)
    except ValueError:
        payload = None
    if not isinstance(payload, dict):
        return HttpError(400, told)
    code, message = payload.get("code"), payload.get("message")
    try:
        return HttpError(
            code if isinstance(code, int) and not isinstance(code, bool) else 400,
            message if isinstance(message, str) else told,
        )
    except ValueError:
        return None


def response_usage(
    request: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    prompt_tokens: int,
    completion_tokens: int,
    finished: bool,
) -> dict[str, Any] | None:
    """Token counts of a chunk; None if it has none.

    Args:
        request: Says whether a stream is to tell them, and how often; a unary answer's last chunk tells them.
        metadata: The worker's; its ``prompt_tokens`` and details win. None is told without any.
        prompt_tokens: Counted here.
        completion_tokens: So far.
        finished: It is the last chunk.
    """
    if not metadata:
        return None
    if request.get("stream"):
        options = request.get("stream_options") or {}
        if not options.get("include_usage") or not (finished or options.get("continuous_usage_stats")):
            return None
    prompt = metadata.get("prompt_tokens", prompt_tokens)
    return {
        **metadata,
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }


class ChunkWriter:
    """Puts choices into envelopes. One a request.

    Args:
        request: The client's, as JSON.
        request_id: Id of all chunks.
        created: Unix seconds.
        prompt_tokens: Of the prompt.
        media: Counts of the prompt's media by metric, ``image_count`` and the like; only those that are not 0.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        request_id: str,
        created: int,
        prompt_tokens: int,
        media: Mapping[str, int],
    ) -> None:
        self._request = request
        self._id = request_id
        self._created = created
        self._prompt_tokens = prompt_tokens
        self._media = media
        self._generated = 0
        self._usage: dict[str, Any] = {}

    def write(
        self,
        choices: Sequence[Mapping[str, Any]],
        new_tokens: int,
        frame: Mapping[str, Any],
        *,
        finished: bool,
        cut: bool = False,
        stop_reason: Any = None,
    ) -> Envelope:
        """One envelope.

        Args:
            choices: What is to be told; without any only counts are.
            new_tokens: Tokens since the envelope before.
            frame: The worker's last frame.
            finished: It is the last envelope.
            cut: The output was ended here, so that the worker's last word, with its counts, does not come.
            stop_reason: What stopped the output, if the frame does not say it.
        """
        self._generated += new_tokens
        self._take_usage(frame, cut)
        metrics = self._metrics(new_tokens)
        if not choices:
            return {"_dynamo_annotated": True, "event": "llm_metrics", "comment": [json.dumps(metrics)]}
        data: dict[str, Any] = {
            "id": self._id,
            "choices": list(choices),
            "created": self._created,
            "model": self._request["model"],
            "object": "chat.completion.chunk",
        }
        usage = response_usage(
            self._request,
            self._usage,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._generated,
            finished=finished,
        )
        if usage is not None:
            data["usage"] = usage
        extension = self._extension(frame, stop_reason)
        if extension:
            data["nvext"] = extension
        data["llm_metrics"] = metrics
        return {"_dynamo_annotated": True, "data": data}

    def _take_usage(self, frame: Mapping[str, Any], cut: bool) -> None:
        given = frame.get("completion_usage")
        if isinstance(given, Mapping):
            self._usage |= {name: value for name, value in given.items() if value is not None}
        if cut and not self._usage:
            self._usage = {"prompt_tokens": self._prompt_tokens}

    def _metrics(self, new_tokens: int) -> dict[str, Any]:
        metrics: dict[str, Any] = {
            "input_tokens": self._prompt_tokens,
            "output_tokens": self._generated,
            "chunk_tokens": new_tokens,
            **self._media,
        }
        details = self._usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        if cached is not None:
            metrics["cached_tokens"] = cached
        return metrics

    def _extension(self, frame: Mapping[str, Any], stop_reason: Any) -> dict[str, Any]:
        told = {
            "stop_reason": stop_reason if frame.get("stop_reason") is None else frame["stop_reason"],
            "engine_data": frame.get("engine_data"),
        }
        return {
            name: value
            for name, value in told.items()
            if value is not None and nvext_extra_field_requested(self._request, name)
        }


def media_counts(media: Mapping[str, Sequence[Any]] | None) -> dict[str, int]:
    """Counts of ``extract_mm_urls``'s media by the names of metrics."""
    return {f"{kind.removesuffix('_url')}_count": len(slots) for kind, slots in (media or {}).items()}
