"""The scripted worker of the recorded transcripts: it obeys the last ``<<<{json}>>>`` of its prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from dynamo_es import errors
from dynamo_es.frontend.errors import HttpError
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.runtime.context import Context

Frame = dict[str, Any]


RECORDED_SUMS = {
    "s-ctx": "df3ce90eaa293946e988569ec8c820117689e60d271d0d8a7dab7b0fa4a83561",
    "s-hermes": "27e90b36fa5f934ee37639dfdc789e4da4933b9b393e5b3ae6f2e8d3730ba87a",
}
RECORDED_SUM = "a712aebaefc84d9719b07bbb55098ef67c1c4db409161cfe0f49e91d98c57063"
"""Checksums of the recorded models' cards; part of what that worker wrote, hence of its token counts."""
NO_LENGTH = "`max_output_tokens` (or `max_tokens`) is required by the mocker worker"


class WorkerUnavailable(errors.CannotConnect):
    pass


class GoldenWorker:
    """``routed_by_kv``: recorded behind the KV router, which sets a rank. ``needs_length``: as Dynamo's mock engine."""

    def __init__(self, tokenizer: Tokenizer, *, needs_length: bool = False) -> None:
        self._tokenizer = tokenizer
        self.needs_length = needs_length
        self.routed_by_kv = False

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, False) if text else []

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[Frame], None]:
        if self.needs_length and request["stop_conditions"]["max_tokens"] is None:
            raise errors.InvalidArgument(NO_LENGTH)
        prompt = self._tokenizer.decode(request["token_ids"], False)
        script: dict[str, Any] = {"text": "Hello there, friend."}
        start, end = prompt.rfind("<<<"), prompt.rfind(">>>")
        if 0 <= start < end:
            script = json.loads(prompt[start + 3 : end])
        for frames in self._frames(request, script):
            await asyncio.sleep(script.get("delay", 0))
            yield frames

    def _as_recorded(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request without what reaches workers here only, with what Dynamo's cards and KV router add."""
        recorded_sum = RECORDED_SUMS.get(request["model"], RECORDED_SUM)
        shown = {**request, "token_ids": len(request["token_ids"]), "mdc_sum": recorded_sum}
        shown["sampling_options"] = {
            name: value for name, value in request["sampling_options"].items() if name != "logit_bias"
        }
        extra = {name: value for name, value in request.get("extra_args", {}).items() if name not in ("echo", "suffix")}
        shown.pop("extra_args", None)
        if extra:
            shown["extra_args"] = extra
        if self.routed_by_kv:
            shown["routing"] = {**request["routing"], "dp_rank": 0}
        return shown

    def _frames(self, request: dict[str, Any], script: dict[str, Any]) -> Iterator[list[Frame]]:
        if "raise" in script:
            for token_id in self._encode(script.get("after", "")):
                yield [{"token_ids": [token_id]}]
            raise _exception(script)
        if "multi" in script:
            yield from self._multi(script["multi"])
            return
        yield from self._single(request, script)

    def _multi(self, texts: list[str]) -> Iterator[list[Frame]]:
        ids = [self._encode(text) for text in texts]
        for place in range(max(map(len, ids))):
            for index, choice in enumerate(ids):
                if place < len(choice):
                    last = place == len(choice) - 1
                    finish = ("length" if index == 0 else "stop") if last else None
                    yield [{"token_ids": [choice[place]], "index": index, "finish_reason": finish}]

    def _single(self, request: dict[str, Any], script: dict[str, Any]) -> Iterator[list[Frame]]:
        finish = script.get("finish", "stop")
        limit = request["stop_conditions"]["max_tokens"]
        if script.get("dump"):
            shown = self._as_recorded(request)
            ids = self._encode(json.dumps(shown, sort_keys=True))
            size = max(len(ids), 1)
        else:
            ids = script.get("ids") or self._encode(script.get("text", ""))
            size = script.get("chunk", 1)
            if limit is not None and limit < len(ids):
                ids, finish = ids[:limit], "length"
        items = [ids[place : place + size] for place in range(0, len(ids), size)] or [[]]
        for place, item in enumerate(items):
            one: Frame = {"token_ids": item, "finish_reason": None}
            count = request["output_options"]["logprobs"]
            if count is not None:
                one["log_probs"] = [-0.5 - 0.25 * (place % 3) for place in range(len(item))]
                one["top_logprobs"] = [
                    [{"rank": rank, "token_id": token + rank, "logprob": -0.5 - rank} for rank in range(max(count, 1))]
                    for token in item
                ]
            if place == len(items) - 1:
                if not script.get("nofinish"):
                    one["finish_reason"] = finish
                if "usage" in script:
                    one["completion_usage"] = script["usage"]
            yield [one]


def _exception(script: dict[str, Any]) -> Exception:
    kind, text = script["raise"], script.get("msg", "x")
    if kind == "value":
        return ValueError(text)
    if kind == "http":
        return HttpError(script.get("code", 400), text)
    if kind == "WorkerUnavailable":
        return WorkerUnavailable(text)
    known: type[Exception] | None = getattr(errors, kind, None)
    return known(text) if known is not None else RuntimeError(text)
