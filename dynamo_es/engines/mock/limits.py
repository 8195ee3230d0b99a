"""What a mock worker refuses, rather than answer as if it had done it. Pure.

``temperature``, ``top_p``, penalties and ``seed`` are taken: they shape a choice that the mock engine does not make,
and any text is one that they allow. What promises something about the answer is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_es.engines.request_parts import section
from dynamo_es.errors import InvalidArgument

_NO_PROBABILITIES = "it computes no probabilities"
_NO_SAMPLING = "it samples no tokens"
_NOT_GUIDED = "its text follows no format"
_TEXT_ONLY = "it makes text only"

UNSUPPORTED: Mapping[str, str] = {
    "best_of": "it ranks no answers; best_of must be equal to n",
    "logprobs": _NO_PROBABILITIES,
    "prompt_logprobs": _NO_PROBABILITIES,
    "logit_bias": _NO_SAMPLING,
    "allowed_token_ids": _NO_SAMPLING,
    "bad_words_token_ids": _NO_SAMPLING,
    "response_format": _NOT_GUIDED,
    "guided_json": _NOT_GUIDED,
    "guided_regex": _NOT_GUIDED,
    "guided_choice": _NOT_GUIDED,
    "guided_grammar": _NOT_GUIDED,
    "tool_choice": "it calls no tools; `auto` and `none` are taken",
    "echo": "it does not repeat prompts",
    "suffix": "it inserts no text",
    "detokenize": "its text is always made",
    "modalities": _TEXT_ONLY,
    "audio": _TEXT_ONLY,
    "web_search_options": "it searches nothing",
}
"""HTTP fields that a mock worker cannot honour, and why; its card says so, and frontends refuse them."""


def check_supported(request: Mapping[str, Any]) -> None:
    """Refuse a preprocessed request that asks for what the mock engine does not do.

    For callers that do not read cards. Raises ``InvalidArgument`` naming the field.
    """
    sampling = section(request, "sampling_options")
    output = section(request, "output_options")
    extra = section(request, "extra_args")
    extra_sampling = section(extra, "sampling_options")
    best_of = sampling.get("best_of")
    asked = {
        "best_of": best_of is not None and best_of != (sampling.get("n") or 1),
        "logprobs": output.get("logprobs") is not None,
        "prompt_logprobs": output.get("prompt_logprobs") is not None,
        "logit_bias": bool(sampling.get("logit_bias")),
        "allowed_token_ids": bool(extra_sampling.get("allowed_token_ids")),
        "bad_words_token_ids": bool(extra_sampling.get("bad_words_token_ids")),
        "guided_decoding": sampling.get("guided_decoding") is not None,
        "echo": bool(extra.get("echo")),
        "suffix": bool(extra.get("suffix")),
        "detokenize": extra_sampling.get("detokenize") is False,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise InvalidArgument(
                f"`{field}` is not supported by the mock engine: {UNSUPPORTED.get(field, _NOT_GUIDED)}"
            )
