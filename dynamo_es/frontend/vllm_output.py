"""vLLM's outputs as choices of chat chunks, by vLLM's parsers (Dynamo's ``StreamingPostProcessor``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo_es.frontend.chat_choices import Choice, choice_of
from dynamo_es.frontend.extras import import_extra
from dynamo_es.frontend.guidance import function_of, named_function
from dynamo_es.frontend.parsers.choice import ChoiceParser, Parsing
from dynamo_es.frontend.parsers.schema import ToolSchemas
from dynamo_es.frontend.responses import call_member
from dynamo_es.frontend.utils import random_call_id

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.abstract_parser import Parser
    from vllm.reasoning import ReasoningParser
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import TokenizerLike
    from vllm.tool_parsers import ToolParser


def request_parser(
    tool_parser_class: type[ToolParser] | None,
    reasoning_parser_class: type[ReasoningParser] | None,
    tokenizer: TokenizerLike,
    request: ChatCompletionRequest,
) -> Parser | None:
    """vLLM's parser of one choice of a request, put together from its two parts; None without any."""
    if tool_parser_class is None and reasoning_parser_class is None:
        return None
    base = import_extra("vllm.parser.abstract_parser", "vllm").DelegatingParser
    parts = {"tool_parser_cls": tool_parser_class, "reasoning_parser_cls": reasoning_parser_class}
    made: Parser = type("RequestParser", (base,), parts)(
        tokenizer, request.tools, chat_template_kwargs=request.chat_template_kwargs or {}
    )
    return made


def demanded_calls(request: ChatCompletionRequest) -> ChoiceParser:
    """A parser of calls that a request demands and that are bound to JSON: a list, or one function's arguments."""
    plain = request.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"}, exclude_unset=True)
    named = named_function(plain.get("tool_choice"))
    functions = [function_of(tool) for tool in plain.get("tools") or ()]
    parsing = Parsing(
        choice="required" if named is None else "named",
        function=named or "",
        schemas=ToolSchemas({str(function.get("name")): function.get("parameters") for function in functions}),
        bound=True,
        single=plain.get("parallel_tool_calls") is False,
    )
    return parsing.parser(random_call_id)


class StreamingPostProcessor:
    """Reads the output of one choice. Belongs to one task.

    Args:
        tokenizer: The model's.
        request_for_sampling: vLLM's request, as ``preprocess_chat_request`` made it.
        sampling_params: Of the request.
        prompt_token_ids: Of the prompt; they tell whether the output begins within a thought.
        tool_parser: vLLM's for the request, or None; every choice has a fresh one of its class.
        reasoning_parser_class: vLLM's parser of thoughts, or None.
        chat_template_kwargs: Variables of the template.
        stream_response: Whether it is told as it comes; otherwise a request with tools is read as a whole at its end.
        reads_demanded: A call is demanded and bound to JSON, which is read here; vLLM's parser reads its own format.
    """

    def __init__(
        self,
        *,
        tokenizer: TokenizerLike,
        request_for_sampling: ChatCompletionRequest,
        sampling_params: SamplingParams | None = None,
        prompt_token_ids: Sequence[int],
        tool_parser: ToolParser | None,
        reasoning_parser_class: type[ReasoningParser] | None,
        chat_template_kwargs: Mapping[str, Any],
        stream_response: bool = True,
        reads_demanded: bool = False,
    ) -> None:
        self._request = request_for_sampling
        self._prompt = list(prompt_token_ids)
        self._sampling_params = sampling_params
        tool_class = None if tool_parser is None or reads_demanded else type(tool_parser)
        self._demanded = demanded_calls(request_for_sampling) if reads_demanded else None
        self._parser = request_parser(tool_class, reasoning_parser_class, tokenizer, request_for_sampling)
        self._template_variables = chat_template_kwargs
        self._whole = tool_class is not None and not stream_response
        self._held: list[str] = []
        self._held_ids: list[int] = []
        self._called = False
        self._over = False

    @property
    def reasoning_ended(self) -> bool | None:
        """Whether the prompt ends outside of a thought; None without a parser of thoughts."""
        parser = self._parser
        if parser is None or parser.reasoning_parser is None:
            return None
        return bool(parser.is_reasoning_end(self._prompt))

    def process_output(self, output: Any) -> Choice | None:
        """The next choice for one of vLLM's ``CompletionOutput``; None if there is nothing to tell yet."""
        if self._over:
            return None
        finish = None if output.finish_reason is None else str(output.finish_reason)
        self._over = finish is not None
        text, ids = output.text, list(output.token_ids)
        if self._whole:
            self._held.append(text)
            self._held_ids += ids
            if finish is None:
                return None
            text, ids = "".join(self._held), self._held_ids
        content, reasoning, calls = self._read(text, ids, over=self._over)
        self._called = self._called or bool(calls)
        if finish == "stop" and self._called:
            finish = "tool_calls"
        if not (content or reasoning or calls or finish):
            return None
        return choice_of(
            output.index,
            content=content,
            reasoning=reasoning,
            calls=calls,
            first=bool(content or reasoning or calls),
            finish=finish,
        )

    def _read(self, text: str, ids: list[int], *, over: bool) -> tuple[str, str, list[dict[str, Any]]]:
        if self._whole:
            return self._read_whole(text, ids)
        content, reasoning = text, ""
        calls: list[dict[str, Any]] = []
        if self._parser is not None:
            delta = self._parser.parse_delta(text, ids, self._request, self._prompt, finished=over)
            content = "" if delta is None else delta.content or ""
            reasoning = "" if delta is None else delta.reasoning or ""
            calls = [] if delta is None else [call.model_dump(exclude_none=True) for call in delta.tool_calls or ()]
        if self._demanded is not None:
            parsed = self._demanded.feed(content, over=over)
            content, calls = parsed.content, [call_member(call) for call in parsed.calls]
        return content, reasoning, calls

    def _read_whole(self, text: str, ids: list[int]) -> tuple[str, str, list[dict[str, Any]]]:
        assert self._parser is not None
        reasoning, content, found = self._parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=ids
        )
        calls = [
            {
                "index": place,
                "id": call.id or random_call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(found or ())
        ]
        return content or "", reasoning or "", calls
