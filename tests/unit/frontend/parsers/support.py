"""Reads texts through parsers, and writes calls in each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from dynamo_es.frontend.parsers.choice import ChoiceParser, Parsing
from dynamo_es.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, ChannelFormat
from dynamo_es.frontend.parsers.schema import ToolSchemas

NS = "]<]minimax[>["
WEATHER = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "t": {"type": "string"},
        "n": {"type": "integer"},
        "f": {"type": "number"},
        "b": {"type": "boolean"},
        "z": {"type": ["integer", "null"]},
        "a": {"type": "array", "items": {"type": "integer"}},
        "o": {"type": "object", "properties": {"k": {"type": "integer"}}},
    },
}
TOOLS: Mapping[str, Any] = {"get_weather": WEATHER, "get_time": WEATHER}
Call = tuple[str, Mapping[str, Any]]


class Read(NamedTuple):
    """All that a choice came to; ``calls`` as (name, text of arguments)."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    ids: list[str]


def parsing(tool: str | None = None, reasoning: str | None = None, **more: Any) -> Parsing:
    """By names; ``thinking`` as a prompt without marks has it."""
    found = None if reasoning is None else REASONING_PARSERS[reasoning]
    forced = found is not None and not isinstance(found, ChannelFormat) and found.forced
    values: dict[str, Any] = {
        "tools": None if tool is None else TOOL_PARSERS[tool],
        "reasoning": found,
        "choice": "none" if tool is None else "auto",
        "schemas": ToolSchemas(TOOLS),
        "thinking": forced,
    }
    return Parsing(**{**values, **more})


def parser_of(how: Parsing) -> ChoiceParser:
    numbers = count()
    return how.parser(lambda: f"id-{next(numbers)}")


def read(how: Parsing, chunks: Iterable[str]) -> Read:
    """What a client puts together from a stream of these chunks."""
    parser = parser_of(how)
    content, reasoning = "", ""
    calls: list[list[str]] = []
    ids: list[str] = []
    steps = [parser.feed(chunk) for chunk in chunks]
    steps += [parser.feed("", over=True), parser.feed("more", over=True)]
    assert not steps[-1], "finishing again must give nothing"
    for step in steps:
        content += step.content
        reasoning += step.reasoning
        for one in step.calls:
            if one.name is not None:
                assert one.call == len(calls)
                assert one.id is not None
                calls.append([one.name, ""])
                ids.append(one.id)
            else:
                assert one.id is None
                assert one.arguments
            calls[one.call][1] += one.arguments
    assert parser.called == bool(calls)
    return Read(content, reasoning, [(name, arguments) for name, arguments in calls], ids)


def whole(how: Parsing, text: str) -> Read:
    return read(how, [text])


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """The text cut at these places."""
    places = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


def arguments_of(found: Read) -> list[Call]:
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


# -- calls as models write them -----------------------------------------------------------------------------------


def _json(name: str, arguments: Mapping[str, Any]) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json(*call)}\n</tool_call>" for call in calls)


def _listed(before: str, after: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: before + "[" + ", ".join(_json(*call) for call in calls) + "]" + after


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _dsml(block: str, space: str = "") -> Callable[[Sequence[Call]], str]:
    mark = "｜DSML｜" + space

    def write(calls: Sequence[Call]) -> str:
        text = f"<{mark}{block}>\n"
        for name, arguments in calls:
            text += f'<{mark}invoke name="{name}">\n'
            for key, value in arguments.items():
                is_string = str(isinstance(value, str)).lower()
                text += f'<{mark}parameter name="{key}" string="{is_string}">{_raw(value)}</{mark}parameter>\n'
            text += f"</{mark}invoke>\n"
        return text + f"</{mark}{block}>"

    return write


def _kimi_k2(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{json.dumps(arguments)}"
        "<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _kimi_k3(calls: Sequence[Call]) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
    text = "<|open|>tools<|sep|>"
    for place, (name, arguments) in enumerate(calls):
        text += f'<|open|>call tool="{name}" index="{place + 1}"<|sep|>'
        for key, value in arguments.items():
            kind = kinds.get(type(value), "null")
            text += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{_raw(value)}<|close|>argument<|sep|>'
        text += "<|close|>call<|sep|>"
    return text + "<|close|>tools<|sep|>"


def _glm(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        text += f"<tool_call>{name}\n"
        for key, value in arguments.items():
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n"
        text += "</tool_call>"
    return text


def _qwen_coder(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        text += f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            text += f"<parameter={key}>\n{_raw(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


def _minimax_m2(calls: Sequence[Call]) -> str:
    text = "<minimax:tool_call>\n"
    for name, arguments in calls:
        text += f'<invoke name="{name}">\n'
        for key, value in arguments.items():
            text += f'<parameter name="{key}">{_raw(value)}</parameter>\n'
        text += "</invoke>\n"
    return text + "</minimax:tool_call>"


def _minimax_m3(calls: Sequence[Call]) -> str:
    def element(tag: str, value: Any) -> str:
        if isinstance(value, dict) and value:
            inner = "".join(element(key, one) for key, one in value.items())
        elif isinstance(value, list) and value:
            inner = "".join(element("item", one) for one in value)
        else:
            inner = _raw(value)
        return f"{NS}<{tag}>{inner}{NS}</{tag}>"

    text = f"{NS}<tool_call>"
    for name, arguments in calls:
        text += f'{NS}<invoke name="{name}">'
        text += "".join(element(key, value) for key, value in arguments.items())
        text += f"{NS}</invoke>"
    return text + f"{NS}</tool_call>"


def _gemma4(calls: Sequence[Call]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, str):
            return f'<|"|>{one}<|"|>'
        if isinstance(one, list):
            return "[" + ",".join(map(value, one)) + "]"
        if isinstance(one, dict):
            return "{" + ",".join(f"{key}:{value(inner)}" for key, inner in one.items()) + "}"
        return json.dumps(one)

    return "".join(f"<|tool_call>call:{name}{value(dict(arguments))}<tool_call|>" for name, arguments in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    inner = ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
    )
    return f"[{inner}]"


def _harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def _muse(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        text += f'<|start|>assistant to={name}<|message|><atem:function_calls>\n<atem:invoke name="{name}">'
        for key, value in arguments.items():
            text += f'<atem:parameter name="{key}">{json.dumps(value)}</atem:parameter>'
        text += "</atem:invoke>\n</atem:function_calls><|eom|>"
    return text


def _inkling(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|message_model|>{name}<|content_invoke_tool_json|>{json.dumps({'name': name, 'args': arguments})}"
        "<|end_message|>"
        for name, arguments in calls
    )


_DSML_V4 = _dsml("tool_calls")
WRITERS: Mapping[str, Callable[[Sequence[Call]], str]] = {
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3_1": _deepseek_v31,
    "deepseek_v3_2": _dsml("function_calls"),
    "deepseek_v4": _DSML_V4,
    "deepseek-v4": _DSML_V4,
    "deepseekv4": _DSML_V4,
    "deepseek_v41": _dsml("calls", " "),
    "default": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "gemma4": _gemma4,
    "gemma-4": _gemma4,
    "glm45": _glm,
    "glm47": _glm,
    "harmony": _harmony,
    "hermes": _hermes,
    "inkling": _inkling,
    "jamba": _listed("<tool_calls>", "</tool_calls>"),
    "kimi_k2": _kimi_k2,
    "kimi_k25": _kimi_k2,
    "kimi_k3": _kimi_k3,
    "kimi-k3": _kimi_k3,
    "llama3_json": _llama,
    "minimax_m2": _minimax_m2,
    "minimax_m3": _minimax_m3,
    "minimax-m3": _minimax_m3,
    "minimax_m3_nom": _minimax_m3,
    "minimax-m3-nom": _minimax_m3,
    "mistral": _mistral,
    "muse": _muse,
    "muse_glimmer": _muse,
    "nemotron_deci": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "nemotron_nano": _qwen_coder,
    "phi4": _listed("functools", ""),
    "pythonic": _pythonic,
    "qwen25": _hermes,
    "qwen3": _qwen_coder,
    "qwen3_coder": _qwen_coder,
}


def distinct(names: Mapping[str, Any]) -> list[str]:
    """One name for each format; what holds for a format holds for its aliases."""
    first: dict[int, str] = {}
    for name, found in sorted(names.items()):
        first.setdefault(id(found), name)
    return sorted(first.values())


# -- what hypothesis draws ----------------------------------------------------------------------------------------

PLAIN = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
"""Text without control characters."""
_NUMBERS = st.integers(-(10**20), 10**20)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=32)


def arguments() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments that fit ``WEATHER``; strings hold no mark of a format and no white space at their ends."""
    text = PLAIN.map(lambda one: one.strip()).filter(lambda one: not set(one) & set("<>|[]{}｜"))
    return st.fixed_dictionaries(
        {},
        optional={
            "s": text,
            "t": text,
            "n": _NUMBERS,
            "f": _FLOATS,
            "b": st.booleans(),
            "z": st.none() | _NUMBERS,
            "a": st.lists(st.integers(-1000, 1000), max_size=3),
            "o": st.fixed_dictionaries({"k": st.integers(-9, 9)}),
        },
    )


def calls() -> st.SearchStrategy[list[Call]]:
    return st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), arguments()), min_size=1, max_size=3)


@st.composite
def cut_texts(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    """A text, and the same text in chunks."""
    text = draw(texts)
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12))
    return text, pieces(text, cuts)


def babble(markers: Sequence[str]) -> st.SearchStrategy[str]:
    """Text that is almost in a format: marks whole and cut short, parts of calls, and plain text, in any order."""
    parts = [
        *markers,
        *(marker[: len(marker) // 2] for marker in markers),
        *(marker[:-1] for marker in markers),
        '{"name": "get_weather", "arguments": {"s": "a"}}',
        '{"name": "get_weather"',
        '"arguments": {"n": 1',
        '{"s": "}"}',
        "get_weather",
        "get_weather(s='a', n=1)",
        "[get_time(), get_weather(",
        "s='b\\'c')]",
        "functions.get_weather:0",
        " to=functions.get_weather",
        "call:get_weather{s:",
        "analysis",
        '"s"',
        '"s">',
        "s>",
        'tool="get_weather" index="1"',
        'key="s" type="number"',
        "get_weather>",
        "```json\n",
        *("{", "}", "[", "]", '"', "\\", ",", ":", ";", "<", ">", "|", "\n", " ", "\t", "42", "null", "x", "é", "😀"),
    ]
    return st.lists(st.sampled_from(parts), max_size=14).map("".join)
