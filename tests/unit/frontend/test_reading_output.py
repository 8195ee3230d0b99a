"""How a request, its model's card and its prompt decide how output is read and bound."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.forced_calls import forced_call_schema
from dynamo_es.frontend.parsers.choice import Parsing
from dynamo_es.frontend.parsers.names import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES
from dynamo_es.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from dynamo_es.frontend.prepare import prepare
from dynamo_es.frontend.reading_output import parsing_of
from dynamo_es.frontend.requests import ChatRequest
from dynamo_es.frontend.template import ChatRenderer
from tests.unit.frontend.fakes import ScriptedEngine, says, served

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
G = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}


def chat(**members: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **members}
    return msgspec.convert(body, ChatRequest)


def model(**runtime_config: Any) -> ServedModel:
    return served(ScriptedEngine(says()), runtime_config=runtime_config)


def parsing(request: ChatRequest, prompt: str | None = "hi", **runtime_config: Any) -> Parsing | None:
    return parsing_of(request, model(**runtime_config), prompt)


def test_names_for_options_are_those_of_the_registry() -> None:
    assert sorted(TOOL_PARSERS) == list(TOOL_PARSER_NAMES)
    assert sorted(REASONING_PARSERS) == list(REASONING_PARSER_NAMES)


def test_without_parsers_and_forced_calls_nothing_is_read() -> None:
    assert parsing(chat()) is None
    assert parsing(chat(tools=[F])) is None
    assert parsing(chat(tools=[F], tool_choice="none"), tool_call_parser="hermes") is None
    assert parsing(chat(), tool_call_parser="hermes") is None


@pytest.mark.parametrize(
    ("members", "choice"),
    [({}, "auto"), ({"tool_choice": "auto"}, "auto"), ({"tool_choice": "required"}, "required")],
)
def test_choice_of_the_request(members: dict[str, Any], choice: str) -> None:
    found = parsing(chat(tools=[F], parallel_tool_calls=False, **members), tool_call_parser="hermes")
    assert found is not None
    assert (found.choice, found.single, found.reads_calls) == (choice, True, True)
    assert found.schemas.knows("f")


def test_a_named_function_needs_no_parser() -> None:
    found = parsing(chat(tools=[F, G], tool_choice=NAMED))
    assert found is not None
    assert (found.choice, found.function, found.bound, found.tools) == ("named", "f", True, None)


def test_names_that_nobody_knows_are_told_and_read_nothing() -> None:
    parsers = model(tool_call_parser="mystery", reasoning_parser="HERMES").parsers
    assert parsers.unknown == ("tool_call_parser mystery", "reasoning_parser HERMES")
    assert (parsers.tools, parsers.reasoning) == (None, None)
    assert model(tool_call_parser=" Hermes ", reasoning_parser=None).parsers.unknown == ()
    assert model(tool_call_parser=3).parsers.tools is None


@pytest.mark.parametrize(
    ("parser", "prompt", "members", "thinking"),
    [
        ("deepseek_r1", "hi", {}, True),
        ("deepseek_r1", None, {}, True),
        ("deepseek_r1", "hi<think></think>\n", {}, False),
        ("deepseek_r1", "hi<think>\n", {"thinking": False}, True),
        ("deepseek_r1", "hi", {"thinking": True}, True),
        ("qwen3", "hi", {}, False),
        ("qwen3", "hi<think>\n\n", {}, True),
        ("qwen3", "hi", {"reasoning_effort": "none"}, False),
        ("kimi_k3", "hi<|open|>think<|sep|>", {}, True),
        ("kimi_k3", "hi", {}, False),
        ("minimax_m3", "hi<mm:think>", {}, True),
    ],
)
def test_where_output_begins(parser: str, prompt: str | None, members: dict[str, Any], thinking: bool) -> None:
    found = parsing(chat(**members), prompt, reasoning_parser=parser)
    assert found is not None
    assert found.thinking is thinking


@pytest.mark.parametrize(
    "members",
    [
        {"thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"chat_template_kwargs": {"thinking_mode": "chat"}},
        {"chat_template_kwargs": {"force_nonempty_content": True}},
    ],
)
def test_a_request_turns_forced_thinking_off(members: dict[str, Any]) -> None:
    assert parsing(chat(**members), reasoning_parser="deepseek_r1") is None


def test_the_models_default_thinking_mode_counts_unless_the_request_says_otherwise() -> None:
    config = {"reasoning_parser": "deepseek_r1", "runtime_data": {"default_thinking_mode": "disabled"}}
    assert parsing(chat(), **config) is None
    assert parsing(chat(thinking=True), **config) is not None


@pytest.mark.parametrize(
    ("members", "bound"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}, True),
        ({"guided_json": {}}, True),
        ({"tools": [F], "tool_choice": "required"}, True),
    ],
)
def test_when_output_is_bound_to_be_json(members: dict[str, Any], bound: bool) -> None:
    found = parsing(chat(**members), reasoning_parser="qwen3")
    assert found is not None
    assert found.bound is bound


def test_schema_of_a_named_function() -> None:
    assert forced_call_schema(chat(tools=[F, G], tool_choice=NAMED)) == F["function"]["parameters"]
    other = {"type": "function", "function": {"name": "g"}}
    assert forced_call_schema(chat(tools=[F, G], tool_choice=other)) == {"type": "object", "properties": {}}
    assert forced_call_schema(chat(tools=[F])) is None


def test_references_of_a_functions_schema_hold_in_the_list_of_calls() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/S"}}, "$defs": {"S": {"type": "string"}}}
    one = {"type": "function", "function": {"name": "f", "parameters": schema}}
    two = {"type": "function", "function": {"name": "g", "parameters": schema}}
    found = forced_call_schema(chat(tools=[one, two], tool_choice="required"))
    assert found is not None
    assert found["$defs"] == {"S": {"type": "string"}}
    assert all("$defs" not in option["properties"]["parameters"] for option in found["items"]["anyOf"])
    assert schema["$defs"], "the request's tools stay as they are"


def test_definitions_that_contradict_are_refused() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"$defs": {"S": {"type": kind}}}}}
        for name, kind in (("f", "string"), ("g", "integer"))
    ]
    with pytest.raises(ApiError, match="rename one") as caught:
        forced_call_schema(chat(tools=tools, tool_choice="required"))
    assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize(("config", "shown"), [({}, False), ({"exclude_tools_when_tool_choice_none": False}, True)])
def test_tools_reach_the_template_with_choice_none_if_the_card_says_so(config: dict[str, Any], shown: bool) -> None:
    engine = ScriptedEngine(says())
    base = served(engine, runtime_config=config)
    printer = ChatRenderer("{{ 'tools' if tools else 'none' }}", {})
    with_printer = ServedModel("m", base.card, base.tokenizer, printer, engine, 0)
    prepared = prepare(chat(tools=[F], tool_choice="none"), with_printer, SystemClock())
    assert prepared.formatted_prompt == ("tools" if shown else "none")


def test_tools_reach_the_template_with_choice_none_if_the_frontend_says_so() -> None:
    base = served(ScriptedEngine(says()))
    printer = ChatRenderer("{{ 'tools' if tools else 'none' }}", {})
    keeping = ServedModel("m", base.card, base.tokenizer, printer, base.engine, 0, keeps_tools=True)
    assert prepare(chat(tools=[F], tool_choice="none"), keeping, SystemClock()).formatted_prompt == "tools"


def test_a_forced_call_binds_the_worker_whatever_else_is_asked_for() -> None:
    request = chat(tools=[F], tool_choice=NAMED, response_format={"type": "json_object"}, guided_decoding_backend="b")
    sent = prepare(request, model(), SystemClock()).requests[0]["sampling_options"]["guided_decoding"]
    assert sent == {"json": F["function"]["parameters"], "backend": "b"}
