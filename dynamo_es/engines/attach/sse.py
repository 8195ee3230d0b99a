"""Reading a stream of server-sent events, as OpenAI-compatible servers send them. Pure."""

from __future__ import annotations

import msgspec

from dynamo_es.errors import Unknown

MAX_EVENT_BYTES = 16 * 1024 * 1024
_DONE = b"[DONE]"
_NOTHING = b"null"


class EventReader:
    """Cuts bytes into events and decodes them. ``feed`` what arrives, however it is cut.

    Attributes:
        done: The end mark ``[DONE]`` came; what follows it is ignored.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self.done = False

    def feed(self, received: bytes) -> list[dict[str, object]]:
        """The events that are whole now; comments and other fields than ``data`` are left out.

        Raises:
            Unknown: An event is longer than the bound, or its data is no JSON object.
        """
        if self.done:
            return []
        *lines, self._rest = (self._rest + received).split(b"\n")
        events: list[dict[str, object]] = []
        for line in lines:
            if self._take(line.removesuffix(b"\r"), events):
                self.done = True
                return events
        if len(self._rest) + self._size > self._max_event_bytes:
            raise self._too_long()
        return events

    def _take(self, line: bytes, events: list[dict[str, object]]) -> bool:
        """True at the end mark."""
        if line.startswith(b"data:"):
            part = line[5:].removeprefix(b" ")
            self._size += len(part)
            if self._size > self._max_event_bytes:
                raise self._too_long()
            self._data.append(part)
            return False
        if line or not self._data:
            return False
        data, self._data, self._size = b"\n".join(self._data), [], 0
        if data.strip() == _DONE:
            return True
        if data.strip() == _NOTHING:
            return False  # llama.cpp begins the answer to several prompts so.
        events.append(_object(data))
        return False

    def _too_long(self) -> Unknown:
        return Unknown(f"the upstream sent an event of more than {self._max_event_bytes} bytes")


def _object(data: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Unknown("the upstream sent an event that is no JSON") from error
    if not isinstance(value, dict):
        raise Unknown("the upstream sent an event that is no JSON object")
    return value
