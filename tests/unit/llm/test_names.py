"""The public names of ``dynamo_es.llm``: where Dynamo has them, and what they are."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dynamo_es.llm as llm
from dynamo_es.llm import exceptions

HIERARCHY = json.loads((Path(__file__).parents[2] / "data/golden/services/exception_hierarchy.json").read_text())


def test_every_name_is_there_once_and_in_order() -> None:
    assert all(hasattr(llm, name) for name in llm.__all__)
    assert len(set(llm.__all__)) == len(llm.__all__)
    assert list(llm.__all__) == sorted(llm.__all__, key=lambda name: (not name[0].isupper(), name))


def test_earlier_names_are_the_same_functions() -> None:
    assert (llm.fetch_llm, llm.register_llm, llm.unregister_llm) == (
        llm.fetch_model, llm.register_model, llm.unregister_model,
    )  # fmt: skip


def test_type_checkers_find_each_name_where_the_interpreter_finds_it() -> None:
    (block,) = [node for node in ast.parse(Path(llm.__file__).read_text()).body if isinstance(node, ast.If)]
    found = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert found == {name: (f"dynamo_es.{room}", known) for name, (room, known) in llm._PLACES.items()}
    assert set(found) == set(llm.__all__)


def test_importing_it_does_not_import_what_some_of_its_names_need() -> None:
    heavy = ("fastapi", "transformers", "uvicorn", "tokenizers", "numpy", "zmq", "grpc", "rocksdict")
    code = f"import sys, dynamo_es.llm; sys.exit([name for name in {heavy!r} if name in sys.modules] or 0)"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_is_not_there_is_an_attribute_error_and_the_others_are_listed() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nobody'"):
        _ = llm.nobody  # type: ignore[attr-defined]
    assert set(llm.__all__) <= set(dir(llm))


@pytest.mark.parametrize(("name", "recorded"), HIERARCHY["mro"].items())
def test_exceptions_derive_from_each_other_as_in_dynamo(name: str, recorded: list[str]) -> None:
    owner = llm if name == "HttpError" else exceptions
    mro = [each.__name__ for each in getattr(owner, name).__mro__]
    expected = [each.rpartition(".")[2] for each in recorded]
    assert [each for each in mro if each in expected] == expected
