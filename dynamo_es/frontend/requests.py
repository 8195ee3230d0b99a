"""The bodies that inference routes take, as typed structures (spec/frontend.md 1.1, 1.2).

msgspec decodes and type-checks them in one pass; an unknown top-level key is an error there, so that ``reading`` can
collect such keys for the message that Dynamo gives. Members that are accepted and dropped stay undecoded (``Raw``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

U8 = Annotated[int, Meta(ge=0, le=255)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class TextPart(msgspec.Struct, tag_field="type", tag="text", gc=False):
    """Text of a message."""

    text: str


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url", gc=False):
    """A picture by URL."""

    image_url: Any
    uuid: Any = None


class VideoPart(msgspec.Struct, tag_field="type", tag="video_url", gc=False):
    """A video by URL."""

    video_url: Any
    uuid: Any = None


class AudioUrlPart(msgspec.Struct, tag_field="type", tag="audio_url", gc=False):
    """A recording by URL."""

    audio_url: Any
    uuid: Any = None


class AudioPart(msgspec.Struct, tag_field="type", tag="input_audio", gc=False):
    """A recording in the request."""

    input_audio: Any


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", gc=False):
    """A refusal of the assistant."""

    refusal: str


UserPart = TextPart | ImagePart | VideoPart | AudioUrlPart | AudioPart
AssistantPart = TextPart | RefusalPart


class CalledFunction(msgspec.Struct, gc=False):
    """Name and arguments (JSON text) of a past tool call."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, gc=False):
    """A past tool call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class DeveloperMessage(msgspec.Struct, tag_field="role", tag="developer", gc=False):
    """Instructions."""

    content: str | list[TextPart]
    name: str | None = None


class SystemMessage(msgspec.Struct, tag_field="role", tag="system", gc=False):
    """Instructions."""

    content: str | list[TextPart]
    name: str | None = None


class UserMessage(msgspec.Struct, tag_field="role", tag="user", gc=False):
    """What the user says."""

    content: str | list[UserPart]
    name: str | None = None


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", gc=False):
    """What the model said before."""

    content: str | list[AssistantPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool", gc=False):
    """Result of a tool call."""

    tool_call_id: str
    content: str | list[UserPart]


class FunctionMessage(msgspec.Struct, tag_field="role", tag="function", gc=False):
    """Result of a function call, the older form."""

    name: str
    content: str | None


Message = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class FunctionSpec(msgspec.Struct, gc=False):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class Tool(msgspec.Struct, gc=False):
    """A tool; only functions exist."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(msgspec.Struct, gc=False):
    """A function by name."""

    name: str


class NamedTool(msgspec.Struct, gc=False):
    """``tool_choice`` that names a function."""

    function: NamedFunction
    type: Literal["function"] = "function"


class StreamOptions(msgspec.Struct, gc=False):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, gc=False):
    """Schema that the answer must follow."""

    name: str
    schema: Any
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text", gc=False):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", gc=False):
    """Any JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", gc=False):
    """JSON that follows a schema."""

    json_schema: JsonSchema


class AgentHints(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Scheduling hints (spec/frontend.md 3.1)."""

    priority: I32 | None = None
    strict_priority: U32 | None = None
    osl: U32 | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None


class RouterTargets(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Latencies that the router should keep, in ms."""

    ttft_target: float | None = None
    itl_target: float | None = None


class NvExt(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Dynamo's extension object, a closed set (spec/frontend.md 3.1)."""

    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[str] | None = None
    backend_instance_id: Annotated[int, Meta(ge=0)] | None = None
    decode_worker_id: Annotated[int, Meta(ge=0)] | None = None
    prefill_worker_id: Annotated[int, Meta(ge=0)] | None = None
    dp_rank: U32 | None = None
    prefill_dp_rank: U32 | None = None
    token_data: list[U32] | None = None
    max_thinking_tokens: U32 | None = None
    cache_salt: str | None = None
    extra_fields: list[str] | None = None
    metadata_upload: dict[str, Any] | None = None
    agent_hints: AgentHints | None = None
    request_timestamp_ms: float | None = None
    routing_constraints: dict[str, Any] | None = None
    router: RouterTargets | None = None


class _Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Members of chat and completions alike."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: I32 | None = None
    min_p: float | None = None
    seed: I64 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: U8 | None = None
    stop: str | list[str | U32] | None = None
    stop_token_ids: Any = None
    allowed_token_ids: Any = None
    bad_words_token_ids: Any = None
    detokenize: Any = None
    cache_salt: Any = None
    prompt_logprobs: U32 | None = None
    logit_bias: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: U32 | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    return_tokens_as_token_ids: bool | None = None
    nvext: NvExt | None = None
    user: str | None = None


class ChatRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: bool | None = None
    top_logprobs: U8 | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking: Any = None
    thinking_token_budget: U32 | None = None
    chat_template_args: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: Raw = msgspec.field(default_factory=Raw)
    metadata: Raw = msgspec.field(default_factory=Raw)
    modalities: Raw = msgspec.field(default_factory=Raw)
    audio: Raw = msgspec.field(default_factory=Raw)
    prediction: Raw = msgspec.field(default_factory=Raw)
    web_search_options: Raw = msgspec.field(default_factory=Raw)
    function_call: Raw = msgspec.field(default_factory=Raw)
    functions: Raw = msgspec.field(default_factory=Raw)


class CompletionRequest(_Common, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | U32 | list[U32]]
    suffix: str | None = None
    logprobs: U8 | None = None
    echo: bool | None = None
    best_of: U8 | None = None
