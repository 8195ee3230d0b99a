from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.models.errors import ModelError
from dynamo_es.models.runtime_config import ModelRuntimeConfig, check_runtime_config

GOLDEN = Path(__file__).parents[2] / "data/golden/services"
DEFAULTS = json.loads((GOLDEN / "model_runtime_config_defaults.json").read_text())["defaults"]
CASES = json.loads((GOLDEN / "model_runtime_config_setters.json").read_text())["cases"]
SETTERS = [case for case in CASES if "attr" in case]
STRUCTURAL = [case for case in CASES if "arg" in case]
# Newer Dynamo takes any value for the engine's own, not JSON text alone; both are taken here.
DEPARTURES = {"engine_specific#11"}


def outcome(call: Any) -> dict[str, str]:
    """A result as the recording has it; our own error class stands for the reference's bare Exception."""
    try:
        return {"ok": repr(call())}
    except (ModelError, ValueError, TypeError, OverflowError, AttributeError) as error:
        name = "Exception" if isinstance(error, ModelError) else type(error).__name__
        return {"err": name, "msg": str(error)}


def test_defaults_are_the_references() -> None:
    config = ModelRuntimeConfig()
    assert {name: repr(getattr(config, name)) for name in DEFAULTS} == DEFAULTS


@pytest.mark.parametrize("case", SETTERS, ids=lambda case: case["case"])
def test_setters_take_and_refuse_what_the_reference_does(case: dict[str, Any]) -> None:
    config = ModelRuntimeConfig()

    def set_and_get() -> Any:
        setattr(config, case["attr"], ast.literal_eval(case["value"]))
        return getattr(config, case["attr"])

    assert outcome(set_and_get) == case["result"]


@pytest.mark.parametrize("case", STRUCTURAL, ids=lambda case: case["case"])
def test_structural_tags(case: dict[str, Any]) -> None:
    assert outcome(lambda: getattr(ModelRuntimeConfig(), case["call"])(case["arg"])) == case["result"]


def test_engine_specific_values_as_recorded() -> None:
    config = ModelRuntimeConfig()
    for case in (case for case in CASES if "calls" in case):
        verb, arguments = re.fullmatch(r"(set|get)\((.*)\)", case["calls"]).groups()  # type: ignore[union-attr]
        call = getattr(config, f"{verb}_engine_specific")
        given = ast.literal_eval(f"({arguments},)")
        found = outcome(lambda call=call, given=given: call(*given))
        assert (found == case["result"]) is (case["case"] not in DEPARTURES), case["case"]


@pytest.mark.parametrize(
    ("value", "shown", "read"),
    [
        (' {"b" : [1, 2.0, 1e3], "a":null} ', '{"b":[1,2.0,1000.0],"a":null}', "invalid type: map, expected a string"),
        ("5", "5", "invalid type: integer `5`, expected a string"),
        ("[1]", "[1]", "invalid type: sequence, expected a string"),
        ("null", "null", "invalid type: null, expected a string"),
        ("true", "true", "invalid type: boolean `true`, expected a string"),
        ("1.5", "1.5", "invalid type: floating point `1.5`, expected a string"),
        ('"text"', '"text"', None),
    ],
)
def test_engine_values_of_every_kind(value: str, shown: str, read: str | None) -> None:
    """As ai-dynamo-runtime 1.5.1 answers."""
    config = ModelRuntimeConfig()
    config.set_engine_specific("k", value)
    assert config.runtime_data == {"k": shown}
    expected = {"ok": "'text'"} if read is None else {"err": "Exception", "msg": read}
    assert outcome(lambda: config.get_engine_specific("k")) == expected


def test_engine_values_that_are_no_json() -> None:
    config = ModelRuntimeConfig()
    config.set_engine_specific("k", {"a": [1, None]})
    assert config.runtime_data == {"k": '{"a":[1,null]}'}
    for text, error in (
        ("", "EOF while parsing a value at line 1 column 0"),
        ('{"a"', "EOF while parsing an object at line 1 column 4"),
    ):
        assert outcome(lambda text=text: config.set_engine_specific("k", text)) == {"err": "Exception", "msg": error}
    with pytest.raises(TypeError, match="cannot be written as JSON"):
        config.set_engine_specific("k", object())
    with pytest.raises(ModelError):
        config.set_engine_specific("k", "[" * 100_000 + "]" * 100_000)
    assert config.runtime_data == {"k": '{"a":[1,null]}'}


def test_the_disaggregated_endpoint_is_replaced_as_a_whole() -> None:
    """golden/services/model_runtime_config_setters.json ``disagg``."""
    config = ModelRuntimeConfig()
    config.set_disaggregated_endpoint("h", 1)
    assert (config.bootstrap_host, config.bootstrap_port) == ("h", 1)
    config.set_disaggregated_endpoint()
    assert (config.bootstrap_host, config.bootstrap_port) == (None, None)
    assert outcome(lambda: config.set_disaggregated_endpoint("h", 70_000))["err"] == "OverflowError"
    assert outcome(lambda: setattr(config, "bogus", 1))["err"] == "AttributeError"
    assert outcome(lambda: config.bogus)["err"] == "AttributeError"


def test_what_is_read_is_a_copy() -> None:
    config = ModelRuntimeConfig()
    config.taints.add("a")
    config.topology_domains["zone"] = "z"
    assert (config.taints, config.topology_domains) == (set(), {})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"topology_domains": {"a=b": "c"}}, "topology_domains: topology_domains key must not contain '='"),
        ({"topology_domains": {" a": "c"}}, "topology_domains: topology_domains key must not contain leading or"),
        ({"topology_domains": {"a": ""}}, "topology_domains: topology_domains value must be non-empty"),
        ({"kv_transfer_enforcement": "required"}, "__all__: kv_transfer_enforcement requires kv_transfer_domain"),
        (
            {"kv_transfer_preferred_weight": 0.5},
            "__all__: kv_transfer_preferred_weight can only be set when kv_transfer_enforcement is preferred",
        ),
    ],
)
def test_values_that_do_not_agree(changes: dict[str, Any], text: str) -> None:
    config = ModelRuntimeConfig()
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        check_runtime_config(config.card_body())
