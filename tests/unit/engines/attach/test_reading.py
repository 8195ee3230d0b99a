"""What servers send is read event by event, whatever their API; what cannot be read is told as what it is."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.engines.attach.dialects import LlamaCppDialect, SglangDialect, VllmDialect
from dynamo_es.engines.attach.metrics_page import MAX_SERIES, loads_of, read_page, take_slots
from dynamo_es.engines.attach.refusals import failure_in_stream, refusal
from dynamo_es.engines.attach.sse import EventReader
from dynamo_es.engines.attach.text_in import TextReader, text_body, text_choices, text_path
from dynamo_es.engines.attach.upstream import tls_of
from dynamo_es.engines.attach.vitals import Change, Vitals
from dynamo_es.engines.attach.worker import AttachSettings, check_settings
from dynamo_es.errors import CannotConnect, ConfigError, EngineShutdown, InvalidArgument, Unknown
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.errors import Overloaded

REQUEST: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "stop_conditions": {"max_tokens": 4, "stop": ["x"], "stop_token_ids": [9], "stop_token_ids_hidden": [2],
                        "min_tokens": 1, "ignore_eos": None},
    "sampling_options": {"temperature": 0.5, "top_k": -1, "n": 1, "seed": 3, "guided_decoding": {"json": {"a": 1}}},
    "output_options": {"logprobs": 2},
    "routing": {"cache_salt": "s"},
}  # fmt: skip


def test_events_are_the_same_however_they_are_cut() -> None:
    stream = b': hello\r\ndata: {"a":1}\r\n\r\nevent: x\ndata: {"b":\ndata: 2}\n\n'
    stream += b'data: null\n\ndata: [DONE]\n\ndata: {"c":3}\n\n'
    for size in (1, 2, 7, len(stream)):
        reader = EventReader()
        events = [event for start in range(0, len(stream), size) for event in reader.feed(stream[start : start + size])]
        assert (events, reader.done) == ([{"a": 1}, {"b": 2}], True)


@pytest.mark.parametrize("stream", [b"data: nonsense\n\n", b"data: [1]\n\n", b"data: " + b"x" * 200, b"x" * 200])
def test_what_is_no_event_is_refused(stream: bytes) -> None:
    with pytest.raises(Unknown):
        EventReader(max_event_bytes=100).feed(stream)


def test_many_short_lines_of_one_event_are_bounded() -> None:
    reader = EventReader(max_event_bytes=100)
    with pytest.raises(Unknown):
        for _ in range(100):
            reader.feed(b"data: 12345\n")


def test_vllm_gets_what_it_knows_and_no_stop_strings() -> None:
    body = VllmDialect().body(REQUEST, "theirs", 4)
    assert body == {
        "model": "theirs", "prompt": [5, 6, 7], "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "temperature": 0.5, "top_k": -1, "n": 1, "seed": 3, "min_tokens": 1,
        "stop_token_ids": [2, 9], "max_tokens": 4, "structured_outputs": {"json": {"a": 1}}, "logprobs": 2,
        "return_tokens_as_token_ids": True, "cache_salt": "s",
    }  # fmt: skip


def test_an_adapter_is_a_model_of_vllm() -> None:
    assert VllmDialect().body({**REQUEST, "routing": {"lora_name": "l"}}, "theirs", 4)["model"] == "l"


def test_vllm_answers_are_frames() -> None:
    dialect = VllmDialect()
    reader = dialect.reader({**REQUEST, "sampling_options": {"n": 2}})
    logprobs = {
        "tokens": ["token_id:8"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"token_id:8": -0.5, "token_id:4": -1}],
    }
    assert reader.read({"choices": [{"index": 1, "text": "a", "token_ids": [8], "logprobs": logprobs}]}) == [
        {
            "token_ids": [8], "index": 1, "log_probs": [-0.5],
            "top_logprobs": [
                [{"rank": 1, "token_id": 8, "logprob": -0.5}, {"rank": 2, "token_id": 4, "logprob": -1}]
            ],
        }
    ]  # fmt: skip
    assert reader.read({"choices": [{"index": 1, "token_ids": [], "finish_reason": "length"}]})
    assert not reader.finished
    (frame,) = reader.read({"choices": [{"index": 0, "token_ids": [3], "finish_reason": "stop"}]})
    assert (frame["finish_reason"], reader.finished) == ("stop", True)
    assert reader.read({"choices": [], "usage": {"prompt_tokens": 3}}) == [
        {"token_ids": [], "completion_usage": {"prompt_tokens": 3}}
    ]


def test_an_abort_that_nobody_asked_for_is_the_workers_fault() -> None:
    for reader, event in (
        (VllmDialect().reader(REQUEST), {"choices": [{"index": 0, "finish_reason": "abort"}]}),
        (TextReader("m", 1), {"choices": [{"index": 0, "finish_reason": "abort"}]}),
        (
            SglangDialect().reader(REQUEST),
            {"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": {"type": "abort"}}},
        ),
    ):
        with pytest.raises(EngineShutdown):
            reader.read(event)


@pytest.mark.parametrize(
    "event",
    [{"choices": [1]}, {"choices": {}}, {"choices": [{"index": "x"}]}, {"choices": [{"token_ids": "x"}]}],
)
def test_strange_events_are_errors(event: dict[str, Any]) -> None:
    with pytest.raises(Unknown):
        VllmDialect().reader(REQUEST).read(event)


@pytest.mark.parametrize("cumulative", [True, False])
def test_sglang_gives_new_ids_or_all_so_far(cumulative: bool) -> None:
    dialect = SglangDialect()
    body = dialect.body(REQUEST, "theirs", 4)
    assert body == {
        "input_ids": [5, 6, 7], "stream": True, "return_logprob": True, "top_logprobs_num": 2,
        "sampling_params": {
            "temperature": 0.5, "top_k": -1, "n": 1, "stop_token_ids": [2, 9], "skip_special_tokens": False,
            "max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 3, "json_schema": {"a": 1},
        },
    }  # fmt: skip
    reader = dialect.reader(REQUEST)

    def event(count: int, new: int, finish: Any = None) -> dict[str, Any]:
        begin = 0 if cumulative else count - new
        ids = list(range(100 + begin, 100 + count))
        return {
            "output_ids": ids,
            "meta_info": {
                "prompt_tokens": 3, "completion_tokens": count, "cached_tokens": 1, "finish_reason": finish,
                "output_token_logprobs": [[-0.5, token, "t"] for token in ids],
                "output_top_logprobs": [[[-0.5, token, "t"]] for token in ids],
            },
        }  # fmt: skip

    frames = [*reader.read(event(2, 2)), *reader.read(event(3, 1)), *reader.read(event(4, 1, {"type": "length"}))]
    assert [frame["token_ids"] for frame in frames] == [[100, 101], [102], [103]]
    assert frames[1]["top_logprobs"] == [[{"rank": 1, "token_id": 102, "logprob": -0.5, "token": "t"}]]
    assert (frames[2]["finish_reason"], reader.finished) == ("length", True)
    assert frames[2]["completion_usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip


def test_llama_cpp_answers_are_frames() -> None:
    dialect = LlamaCppDialect(gives_choices=False)
    request = {**REQUEST, "sampling_options": {"temperature": 0.0, "top_k": -1, "repetition_penalty": 1.1,
                                               "logit_bias": {"4": 1.5}}}  # fmt: skip
    assert dialect.body(request, "theirs", 4) == {
        "prompt": [5, 6, 7], "stream": True, "return_tokens": True, "cache_prompt": True, "temperature": 0.0,
        "n_predict": 4, "repeat_penalty": 1.1, "top_k": 0, "logit_bias": [[4, 1.5]], "n_probs": 2,
    }  # fmt: skip
    reader = dialect.reader(request)
    told = [{"id": 8, "token": "a", "logprob": -0.5, "top_logprobs": [{"id": 8, "token": "a", "logprob": -0.5}]}]
    assert reader.read({"content": "a", "tokens": [8], "stop": False, "completion_probabilities": told}) == [
        {
            "token_ids": [8], "index": 0, "log_probs": [-0.5],
            "top_logprobs": [[{"rank": 1, "token_id": 8, "logprob": -0.5, "token": "a"}]],
        }
    ]  # fmt: skip
    end = {"tokens": [], "stop": True, "stop_type": "limit", "tokens_evaluated": 3, "tokens_predicted": 1,
           "timings": {"cache_n": 2}}  # fmt: skip
    (frame,) = reader.read(end)
    assert (frame["finish_reason"], reader.finished) == ("length", True)
    assert frame["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_llama_cpp_tells_that_a_token_was_the_last_one_only_behind_it() -> None:
    """The end token comes before the event with the counts, and the frontend ends an answer at that token."""
    dialect = LlamaCppDialect(gives_choices=True)
    request = {**REQUEST, "sampling_options": {"n": 2}, "stop_conditions": {"stop_token_ids_hidden": [2]}}
    assert dialect.body(request, "theirs", 4)["n_cmpl"] == 2
    assert "n" not in dialect.unsupported
    reader = dialect.reader(request)

    def event(index: int, *ids: int, stop: bool = False) -> dict[str, Any]:
        end = {"stop_type": "eos", "tokens_evaluated": 3, "tokens_predicted": 2, "timings": {"cache_n": 1}}
        return {"index": index, "tokens": list(ids), "stop": stop, **(end if stop else {})}

    assert reader.read(event(1, 8)) == [{"token_ids": [8], "index": 1}]
    assert reader.read(event(1, 2)) == []
    assert reader.read(event(0, 2)) == []
    # It went on all the same.
    assert [frame["token_ids"] for frame in reader.read(event(0, 9))] == [[2], [9]]
    (frame,) = reader.read(event(1, stop=True))
    assert (frame["token_ids"], frame["index"], frame["finish_reason"]) == ([2], 1, "stop")
    assert frame["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert not reader.finished
    assert reader.read(event(0, stop=True))[0]["token_ids"] == []
    assert reader.finished


def test_llama_cpp_is_asked_for_two_choices_first() -> None:
    one = {"index": 0, "tokens": [5], "tokens_evaluated": 3}
    several, single = LlamaCppDialect(gives_choices=True), LlamaCppDialect(gives_choices=False)
    assert (several.probe("m")["n_cmpl"], "n_cmpl" in single.probe("m")) == (2, False)
    assert several.understood([one, {**one, "index": 1}])
    assert single.understood(one)
    for strange in (one, [one], [one, 1], None):
        assert not several.understood(strange)
    assert not single.understood({**one, "tokens_evaluated": 4})


def test_what_a_server_cannot_do_is_refused_with_the_field() -> None:
    guided = {**REQUEST, "sampling_options": {"guided_decoding": {"choice": ["a"]}}}
    for dialect in (SglangDialect(), LlamaCppDialect(gives_choices=True)):
        with pytest.raises(InvalidArgument, match="guided"):
            dialect.body(guided, "m", 1)
    with pytest.raises(InvalidArgument, match="`n`"):
        LlamaCppDialect(gives_choices=False).body({**REQUEST, "sampling_options": {"n": 2}}, "m", 1)


def test_text_goes_on_as_it_was_written() -> None:
    request = {"model": "ours", "messages": [], "tools": [1], "stream": True, "routing": {"dp_rank": 0}, "nvext": {}}
    assert text_path(request) == "/v1/chat/completions"
    assert text_body(request, "theirs") == {"model": "theirs", "messages": [], "tools": [1], "stream": True}
    assert text_path({"prompt": "x"}) == "/v1/completions"
    asked = ({"prompt": "x"}, {"prompt": [1, 2], "n": 3}, {"prompt": ["x", "y"], "n": 2}, {"prompt": [[1], [2]]}, {})
    assert [text_choices(request) for request in asked] == [1, 3, 4, 2, 1]
    with pytest.raises(InvalidArgument):
        text_path({"token_ids": [1]})


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (400, {"error": {"message": "temperature must be under 2", "param": "temperature"}}, InvalidArgument,
         "temperature must be under 2"),
        (400, {"error": {"message": "too hot", "param": "temperature"}}, InvalidArgument, "too hot (`temperature`)"),
        (400, {"object": "error", "message": "flat", "code": 400}, InvalidArgument, "flat"),
        (422, {"detail": [{"loc": ["body", "n"], "msg": "not a number"}]}, InvalidArgument, "n: not a number"),
        (413, None, InvalidArgument, "refused the request (413)"),
        (429, None, Overloaded, "429"),
        (503, None, Overloaded, "503"),
        (502, None, CannotConnect, "502"),
        (401, None, CannotConnect, "--upstream-api-key-file"),
        (302, None, CannotConnect, "redirection"),
        (404, None, HttpError, "404"),
        (500, {"error": {"message": "quotes the prompt"}}, HttpError, "HTTP 500: the upstream answered 500"),
    ],
)  # fmt: skip
def test_a_refusal_says_whose_fault_it_is(status: int, body: Any, kind: type[Exception], text: str) -> None:
    error = refusal(status, b"<html>" if body is None else json.dumps(body).encode())
    assert type(error) is kind
    assert text in str(error)


def test_failures_within_a_stream() -> None:
    assert isinstance(failure_in_stream({"message": "m", "code": 400}), InvalidArgument)
    assert isinstance(failure_in_stream({"message": "m", "code": "503"}), EngineShutdown)
    for odd in ({"code": True}, "text", {"code": 7}, None):
        error = failure_in_stream(odd)
        assert isinstance(error, HttpError)
        assert error.code == 500


VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100",cache_dtype="auto"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="100",cache_dtype="auto"} 1.0
process_start_time_seconds 1.7e+09
"""


def test_load_of_vllm_by_rank() -> None:
    page = read_page(VLLM_PAGE)
    assert (page.block_size, page.total_blocks(None), page.started_at) == (32, 100, 1.7e9)
    assert loads_of(page, None) == {0: (25, 100, 2, 5), 1: (50, 100, 1, None)}


def test_load_of_sglang_and_llama_cpp() -> None:
    sglang = (
        'sglang:num_running_reqs{x="y"} 3.0\nsglang:num_used_tokens{x="y"} 65.0\nsglang:max_total_num_tokens 640.0\n'
    )
    assert loads_of(read_page(sglang), 16) == {0: (5, 40, 3, None)}
    assert loads_of(read_page(sglang), None) == {}
    assert read_page(sglang).total_blocks(16) == 40
    llama = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\nllamacpp:kv_cache_tokens 33\n"
    assert loads_of(read_page(llama), 16) == {0: (3, None, 1, 2)}


def test_load_of_a_newer_llama_cpp_is_in_its_slots() -> None:
    """As answered by the server in xllamacpp 2026.10."""
    page = read_page("llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\nllamacpp:n_tokens_max 114\n")
    assert page.wants_slots
    assert loads_of(page, 16) == {}
    slots = [
        {"id": 0, "n_ctx": 1024, "is_processing": False, "n_prompt_tokens": 21},
        {"id": 1, "n_ctx": 1024, "is_processing": True, "n_prompt_tokens": 56, "next_token": [{"n_decoded": 16}]},
    ]
    take_slots(page, slots)
    assert loads_of(page, 16) == {0: (4, 128, 1, 0)}
    for strange in (None, {}, [1], [{"n_ctx": "x"}], [{"n_ctx": 5, "is_processing": True}]):
        page = read_page("llamacpp:requests_processing 1\n")
        take_slots(page, strange)
        assert loads_of(page, 16) == {}


def test_pages_that_say_nothing_or_are_none() -> None:
    assert loads_of(read_page("python_info 1.0\n"), 16) == {}
    strange = (
        'vllm:num_requests_running{engine="x"} 1\nvllm:kv_cache_usage_perc NaN\n'
        'vllm:cache_config_info{block_size="-"} 1\n'
    )
    assert loads_of(read_page(strange), 16) == {}
    with pytest.raises(Unknown):
        read_page("<html>no page</html>")


CACHE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="10"} 1\n'


@pytest.mark.parametrize("value", ["1e400", "+Inf", "-Inf", "NaN", "1e308", "-1e308", "-5", "9007199254740993e3"])
def test_numbers_that_are_no_amounts_say_nothing(value: str) -> None:
    page = read_page(f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc 0.1\n{CACHE}")
    assert loads_of(page, 16) == {0: (1, 10, None, None)}
    page = read_page(f"vllm:num_requests_running 1\nvllm:kv_cache_usage_perc {value}\n{CACHE}")
    assert loads_of(page, 16) in ({}, {0: (10, 10, 1, None)})
    page = read_page(f"llamacpp:requests_processing 1\nllamacpp:kv_cache_tokens {value}\n")
    assert loads_of(page, 16) == {}
    page = read_page(f"sglang:token_usage 0.5\nsglang:max_total_num_tokens {value}\n")
    assert (loads_of(page, 16), page.total_blocks(16)) == ({}, None)
    # A start time that equals nothing would be a new process at every look.
    assert read_page(f"process_start_time_seconds {value}\n").started_at is None


def test_what_adds_up_to_too_much_says_nothing() -> None:
    many = "".join(f'vllm:num_requests_running{{m="{number}"}} 9e15\n' for number in range(5000))
    assert loads_of(read_page(f"{many}vllm:kv_cache_usage_perc 1\n{CACHE}"), 16) == {0: (10, 10, None, None)}
    page = read_page("llamacpp:requests_processing 1\n")
    take_slots(page, [{"n_ctx": 2**63, "is_processing": True, "n_prompt_tokens": 2**63}] * 9)
    assert loads_of(page, 16) == {}
    huge = CACHE.replace('"16"', f'"{10**14}"')
    assert read_page(huge).block_size is None


def test_a_series_that_is_there_twice_counts_once() -> None:
    running = 'vllm:num_requests_running{engine="0",m="a"} 2\n'
    other = running.replace('"a"', '"b"')
    assert loads_of(read_page(f"{running * 3}{other}vllm:kv_cache_usage_perc 0\n{CACHE}"), 16) == {0: (0, 10, 4, None)}
    starts = "process_start_time_seconds 5\n", "process_start_time_seconds 6\n"
    assert read_page("".join(starts)).started_at == read_page("".join(reversed(starts))).started_at == 6


def test_of_a_page_without_end_only_what_matters_is_parsed() -> None:
    """The loop that serves requests reads it."""
    histogram = "".join(f'vllm:time_to_first_token_seconds_bucket{{le="{number}"}} 1\n' for number in range(200_000))
    many = "".join(f'vllm:num_requests_running{{m="{number}"}} 1\n' for number in range(50_000))
    began = time.process_time()
    (load,) = loads_of(read_page(f"{histogram}{CACHE}vllm:kv_cache_usage_perc 0\n{many}"), 16).values()
    assert load.running == MAX_SERIES - 2
    assert time.process_time() - began < 5


@pytest.mark.parametrize("count", [0, -1, 129, 10**8, True, "2", 1.5])
def test_a_request_for_choices_without_end_is_refused(count: Any) -> None:
    with pytest.raises(InvalidArgument, match="n must be 1 to 128"):
        text_choices({"n": count, "messages": []})
    for dialect in (VllmDialect(), SglangDialect(), LlamaCppDialect(gives_choices=True)):
        with pytest.raises(InvalidArgument, match="n must be 1 to 128"):
            dialect.reader({**REQUEST, "sampling_options": {"n": count}})


def test_choices_of_several_prompts_are_bounded_together() -> None:
    assert text_choices({"n": 2, "prompt": ["a"] * 64}) == 128
    with pytest.raises(InvalidArgument, match="128"):
        text_choices({"n": 2, "prompt": ["a"] * 65})


def test_a_chunk_whose_index_is_none_ends_nothing() -> None:
    reader = TextReader("m", 1)
    assert reader.read({"choices": [{"index": [0], "finish_reason": "stop"}]})
    assert not reader.finished


def test_an_upstream_is_down_when_nobody_is_there_or_it_fails_twice() -> None:
    vitals = Vitals()
    assert vitals.saw_failure("slow", refused=False) is Change.NONE
    assert vitals.saw_well() is Change.NONE
    assert vitals.saw_failure("slow", refused=False) is Change.NONE
    assert vitals.saw_failure("slow", refused=False) is Change.DOWN
    assert (vitals.up, vitals.gone, vitals.reason) == (False, False, "slow")
    assert vitals.saw_well() is Change.UP
    assert vitals.saw_failure("refused", refused=True) is Change.DOWN
    assert vitals.gone
    assert vitals.saw_failure("loading", refused=False) is Change.NONE
    assert vitals.gone


def test_another_start_time_is_another_process() -> None:
    vitals = Vitals()
    assert [vitals.saw_start(at) for at in (None, 1.0, 1.0, 2.0, None, 2.0)] == [None, None, False, True, None, False]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "--upstream is missing"),
        ({"upstream": "http://h", "kv_events_replay": ("tcp://a:1",)}, "--kv-events-replay"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_settings(AttachSettings(RuntimeSettings(), attach=AttachConfig(**options)))


@pytest.mark.parametrize("url", ["host:8000", "ftp://h", "http://", "http://u:p@h", "http://h?key=1", "http://h:0"])
def test_an_upstream_is_a_plain_url(url: str) -> None:
    flags = argparse.ArgumentParser()
    add_flags(flags, AttachConfig)
    with pytest.raises(ConfigError, match="--upstream"):
        load(AttachConfig, flags.parse_args(["--upstream", url]), {})


def test_tls_needs_authorities_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--upstream-ca-cert-path"):
        tls_of(AttachConfig(ca_cert_path=str(tmp_path / "none.pem")))
    with pytest.raises(ConfigError, match="exclude"):
        tls_of(AttachConfig(ca_cert_path="x", verify=False))
    assert tls_of(AttachConfig(verify=False)) is False
