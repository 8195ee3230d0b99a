"""The chat in the terminal: what is typed goes through the application, and what comes back is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from dynamo_es.frontend.app_caller import Answer, post_json
from dynamo_es.frontend.terminal_chat import TerminalChat, ready_model
from dynamo_es.http_error import HttpError
from tests.unit.frontend.fakes import FixedDirectory, ScriptedEngine, application, frame, says, served

PATH = "/v1/chat/completions"


async def typed(*lines: str) -> AsyncIterator[str]:
    for line in lines:
        yield line + "\n"


async def chat(engine: ScriptedEngine, executor: ThreadPoolExecutor, *lines: str, model: str = "m") -> str:
    shown: list[str] = []
    app = application(served(engine), executor=executor)
    await TerminalChat(app, PATH, model, shown.append).run(typed(*lines))
    return "".join(shown)


def prompt(engine: ScriptedEngine, place: int) -> str:
    text = bytes(token for token in engine.requests[place]["token_ids"] if token < 256)
    return text.decode(errors="replace")


async def test_turns_build_on_each_other(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Hel"), frame("lo.", "stop")))
    shown = await chat(engine, executor, "Hi", "", "And you?", "/new", "Again", "/quit", "never")
    assert shown.count("Hello.\n> ") == 3
    assert "Hi" in prompt(engine, 1)
    assert "Hello." in prompt(engine, 1)
    assert "Hi" not in prompt(engine, 2)
    assert len(engine.requests) == 3


async def test_a_turn_that_fails_is_told_and_forgotten(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Half"), HttpError(503, "gone")))
    shown = await chat(engine, executor, "One", "Two")
    assert shown.count("Half\nerror: Service temporarily unavailable\n") == 2
    assert "One" not in prompt(engine, 1)


async def test_another_model_and_one_that_is_not_there(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Yes", "stop")))
    shown = await chat(engine, executor, "One", "/model m", "Two", "/what", model="nobody")
    assert "error: Model not found\n" in shown
    assert shown.count("Yes\n") == 1
    assert shown.count("/quit") == 2  # at the start, and for a command that there is not


async def test_the_first_model_that_chats_is_taken_as_soon_as_it_is_there() -> None:
    vectors = served(ScriptedEngine(says()), "vectors", model_type="Embedding")
    directory = FixedDirectory({"vectors": vectors})
    shown: list[str] = []
    waiting = asyncio.create_task(ready_model(directory, None, shown.append))
    await asyncio.sleep(0)
    assert shown == ["waiting for a model ...\n"]
    directory.by_name["m"] = served(ScriptedEngine(says()))
    async with asyncio.timeout(60):
        assert await waiting == "m"


async def test_who_waits_for_a_model_is_told_which_ones_there_are() -> None:
    directory = FixedDirectory({"m": served(ScriptedEngine(says()))})
    shown: list[str] = []
    waiting = asyncio.create_task(ready_model(directory, "nix", shown.append))
    await asyncio.sleep(0)
    assert shown == ["waiting for nix; there is m ...\n"]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_caller_that_leaves_ends_the_request(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Hel"), frame("lo.", "stop")))
    app = application(served(engine), executor=executor)
    body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"Hi"}]}'
    answer = Answer()
    parts = post_json(app, PATH, body, answer)
    await anext(parts)
    await parts.aclose()
    assert answer.status == 200
    assert not app.service.running
