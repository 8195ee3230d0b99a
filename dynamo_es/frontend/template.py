"""Chat templates: the rendering that Hugging Face's ``apply_chat_template`` does, in Jinja's immutable sandbox.

A template belongs to a model and is trusted as far as its directory is; what requests bring are only variables. The
size of a rendered prompt is bounded; a template that loops without output is not, a watchdog is not part of this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynamo_es.errors import DynamoException

MAX_PROMPT_CHARS = 64 * 1024 * 1024
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

    Raises:
        TemplateError: It does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
        max_chars: int = MAX_PROMPT_CHARS,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template does not compile: {error}") from error
        # Jinja keeps globals in a ChainMap, which every rendering copies key by key; a dict is copied at once.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
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
            RenderError: The template raised, the result is too large, or there is no final text to continue.
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
        try:
            for part in self._template.root_render_func(self._template.new_context(context)):
                size += len(part)
                if size > self._max_chars:
                    raise RenderError(f"the prompt exceeds {self._max_chars} characters")
                parts.append(part)
        except jinja2.TemplateError as error:
            raise RenderError(f"chat template: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RenderError(f"chat template: {type(error).__name__}: {error}") from error
        return "".join(parts)


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
