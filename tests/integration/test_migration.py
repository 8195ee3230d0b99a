"""Requests whose worker is lost in the middle, on the real request plane: the client sees no seam."""

from __future__ import annotations

import asyncio
import functools
import json

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.router.active_sequences import NO_LOAD
from dynamo_es.runtime.request_server import Batch
from tests.support.runtimes import PATIENT, wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, served_fleet

ANSWER = "One, two, three, \u00e4\u00f6\u00fc, four, five, END and more that nobody is to see."
CALLING = 'Yes.<tool_call>{"name": "f", "arguments": {"city": "Nur Sultan"}}</tool_call>'
lossy_fleet = functools.partial(served_fleet, runtime=PATIENT)


class Workers:
    """Workers of one model that says the same whoever computes it. ``losses``: after how many tokens the worker that
    has the request first, second, ... is lost, and how: a function of this object.
    """

    def __init__(self, fleet, losses=(), text=ANSWER, prompt_tokens=2):
        self.fleet, self.losses, self.prompt_tokens = fleet, list(losses), prompt_tokens
        self.tokens = list(text.encode())
        self.runtimes, self.requests, self.tasks, self.contexts = {}, [], [], []

    async def start(self, count=3, **card):
        for number in range(count):
            await self.add(wait=number == count - 1, **card)

    async def add(self, **options):
        place = len(self.runtimes)
        self.runtimes[place] = None

        async def answer(request, context):
            self.contexts.append(context)
            async for batch in self.answer(place, request):
                yield batch

        self.runtimes[place] = await self.fleet.worker(answer, **options)
        known = set(self.runtimes)
        if options.get("wait"):
            await wait_for(lambda: len(self.fleet.models.find("m").engine.router._candidates()) == len(known))

    async def answer(self, place, request):
        self.requests.append(request)
        loss = self.losses.pop(0) if self.losses else None
        done = len(request["token_ids"]) - self.prompt_tokens
        left = self.tokens[done:][: request["stop_conditions"]["max_tokens"]]
        for number, token in enumerate(left):
            if loss is not None and number == loss[0]:
                await wait_for(lambda: self.arrived >= loss[0])
                self.tasks.append(asyncio.create_task(loss[1](self, place)))
                await asyncio.Event().wait()
            last = number == len(left) - 1
            frame = {"token_ids": [token], "log_probs": [-float(done + number)]}
            if last:
                count = len(request["token_ids"])
                frame |= {
                    "finish_reason": "length",
                    "completion_usage": {"prompt_tokens": count, "completion_tokens": len(left), "total_tokens": 0},
                }
            yield Batch([frame])

    @property
    def arrived(self):
        """Tokens that the frontend has of the worker that is at work."""
        booked = self.fleet.models.find("m").engine.router._open
        return sum(one.output_tokens for one in booked.values())

    async def cut(self, place):
        """The connection breaks."""
        (connection,) = [
            connection
            for (_, instance), connection in self.fleet.core.pool._connections.items()
            if instance == self.runtimes[place].core.instance_id
        ]
        connection._lose("cut by the test")

    async def leave(self, place):
        """The worker is told to stop, and its streams take longer than it may drain."""
        self.runtimes[place].shutdown()
        await self.runtimes[place].close()

    async def hold(self, place):
        """Nothing happens any more."""

    async def end(self):
        async with asyncio.timeout(60):
            await asyncio.gather(*self.tasks)


def chunks(text):
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def text_of(reply):
    return "".join(chunk["choices"][0]["text"] for chunk in chunks(reply.text) if chunk["choices"])


def config(limit=3, **options):
    return FrontendConfig(router_mode="kv", migration_limit=limit, **options)


@pytest.mark.parametrize("loss", [Workers.cut, Workers.leave], ids=["cut", "drained"])
async def test_PROTO_21_a_stream_goes_on_at_another_worker_without_a_seam(loss):
    async with lossy_fleet(config=config()) as fleet:
        workers = Workers(fleet, [(3, loss), (19, loss)])
        await workers.start()
        reply = await fleet.ask(
            COMPLETIONS, max_tokens=60, stop=["END"], logprobs=0, stream=True, stream_options={"include_usage": True}
        )
        assert text_of(reply) == ANSWER.partition("END")[0]
        *parts, usage = chunks(reply.text)
        assert {part["id"] for part in parts} == {parts[0]["id"]}
        said = len(ANSWER.partition("END")[0].encode()) + 3
        values = [
            value
            for part in parts
            for value in (part["choices"][0].get("logprobs") or {"token_logprobs": []})["token_logprobs"]
        ]
        assert values == [-float(number) for number in range(said)]
        assert usage["usage"]["completion_tokens"] == said
        assert usage["usage"]["prompt_tokens"] == 2
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"
        sizes = [(len(request["token_ids"]), request["stop_conditions"]["max_tokens"]) for request in workers.requests]
        assert sizes == [(2, 60), (5, 57), (24, 38)]
        ends = await fleet.finished(3)
        assert [(end.attempt, end.outcome, end.output_tokens) for end in ends][:2] == [
            (1, "migrated", 3), (2, "migrated", 19),
        ]  # fmt: skip
        assert (ends[2].attempt, ends[2].outcome) == (3, "ok")
        router = fleet.models.find("m").engine.router
        assert router.open_requests == 0
        assert all(router._sequences.load(rank) == NO_LOAD for rank in router._candidates())
        page = (await fleet.get("/metrics")).text
        assert 'dynamo_frontend_model_migration_total{migration_type="ongoing_request",model="m"} 2.0' in page
        assert (
            'model_migration_duration_seconds_count{migration_type="ongoing_request",model="m",outcome="success"} 2.0'
            in page
        )
        assert 'dynamo_frontend_model_migration_limit{model="m"} 3.0' in page
        await workers.end()


async def test_PROTO_21_the_limit_is_respected_and_a_unary_answer_is_whole():
    async with lossy_fleet(config=config(2)) as fleet:
        workers = Workers(fleet, [(3, Workers.cut), (2, Workers.cut)], prompt_tokens=2)
        await workers.start(5)
        reply = (await fleet.ask(COMPLETIONS, max_tokens=8)).json()
        assert reply["choices"][0]["text"] == ANSWER[:8]
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2, 8)
        workers.losses = [(1, Workers.cut)] * 3
        workers.requests.clear()
        await workers.add(wait=True)
        failed = await fleet.ask(COMPLETIONS, max_tokens=8)
        assert (failed.status, failed.json()["message"]) == (503, "Service temporarily unavailable")
        assert len(workers.requests) == 3
        ends = await fleet.finished(6)
        assert [end.outcome for end in ends] == ["migrated", "migrated", "ok", "migrated", "migrated", "error"]
        await workers.end()


@pytest.mark.parametrize("cut", range(1, len(CALLING), 16))
async def test_thoughts_and_calls_are_read_over_the_seam(cut):
    async with lossy_fleet(config=config()) as fleet:
        workers = Workers(fleet, [(cut, Workers.cut)], text=CALLING, prompt_tokens=len("<|user|>Hi<|assistant|>"))
        await workers.start(2, runtime_config={"tool_call_parser": "hermes"})
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        workers.prompt_tokens = None
        seen = []
        original = workers.answer

        async def answer(place, request):
            seen.append(len(request["token_ids"]))
            workers.prompt_tokens = seen[0]
            async for batch in original(place, request):
                yield batch

        workers.answer = answer
        reply = (await fleet.ask(CHAT, max_tokens=len(CALLING), tools=tools)).json()
        message = reply["choices"][0]["message"]
        assert message["content"] == "Yes."
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Nur Sultan"}
        assert len(message["tool_calls"]) == 1
        assert seen == [seen[0], seen[0] + cut]
        await workers.end()


@pytest.mark.parametrize("body", [{"response_format": {"type": "json_object"}}, {"n": 2, "temperature": 1.0}])
async def test_PROTO_20_a_grammar_is_not_begun_anew_in_the_middle(body):
    async with lossy_fleet(config=config()) as fleet:
        workers = Workers(fleet, [(10, Workers.cut)])
        await workers.start()
        asked = len("Hi")
        workers.prompt_tokens = asked
        original = workers.answer

        async def answer(place, request):
            workers.prompt_tokens = len(request["token_ids"])
            async for batch in original(place, request):
                yield batch

        workers.answer = answer
        reply = await fleet.ask(CHAT, max_tokens=20, stream=True, **body)
        *parts, failure = chunks(reply.text)
        assert "".join(part["choices"][0]["delta"].get("content", "") for part in parts) == ANSWER[:10]
        assert failure == {
            "error": {"message": "Service temporarily unavailable", "type": "service_unavailable", "code": 503}
        }
        assert reply.text.endswith("data: [DONE]\n\n")
        # Before anything was sent it starts over.
        workers.losses = [(0, Workers.cut)]
        whole = await fleet.ask(CHAT, max_tokens=10, stream=True, **body)
        assert '"error"' not in whole.text
        assert [end.outcome for end in await fleet.finished(3)] == ["error", "migrated", "ok"]
        await workers.end()


async def test_without_another_worker_the_client_is_told():
    async with lossy_fleet(config=config()) as fleet:
        workers = Workers(fleet, [(4, Workers.cut)])
        await workers.start(1)
        reply = await fleet.ask(COMPLETIONS, max_tokens=20, stream=True)
        assert text_of_until_failure(reply) == ANSWER[:4]
        (end,) = await fleet.finished()
        assert (end.outcome, end.detail) == ("error", "Disconnected")
        await workers.end()


def text_of_until_failure(reply):
    *parts, failure = chunks(reply.text)
    assert failure["error"]["code"] == 503
    return "".join(part["choices"][0]["text"] for part in parts)


async def test_a_client_that_leaves_during_a_migration_frees_everything():
    async with lossy_fleet(config=config()) as fleet:
        workers = Workers(fleet, [(3, Workers.cut), (0, Workers.hold)])
        await workers.start(2)
        asking = asyncio.create_task(fleet.ask(COMPLETIONS, max_tokens=20, stream=True))
        await wait_for(lambda: len(workers.requests) == 2)
        (exchange,) = fleet.app.service.running
        exchange.interrupt("disconnect")
        await asking
        await wait_for(lambda: workers.contexts[1].is_stopped())
        ends = await fleet.finished(2)
        assert [(end.attempt, end.outcome) for end in ends] == [(1, "migrated"), (2, "cancelled")]
        router = fleet.models.find("m").engine.router
        assert all(router._sequences.load(rank) == NO_LOAD for rank in router._candidates())
        await workers.end()
