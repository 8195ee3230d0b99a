from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_es.frontend.conversation import template_messages, template_tools, template_variables
from dynamo_es.frontend.requests import ChatRequest
from dynamo_es.frontend.template import ChatRenderer, RenderError, TemplateError
from dynamo_es.frontend.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "data"
RECORDED = [
    item
    for item in map(json.loads, (DATA / "vllm-0.32.0-chat.jsonl").read_text().splitlines())
    if item["kind"] == "request"
]


def chat(messages: list[dict[str, Any]], **more: Any) -> ChatRequest:
    return msgspec.convert({"model": "m", "messages": messages, **more}, ChatRequest)


@pytest.mark.parametrize("item", RECORDED, ids=range(len(RECORDED)))
def test_prompt_ids_are_those_of_vllm(item: dict[str, Any], smollm: tuple[Tokenizer, ChatRenderer]) -> None:
    tokenizer, renderer = smollm
    messages = template_messages(chat(item["messages"]).messages, takes_parts=renderer.takes_parts)
    assert tokenizer.encode(renderer.render(messages), False) == item["prompt_token_ids"]


def test_there_are_33_recorded_requests() -> None:
    assert len(RECORDED) == 33


TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.role }}:{{ m['content'] }}\n{% endfor %}{{ eos_token }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }}|{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}",
    "blocks": "  {% if true %}\n    x\n  {% endif %}\ny",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "tools": "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ add_generation_prompt }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendering_is_that_of_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    messages = [{"role": "user", "content": "é <b>"}, {"role": "assistant", "content": "two"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    expected, _ = render_jinja_template(
        [messages], chat_template=source, tools=tools, add_generation_prompt=True, eos_token="</s>"
    )
    assert ChatRenderer(source, {"eos_token": "</s>"}).render(messages, tools=tools) == expected[0]


def test_continue_final_message_cuts_after_the_last_text() -> None:
    source = "{% for m in messages %}[{{ m.content }}]<end>{% endfor %}"
    renderer = ChatRenderer(source, {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    assert renderer.render(messages, continue_final_message=True, add_generation_prompt=False) == "[a]<end>[b "
    with pytest.raises(RenderError):
        renderer.render([{"role": "assistant"}], continue_final_message=True)


def test_clock_is_injected() -> None:
    renderer = ChatRenderer("{{ strftime_now('%Y-%m-%d') }}", {}, now=lambda: datetime(2026, 1, 2))
    assert renderer.render([]) == "2026-01-02"


def test_sandbox_and_bounds() -> None:
    with pytest.raises(TemplateError):
        ChatRenderer("{% if %}", {})
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'a' + 1 }}",
    ):
        with pytest.raises(RenderError):
            ChatRenderer(source, {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(RenderError, match="exceeds"):
        ChatRenderer("{% for i in range(99) %}xxxx{% endfor %}", {}, max_chars=100).render([])


def test_SEC_03_variables_cannot_shadow_the_conversation() -> None:
    renderer = ChatRenderer("{{ messages | length }}{{ tools }}{{ bos_token }}{{ foo }}", {"bos_token": "<s>"})
    variables = {"messages": [], "tools": [1], "bos_token": "evil", "add_generation_prompt": False, "foo": 7}
    assert renderer.render([{"role": "user", "content": "x"}], variables=variables) == "1None<s>7"


def test_messages_become_plain_mappings() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    request = chat(
        [
            {"role": "system", "content": [{"type": "text", "text": "s"}], "name": "n"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "foo": 1},
            {"role": "assistant", "content": "b", "reasoning_content": "rr"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ]
    )
    assert template_messages(request.messages, takes_parts=False) == [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "<think>rr</think>b"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ]
    parts = template_messages(request.messages[1:2], takes_parts=True)[0]["content"]
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_thoughts_of_past_turns_are_kept_beside_parts() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning_content": "hm"}
    messages = chat([said]).messages
    assert template_messages(messages, takes_parts=False)[0]["content"] == "<think>hm</think>a"
    parts = template_messages(messages, takes_parts=True)[0]["content"]
    assert [part["text"] for part in parts] == ["<think>hm</think>", "a"]


def test_media_parts_are_placeholders_and_never_text() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
    messages = chat([{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]).messages
    for takes_parts in (True, False):
        content = template_messages(messages, takes_parts=takes_parts)[0]["content"]
        assert content == [{"type": "text", "text": "a"}, {"type": "image"}]
        with pytest.raises(RenderError):
            ChatRenderer("{{ messages[0].content }}", {}).render([{"role": "user", "content": content}])
    left = template_messages(messages, takes_parts=False, without_media=True)[0]["content"]
    assert left == [{"type": "text", "text": "a"}]


def test_template_that_loops_over_content_takes_parts() -> None:
    assert ChatRenderer("{% for p in message['content'] %}{% endfor %}", {}).takes_parts
    assert ChatRenderer("{%- for part in m.content -%}{% endfor %}", {}).takes_parts
    assert not ChatRenderer("{% for m in messages %}{{ m['content'] }}{% endfor %}", {}).takes_parts


def test_tools_and_thinking_variables() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "x"}]
    shown = [{"type": "function", "function": {"name": "f", "description": ""}}]
    assert template_tools(chat(messages, tools=tools)) == shown
    assert template_tools(chat(messages, tools=tools, tool_choice="none")) is None
    assert template_variables(chat(messages)) is None
    off = {"thinking_mode": "disabled", "enable_thinking": False, "thinking": False}
    assert template_variables(chat(messages, chat_template_kwargs={"enable_thinking": False})) == off
    assert template_variables(chat(messages, thinking=False, chat_template_args={"enable_thinking": True})) == off
    assert template_variables(chat(messages, thinking={"type": "adaptive"})) == {"thinking_mode": "adaptive"}
    assert template_variables(chat(messages, reasoning_effort="none")) == {**off, "reasoning_effort": "none"}
