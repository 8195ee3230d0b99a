"""Functions of ``dynamo.frontend``, as Dynamo's were recorded.

``test_frontend_args`` replays arguments and ``HttpError``, ``test_route_extensions`` what belongs to routes.
"""

from __future__ import annotations

import ast
import json
import logging
import pickle
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.frontend import chat_envelopes, guidance, sglang_output, sglang_prepost, thinking, utils, vllm_processor
from tests.unit.frontend.golden_replay import DATA

RECORDED: Mapping[str, Any] = json.loads((DATA / "golden" / "frontend" / "functions.json").read_text())
PLAIN: Mapping[str, Callable[..., Any]] = {
    "make_backend_error": utils.make_backend_error,
    "make_internal_error": utils.make_internal_error,
    "handle_engine_error": lambda **given: utils.handle_engine_error(**given, logger=logging.getLogger("test")),
    "nvext_extra_field_requested": utils.nvext_extra_field_requested,
    "worker_warmup": utils.worker_warmup,
    "extract_mm_urls": utils.extract_mm_urls,
    "runtime_default_thinking_mode": thinking.runtime_default_thinking_mode,
    "apply_default_thinking_mode_to_template_kwargs": thinking.apply_default_thinking_mode_to_template_kwargs,
    "detect_force_reasoning_from_template": sglang_prepost.detect_force_reasoning_from_template,
    "resolve_request_force_reasoning": sglang_prepost.resolve_request_force_reasoning,
    "build_response_format_guided_decoding": sglang_prepost.build_response_format_guided_decoding,
    "legacy_guided_decoding (helper)": guidance.legacy_guided_decoding,
    "runtime_structural_tag_options (helper)": guidance.runtime_structural_tag_options,
    "should_attempt_structural_tag (helper)": guidance.should_attempt_structural_tag,
    "as_error_envelope (helper)": chat_envelopes.as_error_envelope,
    "response_usage (helper)": chat_envelopes.response_usage,
    "sglang finish-reason mapping (helper)": sglang_output.map_sglang_finish_reason,
}
ELSEWHERE = {
    "test_frontend_args": (
        "HttpError(...)", "parse_args / FrontendConfig.validate", "validate_model_name", "validate_model_path",
    ),
    "test_route_extensions": ("FrontendResponse(...)", "FrontendRoute(...)", "load_frontend_route_extensions"),
}  # fmt: skip
"""Entries that another module replays."""
HERE = (
    *PLAIN, "PreprocessError", "backend_invalid_argument_to_http_error (helper)", "convert_tools", "map_finish_reason",
    "random_call_id", "random_uuid", "read_jinja_chat_template", "resolve_chat_template",
)  # fmt: skip


def test_every_recorded_entry_is_replayed() -> None:
    told = {name: (Path(__file__).parent / f"{name}.py").read_text() for name in ELSEWHERE}
    elsewhere = [entry for entries in ELSEWHERE.values() for entry in entries]
    assert sorted([*HERE, *elsewhere]) == sorted(RECORDED)
    for module, entries in ELSEWHERE.items():
        assert [entry for entry in entries if f'cases("{entry}")' not in told[module]] == []


def cases(*names: str) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{place}")
        for name in names
        for place, case in enumerate(RECORDED[name]["cases"])
    ]


def check(case: Mapping[str, Any], call: Callable[[], Any], directory: Path | None = None) -> None:
    if "raises" in case:
        try:
            call()
        except Exception as error:
            found = error
        assert type(found).__name__ == case["raises"]
        told = str(found)
        assert (told if directory is None else told.replace(str(directory), "<dir>")) == case["message"]
        return
    found = json.loads(json.dumps(call()))
    assert found == case["output"]


@pytest.mark.parametrize(("name", "case"), cases(*PLAIN))
def test_function(name: str, case: Mapping[str, Any]) -> None:
    given = dict(case["input"])
    if isinstance(given.get("request"), str):
        given["request"] = ast.literal_eval(given["request"])
    # A finish reason is the only argument of its function here.
    call = PLAIN[name]
    check(case, lambda: call(given["raw"]) if list(given) == ["raw"] else call(**given))


@pytest.mark.parametrize(("name", "case"), cases("backend_invalid_argument_to_http_error (helper)"))
def test_status_of_a_backend(name: str, case: Mapping[str, Any]) -> None:
    error = chat_envelopes.backend_invalid_argument_to_http_error(RuntimeError(case["input"]["exception_text"]))
    assert (None if error is None else {"code": error.code, "message": error.message}) == case["output"]


class FinishReason(Enum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


@pytest.mark.parametrize(("name", "case"), cases("map_finish_reason"))
def test_map_finish_reason(name: str, case: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was recorded, with a stand-in for vLLM's reasons; the integration tests have vLLM's own."""
    module: Any = types.ModuleType("vllm.v1.engine")
    module.FinishReason = FinishReason
    for part in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = vllm_processor.map_finish_reason(case["input"]["raw_reason"])
    assert (None if found is None else found.name) == case["output"]


@pytest.mark.parametrize(("name", "case"), cases("random_uuid", "random_call_id"))
def test_random_ids(name: str, case: Mapping[str, Any]) -> None:
    pattern = r"(call_)?[0-9a-f]{16}"
    function: Callable[[], str] = getattr(utils, name)
    assert re.fullmatch(pattern, case["output"]["example"])
    assert re.fullmatch(pattern, function())
    assert function().startswith("call_") == (name == "random_call_id")
    assert function() != function()


@pytest.mark.parametrize(("name", "case"), cases("PreprocessError"))
def test_preprocess_error(name: str, case: Mapping[str, Any]) -> None:
    error = utils.PreprocessError(case["input"]["message"])
    assert str(pickle.loads(pickle.dumps(error))) == case["output"]["pickle_roundtrip"]
    assert (str(error), list(error.args)) == (case["output"]["str"], case["output"]["args"])


@pytest.mark.parametrize(("name", "case"), cases("read_jinja_chat_template"))
def test_template_file(name: str, case: Mapping[str, Any], tmp_path: Path) -> None:
    given = case["input"]
    file = tmp_path / "zz.jinja"
    if given["file_text"] != "<missing file>":
        file.write_bytes(given["file_text"].encode())
    check(case, lambda: utils.read_jinja_chat_template(str(file), backend=given["backend"]), tmp_path)


@pytest.mark.parametrize(("name", "case"), cases("resolve_chat_template"))
def test_template_of_a_directory(name: str, case: Mapping[str, Any], tmp_path: Path) -> None:
    for file, text in case["input"]["files"].items():
        (tmp_path / file).write_bytes(text.encode())
    check(case, lambda: utils.resolve_chat_template(str(tmp_path), backend=case["input"]["backend"]), tmp_path)


@dataclass
class Function:
    name: str
    description: str | None
    parameters: Any
    strict: bool | None


@dataclass
class Tool:
    type: str
    function: Function


@pytest.mark.parametrize(("name", "case"), cases("convert_tools"))
def test_convert_tools(name: str, case: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("sglang.srt.entrypoints.openai.protocol")
    module.Function, module.Tool = Function, Tool
    for part in ("sglang", "sglang.srt", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = sglang_prepost.convert_tools(case["input"]["tools"])
    assert (None if made is None else [asdict(one) for one in made]) == case["output"]
