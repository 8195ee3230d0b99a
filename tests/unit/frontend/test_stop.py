from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_es.frontend.stop import StopMatcher, first_marker, held_length


def feed(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include=include)
    texts = []
    for piece in pieces:
        matched = matcher.push(piece)
        texts.append(matched.text)
        if matched.stop is not None:
            return texts, matched.stop
    texts.append(matcher.finish())
    return texts, None


@pytest.mark.parametrize("cut", range(1, len("</think>")))
def test_PROTO_05_marker_is_found_at_every_cut(cut: int) -> None:
    text = "...think</think>\nAnswer"
    place = text.index("</think>") + cut
    texts, found = feed([text[:place], text[place:]], ["</think>", "</thinking>"])
    assert (texts[0], found) == ("...think", "</think>")


def test_PROTO_05_lone_angle_is_delivered_at_most_one_chunk_late() -> None:
    texts, found = feed(["a <", " b", ""], ["</think>"])
    assert texts[:2] == ["a ", "< b"]
    assert found is None
    assert "".join(feed(["a < b"], ["</think>"])[0]) == "a < b"
    assert "".join(feed(["a <"], ["</think>"])[0]) == "a <"


@pytest.mark.parametrize(("text", "held"), [("abc", 0), ("ab<", 1), ("x</thin", 6), ("</think>", 0), ("<<", 1)])
def test_PROTO_05_held_back_only_if_a_real_beginning(text: str, held: int) -> None:
    assert held_length(text, ["</think>"]) == held


def test_PROTO_06_stop_over_tokens_is_never_partly_sent() -> None:
    texts, found = feed(["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"])
    assert "".join(texts) == "ABC"
    assert found == "DEFGHIJ"


def test_PROTO_06_shorter_of_two_stops_ends_first() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"], ["abc", "d"]):
        texts, found = feed(pieces, ["ab", "abcd"])
        assert ("".join(texts), found) == ("", "ab")


def test_PROTO_06_multi_byte_stop() -> None:
    texts, found = feed(["na", "ï", "ve 世", "界!"], ["世界"])
    assert ("".join(texts), found) == ("naïve ", "世界")


def test_included_stop_string_is_not_held_back() -> None:
    texts, found = feed(["one", " two", " three", " fo", "ur"], ["ee fo"], include=True)
    assert texts == ["one", " two", " three", " fo"]
    assert found == "ee fo"


@settings(deadline=None)
@given(st.text("ab<c", max_size=20), st.lists(st.text("ab<c", min_size=1, max_size=4), min_size=1), st.data())
def test_result_does_not_depend_on_the_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for include in (False, True):
        whole, one = feed([text], stops, include=include), feed(pieces, stops, include=include)
        assert ("".join(one[0]), one[1]) == ("".join(whole[0]), whole[1])


def test_marker_that_ends_first_wins() -> None:
    assert first_marker("xabcd", ["bcd", "c"]) == (3, 4, "c")
    assert first_marker("xabc", ["bc", "abc"]) == (1, 4, "abc")
    assert first_marker("x", ["y"]) is None
