"""A worker's frames as choices of chat chunks, by SGLang's parsers (Dynamo's ``SglangStreamingPostProcessor``).

Text and stop strings come from the pipeline that all output takes; SGLang's parsers read that text. Nothing of SGLang
is imported here but where a parser of it is made anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from dynamo_es.frontend.chat_choices import Choice, choice_of, openai_logprobs
from dynamo_es.frontend.extras import import_extra
from dynamo_es.frontend.hf_tokens import HuggingFaceDetokenizer
from dynamo_es.frontend.pipeline import OutputOptions, OutputPipeline, TokenLogprob
from dynamo_es.frontend.utils import random_call_id

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.json_array_parser import JsonArrayParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    ToolCallParserType: TypeAlias = FunctionCallParser | JsonArrayParser

_STOPS = ("stop", "eos", "cancelled", "content_filter")
_KIMI = ("kimi_k2",)
_ALIASES = {
    "minimax_m3": "minimax-m3",
    "minimax_m3_nom": "minimax-m3",
    "minimax-m3-nom": "minimax-m3",
    "kimi-k3": "kimi_k3",
    "gemma-4": "gemma4",
}


def known_parser_name(name: str) -> str:
    """SGLang's name of a parser that Dynamo knows by another."""
    return _ALIASES.get(name, name)


def map_sglang_finish_reason(raw: str | None) -> str | None:
    """A worker's finish reason as a chunk of SGLang's processor tells it; unknown ones stay as they are."""
    if raw is None:
        return None
    if raw in _STOPS or raw.startswith("abort"):
        return "stop"
    return "error" if raw.startswith("error") else raw


class _Call:
    """A call as it comes in: its name, and its arguments in parts."""

    __slots__ = ("name", "parts")

    def __init__(self) -> None:
        self.name = ""
        self.parts: list[str] = []

    @property
    def arguments(self) -> str:
        return "".join(self.parts)


class SglangStreamingPostProcessor:
    """Reads the output of one request. Belongs to one task.

    ``locally_finished``: a stop string or token ended it here, the worker need not go on; ``local_stop_reason`` is the
    string. Thoughts and content are told as they come, calls as a whole with the last choice.

    Args:
        tokenizer: The model's, Hugging Face's.
        tool_call_parser: SGLang's parser of calls, or None.
        reasoning_parser: SGLang's parser of thoughts, or None.
        history_tool_calls_count: Calls in the conversation so far; some models count on.
        sglang_tools: The request's tools.
        tool_call_parser_name: Of the model.
        eos_token_ids: Ids that end the output and give no text.
        prompt_token_ids: Of the prompt; its end is what the first token follows.
        options: How the output is wanted; without it, no stop strings, and special tokens are hidden unless parsers
            need them.
        named_zero_arg_tool: The function that ``{}`` alone calls.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        tool_call_parser: ToolCallParserType | None,
        reasoning_parser: ReasoningParser | None,
        history_tool_calls_count: int = 0,
        sglang_tools: list[SglangTool] | None = None,
        tool_call_parser_name: str | None = None,
        eos_token_ids: list[int] | None = None,
        prompt_token_ids: list[int] | None = None,
        options: OutputOptions | None = None,
        named_zero_arg_tool: str | None = None,
    ) -> None:
        self._calls_parser = tool_call_parser
        self._thoughts_parser = reasoning_parser
        self._history = history_tool_calls_count
        self._tools = sglang_tools or []
        self._parser_name = tool_call_parser_name
        self._named_zero_arg_tool = named_zero_arg_tool
        eos = frozenset(eos_token_ids or ())
        used = options if options is not None else OutputOptions(stop_ids=eos)
        reads = tool_call_parser is not None or reasoning_parser is not None
        detokenizer = HuggingFaceDetokenizer(tokenizer, hidden=eos, prompt=prompt_token_ids or (), shows_special=reads)
        self._pipeline = OutputPipeline(detokenizer, used)
        self._calls: dict[int, _Call] = {}
        self._normal: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._first = True
        self._over = False
        self._tokenizer = tokenizer
        self.locally_finished = False
        self.local_stop_reason: str | None = None

    def process_output(self, engine_response: Mapping[str, Any]) -> Choice | None:
        """The next choice.

        Args:
            engine_response: ``token_ids`` and what else a worker's frame has.

        Returns:
            ``{index, delta, finish_reason, logprobs}``, or None if there is nothing to tell yet.
        """
        if self._over:
            return None
        finish = map_sglang_finish_reason(engine_response.get("finish_reason"))
        # The pipeline knows regular ends only; which one it is, is told here.
        frame = {**engine_response, "finish_reason": None if finish is None else "stop", "completion_usage": None}
        delta = self._pipeline.push(frame)
        self._over = delta is not None and delta.finish_reason is not None
        if self._over and finish is None:
            self.locally_finished, finish = True, "stop"
        if delta is not None:
            self._logprobs += delta.logprobs or ()
            self.local_stop_reason = delta.stop
        return self._choice("" if delta is None else delta.text, finish if self._over else None)

    def _choice(self, text: str, finish: str | None) -> Choice | None:
        reasoning, normal = self._thoughts(text, over=finish is not None)
        content = self._without_calls(normal, over=finish is not None)
        calls = self._told_calls() if finish is not None else []
        if calls and finish == "stop":
            finish = "tool_calls"
        if not (content or reasoning or calls or finish):
            return None
        logprobs, self._logprobs = self._logprobs, []
        choice = choice_of(
            0,
            content=content,
            reasoning=reasoning,
            calls=calls,
            first=self._first,
            finish=finish,
            logprobs=openai_logprobs(logprobs, self._decode_one) if logprobs else None,
        )
        self._first = False
        return choice

    def _decode_one(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _thoughts(self, text: str, *, over: bool) -> tuple[str, str]:
        parser = self._thoughts_parser
        if parser is None:
            return "", text
        reasoning, normal = parser.parse_stream_chunk(text) if text else ("", "")
        if over:
            last_reasoning, last_normal = parser.parse_stream_end()
            reasoning, normal = (reasoning or "") + (last_reasoning or ""), (normal or "") + (last_normal or "")
        return reasoning or "", normal or ""

    def _without_calls(self, text: str, *, over: bool) -> str:
        """Content of more text; what calls gain is kept."""
        if self._named_zero_arg_tool is not None:
            self._normal.append(text)
            return ""
        parser = self._calls_parser
        if parser is None:
            return text
        if text:
            self._normal.append(text)
        content = ""
        if hasattr(parser, "parse_stream_chunk"):
            if text:
                content, items = parser.parse_stream_chunk(text)
                self._gain(items)
            if over:
                rest, items = parser.parse_stream_end()
                self._gain(items)
                content += rest
        elif text:
            result = parser.parse_streaming_increment(text, self._tools)
            self._gain(result.calls)
            content = result.normal_text
        return content

    def _gain(self, items: Iterable[Any]) -> None:
        for item in items:
            call = self._calls.setdefault(item.tool_index, _Call())
            if item.name:
                call.name = item.name
            if item.parameters:
                call.parts.append(item.parameters)

    def _told_calls(self) -> list[dict[str, Any]]:
        """All calls as a delta tells them; those without a known name or JSON arguments are left out."""
        streamed = self._sound((call.name, call.arguments) for _, call in sorted(self._calls.items()))
        whole = self._read_whole()
        calls = whole if len(whole) > len(streamed) else streamed
        return [
            {
                "index": place,
                "id": self._call_id(name, place),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for place, (name, arguments) in enumerate(calls)
        ]

    def _read_whole(self) -> list[tuple[str, str]]:
        """Calls of the whole text, which a parser may find where it missed them in pieces."""
        text = "".join(self._normal)
        if self._named_zero_arg_tool is not None:
            return [(self._named_zero_arg_tool, "{}")] if text.strip() == "{}" else []
        if not text or self._calls_parser is None:
            return []
        if not hasattr(self._calls_parser, "parse_stream_chunk"):
            return self._sound(_listed_calls(text))
        if not self._calls_parser.has_tool_call(text):
            return []
        module = import_extra("sglang.srt.function_call.function_call_parser", "sglang")
        assert self._parser_name is not None
        parser = module.FunctionCallParser(tools=self._tools, tool_call_parser=known_parser_name(self._parser_name))
        _, items = parser.parse_non_stream(text)
        return self._sound((item.name or "", item.parameters or "") for item in items)

    def _sound(self, calls: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        names = {tool.function.name for tool in self._tools}
        return [(name, arguments) for name, arguments in calls if name in names and _is_json(arguments)]

    def _call_id(self, name: str, place: int) -> str:
        return f"functions.{name}:{self._history + place}" if self._parser_name in _KIMI else random_call_id()


def _listed_calls(text: str) -> list[tuple[str, str]]:
    """Calls of a JSON list (or of one object), as a schema binds demanded calls."""
    try:
        listed = json.loads(text)
    except ValueError:
        return []
    calls = listed if isinstance(listed, list) else [listed]
    return [
        (str(call.get("name")), json.dumps(call.get("parameters", call.get("arguments")), ensure_ascii=False))
        for call in calls
        if isinstance(call, dict)
    ]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
