"""The terminal of a chat: what a person types, and what is shown."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator

MAX_LINE = 1_000_000
"""Characters; a longer line counts as several."""
MAX_PROMPT = 16_000_000
"""Characters of a prompt that is all of standard input."""


def written(text: str) -> None:
    """Show text at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


async def whole_input() -> str:
    """All of standard input as one text. A thread reads it, which nobody waits for at the end.

    Raises:
        OSError, ValueError: It cannot be read, is no text, or is longer than ``MAX_PROMPT`` characters.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def tell(result: str | Exception) -> None:
        if found.done():
            return
        if isinstance(result, Exception):
            found.set_exception(result)
        else:
            found.set_result(result)

    def read() -> None:
        result: str | Exception
        try:
            result = sys.stdin.read(MAX_PROMPT + 1)
        except (OSError, ValueError) as error:
            result = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=read, name="terminal", daemon=True).start()
    text = await found
    if len(text) > MAX_PROMPT:
        raise ValueError(f"standard input is longer than {MAX_PROMPT} characters")
    return text


async def typed_lines() -> AsyncIterator[str]:
    """Lines of standard input, read one at a time. A thread waits for them, which nobody waits for at the end."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()
    wanted = threading.Semaphore(0)

    def read() -> None:
        while wanted.acquire():
            line = sys.stdin.readline(MAX_LINE)
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(lines.put_nowait, line)
            if not line:
                return

    threading.Thread(target=read, name="terminal", daemon=True).start()
    while True:
        wanted.release()
        line = await lines.get()
        if not line:
            return
        yield line
