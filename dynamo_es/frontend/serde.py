"""Why a JSON body was refused, in the words of Dynamo's decoder (serde_json), for error messages only.

The decoder that decides is msgspec (``reading``); this runs after it refused. Positions are 1-based lines and byte
columns. Errors of type are reported at the end of the document, as Dynamo's flattened structures do.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

MAX_DEPTH = 127
_SHOWN_CHARS = 64
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_CONSTANT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(-?Infinity|NaN)', re.DOTALL)
_LONE_SURROGATE = re.compile(rb"\\u[dD](?:[c-fC-F]|[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F]))[0-9a-fA-F]{0,2}")

Check = Callable[[Any], str | None]
ROLES = ("developer", "system", "user", "assistant", "tool", "function")


class Fault(NamedTuple):
    """What is wrong, in which top-level field (None: in the document), and for syntax after how many bytes."""

    detail: str
    field: str | None
    offset: int | None = None


class _OutOfRange(ValueError):
    pass


def too_deep(body: bytes) -> int | None:
    """Offset of the bracket that exceeds the nesting limit, or None."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return None
    depth = 0
    for match in _STRUCTURE.finditer(body):
        mark = body[match.start()]
        if mark in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return match.start()
        elif mark in b"]}":
            depth -= 1
    return None


def position(body: bytes, offset: int) -> str:
    """``at line L column C`` where ``offset`` is the number of bytes read before."""
    line_start = body.rfind(b"\n", 0, offset) + 1
    line = body.count(b"\n", 0, offset) + 1
    return f"at line {line} column {offset - line_start}"


def repeated_field(body: bytes, names: frozenset[str]) -> str | None:
    """The first of ``names`` that a valid body's object has twice, or None.

    The decoder keeps the last of equal members. Whether it dropped one shows in the bytes that its members do not
    account for: in compact JSON there are none, and in Python's usual spelling a space behind each comma and colon.
    Only a body with another spelling is looked through.
    """
    try:
        members = _MEMBERS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    count = len(members)
    known = sum(len(name) + len(memoryview(value)) for name, value in members.items())
    rest = len(body) - known - 4 * count - 1  # quotes, colon and comma of each member, and the braces
    if rest == 0 or (rest == 2 * count - 1 and b'": ' in body):
        return None
    pairs: list[tuple[str, Any]] = []

    def keep(found: list[tuple[str, Any]]) -> None:
        pairs[:] = found  # The outermost object comes last.

    try:
        json.loads(body, object_pairs_hook=keep)
    except ValueError:
        return None  # A number that Python refuses, in a member that nobody knows.
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen and name in names:
            return name
        seen.add(name)
    return None


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def syntax_fault(body: bytes) -> Fault | None:  # noqa: PLR0911 - a list of refusals
    """Why this is no JSON, or None if it is."""
    deep = too_deep(body)
    if deep is not None:
        return _fault(body, "recursion limit exceeded", deep + 1)
    if body.startswith(b"\xef\xbb\xbf"):
        return _fault(body, "expected value", 1)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        return _fault(body, "invalid unicode code point", error.start + 1)
    try:
        json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        return _of_decode_error(body, text, error)
    except _OutOfRange as error:
        return _fault(body, "number out of range", body.find(str(error).encode()) + len(str(error)))
    except ValueError:
        return _of_constant(body)
    lone = _LONE_SURROGATE.search(body)
    return _fault(body, "unexpected end of hex escape", lone.end() + 1) if lone else None


def _of_constant(body: bytes) -> Fault:
    for match in _CONSTANT.finditer(body):
        if match.group(1) is not None:
            return _fault(body, "expected value", match.start() + 1)
    return _fault(body, "expected value", len(body))


def _fault(body: bytes, what: str, offset: int) -> Fault:
    return Fault(f"{what} {position(body, offset)}", None, offset)


def _refuse_constant(_name: str) -> None:
    raise ValueError("constant")


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise _OutOfRange(literal)
    return value


def _of_decode_error(body: bytes, text: str, error: json.JSONDecodeError) -> Fault:
    offset = len(text[: error.pos].encode())
    message = error.msg
    rest = body[offset:].lstrip(b", \t\r\n" if message.startswith("Illegal trailing comma") else b" \t\r\n")
    place = len(body) - len(rest)
    if message.startswith("Unterminated string"):
        return _fault(body, "EOF while parsing a string", len(body))
    if not rest:
        return _fault(body, f"EOF while parsing {_open_kind(body, message)}", len(body))
    read = 2 if message.startswith("Invalid \\") else 1
    return _fault(body, _what(body, message, rest[:1], place), place + read)


def _what(body: bytes, message: str, mark: bytes, place: int) -> str:  # noqa: PLR0911 - a list of refusals
    if message.startswith("Extra data"):
        return "trailing characters"
    if message.startswith("Invalid control character"):
        return "control character (\\u0000-\\u001F) found while parsing a string"
    if message.startswith("Invalid"):
        return "invalid escape"
    if message.startswith(("Expecting property name", "Illegal trailing comma")):
        return "trailing comma" if mark in (b"}", b"]") else "key must be a string"
    if message.startswith("Expecting ':'"):
        return "expected `:`"
    if message.startswith("Expecting ','"):
        return "expected `,` or `}`" if _innermost(body[:place]) == b"{" else "expected `,` or `]`"
    return "trailing comma" if mark == b"]" else "expected value"


def _open_kind(body: bytes, message: str) -> str:
    if message.startswith(("Expecting value", "Expecting property name")) and body.rstrip()[-1:] != b"{":
        return "a value" if body.rstrip()[-1:] != b"[" else "a list"
    return "an object" if _innermost(body) == b"{" else "a list"


def _innermost(body: bytes) -> bytes:
    stack: list[bytes] = []
    for match in _STRUCTURE.finditer(body):
        mark = match.group()
        if mark in (b"[", b"{"):
            stack.append(mark)
        elif mark in (b"]", b"}") and stack:
            stack.pop()
    return stack[-1] if stack else b""


def unexpected(value: Any) -> str:
    """How the decoder calls a value that it did not expect; long text is cut."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, str):
        shown = value if len(value) <= _SHOWN_CHARS else value[:_SHOWN_CHARS] + "…"
        return f"string {json.dumps(shown, ensure_ascii=False)}"
    return "sequence" if isinstance(value, list) else "map"


def typed(kinds: type | tuple[type, ...], expected: str, *, null: bool = True) -> Check:
    """A check for values of some types; ``expected`` is the decoder's name for them."""

    def check(value: Any) -> str | None:
        if (value is None and null) or (isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))):
            return None
        return f"invalid type: {unexpected(value)}, expected {expected}"

    return check


def integer(low: int, high: int, expected: str) -> Check:
    """A check for whole numbers from ``low`` to ``high``."""

    def check(value: Any) -> str | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            return f"invalid type: {unexpected(value)}, expected {expected}"
        return None if low <= value <= high else f"invalid value: integer `{value}`, expected {expected}"

    return check


def variant(value: Any, names: Sequence[str]) -> str | None:
    """What is wrong with a text that must be one of ``names``."""
    if isinstance(value, str) and value not in names:
        listed = [f"`{name}`" for name in names]
        expected = " or ".join(listed) if len(listed) < 3 else f"one of {', '.join(listed)}"
        return f"unknown variant `{value[:_SHOWN_CHARS]}`, expected {expected}"
    return None


def untagged(name: str, fits: Callable[[Any], bool]) -> Check:
    """A check for values of several forms, of which the decoder only says that none fits."""
    return lambda value: None if fits(value) else f"data did not match any variant of untagged enum {name}"


def homogeneous(value: Any, kinds: Sequence[type]) -> bool:
    """Whether a value is a list of one of these types alone."""
    return isinstance(value, list) and any(all(type(item) is kind for item in value) for kind in kinds)


def _fits_stop(value: Any) -> bool:
    return value is None or isinstance(value, str) or homogeneous(value, (str, int))


def _fits_prompt(value: Any) -> bool:
    return isinstance(value, str) or homogeneous(value, (str, int, list))


def _fits_choice(value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(value.get("function"), dict) and isinstance(value["function"].get("name"), str)
    return value is None or value in ("none", "auto", "required")


def _check_messages(value: Any) -> str | None:
    if not isinstance(value, list):
        return f"invalid type: {unexpected(value)}, expected a sequence"
    return next(filter(None, map(_check_message, value)), None)


def _check_message(value: Any) -> str | None:  # noqa: PLR0911 - a list of refusals
    if not isinstance(value, dict):
        return f"invalid type: {unexpected(value)}, expected internally tagged enum Wire"
    role = value.get("role")
    if role is None:
        return "missing field `role`"
    if wrong := variant(role, ROLES):
        return wrong
    required = {"tool": ("tool_call_id",), "function": ("name",)}.get(role, ())
    missing = next((name for name in required if name not in value), None)
    if missing is not None:
        return f"missing field `{missing}`"
    if role == "assistant":
        return None
    if "content" not in value:
        return "missing field `content`"
    if role == "function" or isinstance(value["content"], str):
        return None
    parts = value["content"]
    known = {"text", "image_url", "video_url", "audio_url", "input_audio"} if role in ("user", "tool") else {"text"}
    if isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") in known and part["type"] in part for part in parts
    ):
        return None
    name = f"ChatCompletionRequest{str(role).capitalize()}MessageContent"
    return f"data did not match any variant of untagged enum {name}"


def _check_tools(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, list):
        return f"invalid type: {unexpected(value)}, expected a sequence"
    for tool in value:
        if not isinstance(tool, dict):
            return f"invalid type: {unexpected(tool)}, expected struct ChatCompletionTool"
        if wrong := variant(tool.get("type"), ("function",)):
            return wrong
        function = tool.get("function")
        missing = [name for name in ("type", "function") if name not in tool]
        if not missing and isinstance(function, dict) and "name" not in function:
            missing = ["name"]
        if missing:
            return f"missing field `{missing[0]}`"
    return None


def _check_format(value: Any) -> str | None:  # noqa: PLR0911 - a list of refusals
    if value is None:
        return None
    if not isinstance(value, dict):
        return f"invalid type: {unexpected(value)}, expected internally tagged enum ResponseFormat"
    if "type" not in value:
        return "missing field `type`"
    if wrong := variant(value["type"], ("text", "json_object", "json_schema")):
        return wrong
    if value["type"] != "json_schema":
        return None
    if "json_schema" not in value:
        return "missing field `json_schema`"
    schema = value["json_schema"]
    missing = [name for name in ("name", "schema") if isinstance(schema, dict) and name not in schema]
    return f"missing field `{missing[0]}`" if missing else None


def _check_effort(value: Any) -> str | None:
    names = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
    return variant(value, names) or typed(str, "a string")(value)


_HINTS = ("priority", "strict_priority", "osl", "speculative_prefill", "latency_sensitivity")
_NVEXT = (
    *("greed_sampling", "use_raw_prompt", "annotations", "backend_instance_id", "token_data", "max_thinking_tokens"),
    *("cache_salt", "extra_fields", "metadata_upload", "prefill_worker_id", "decode_worker_id", "dp_rank"),
    *("prefill_dp_rank", "agent_hints", "request_timestamp_ms", "routing_constraints", "router"),
)


def _closed(value: Mapping[str, Any], names: Sequence[str]) -> str | None:
    foreign = next((name for name in value if name not in names), None)
    if foreign is None:
        return None
    return f"unknown field `{foreign}`, expected one of {', '.join(f'`{name}`' for name in names)}"


def check_nvext(value: Any) -> str | None:
    """What is wrong with a member ``nvext``."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return f"invalid type: {unexpected(value)}, expected struct NvExt"
    hints = value.get("agent_hints")
    for name in ("annotations", "extra_fields", "token_data"):
        if wrong := LIST(value.get(name)):
            return wrong
    return _closed(value, _NVEXT) or (_closed(hints, _HINTS) if isinstance(hints, dict) else None)


BOOL = typed(bool, "a boolean")
TEXT = typed(str, "a string")
SINGLE = typed((int, float), "f32")
MAP = typed(dict, "a map")
LIST = typed(list, "a sequence")
_U8 = integer(0, 2**8 - 1, "u8")
UNSIGNED_32 = integer(0, 2**32 - 1, "u32")
_I32 = integer(-(2**31), 2**31 - 1, "i32")
_I64 = integer(-(2**63), 2**63 - 1, "i64")

_COMMON: dict[str, Check] = {
    "model": typed(str, "a string", null=False),
    **dict.fromkeys(
        ("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "return_tokens_as_token_ids"),
        BOOL,
    ),
    "stream_options": typed(dict, "struct ChatCompletionStreamOptions"),
    **dict.fromkeys(("max_tokens", "prompt_logprobs", "min_tokens"), UNSIGNED_32),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"), SINGLE
    ),
    "top_k": _I32,
    "seed": _I64,
    "n": _U8,
    "stop": untagged("Stop", _fits_stop),
    "logit_bias": MAP,
    "guided_choice": LIST,
    **dict.fromkeys(
        ("guided_regex", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern", "user"), TEXT
    ),
    "nvext": check_nvext,
}
CHAT_CHECKS: Mapping[str, Check] = {
    **_COMMON,
    "messages": _check_messages,
    "max_completion_tokens": UNSIGNED_32,
    "thinking_token_budget": UNSIGNED_32,
    "logprobs": BOOL,
    "top_logprobs": _U8,
    "tools": _check_tools,
    "tool_choice": untagged("ChatCompletionToolChoiceOption", _fits_choice),
    "parallel_tool_calls": BOOL,
    "response_format": _check_format,
    "reasoning_effort": _check_effort,
    "chat_template_args": MAP,
    "chat_template_kwargs": MAP,
    "add_generation_prompt": BOOL,
    "continue_final_message": BOOL,
}
COMPLETION_CHECKS: Mapping[str, Check] = {
    **_COMMON,
    "prompt": untagged("Prompt", _fits_prompt),
    "suffix": TEXT,
    "logprobs": _U8,
    "echo": BOOL,
    "best_of": _U8,
}


def shape_fault(document: Any, checks: Mapping[str, Check], required: Sequence[str], struct: str) -> Fault | None:
    """Why this JSON document is not the request: first wrong member in order, then the first one missing.

    Args:
        document: Decoded JSON.
        checks: A check for each member.
        required: Members that must be there.
        struct: Dynamo's name of the request.
    """
    if not isinstance(document, dict):
        return Fault(f"invalid type: {unexpected(document)}, expected struct {struct}", None)
    for name, value in document.items():
        check = checks.get(name)
        wrong = check(value) if check is not None else None
        if wrong is not None:
            return Fault(wrong, name)
    missing = next((name for name in required if name not in document), None)
    return None if missing is None else Fault(f"missing field `{missing}`", missing)
