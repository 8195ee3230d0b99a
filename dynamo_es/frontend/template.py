"""Chat templates: the rendering that Hugging Face's ``apply_chat_template`` does, in Jinja's immutable sandbox.

A template belongs to a model; what requests bring are only variables. Neither is trusted with the machine: the sandbox
(``template_sandbox``) bounds the computing time of a rendering and the size of whatever it makes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols

from dynamo_es.errors import DynamoException
from dynamo_es.frontend.template_sandbox import (
    Budget,
    BudgetedContext,
    BudgetedEnvironment,
    OverBudget,
    strftime_form,
)

MAX_PROMPT_CHARS = 64 * 1024 * 1024
MAX_TEMPLATE_CHARS = 1024 * 1024
MAX_RENDER_S = 1.0
"""Computing time of one rendering, which takes a thousandth of it for a usual chat; more for long ones."""
_MORE_S = 100e-6
"""For each message and part of one: some ten times what templates take for it."""
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)
"""Variables that ``chat_template_kwargs`` cannot set; they are dropped, as in Dynamo."""

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
_LOOPS_OVER_CONTENT = re.compile(r"\bfor\s+\w+\s+in\s+\w+(?:\.content\b|\[\s*['\"]content['\"]\s*\])")


class TemplateError(DynamoException):
    """A model's chat template does not compile."""


class RenderError(DynamoException):
    """A chat template refused a conversation, or its output is too large. The text may hold parts of the prompt."""


class RenderOverBudget(RenderError):
    """A chat template took too long, or made a value that is too large. The text holds nothing of the prompt."""


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's protocol

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatRenderer:
    """A compiled chat template. Thread-safe.

    Args:
        source: Jinja text.
        special_tokens: ``bos_token`` and the like, variables of the template.
        now: Local time for ``strftime_now``.
        max_chars: Largest prompt.
        max_s: Computing time of a rendering, beside what long chats get.
        cpu_s: Its clock, seconds of the present thread.

    Raises:
        TemplateError: It does not compile, or is too large.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_PROMPT_CHARS,
        max_s: float = MAX_RENDER_S,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateError(f"chat template exceeds {MAX_TEMPLATE_CHARS} characters")
        environment = BudgetedEnvironment(
            max_chars, trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.bound_filters()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(strftime_form(form))
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise TemplateError(f"chat template does not compile: {error}") from error
        # Jinja keeps globals in a ChainMap, which every rendering copies key by key; a dict is copied at once.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_s = max_s
        self._cpu_s = cpu_s
        self.takes_parts = _LOOPS_OVER_CONTENT.search(source) is not None
        """Whether messages may keep their content as a list of parts; otherwise text parts are joined before."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt.

        Raises:
            RenderError: The template raised, took too long or made too much, or there is no final text to continue.
        """
        chat = [*messages]
        if continue_final_message:
            chat[-1] = _marked(chat[-1])
        context: dict[str, Any] = dict(self._special_tokens)
        if variables:
            context.update((key, value) for key, value in variables.items() if key not in RESERVED_VARIABLES)
        context.update(messages=chat, tools=tools, documents=None, add_generation_prompt=add_generation_prompt)
        prompt = self._run(context)
        return _cut(prompt) if continue_final_message else prompt

    def _run(self, context: dict[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        variables = self._template.new_context(context)
        assert isinstance(variables, BudgetedContext)
        variables.budget = Budget(self._cpu_s, self._max_s + _MORE_S * _items(context["messages"]))
        try:
            for part in self._template.root_render_func(variables):
                size += len(part)
                if size > self._max_chars:
                    raise RenderError(f"the prompt exceeds {self._max_chars} characters")
                parts.append(part)
        except OverBudget as error:
            raise RenderOverBudget(f"chat template: {error}") from error
        except jinja2.TemplateError as error:
            raise RenderError(f"chat template: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RenderError(f"chat template: {type(error).__name__}: {error}") from error
        return "".join(parts)


def _items(messages: Sequence[Mapping[str, Any]]) -> int:
    return len(messages) + sum(
        len(message["content"]) for message in messages if isinstance(message.get("content"), list)
    )


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_MARK}
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUE_MARK}]}
    raise RenderError("continue_final_message needs a final message with text")


def _cut(prompt: str) -> str:
    place = prompt.rfind(_CONTINUE_MARK.strip())
    if place < 0:
        raise RenderError("the chat template does not show the final message, it cannot be continued")
    if prompt.startswith(_CONTINUE_MARK, place):
        return prompt[:place]
    return prompt[:place].rstrip()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
