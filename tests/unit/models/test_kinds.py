from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.models.endpoint_id import parse_endpoint_id
from dynamo_es.models.kinds import ModelInput, ModelType, WorkerType, parse_model_type
from dynamo_es.router.modes import RouterMode

GOLDEN = Path(__file__).parents[2] / "data/golden/services"
ENUMS = {"ModelInput": ModelInput, "WorkerType": WorkerType, "RouterMode": RouterMode}
VALUES = json.loads((GOLDEN / "enum_values.json").read_text())["cases"]
FLAGS = json.loads((GOLDEN / "model_type_flags.json").read_text())["cases"]


@pytest.mark.parametrize(
    "case", [case for case in VALUES if case["case"].split(".")[0] in ENUMS], ids=lambda case: case["case"]
)
def test_numbers_and_texts_are_the_references(case: dict[str, Any]) -> None:
    kind, name = case["case"].split(".")
    value = ENUMS[kind][name]  # type: ignore[index]
    assert (int(value), str(value), repr(value)) == (case["int"], case["str"], case["repr"])


@pytest.mark.parametrize("case", FLAGS, ids=lambda case: case["case"])
def test_model_types_say_what_they_support(case: dict[str, Any]) -> None:
    value = ModelType[case["case"]]
    assert str(value) == case["str"]
    for api in ("chat", "classify", "embedding", "pooling"):
        assert getattr(value, f"supports_{api}")() is case[f"supports_{api}"]


def test_model_types_are_joined_in_the_order_of_their_declaration() -> None:
    joined = ModelType.Completions | ModelType.Chat | ModelType.TensorBased
    assert str(joined) == "chat,completions,tensor"
    assert joined.card_text() == "Chat | Completions | TensorBased"
    assert parse_model_type(joined.card_text()) == joined
    assert joined.supports_chat()
    assert ModelType.Empty.card_text() == ""
    assert parse_model_type("") is ModelType.Empty
    with pytest.raises(TypeError, match="unsupported operand"):
        ModelType.Chat | 5  # type: ignore[operator]
    with pytest.raises(ValueError, match="unknown model type 'Chit'"):
        parse_model_type("Chat | Chit")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.b.c", "a/b/c"), ("dyn://x.y.z", "x/y/z"), ("a.b/c", "a/b/c"), ("a.b.c.d.e", "a/b/c_d_e"), ("a..c", "a/c/E"),
        (".b.c", "b/c/E"), ("a/b", "a/b/E"), ("x", "NS/x/E"), ("", "NS/C/E"), (" a . b", " a / b/E"),
    ],
)  # fmt: skip
def test_endpoint_names_are_read_leniently(text: str, shown: str) -> None:
    """As ai-dynamo-runtime 1.5.1 shows ``ModelRuntimeConfig.kv_state_endpoint``."""
    assert str(parse_endpoint_id(text)) == shown
