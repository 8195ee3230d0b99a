"""From a preprocessed request to vLLM's sampling parameters, and from its outputs to frames. Pure: imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.engines.request_parts import completion_usage, given, section, stop_token_ids
from dynamo_es.errors import EngineShutdown, InvalidArgument

Frame = dict[str, Any]
UNSUPPORTED: Mapping[str, str] = dict.fromkeys(
    ("best_of", "prompt_logprobs", "echo", "suffix", "detokenize", "bad_words_token_ids"),
    "the vLLM worker does not pass it on",
)
"""HTTP fields that are not passed on, and why; the worker's card says so."""
_SAME = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed",
)  # fmt: skip
_GUIDES = ("json", "regex", "choice", "grammar", "whitespace_pattern")


def prompt_of(request: Any, max_model_len: int) -> list[int]:
    """The prompt's token ids. Raises ``InvalidArgument``: there are none, or too many."""
    token_ids = request.get("token_ids") if isinstance(request, dict) else None
    if not isinstance(token_ids, list) or not token_ids or not all(type(token) is int for token in token_ids):
        raise InvalidArgument("the request must have `token_ids`, one list")
    if len(token_ids) >= max_model_len:
        raise InvalidArgument(f"the prompt has {len(token_ids)} tokens, the engine takes less than {max_model_len}")
    return token_ids


def sampling_arguments(
    request: Mapping[str, Any], defaults: Mapping[str, Any], max_model_len: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Arguments of ``SamplingParams``, and of its ``StructuredOutputsParams`` (None: there is no guide).

    ``defaults``: the model's own (its generation_config.json). Stop strings stay with the frontend, which sees the
    text.
    """
    sampling, stop = section(request, "sampling_options"), section(request, "stop_conditions")
    arguments = {**defaults, **given(sampling, _SAME), **given(stop, ("min_tokens", "ignore_eos"))}
    if sampling.get("logit_bias"):
        arguments["logit_bias"] = {int(token): value for token, value in sampling["logit_bias"].items()}
    ids = stop_token_ids(request)
    if ids:
        arguments["stop_token_ids"] = ids
    room = max_model_len - len(request["token_ids"])
    wanted = stop.get("max_tokens")
    arguments["max_tokens"] = room if wanted is None else min(wanted, room)
    logprobs = section(request, "output_options").get("logprobs")
    if logprobs is not None:
        arguments["logprobs"] = logprobs
    extra = section(section(request, "extra_args"), "sampling_options")
    arguments |= given(extra, ("allowed_token_ids",))
    guided = sampling.get("guided_decoding")
    return arguments, given(guided, _GUIDES) if guided else None


class OutputReader:
    """From the outputs of one request, each with what is new since the one before, to frames."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._prompt_tokens = len(request["token_ids"])
        self._alternatives = section(request, "output_options").get("logprobs")
        self._generated = 0

    def read(self, output: Any) -> list[Frame]:
        """Frames of vLLM's ``RequestOutput``. Raises ``EngineShutdown``: the engine aborted it by itself."""
        frames = [self._frame(choice) for choice in output.outputs]
        if output.finished and frames:
            cached = output.num_cached_tokens
            frames[-1]["completion_usage"] = completion_usage(self._prompt_tokens, self._generated, cached)
        return frames

    def _frame(self, choice: Any) -> Frame:
        token_ids = list(choice.token_ids)
        self._generated += len(token_ids)
        frame: Frame = {"token_ids": token_ids, "index": choice.index}
        if choice.finish_reason is not None:
            if choice.finish_reason in ("abort", "error"):
                raise EngineShutdown(f"the engine ended the request: {choice.finish_reason}")
            frame["finish_reason"] = choice.finish_reason
        if choice.logprobs and self._alternatives is not None:
            rows = list(choice.logprobs)[-len(token_ids) :] if token_ids else []
            frame["log_probs"] = [row[token].logprob for token, row in zip(token_ids, rows, strict=True)]
            frame["top_logprobs"] = [self._top(row) for row in rows]
        return frame

    def _top(self, row: Mapping[int, Any]) -> Sequence[dict[str, Any]]:
        """The likeliest ones; vLLM adds the chosen token if it is none of them."""
        ranked = sorted(row.items(), key=lambda item: item[1].rank or 0)[: self._alternatives]
        return [{"rank": one.rank, "token_id": token, "logprob": one.logprob} for token, one in ranked]
