"""Outputs of real models and of their chat templates, with what a client should get: canitoolcall's corpus.

What differs is told here by fixture, each with its reason.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from dynamo_es.frontend.parsers.registry import REASONING_PARSERS, ChannelFormat
from dynamo_es.frontend.parsers.schema import ToolSchemas
from tests.unit.frontend.parsers.support import Read, parsing, pieces, read, whole

pytest.importorskip("canitoolcall")

from canitoolcall.fixtures import Fixture, load_fixtures
from canitoolcall.pytest_plugin import assert_conforms, family_for
from canitoolcall.results import ParsedToolCall, ParseResult

# A call that broke off was told while it came, as OpenAI does; its arguments are no JSON, and a client sees that.
BROKEN_OFF = (
    *("deepseek/v3-truncated-mid-arguments", "deepseek/v31-truncated-mid-arguments"),
    *("deepseek/v32-truncated-mid-arguments", "deepseek/v4-truncated-mid-arguments"),
    *("deepseek/v41-truncated-mid-arguments", "gemma4/truncated-mid-string", "gemma4/truncated-before-close"),
    *("gemma4/truncated-second-parallel-call", "glm/glm47-truncated-inside-arg-value"),
    *("glm/glm47-truncated-before-close-call", "glm/glm45-truncated-after-arg-key"),
    *("gpt-oss/harmony-truncated-in-arguments", "kimi/k26-truncated-inside-arguments"),
    *("kimi/k3-truncated-inside-argument", "llama/l4-truncated-missing-close-bracket"),
    *("llama/l3-truncated-inside-parameters", "mistral/v13think-truncated-in-arguments"),
    *("qwen3-hermes/bug-sglang-30480-truncated-mid-arguments", "qwen3-hermes/truncated-mid-arguments-no-thinking"),
    *("qwen3-hermes/truncated-mid-arguments-thinking", "qwen3-hermes/truncated-second-parallel-call"),
    *("qwen3-xml/q38-truncated-in-parameter", "deepseek/vllm-v3-malformed-missing-brace"),
)
OTHERWISE = {
    "qwen3-hermes/vllm-invalid-json-missing-brace": "its arguments are complete, so it is a call; Dynamo agrees",
    "deepseek/v32-truncated-second-parallel-call": "what broke off before it was a call is content",
    "deepseek/v4-truncated-second-parallel-call": "what broke off before it was a call is content",
    "deepseek/v41-truncated-second-parallel-call": "what broke off before it was a call is content",
    "gpt-oss/harmony-truncated-in-header": "what broke off before it was a call is content",
    "kimi/k2i-vllm-noise-between-markers": "what a model writes between marks is content",
    "gpt-oss/llamacpp-builtin-python-recipient": "what goes to a tool that is no function is content",
    "gpt-oss/harmony-marker-in-reasoning": "without token ids a mark that is only spelled is a mark",
    "kimi/k3-control-marker-text-in-value": "without token ids a mark that is only spelled is a mark",
}


FIXTURES = load_fixtures(None)


def parsers_of(fixture: Fixture) -> tuple[str, str | None]:
    """Tool and reasoning parser that Dynamo documents for the model."""
    model = fixture.models[0]
    if fixture.family == "deepseek":
        for part, name in (("V3-0324", "deepseek_v3"), ("R1", "deepseek_v3"), ("V3.1", "deepseek_v3_1")):
            if part in model:
                return name, {"V3-0324": None, "R1": "deepseek_r1"}.get(part, name)
        for part, name in (("V3.2", "deepseek_v3_2"), ("V4.1", "deepseek_v41"), ("V4", "deepseek_v4")):
            if part in model:
                return name, name
    if fixture.family == "kimi":
        if "K3" in model:
            return "kimi_k3", "kimi_k3"
        return "kimi_k2", "kimi_k25" if "K2.6" in model else None
    if fixture.family == "llama":
        return "pythonic" if "Llama-4" in model else "llama3_json", None
    if fixture.family == "mistral":
        return "mistral", "mistral" if "THINK]" in fixture.raw_output or "think" in fixture.raw_output else None
    if fixture.family == "qwen3-xml":
        return "qwen3_coder", None if "Coder" in model else "qwen3"
    return {
        "gemma4": ("gemma4", "gemma4"),
        "glm": ("glm47", "glm45"),
        "gpt-oss": ("harmony", "gpt_oss"),
        "qwen3-hermes": ("hermes", "qwen3"),
    }[fixture.family]


def reader(fixture: Fixture) -> Any:
    tool, reasoning = parsers_of(fixture)
    family = family_for(fixture)
    reference = None if family is None else family.reference_for(fixture.reference_model)
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = "" if reference is None else reference.default_generation_prompt or ""
    found = None if reasoning is None else REASONING_PARSERS[reasoning]
    if found is None:
        thinking = False
    elif isinstance(found, ChannelFormat):
        thinking = bool(found.opens) and prompt.rstrip().endswith(found.opens)
    else:
        closed = prompt.rstrip().endswith(found.marks.closes)
        thinking = prompt.rstrip().endswith(found.marks.opens) or (found.forced and not closed)
    schemas = ToolSchemas({tool["function"]["name"]: tool["function"].get("parameters") for tool in fixture.tools})
    return parsing(tool, reasoning, schemas=schemas, thinking=thinking)


def result_of(found: Read) -> ParseResult:
    calls = tuple(ParsedToolCall(name, arguments) for name, arguments in found.calls)
    return ParseResult(content=found.content or None, reasoning_content=found.reasoning or None, tool_calls=calls)


@pytest.mark.parametrize("fixture", [pytest.param(one, id=one.id) for one in FIXTURES])
def test_output_is_read_as_it_should(fixture: Fixture) -> None:
    how = reader(fixture)
    text = fixture.raw_output
    found = whole(how, text)
    rng = random.Random(fixture.id)
    for _ in range(3):
        cuts = [rng.randrange(len(text) + 1) for _ in range(6)]
        assert read(how, pieces(text, cuts)) == found
    assert read(how, list(text)) == found
    if fixture.id in BROKEN_OFF or fixture.id in OTHERWISE:
        with pytest.raises(AssertionError):
            assert_conforms(fixture, result_of(found), soft=True)
    else:
        assert_conforms(fixture, result_of(found), soft=True)


def test_every_departure_is_one() -> None:
    told = [*BROKEN_OFF, *OTHERWISE]
    assert len(told) == len(set(told))
    assert {one.id for one in FIXTURES}.issuperset(told)
