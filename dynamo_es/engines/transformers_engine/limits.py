"""What a Transformers worker refuses by name, rather than answer without it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_es.engines.request_parts import section
from dynamo_es.errors import InvalidArgument

_NOT_GUIDED = "it does not guide decoding; a vLLM worker does"
_TEXT_ONLY = "it makes text only"

UNSUPPORTED: Mapping[str, str] = {
    "best_of": "it ranks no answers; best_of must be equal to n",
    "prompt_logprobs": "it tells log probabilities of its answer only",
    "response_format": _NOT_GUIDED,
    "guided_json": _NOT_GUIDED,
    "guided_regex": _NOT_GUIDED,
    "guided_choice": _NOT_GUIDED,
    "guided_grammar": _NOT_GUIDED,
    "tool_choice": "it forces no call; `auto` and `none` are taken",
    "echo": "it does not repeat prompts",
    "suffix": "it inserts no text",
    "detokenize": "its text is always made",
    "thinking_token_budget": "it does not end thoughts",
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "web_search_options": "it searches nothing",
}
"""HTTP fields that the engine does not do, and why; its card says so, and frontends refuse them."""


def check_supported(request: Mapping[str, Any]) -> None:
    """The same for callers that do not read cards. Raises ``InvalidArgument`` naming the field."""
    sampling, extra = section(request, "sampling_options"), section(request, "extra_args")
    best_of = sampling.get("best_of")
    asked = {
        "best_of": best_of is not None and best_of != (sampling.get("n") or 1),
        "prompt_logprobs": section(request, "output_options").get("prompt_logprobs") is not None,
        "guided_decoding": sampling.get("guided_decoding") is not None,
        "use_beam_search": bool(sampling.get("use_beam_search")),
        "echo": bool(extra.get("echo")),
        "suffix": bool(extra.get("suffix")),
        "detokenize": section(extra, "sampling_options").get("detokenize") is False,
        "max_thinking_tokens": section(request, "stop_conditions").get("max_thinking_tokens") is not None,
        "multi_modal_data": bool(request.get("multi_modal_data")),
    }
    for name, is_asked in asked.items():
        if is_asked:
            why = UNSUPPORTED.get(name, _NOT_GUIDED if name == "guided_decoding" else "it does not do that")
            raise InvalidArgument(f"`{name}` is not supported by the Transformers engine: {why}")
