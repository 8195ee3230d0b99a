"""The public names of ``dynamo_es.llm``: where Dynamo has them, and what they are."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(("name", "recorded"), HIERARCHY["mro"].items())
def test_exceptions_derive_from_each_other_as_in_dynamo(name: str, recorded: list[str]) -> None:
    owner = llm if name == "HttpError" else exceptions
    mro = [each.__name__ for each in getattr(owner, name).__mro__]
    expected = [each.rpartition(".")[2] for each in recorded]
    assert [each for each in mro if each in expected] == expected
