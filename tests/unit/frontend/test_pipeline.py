from __future__ import annotations

from typing import Any

import pytest

from dynamo_es.frontend.errors import OutputError
from dynamo_es.frontend.pipeline import Delta, OutputOptions, OutputPipeline
from dynamo_es.frontend.tokenizer import BytesTokenizer
from tests.unit.frontend.fakes import frame

EOS = 262


def run(frames: list[dict[str, Any]], **options: Any) -> tuple[OutputPipeline, list[Delta]]:
    pipeline = OutputPipeline(BytesTokenizer(), OutputOptions(**options))
    deltas = []
    for one in frames:
        delta = pipeline.push(one)
        if delta is not None:
            deltas.append(delta)
        if pipeline.cut:
            return pipeline, deltas
    return pipeline, deltas + pipeline.finish()


def test_PROTO_06_stop_string_cuts_the_worker_and_counts_consumed_tokens() -> None:
    frames = [frame(text) for text in ("ABC", "DEF", "G", "HI", "J", "K")]
    pipeline, deltas = run(frames, stops=["DEFGHIJ"])
    assert [delta.text for delta in deltas] == ["ABC", ""]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop == "DEFGHIJ"
    assert pipeline.cut
    assert pipeline.generated == len("ABCDEFGHIJ")


def test_PROTO_06_tokens_after_the_match_in_one_frame_are_not_counted() -> None:
    pipeline, deltas = run([frame("one two three four")], stops=["three"])
    assert deltas == [Delta(0, "one two ", "stop", True, 13, None, "three")]
    assert pipeline.usage(5)["completion_tokens"] == 13


def test_PROTO_07_held_text_is_flushed_in_the_delta_with_the_finish_reason() -> None:
    _, deltas = run([frame("abc<|se"), frame("", "length")], stops=["<|sep|>"])
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("abc", None), ("<|se", "length")]


def test_PROTO_07_control_marker_in_the_held_window_does_not_come_out() -> None:
    pipeline = OutputPipeline(BytesTokenizer(), OutputOptions(stops=["<|sep|>"]))
    first = pipeline.push({"token_ids": [*b"abc<|", 258], "finish_reason": None})
    last = pipeline.push({"token_ids": [*b"sep|>"], "finish_reason": "stop"})
    assert first is not None
    assert last is not None
    assert (first.text + last.text, last.finish_reason) == ("abc", "stop")


def test_PROTO_08_pending_bytes_at_the_end_of_a_stream_are_one_replacement() -> None:
    _, deltas = run([{"token_ids": [97, 0xE4, 0xB8], "finish_reason": "stop"}])
    assert deltas[0].text == "a�"


def test_PROTO_10_choices_are_kept_apart() -> None:
    frames = [frame("a", index=0), frame("c", index=1), frame("d", "stop", index=1), frame("b", "length", index=0)]
    pipeline, deltas = run(frames, n=2)
    assert [(one.choice, one.text, one.first, one.finish_reason) for one in deltas] == [
        (0, "a", True, None),
        (1, "c", True, None),
        (1, "d", False, "stop"),
        (0, "b", False, "length"),
    ]
    assert pipeline.usage(7) == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    assert not pipeline.cut


def test_PROTO_10_one_stopped_choice_does_not_cut_the_other() -> None:
    frames = [frame("ab", index=0), frame("xx", index=1), frame("ignored", index=0), frame("yy", "stop", index=1)]
    pipeline, deltas = run(frames, n=2, stops=["b"])
    assert [(one.choice, one.text, one.finish_reason) for one in deltas] == [
        (0, "a", "stop"),
        (1, "xx", None),
        (1, "yy", "stop"),
    ]
    assert pipeline.generated == 2 + 4


def test_eos_ends_the_choice_and_gives_no_text() -> None:
    pipeline, deltas = run([{"token_ids": [97, EOS, 98], "finish_reason": None}], stop_ids={EOS})
    assert (deltas[0].text, deltas[0].finish_reason, pipeline.generated, pipeline.cut) == ("a", "stop", 2, True)


def test_min_tokens_defers_stop_strings_and_eos() -> None:
    frames = [frame("x"), frame("x"), {"token_ids": [EOS]}, frame("y"), frame("x"), frame("z")]
    _, deltas = run(frames, stops=["x"], stop_ids={EOS}, min_tokens=4)
    assert "".join(delta.text for delta in deltas) == "xxy"
    assert deltas[-1].finish_reason == "stop"


def test_worker_finish_reason_is_mapped_and_unknown_ones_fail() -> None:
    for given, shown in (("eos", "stop"), ("cancelled", "stop"), ("length", "length"), ("abort", "stop")):
        assert run([frame("a", given)])[1][0].finish_reason == shown
    for bad in ("error", "error: boom", "tool_calls", "weird", 3):
        with pytest.raises(OutputError):
            run([frame("a", bad)])


def test_choice_index_is_bounded() -> None:
    for bad in (-1, 128, "x", True):
        with pytest.raises(OutputError):
            run([frame("a", index=bad)])


def test_text_of_the_worker_is_used_as_it_is() -> None:
    _, deltas = run([{"token_ids": [1, 2], "text": "given stop here", "finish_reason": None}], stops=["stop"])
    assert (deltas[0].text, deltas[0].tokens) == ("given ", 2)


def test_output_without_an_end_is_flushed_without_finish_reason() -> None:
    pipeline, deltas = run([frame("a<")], stops=["<end>"])
    assert [(delta.text, delta.finish_reason) for delta in deltas] == [("a", None), ("<", None)]
    assert not pipeline.any_finished


def test_logprobs_wait_for_the_delta_that_shows_their_text() -> None:
    first, second = "é".encode()
    frames = [
        {"token_ids": [first], "log_probs": [-0.5], "top_logprobs": [[{"token_id": first, "logprob": -0.5}]]},
        {"token_ids": [second], "log_probs": [-0.25], "finish_reason": "stop"},
    ]
    _, deltas = run(frames, logprobs=True)
    assert len(deltas) == 1
    assert deltas[0].logprobs is not None
    assert [entry.logprob for entry in deltas[0].logprobs] == [-0.5, -0.25]
    assert run(frames)[1][0].logprobs is None


def test_usage_of_the_worker_wins_for_the_prompt_only() -> None:
    details = {"cached_tokens": 64}
    usage = {"prompt_tokens": 100, "completion_tokens": 9, "total_tokens": 109, "prompt_tokens_details": details}
    pipeline, _ = run([frame("ab", "stop", completion_usage=usage)])
    assert pipeline.usage(3) == {
        "prompt_tokens": 100,
        "completion_tokens": 2,
        "total_tokens": 102,
        "prompt_tokens_details": details,
    }


def test_frames_after_the_end_only_update_usage() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
    pipeline, deltas = run([frame("a", "stop"), frame("b"), frame("", None, completion_usage=usage)])
    assert len(deltas) == 1
    assert pipeline.usage(3)["prompt_tokens"] == 5
    assert pipeline.generated == 1
