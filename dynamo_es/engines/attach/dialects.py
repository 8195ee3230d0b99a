"""How servers take token ids and give them back: one dialect each for vLLM, SGLang and llama.cpp. Pure.

vLLM: ``/v1/completions`` with ``prompt`` as ids and ``return_token_ids``. SGLang: ``/generate`` with ``input_ids``.
llama.cpp's own server: ``/completion`` with ``prompt`` as ids and ``return_tokens``. Stop strings stay with the
frontend, which sees the text; token ids that end an answer are told to the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from dynamo_es.engines.attach.refusals import failure_in_stream
from dynamo_es.engines.frame_stream import checked_choice_count
from dynamo_es.engines.request_parts import completion_usage, given, section, stop_token_ids
from dynamo_es.errors import EngineShutdown, InvalidArgument, Unknown

Frame = dict[str, Any]
PROBE = [1, 2, 3]
"""The prompt that finds out whether a server takes ids; every vocabulary has these."""
_GONE = "the upstream gave the request up"
_NOT_GIVEN = "it is not given by the attached server's API for token ids"
_COMMON_UNSUPPORTED = dict.fromkeys(("best_of", "prompt_logprobs", "echo", "suffix", "detokenize"), _NOT_GIVEN)


class Reader(Protocol):
    """Reads the events of one answer in order."""

    def read(self, event: Mapping[str, Any]) -> list[Frame]:
        """Frames of an event, as preprocessed requests are answered with them.

        Raises:
            DynamoException, HttpError: The server failed the request, or it is no such event.
        """

    @property
    def finished(self) -> bool:
        """Every choice came to its end."""


class Dialect(Protocol):
    """One server's API for token ids.

    Attributes:
        name: As ``--upstream-api`` names it.
        path: Where requests go.
        unsupported: HTTP fields that cannot be passed on, each with the reason.
    """

    name: str
    path: str
    unsupported: Mapping[str, str]

    def probe(self, model: str) -> dict[str, Any]:
        """The body of a request that finds out whether the server speaks so."""

    def understood(self, answer: Any) -> bool:
        """Whether the answer to ``probe``, decoded JSON, is one to a prompt of ids, with ids."""

    def body(self, request: Mapping[str, Any], model: str, max_tokens: int | None) -> dict[str, Any]:
        """The body for a preprocessed request. ``max_tokens``: what is asked for, or fits; None: not known.

        Raises ``InvalidArgument``: it asks for what this API cannot give.
        """

    def reader(self, request: Mapping[str, Any]) -> Reader:
        """For the answer to ``request``."""


class VllmDialect:
    """vLLM 0.10.2 and later."""

    name = "vllm"
    path = "/v1/completions"
    unsupported: Mapping[str, str] = _COMMON_UNSUPPORTED
    # Members of sampling_options that vLLM knows by the same name.
    _SAME = (
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
        "length_penalty", "seed", "logit_bias",
    )  # fmt: skip
    _GUIDES = ("json", "regex", "choice", "grammar", "whitespace_pattern")

    def probe(self, model: str) -> dict[str, Any]:
        return {"model": model, "prompt": PROBE, "max_tokens": 1, "temperature": 0, "return_token_ids": True}

    def understood(self, answer: Any) -> bool:
        choices = answer.get("choices") if isinstance(answer, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        return (
            isinstance(choice, dict)
            and isinstance(choice.get("token_ids"), list)
            and choice.get("prompt_token_ids") == PROBE
        )

    def body(self, request: Mapping[str, Any], model: str, max_tokens: int | None) -> dict[str, Any]:
        sampling, stop = section(request, "sampling_options"), section(request, "stop_conditions")
        routing = section(request, "routing")
        body: dict[str, Any] = {
            "model": routing.get("lora_name") or model,
            "prompt": request["token_ids"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **given(sampling, self._SAME),
            **given(stop, ("min_tokens", "ignore_eos")),
            **_stop_ids(request, "stop_token_ids"),
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        guided = sampling.get("guided_decoding")
        if guided:
            body["structured_outputs"] = given(guided, self._GUIDES)
        logprobs = section(request, "output_options").get("logprobs")
        if logprobs is not None:
            body |= {"logprobs": logprobs, "return_tokens_as_token_ids": True}
        extra = section(section(request, "extra_args"), "sampling_options")
        body |= given(extra, ("allowed_token_ids",))
        if extra.get("bad_words_token_ids"):
            raise InvalidArgument("`bad_words_token_ids` cannot be passed on to the attached server")
        return body | given(routing, ("cache_salt",))

    def reader(self, request: Mapping[str, Any]) -> Reader:
        return _VllmReader(_choices(request), section(request, "output_options").get("logprobs"))


class _VllmReader:
    def __init__(self, choices: int, alternatives: int | None) -> None:
        self._left = set(range(choices))
        self._alternatives = alternatives

    @property
    def finished(self) -> bool:
        return not self._left

    def read(self, event: Mapping[str, Any]) -> list[Frame]:
        if event.get("error") is not None:
            raise failure_in_stream(event["error"])
        frames = [self._frame(choice) for choice in _list(event, "choices")]
        usage = event.get("usage")
        if isinstance(usage, dict):
            if not frames:
                frames.append({"token_ids": []})
            frames[-1]["completion_usage"] = usage
        return frames

    def _frame(self, choice: Any) -> Frame:
        if not isinstance(choice, dict):
            raise _strange()
        index, token_ids = _index(choice), _list(choice, "token_ids")
        frame: Frame = {"token_ids": token_ids, "index": index, **_finish(choice.get("finish_reason"))}
        if "finish_reason" in frame:
            self._left.discard(index)
        told = choice.get("logprobs")
        if isinstance(told, dict) and token_ids:
            frame["log_probs"] = told.get("token_logprobs")
            tops = told.get("top_logprobs")
            if isinstance(tops, list):
                frame["top_logprobs"] = [list(_vllm_alternatives(top))[: self._alternatives] for top in tops]
        return frame


def _vllm_alternatives(top: Any) -> Iterator[dict[str, Any]]:
    # The chosen token is the first one, even if it is none of the likeliest.
    likeliest = sorted((top or {}).items(), key=lambda item: -item[1])
    for rank, (name, value) in enumerate(likeliest, 1):
        token_id = str(name).removeprefix("token_id:")
        if not token_id.isdecimal():
            raise _strange()
        yield {"rank": rank, "token_id": int(token_id), "logprob": value}


class SglangDialect:
    """SGLang's native API."""

    name = "sglang"
    path = "/generate"
    unsupported: Mapping[str, str] = {
        **_COMMON_UNSUPPORTED,
        **dict.fromkeys(("guided_choice", "allowed_token_ids", "bad_words_token_ids"), _NOT_GIVEN),
    }
    _SAME = ("n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k",
             "min_p", "logit_bias")  # fmt: skip
    _GUIDES = (("json", "json_schema"), ("regex", "regex"), ("grammar", "ebnf"))

    def probe(self, model: str) -> dict[str, Any]:
        return {"input_ids": PROBE, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}

    def understood(self, answer: Any) -> bool:
        told = answer.get("meta_info") if isinstance(answer, dict) else None
        return (
            isinstance(told, dict)
            and told.get("prompt_tokens") == len(PROBE)
            and isinstance(answer.get("output_ids"), list)
        )

    def body(self, request: Mapping[str, Any], model: str, max_tokens: int | None) -> dict[str, Any]:
        sampling, stop = section(request, "sampling_options"), section(request, "stop_conditions")
        params: dict[str, Any] = {
            **given(sampling, self._SAME),
            **given(stop, ("ignore_eos",)),
            **_stop_ids(request, "stop_token_ids"),
            "skip_special_tokens": False,
        }
        if max_tokens is not None:
            params["max_new_tokens"] = max_tokens
        if stop.get("min_tokens"):
            params["min_new_tokens"] = stop["min_tokens"]
        if sampling.get("seed") is not None:
            params["sampling_seed"] = sampling["seed"]
        params |= _guides(sampling.get("guided_decoding"), self._GUIDES)
        body: dict[str, Any] = {"input_ids": request["token_ids"], "sampling_params": params, "stream": True}
        logprobs = section(request, "output_options").get("logprobs")
        if logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": logprobs}
        lora = section(request, "routing").get("lora_name")
        return body | ({"lora_path": lora} if lora else {})

    def reader(self, request: Mapping[str, Any]) -> Reader:
        return _SglangReader(_choices(request))


class _SglangReader:
    """Ids come as all so far or as the new ones, by the server's settings; ``completion_tokens`` tells which."""

    def __init__(self, choices: int) -> None:
        self._left = set(range(choices))
        self._seen: dict[int, int] = {}

    @property
    def finished(self) -> bool:
        return not self._left

    def read(self, event: Mapping[str, Any]) -> list[Frame]:
        if event.get("error") is not None:
            raise failure_in_stream(event["error"])
        told, index, ids = event.get("meta_info"), _index(event), _list(event, "output_ids")
        if not isinstance(told, dict):
            raise _strange()
        seen, count = self._seen.get(index, 0), told.get("completion_tokens")
        if not isinstance(count, int) or isinstance(count, bool) or count < seen:
            raise _strange()
        new = count - seen
        self._seen[index] = count
        if len(ids) < new:
            raise _strange()
        token_ids = ids[len(ids) - new :]
        reason = told.get("finish_reason")
        frame: Frame = {"token_ids": token_ids, "index": index}
        if isinstance(reason, dict):
            if reason.get("type") == "abort" and reason.get("status_code") is not None:
                raise failure_in_stream({"code": reason["status_code"], "message": reason.get("message")})
            frame |= _finish(reason.get("type"))
            self._left.discard(index)
            frame["completion_usage"] = completion_usage(told.get("prompt_tokens"), count, told.get("cached_tokens"))
        frame |= _sglang_logprobs(told, new)
        return [frame]


def _sglang_logprobs(told: Mapping[str, Any], new: int) -> Frame:
    """``(logprob, id, text)`` a token, all so far or the new ones."""
    values = told.get("output_token_logprobs")
    if not isinstance(values, list) or new <= 0 or len(values) < new:
        return {}
    tops = told.get("output_top_logprobs")
    frame: Frame = {"log_probs": [value[0] for value in values[-new:]]}
    if isinstance(tops, list) and len(tops) >= new:
        frame["top_logprobs"] = [
            [
                {"rank": rank, "token_id": item[1], "logprob": item[0], "token": item[2]}
                for rank, item in enumerate(top or (), 1)
            ]
            for top in tops[-new:]
        ]
    return frame


class LlamaCppDialect:
    """llama.cpp's own server (``llama-server``). One that has several slots and is new enough gives several choices."""

    name = "llamacpp"
    path = "/completion"
    _SAME = ("presence_penalty", "frequency_penalty", "temperature", "top_p", "min_p", "seed")
    _GUIDES = (("json", "json_schema"), ("grammar", "grammar"))
    _FINISHES: Mapping[Any, str] = {"eos": "stop", "word": "stop", "limit": "length"}
    _UNSUPPORTED = (
        "guided_regex", "guided_choice", "stop_token_ids", "min_tokens", "allowed_token_ids", "bad_words_token_ids",
    )  # fmt: skip

    def __init__(self, *, gives_choices: bool) -> None:
        """``gives_choices``: whether a request may ask for several."""
        self._gives_choices = gives_choices
        names = self._UNSUPPORTED if gives_choices else ("n", *self._UNSUPPORTED)
        self.unsupported: Mapping[str, str] = {**_COMMON_UNSUPPORTED, **dict.fromkeys(names, _NOT_GIVEN)}

    def probe(self, model: str) -> dict[str, Any]:
        body = {"prompt": PROBE, "n_predict": 1, "temperature": 0, "return_tokens": True}
        return body | {"n_cmpl": 2} if self._gives_choices else body

    def understood(self, answer: Any) -> bool:
        answers = answer if self._gives_choices else [answer]
        return (
            isinstance(answers, list)
            and len(answers) == (2 if self._gives_choices else 1)
            and all(self._has_ids(one) for one in answers)
        )

    @staticmethod
    def _has_ids(answer: Any) -> bool:
        return (
            isinstance(answer, dict)
            and isinstance(answer.get("tokens"), list)
            and answer.get("tokens_evaluated") == len(PROBE)
        )

    def body(self, request: Mapping[str, Any], model: str, max_tokens: int | None) -> dict[str, Any]:
        sampling, stop = section(request, "sampling_options"), section(request, "stop_conditions")
        choices = _choices(request)
        if choices != 1 and not self._gives_choices:
            raise InvalidArgument("`n` must be 1: the attached server has one choice a request")
        body: dict[str, Any] = {
            "prompt": request["token_ids"],
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            **given(sampling, self._SAME),
            **given(stop, ("ignore_eos",)),
        }
        if choices != 1:
            body["n_cmpl"] = choices
        if max_tokens is not None:
            body["n_predict"] = max_tokens
        if sampling.get("repetition_penalty") is not None:
            body["repeat_penalty"] = sampling["repetition_penalty"]
        if sampling.get("top_k") is not None:
            body["top_k"] = max(sampling["top_k"], 0)
        if sampling.get("logit_bias"):
            body["logit_bias"] = [[int(token), value] for token, value in sampling["logit_bias"].items()]
        body |= _guides(sampling.get("guided_decoding"), self._GUIDES)
        logprobs = section(request, "output_options").get("logprobs")
        return body if logprobs is None else body | {"n_probs": max(logprobs, 1)}

    def reader(self, request: Mapping[str, Any]) -> Reader:
        return _LlamaCppReader(self._FINISHES, _choices(request), frozenset(stop_token_ids(request)))


class _LlamaCppReader:
    """A token that ends an answer comes before the event that tells so, with what was cached: it waits for that."""

    def __init__(self, finishes: Mapping[Any, str], choices: int, ends: frozenset[int]) -> None:
        self._finishes = finishes
        self._ends = ends
        self._left = set(range(choices))
        self._held: dict[int, Frame] = {}

    @property
    def finished(self) -> bool:
        return not self._left

    def read(self, event: Mapping[str, Any]) -> list[Frame]:
        if event.get("error") is not None:
            raise failure_in_stream(event["error"])
        if not isinstance(event.get("stop"), bool):
            raise _strange()
        index, token_ids = _index(event), _list(event, "tokens")
        held = self._held.pop(index, None)
        frame: Frame = {"token_ids": token_ids, "index": index, **_llama_cpp_logprobs(event)}
        if event["stop"]:
            self._left.discard(index)
            frame = {"token_ids": token_ids, "index": index} if held is None else held
            return [frame | self._end(event)]
        if token_ids and token_ids[-1] in self._ends:
            self._held[index] = frame
            return [] if held is None else [held]
        return [frame] if held is None else [held, frame]

    def _end(self, event: Mapping[str, Any]) -> Frame:
        timings = event.get("timings")
        cached = timings.get("cache_n") if isinstance(timings, dict) else None
        return {
            "finish_reason": self._finishes.get(event.get("stop_type"), "stop"),
            "completion_usage": completion_usage(event.get("tokens_evaluated"), event.get("tokens_predicted"), cached),
        }


def _llama_cpp_logprobs(event: Mapping[str, Any]) -> Frame:
    told = event.get("completion_probabilities")
    if not isinstance(told, list) or not told:
        return {}
    return {
        "log_probs": [item["logprob"] for item in told],
        "top_logprobs": [
            [
                {"rank": rank, "token_id": one["id"], "logprob": one["logprob"], "token": one.get("token")}
                for rank, one in enumerate(item.get("top_logprobs") or (), 1)
            ]
            for item in told
        ],
    }


DIALECTS: Sequence[Dialect] = (
    VllmDialect(), SglangDialect(), LlamaCppDialect(gives_choices=True), LlamaCppDialect(gives_choices=False),
)  # fmt: skip
"""In the order in which they are tried."""


def _guides(guided: Any, names: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A grammar by the server's name for its kind. Raises ``InvalidArgument``: it has no such kind."""
    if not guided:
        return {}
    for ours, theirs in names:
        if guided.get(ours) is not None:
            return {theirs: guided[ours]}
    raise InvalidArgument("this kind of guided decoding cannot be passed on to the attached server")


def _stop_ids(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    ids = stop_token_ids(request)
    return {name: ids} if ids else {}


def _choices(request: Mapping[str, Any]) -> int:
    return checked_choice_count(section(request, "sampling_options").get("n"))


def _list(event: Mapping[str, Any], name: str) -> list[Any]:
    value = event.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _strange()
    return value


def _index(choice: Mapping[str, Any]) -> int:
    value = choice.get("index") or 0
    if not isinstance(value, int):
        raise _strange()
    return value


def _finish(reason: Any) -> Frame:
    """Raises ``EngineShutdown``: the server aborted it, which nobody asked for."""
    if reason is None:
        return {}
    if reason == "abort":
        raise EngineShutdown(_GONE)
    return {"finish_reason": reason}


def _strange() -> Unknown:
    return Unknown("the upstream sent an event that is not understood")
