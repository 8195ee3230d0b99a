"""Recorded answers of Dynamo's routes beside chat and completions, and of what its options change.

As in ``test_golden_transcripts``: byte for byte but for ids and times; errors carry one more member here.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.contracts import ModelStatus, ServedModel
from dynamo_es.frontend.servable import NoTokenizer
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.http_error import HttpError
from dynamo_es.router.overload import BusyThresholds
from dynamo_es.runtime.context import Context
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import application, card
from tests.unit.frontend.golden_replay import flat, holds, masked, recorded, request_bytes
from tests.unit.frontend.golden_worker import GoldenWorker

GROUPS = (
    *("anthropic", "busy", "classify", "embeddings", "embeddings_text", "env_overrides", "env_overrides2", "images"),
    *("nvext", "pooling", "rerank", "responses", "routes", "worker_loss"),
)
PARSERS: Mapping[str, dict[str, str]] = {
    "s-hermes": {"tool_call_parser": "hermes"},
    "s-qwen": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
}
USAGE = {"prompt_tokens": 3, "total_tokens": 3}
FLOATS = {"index": 0, "object": "embedding", "embedding": [0.1, 0.2, 0.3]}
ONE_TWO = base64.b64encode(struct.pack("<2f", 1.0, 2.0)).decode()
POOLED = {"id": "pool-1", "object": "list", "created": 5, "model": "s-cls", "usage": USAGE}
# What the recorded workers answered.
ANSWERS: Mapping[str, Any] = {
    "embeddings": {"nothing": "that could be understood"},
    "embeddings_text": {"object": "list", "model": "s-embt", "data": [FLOATS], "usage": USAGE},
    "embeddings_text/worker_b64_client_float": {
        "object": "list",
        "model": "s-embt",
        "data": [{**FLOATS, "embedding": ONE_TWO}],
        "usage": USAGE,
    },
    "embeddings_text/worker_bad_shape": {"vectors": []},
    "classify": {
        "id": "classify-1",
        "object": "list",
        "created": 5,
        "model": "s-cls",
        "data": [{"index": 0, "label": "POS", "probs": [0.25, 0.75], "num_classes": 2}],
        "usage": USAGE,
    },
    "pooling": {**POOLED, "data": [{"index": 0, "object": "pooling", "data": [0.1, 0.2]}]},
    "pooling/bytes": {**POOLED, "data": [{"index": 0, "object": "pooling", "data": ONE_TWO, "shape": [2]}]},
    "rerank": {"results": [{"index": 0, "relevance_score": 0.9}]},
    "images": {"created": 1, "data": [{"url": "http://x/y.png"}]},
}
# Thresholds as calls before them left them.
THRESHOLDS: Mapping[str, BusyThresholds] = {
    **dict.fromkeys(("busy/int_for_float", "busy/bool", "busy/frac_neg"), BusyThresholds(0.0, 10_000_000, None)),
    "busy/extra_field": BusyThresholds(1.0, 10_000_000, None),
    "routes/busy_get2": BusyThresholds(0.9, 100_000, None),
    **dict.fromkeys(("routes/busy_unset", "routes/busy_get3"), BusyThresholds(0.9, 100_000, 2.5)),
}
# spec/frontend.md 1
ROUTES = (
    *("GET /busy_threshold", "POST /busy_threshold", "GET /health", "GET /live", "GET /metrics"),
    *("POST /v1/audio/speech", "POST /v1/chat/completions", "POST /v1/classify", "POST /v1/completions"),
    *("POST /v1/embeddings", "POST /v1/images/edits", "POST /v1/images/generations", "GET /v1/models"),
    *("GET /v1/models/{model_id}", "GET /v1/models/{model_id}/ready", "POST /v1/pooling", "GET /v1/realtime"),
    *("POST /v1/rerank", "POST /v1/responses", "POST /v1/responses/input_tokens", "POST /v1/videos"),
    "POST /v1/videos/stream",
)
COMMENT = ":\n\n"
READY = ModelStatus(
    True,
    None,
    {
        "dynamo": {
            "ready": True,
            "worker_types": {"aggregated": {"workers": 1, "needs": []}},
            "present": ["aggregated"],
            "missing_worker_types": [],
        }
    },
)
ENV_OVERRIDES = FrontendConfig(
    body_limit_mb=1,
    disable_nvext=True,
    force_include_usage=True,
    ignore_unsupported_fields=True,
    pre_commit_error_peek_ms=500,
    sse_keep_alive_ms=300,
    disable_admin_api=True,
)
ENV_OVERRIDES_PATHS = HttpPathsConfig(chat="/my/chat", health="/hz")
ENV_OVERRIDES_2 = FrontendConfig(overload_status_code=507, enable_anthropic_api=True)
ENV_OVERRIDES_2_PATHS = HttpPathsConfig(
    completions="/c", embeddings="/e", responses="/r", models="/m", live="/l", metrics="/mt", anthropic="/an"
)


@dataclass
class FixedWorker:
    """Answers everything with ``answer``."""

    answer: Any = None

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[Any], None]:
        yield [self.answer]


@dataclass
class Busy:
    """Whether the fleet takes nothing."""

    on: bool = False

    def __call__(self) -> bool:
        return self.on


class BusyWorker(GoldenWorker):
    """A recorded worker behind a router that refuses while the fleet is busy."""

    def __init__(self, tokenizer: Tokenizer, busy: Busy, *, needs_length: bool) -> None:
        super().__init__(tokenizer, needs_length=needs_length)
        self._busy = busy

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[Any], None]:
        if context.placement is not None:
            context.placement.note_worker("", 7, None)
        if self._busy():
            raise HttpError(529, "all workers are overloaded")
        async for frames in super().generate(request, context):
            yield frames


@dataclass
class Stage:
    """An application with what tests set in it."""

    app: FrontendApp
    worker: FixedWorker
    busy: Busy
    limits: dict[str, BusyThresholds]


def models_of(group: str, worker: FixedWorker, busy: Busy, loaded: tuple[Tokenizer, ChatRenderer]) -> list[ServedModel]:
    tokenizer, renderer = loaded
    models = [
        ServedModel(
            name,
            card(name, context_length=0 if name == "smol" else 8192, runtime_config=PARSERS.get(name, {})),
            tokenizer,
            renderer,
            BusyWorker(tokenizer, busy, needs_length=name == "smol"),
            0,
            busy,
        )
        for name in ("smol", "s-plain", "s-hermes", "s-qwen")
    ]
    models.append(
        ServedModel("s-emb", card("s-emb", model_type="Embedding", context_length=8192), tokenizer, None, worker, 0)
    )
    types = {"s-embt": "Embedding", "s-cls": "Classify | Pooling", "s-rerank": "Rerank", "s-img": "Images"}
    models += [
        ServedModel(name, card(name, model_type=kind, model_input="Text"), NoTokenizer(), None, worker, 0)
        for name, kind in types.items()
    ]
    kept = {"routes": {"smol", "s-plain", "s-emb"}, "busy": {"smol"}, "worker_loss": set[str]()}
    return [model for model in models if group not in kept or model.name in kept[group]]


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def stages(executor: ThreadPoolExecutor, smollm: tuple[Tokenizer, ChatRenderer]) -> Callable[[str], Stage]:
    """Makes the stage of a group, once."""

    @cache
    def stage(group: str) -> Stage:
        worker, busy, limits = FixedWorker(), Busy(), dict[str, BusyThresholds]()
        config, paths = FrontendConfig(enable_anthropic_api=group == "anthropic"), None
        if group == "env_overrides":
            config, paths = ENV_OVERRIDES, ENV_OVERRIDES_PATHS
        elif group == "env_overrides2":
            config, paths = ENV_OVERRIDES_2, ENV_OVERRIDES_2_PATHS
        app = application(
            *models_of(group, worker, busy, smollm),
            executor=executor,
            config=config,
            paths=paths,
            limits=limits,
            ready=READY,
        )
        return Stage(app, worker, busy, limits)

    return stage


# -- what differs ------------------------------------------------------------------------------------------------------

# Recorded without a body, or as plain text; here errors always carry both shapes, so that a client can tell what to do.
TEXT_HERE_JSON = {
    "anthropic/malformed": "JSON",
    "anthropic/ct": "JSON",
    "rerank/malformed": "JSON",
    "busy/malformed": "JSON",
}
NO_BODY_THERE = (
    *("anthropic/get", "worker_loss/after_all_workers_gone_chat"),
    *("routes/post_v1_rerank", "routes/post_v1_classify", "routes/post_v1_pooling"),
)
# A 404 there; here they say that they are not implemented.
ANNOUNCED = (
    *("routes/post_v1_images_generations", "routes/post_v1_images_edits", "routes/post_v1_videos"),
    *("routes/post_v1_audio_speech", "routes/post_v1_realtime", "routes/get_realtime"),
)
# Dynamo could not route token-input embeddings in KV mode; here only the recorded worker is at fault.
ROUTED_HERE = tuple(name for name, item in recorded(["embeddings"]) if item["status"] == 500)
# Lists of other models, health that tells more, generated pages.
MORE_HERE = (
    *("routes/models_list", "routes/model_smol", "routes/health", "routes/busy_get", "routes/busy_get2"),
    *("routes/busy_get3", "env_overrides/health_custom", "busy/health_while_busy", "anthropic/models_anthropic_header"),
    *("env_overrides2/models", "worker_loss/after_all_workers_gone_health"),
)
PAGES = ("routes/docs_slash", "routes/openapi")
# Comments on a silent stream come whenever it is silent.
COMMENTED = ("env_overrides/keepalive",)
# Here the message says where the body ends, as everywhere.
POSITION_HERE = ("images/noprompt",)
# Pins to workers are the router's to refuse (``test_golden_life``); there is none before the recorded worker here.
# Ranks can be asked for in every router mode.
PINNED = (
    *("nvext/backend_instance_id_unknown", "nvext/dp_rank", "nvext/dp_rank_bad", "nvext/token_data_with_instance"),
    *("nvext/h_worker", "nvext/h_worker_alias"),
)
# Arguments of calls come in fragments here; Dynamo sends them at once.
FRAGMENTS_HERE = ("anthropic/tool_stream",)


def cases() -> Iterator[Any]:
    for name, item in recorded(GROUPS):
        yield pytest.param(name, item, id=name)


def answer_of(name: str) -> Any:
    return ANSWERS.get(name, ANSWERS.get(name.partition("/")[0]))


@pytest.mark.parametrize(("name", "item"), list(cases()))
async def test_answer_is_that_of_dynamo(name: str, item: dict[str, Any], stages: Callable[[str], Stage]) -> None:
    group = name.partition("/")[0]
    stage = stages(group)
    stage.worker.answer = answer_of(name)
    stage.busy.on = name.startswith("busy/reject_") or "overload_507" in name
    stage.limits.clear()
    if name in THRESHOLDS:
        stage.limits["smol"] = THRESHOLDS[name]
    reply = await call(
        stage.app, item["path"], request_bytes(item["body"]), method=item["method"], headers=item["headers"] or {}
    )
    if name in ANNOUNCED:
        assert (reply.status, json.loads(reply.text)["error"]["code"]) == (501, "not_implemented")
        return
    if name in PINNED:
        assert item["status"] == 400
        return
    assert reply.status == item["status"], reply.text
    theirs = item["response_body"] or ""
    for header in ("content-type", "cache-control", "allow", "x-request-id"):
        if header in item["response_headers"] and name not in TEXT_HERE_JSON and name not in PAGES:
            assert reply.headers[header] == item["response_headers"][header]
    if name in PAGES:
        check_page(name, reply, theirs)
    elif name in TEXT_HERE_JSON:
        assert message_of(reply) == theirs
    elif name in NO_BODY_THERE:
        assert theirs == ""
        assert json.loads(reply.text)["code"] == reply.status
    elif name in ROUTED_HERE:
        assert json.loads(reply.text)["message"] == "Internal server error"
    elif name in MORE_HERE:
        if not theirs.endswith("[truncated]"):
            assert holds(json.loads(masked(reply.text)), shared(json.loads(masked(theirs)), stage.app))
    elif name in POSITION_HERE:
        assert message_of(reply).startswith(json.loads(theirs)["message"])
    elif name in COMMENTED:
        assert reply.text.count(COMMENT) >= 3
        assert masked(reply.text.replace(COMMENT, "")) == masked(theirs.replace(COMMENT, ""))
    elif name in FRAGMENTS_HERE:
        assert joined(reply.text) == joined(theirs)
    else:
        compare(reply, theirs)


def compare(reply: Reply, theirs: str) -> None:
    ours = reply.body.decode("utf-8", "replace")
    if reply.status >= 400 and theirs:
        body = json.loads(ours)
        if body.get("type") == "error":
            body = {"type": "error", "error": {key: body["error"][key] for key in ("type", "message")}}
        elif isinstance(body["error"], str):
            body = {"error": body["error"]}
        else:
            body = json.loads(flat(ours))
        ours = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    assert masked(ours) == masked(theirs)


def message_of(reply: Reply) -> str:
    body = json.loads(reply.text)
    assert body["code"] == reply.status
    return str(body["message"])


def shared(theirs: Any, app: FrontendApp) -> Any:
    """What was recorded, of models that are here."""
    names = {name for name, _ in app.service.directory.models()}
    for member in ("data", "thresholds"):
        if isinstance(theirs, dict) and isinstance(theirs.get(member), list):
            kept = [entry for entry in theirs[member] if entry.get("id", entry.get("model")) in names]
            assert kept
            return {**{key: value for key, value in theirs.items() if not key.endswith("_id")}, member: kept}
    if isinstance(theirs, dict) and "instances" in theirs:
        return {"status": theirs["status"]}
    return theirs


def check_page(name: str, reply: Reply, theirs: str) -> None:
    if name == "routes/docs_slash":
        assert "Swagger UI" in reply.text
        assert reply.headers["content-type"].startswith("text/html")
        return
    paths = reply.json()["paths"]
    assert set(ROUTES) <= {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def joined(text: str) -> list[Any]:
    """Events with fragments of arguments put together, the counts of the last one kept."""
    events: list[Any] = []
    for block in masked(text).split("\n\n"):
        data = block.partition("data: ")[2]
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        fragment = event.get("delta", {}).get("partial_json")
        last = events[-1] if events else {}
        if fragment is not None and last.get("delta", {}).get("partial_json") is not None:
            event["delta"]["partial_json"] = last["delta"]["partial_json"] + fragment
            events[-1] = event
        else:
            events.append(event)
    for event in events:
        if event.get("delta", {}).get("partial_json") is not None:
            event.pop("usage")
    return events
