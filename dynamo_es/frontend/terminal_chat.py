"""``--interactive``: a chat in the terminal, through the same application that HTTP requests go to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

from dynamo_es.frontend.app_caller import Answer, post_json
from dynamo_es.frontend.asgi import AsgiApp
from dynamo_es.frontend.contracts import ModelDirectory

_POLL_S = 0.2
_HELP = "/new starts over, /model NAME asks another model, /quit (or Ctrl-D) leaves\n"
Write = Callable[[str], None]


class TerminalChat:
    """A conversation with one model. Belongs to one event loop.

    Args:
        app: Takes chat completions.
        path: Where.
        model: Whom to ask.
        write: Shows text as it comes.
    """

    def __init__(self, app: AsgiApp, path: str, model: str, write: Write) -> None:
        self.model = model
        self._app = app
        self._path = path
        self._write = write
        self._messages: list[dict[str, str]] = []

    async def run(self, lines: AsyncIterator[str]) -> None:
        """Answer line by line until there is none or one says ``/quit``."""
        self._write(f"chatting with {self.model}; {_HELP}> ")
        async for line in lines:
            text = line.strip()
            command, _, rest = text.partition(" ")
            if command == "/quit":
                return
            if command == "/new":
                self._messages.clear()
            elif command == "/model" and rest.strip():
                self.model = rest.strip()
            elif command.startswith("/"):
                self._write(_HELP)
            elif text:
                await self.ask(text)
            self._write("> ")

    async def ask(self, text: str) -> bool:
        """One turn; whether it was answered. A turn that failed is no part of the conversation."""
        self._messages.append({"role": "user", "content": text})
        body = msgspec.json.encode({"model": self.model, "messages": self._messages, "stream": True})
        answer, said, held = Answer(), "", b""
        problem: str | None = None
        async with aclosing(post_json(self._app, self._path, body, answer)) as parts:
            async for part in parts:
                held += part
                if answer.status != 200:
                    continue
                *events, held = held.split(b"\n\n")
                for event in read_events(events):
                    said += self._show(event)
                    problem = problem_of(event) or problem
        if answer.status != 200:
            problem = problem_of(msgspec.json.decode(held)) or f"status {answer.status}"
        if problem is not None:
            self._messages.pop()
            self._write(f"\nerror: {problem}\n")
            return False
        self._messages.append({"role": "assistant", "content": said})
        self._write("\n")
        return True

    def _show(self, event: Any) -> str:
        """Write what a chunk brings; what of it is the answer's text."""
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if thought:
            self._write(thought)
        content: str = delta.get("content") or ""
        if content:
            self._write(content)
        return content


async def ready_model(directory: ModelDirectory, wanted: str | None, write: Write) -> str:
    """The model of that name, or the first one, as soon as it can be asked."""
    told = False
    while True:
        names = [name for name, model in directory.models() if "chat" in model.families]
        found = next((name for name in names if wanted in (None, name)), None)
        if found is not None:
            return found
        if not told:
            others = f"; there is {', '.join(names)}" if names else ""
            write(f"waiting for {wanted or 'a model'}{others} ...\n")
            told = True
        await asyncio.sleep(_POLL_S)


def read_events(events: list[bytes]) -> Iterator[dict[str, Any]]:
    """The objects in events of a stream; its end mark is none."""
    for event in events:
        for line in event.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield msgspec.json.decode(line[6:])


def problem_of(body: Any) -> str | None:
    """What an answer or an event says went wrong; None: nothing."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else None
