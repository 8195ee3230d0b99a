"""The main job, whole: processes, HTTP, log. A log's test class inherits this and says which log."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import re
import signal
import sys

import httpx
import msgspec
import openai
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import TopicPartition
from dynamo_es.log.open import open_log
from schemas.codec import TopicCodec
from schemas.requests import REQUESTS, Finished, Routed, RouterLost
from tests.support.fleet import MODEL, Fleet

SYSTEM = {"role": "system", "content": "You answer questions about an observatory. " * 12}


def question(text: str) -> list[dict]:
    return [SYSTEM, {"role": "user", "content": text}]


def openai_client(fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.base}/v1", api_key="none", max_retries=0)


class FleetSuite(abc.ABC):
    @abc.abstractmethod
    def log_url(self, tmp_path, request) -> tuple[str, str]:
        """URL and topic namespace, fresh for each test."""

    @pytest.fixture
    async def fleet(self, tmp_path, request):
        url, namespace = self.log_url(tmp_path, request)
        fleet = Fleet(url, tmp_path, namespace)
        yield fleet
        await fleet.close()

    @pytest.fixture
    async def running(self, fleet):
        await fleet.frontend()
        await asyncio.gather(*(fleet.worker(number) for number in (1, 2)))
        await fleet.wait_workers(2)
        return fleet

    async def decisions(self, fleet) -> dict[str, list]:
        """Events by request id, from the log itself."""
        log = open_log(fleet.url, SystemClock())
        await log.start()
        codec = TopicCodec(REQUESTS)
        topic = REQUESTS.qualified(fleet.namespace)
        events: dict[str, list] = {}
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(log.close)
            bounds = await log.bounds(topic)
            reader = log.reader({TopicPartition(topic, number): limits.start for number, limits in bounds.items()})
            opened.push_async_callback(reader.close)
            ends = {TopicPartition(topic, number): limits.end for number, limits in bounds.items()}
            while any(reader.positions()[place] < end for place, end in ends.items()):
                for records in (await reader.poll(timeout_s=1)).values():
                    for record in records:
                        event = codec.decode(record.value, record.headers)
                        if not isinstance(event, RouterLost):  # names a router, not a request
                            events.setdefault(event.request_id, []).append(event)
        return events

    async def indexed(self, fleet, blocks: int) -> None:
        """Wait until the frontend's index holds so many blocks: they come later than the answer they are from."""
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=fleet.base) as http:
            while True:
                page = (await http.get("/metrics")).text
                held = re.findall(r"^dynamo_es_index_blocks\{.*\} (\S+)$", page, re.MULTILINE)
                if sum(map(float, held)) >= blocks:
                    return
                await asyncio.sleep(0.05)

    async def finished(self, fleet, request_id: str) -> list:
        async with asyncio.timeout(60):
            while True:
                events = (await self.decisions(fleet)).get(request_id, [])
                if any(isinstance(event, Finished) for event in events):
                    return events
                await asyncio.sleep(0.05)

    async def test_the_openai_client_streaming_and_not(self, running):
        async with openai_client(running) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            answer = await client.chat.completions.create(model=MODEL, messages=question("Hello?"), max_tokens=24)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage.completion_tokens == 24
            text = ""
            usage = None
            stream = await client.chat.completions.create(
                model=MODEL, messages=question("Hello?"), max_tokens=24, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            async for chunk in stream:
                usage = chunk.usage or usage
                if chunk.choices:
                    text += chunk.choices[0].delta.content or ""
            assert text == answer.choices[0].message.content
            assert text.isascii()
            assert len(text.split()) >= 3
            assert usage.prompt_tokens == answer.usage.prompt_tokens
            plain = await client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8)
            assert plain.usage.completion_tokens == 8
            stopped = await client.chat.completions.create(
                model=MODEL, messages=question("Hello?"), max_tokens=200, stop=[text[4:9]]
            )
            assert stopped.choices[0].finish_reason == "stop"
            assert stopped.choices[0].message.content == text[: text.index(text[4:9])]

    async def check_chats_follow_their_prefix(self, running, count: int) -> None:
        async with openai_client(running) as client:
            first = await client.chat.completions.create(model=MODEL, messages=question("One?"), max_tokens=4)
            await self.finished(running, first.id.removeprefix("chatcmpl-"))
            await self.indexed(running, blocks=21)
            for number in range(count):
                answer = await client.chat.completions.create(
                    model=MODEL, messages=question(f"And {number}?"), max_tokens=4
                )
                events = await self.finished(running, answer.id.removeprefix("chatcmpl-"))
                routed = next(event for event in events if isinstance(event, Routed))
                blocks = len(routed.sequence_hashes) // 8
                assert routed.overlap_blocks >= blocks - 2 > 20
                rows = {row.worker_id: row for row in routed.candidates}
                assert rows[routed.worker_id].device_blocks == max(row.device_blocks for row in rows.values())
                cached = answer.usage.prompt_tokens_details.cached_tokens
                assert cached == min(routed.cached_tokens, (routed.isl_tokens - 1) // 16 * 16)

    async def check_diagnosis(self, running) -> None:
        """OPS-02: the command line sees a fleet that routes by cache, from the frontend and from this log."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dynamo_es.cli.main", "diagnose", "--url", running.base, "--log", running.url,
            "--topic-namespace", running.namespace, "--json", stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await child.communicate()
        (model,) = msgspec.json.decode(out)["models"]
        assert (child.returncode, model["model"], model["causes"]) == (0, MODEL, [])
        assert "2 of 2 ranks exact" in model["summary"]
        assert "of 7 decisions by overlap" in model["summary"]

    async def test_IDX_15_a_second_chat_goes_where_its_prefix_is_and_the_log_says_why(self, running):
        await self.check_chats_follow_their_prefix(running, 6)
        await self.check_diagnosis(running)

    async def test_bad_requests_get_both_error_shapes(self, running):
        async with httpx.AsyncClient(base_url=running.base) as http:
            url = "/v1/chat/completions"
            hi = [{"role": "user", "content": "Hi"}]
            long = [{"role": "user", "content": "x" * 40_000}]
            answers = {
                "unknown model": (await http.post(url, json={"model": "nope", "messages": hi}), 404),
                "malformed": (
                    await http.post(url, content=b"{not json", headers={"content-type": "application/json"}), 400,
                ),
                "wrong type": (await http.post(url, json={"model": MODEL, "messages": hi, "max_tokens": "4"}), 400),
                "empty list": (await http.post(url, json={"model": MODEL, "messages": []}), 400),
                "too long": (await http.post(url, json={"model": MODEL, "messages": long}), 400),
            }  # fmt: skip
        for name, (answer, status) in answers.items():
            assert answer.status_code == status, name
            body = answer.json()
            assert body["code"] == status, name
            assert body["message"], name
            assert set(body["error"]) == {"message", "type", "param", "code"}, name
        assert answers["unknown model"][0].json()["error"]["code"] == "model_not_found"
        assert answers["too long"][0].json()["error"]["code"] == "context_length_exceeded"
        assert answers["wrong type"][0].json()["error"]["param"] == "max_tokens"

    async def test_PROTO_18_a_client_that_leaves_cancels_at_the_worker(self, fleet):
        await fleet.frontend()
        await fleet.worker(1, "--speedup-ratio", "0.5")
        await fleet.wait_workers(1)
        async with httpx.AsyncClient(base_url=fleet.base) as http:
            body = {"model": MODEL, "messages": question("Long?"), "max_tokens": 5000, "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
                request_id = ""
                async for line in stream.aiter_lines():
                    if line.startswith("data: "):
                        request_id = msgspec.json.decode(line[6:])["id"].removeprefix("chatcmpl-")
                        break
            events = await self.finished(fleet, request_id)
            finished = [event for event in events if isinstance(event, Finished)]
            assert [event.outcome for event in finished] == ["cancelled"]
            assert finished[0].output_tokens < 200
            page = (await http.get("/metrics")).text
            assert 'dynamo_es_routing_active_requests{model="e2e"} 0.0' in page

    @pytest.mark.crash
    async def test_a_killed_worker_is_found_out_and_the_rest_serve(self, running):
        worker = next(process for process in running.processes if process.name == "worker-1")
        async with httpx.AsyncClient(base_url=running.base, timeout=60) as http:
            body = {"model": MODEL, "messages": question("Hi"), "max_tokens": 8}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            await worker.end(signal.SIGKILL)
            for number in range(8):
                body["messages"] = question(f"Hi {number}")
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
            await running.wait_workers(1)
            health = (await http.get("/health")).json()
            assert len(health["instances"]) == 1

    @pytest.mark.crash
    async def test_a_frontend_killed_in_the_middle_comes_back_with_its_view(self, running):
        frontend = running.processes[0]
        async with httpx.AsyncClient(base_url=running.base, timeout=60) as http:
            body = {"model": MODEL, "messages": question("Hi"), "max_tokens": 8}
            first = (await http.post("/v1/chat/completions", json=body)).json()
            await self.finished(running, first["id"].removeprefix("chatcmpl-"))
            await self.indexed(running, blocks=21)
            with contextlib.suppress(httpx.HTTPError):
                body["stream"] = True
                async with http.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 3000}) as stream:
                    await anext(stream.aiter_bytes())
                    await frontend.end(signal.SIGKILL)
        await running.frontend()
        await running.wait_workers(2)
        async with httpx.AsyncClient(base_url=running.base, timeout=60) as http:
            answer = (await http.post("/v1/chat/completions", json={**body, "stream": False})).json()
        events = await self.finished(running, answer["id"].removeprefix("chatcmpl-"))
        routed = next(event for event in events if isinstance(event, Routed))
        assert routed.overlap_blocks > 20, routed

    async def test_a_worker_that_hung_for_long_comes_back_with_its_cache(self, running):
        async with httpx.AsyncClient(base_url=running.base, timeout=60) as http:
            body = {"model": MODEL, "messages": question("Hi"), "max_tokens": 4}
            first = (await http.post("/v1/chat/completions", json=body)).json()
            events = await self.finished(running, first["id"].removeprefix("chatcmpl-"))
            chosen = next(event for event in events if isinstance(event, Routed)).worker_id
            worker = next(process for process in running.processes if process.ready == f"worker {chosen}")
            worker.process.send_signal(signal.SIGSTOP)
            await running.wait_workers(1)
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            worker.process.send_signal(signal.SIGCONT)
            await running.wait_workers(2)
            async with asyncio.timeout(60):
                while True:
                    body["messages"] = question("And now?")
                    answer = (await http.post("/v1/chat/completions", json=body)).json()
                    events = await self.finished(running, answer["id"].removeprefix("chatcmpl-"))
                    routed = next(event for event in events if isinstance(event, Routed))
                    overlaps = {row.worker_id: row.device_blocks for row in routed.candidates}
                    if overlaps.get(chosen, 0) > 20:
                        break

    async def test_a_worker_that_is_told_to_stop_finishes_its_streams(self, fleet):
        await fleet.frontend()
        worker = await fleet.worker(1, "--speedup-ratio", "2")
        await fleet.wait_workers(1)
        async with httpx.AsyncClient(base_url=fleet.base, timeout=60) as http:
            body = {"model": MODEL, "messages": question("Slow"), "max_tokens": 200, "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                worker.process.terminate()
                rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert await worker.process.wait() == 0
        await fleet.wait_workers(0)
