"""Functions of ``dynamo.frontend``, as Dynamo's were recorded."""

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
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.frontend import sglang_prepost, thinking, utils
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
}


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
    check(case, lambda: PLAIN[name](**given))


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
