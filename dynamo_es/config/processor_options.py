"""Options of chat processors: who renders prompts and reads output of chat requests."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_path

CHAT_PROCESSORS = ("dynamo", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class ChatProcessorConfig:
    """What renders the prompts of chat requests and reads what models say."""

    chat_processor: str = option(
        "dynamo", flag="--dyn-chat-processor", env="DYN_CHAT_PROCESSOR", choices=CHAT_PROCESSORS,
        help="Whose renderer and parsers chat requests go through: the frontend's own (dynamo), vLLM's or SGLang's; "
        "these two need the extra of that name, and the models' files on this machine.",
    )  # fmt: skip
    tool_call_parser: str | None = option(
        None, flag="--tool-call-parser", env="DYN_ES_CHAT_TOOL_CALL_PARSER",
        help="vLLM's or SGLang's parser of tool calls, for all models; unset: what each model's card says.",
    )  # fmt: skip
    reasoning_parser: str | None = option(
        None, flag="--reasoning-parser", env="DYN_ES_CHAT_REASONING_PARSER",
        help="The same for thoughts.",
    )  # fmt: skip
    chat_template: str | None = option(
        None, flag="--chat-template", env="DYN_ES_CHAT_TEMPLATE", check=check_path,
        help="A .jinja file that SGLang's processor renders all models' prompts by; unset: the models' own.",
    )  # fmt: skip
    preprocess_workers: int = option(
        0, flag="--dyn-preprocess-workers", env="DYN_PREPROCESS_WORKERS", unit="processes", minimum=0, maximum=256,
        help="Processes in which SGLang's processor prepares requests, for each model; 0: threads do "
        "(--preprocess-threads), as for the other processors.",
    )  # fmt: skip
    debug_perf: bool = option(
        False, flag="--dyn-debug-perf", env="DYN_DEBUG_PERF",
        help="Tell how long SGLang's processor takes for each request.",
    )  # fmt: skip
    trust_remote_code: bool = option(
        False, flag="--trust-remote-code", env="DYN_TRUST_REMOTE_CODE",
        help="Let vLLM's and SGLang's processors run code that a model's directory brings.",
    )  # fmt: skip
