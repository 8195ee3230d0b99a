"""Names of ``dynamo.frontend`` at their import paths: Dynamo's documentation lists 12 classes and 31 functions."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.frontend.golden_replay import DATA

LISTED: list[Mapping[str, Any]] = json.loads((DATA / "golden" / "frontend" / "python_api.json").read_text())


def parameters(signature: str) -> list[tuple[str, bool]]:
    """Names of a documented signature, and whether each has a default."""
    text = signature if "->" in signature else f"{signature} -> None"
    function = ast.parse(f"def {text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    places = [*given.posonlyargs, *given.args]
    defaults = [False] * (len(places) - len(given.defaults)) + [True] * len(given.defaults)
    named = [(arg.arg, default is not None) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return [*zip([arg.arg for arg in places], defaults, strict=True), *named]


def found(item: Mapping[str, Any]) -> Any:
    module = importlib.import_module(item["module"].replace("dynamo.", "dynamo_es.", 1))
    return getattr(module, item["name"])


def test_the_list_is_whole() -> None:
    kinds = [item["kind"] for item in LISTED]
    assert (kinds.count("class"), kinds.count("function")) == (12, 31)


@pytest.mark.parametrize("item", LISTED, ids=[f"{item['module']}.{item['name']}" for item in LISTED])
def test_name(item: Mapping[str, Any]) -> None:
    """It is there, can be called as documented, and has the documented methods."""
    here = found(item)
    assert inspect.isclass(here) == (item["kind"] == "class")
    for method in item["methods"]:
        assert callable(getattr(here, method))
    if item["signature"] is None:
        return
    ours = inspect.signature(here).parameters
    variable = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in ours.values())
    for name, has_default in parameters(item["signature"]):
        assert name in ours or variable, f"no parameter {name}"
        if has_default and name in ours:
            assert ours[name].default is not inspect.Parameter.empty, f"{name} has no default"
    documented = {name for name, _ in parameters(item["signature"])}
    needed = {
        name
        for name, one in ours.items()
        if one.default is inspect.Parameter.empty
        and one.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    }
    assert needed <= documented
