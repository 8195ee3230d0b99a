"""From a worker's frames to what a client sees: one pipeline for streams and unary answers. Pure, no asyncio.

``frame -> detokenize -> stop strings and stop tokens -> thoughts and tool calls -> Delta``. At the end of a choice
everything that was held back takes the same way; nothing by-passes a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo_es.frontend.errors import EngineFailed, OutputError
from dynamo_es.frontend.parsers.choice import CallDelta, ChoiceParser, Parsed, Parsing
from dynamo_es.frontend.parsers.shield import Shield
from dynamo_es.frontend.stop import StopMatcher
from dynamo_es.frontend.tokenizer import DecodeStream, Detokenizer

MAX_CHOICE_INDEX = 127
_FINISH = {
    "stop": "stop",
    "eos": "stop",
    "cancelled": "stop",
    "abort": "stop",
    "length": "length",
    "content_filter": "content_filter",
}


class TokenLogprob(NamedTuple):
    """Log probability of a generated token, and the alternatives as the worker gave them."""

    token_id: int
    logprob: float
    top: Sequence[Mapping[str, Any]]


class Delta(NamedTuple):
    """What one choice gained.

    Attributes:
        choice: Index of the choice.
        text: New content, may be empty.
        finish_reason: ``stop``, ``length``, ``content_filter`` or ``tool_calls`` on the choice's last delta, else None.
        first: It is the first delta of this choice.
        tokens: Tokens generated since the delta before.
        logprobs: Of the tokens since the delta before; None if not asked for or none came.
        stop: The stop string that ended the choice, or None.
        reasoning: New text of thoughts, may be empty.
        calls: What tool calls gained, at most one entry a call.
    """

    choice: int
    text: str
    finish_reason: str | None
    first: bool
    tokens: int
    logprobs: list[TokenLogprob] | None = None
    stop: str | None = None
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


class OutputOptions(msgspec.Struct, frozen=True):
    """How a request wants its output.

    Attributes:
        stops: Stop strings.
        include_stop: Keep the stop string in the text.
        stop_ids: Tokens that end a choice and give no text (the model's eos ids and the client's).
        min_tokens: Nothing stops a choice before it has so many tokens.
        skip_special_tokens: Hide special tokens.
        logprobs: Carry log probabilities.
        n: Choices that were asked for.
        parsing: How thoughts and tool calls are told from content; None: all is content.
    """

    stops: Sequence[str] = ()
    include_stop: bool = False
    stop_ids: Collection[int] = frozenset()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    logprobs: bool = False
    n: int = 1
    parsing: Parsing | None = None


def finish_of_worker(reason: Any) -> str:
    """Client's finish reason for a worker's.

    Raises:
        EngineFailed: ``error``, ``error: <text>`` or ``{"error": text}``.
        OutputError: Anything else that is not a regular end.
    """
    try:
        return _FINISH[reason]
    except (KeyError, TypeError):
        if (isinstance(reason, dict) and "error" in reason) or (isinstance(reason, str) and reason.startswith("error")):
            raise EngineFailed from None
        raise OutputError("a finish reason that is not known") from None


class _Choice:
    __slots__ = (
        *("finished", "generated", "is_plain", "logprobs", "matcher", "parser", "reported", "seen", "shield"),
        *("stream", "thinks"),
    )

    def __init__(
        self, stream: DecodeStream, matcher: StopMatcher | None, parser: ChoiceParser | None, shield: Shield | None
    ) -> None:
        self.stream = stream
        self.matcher = matcher
        self.parser = parser
        self.shield = shield
        self.is_plain = matcher is None and parser is None and shield is None
        self.thinks = False
        self.generated = 0
        self.reported = 0
        self.seen = False
        self.finished = False
        self.logprobs: list[TokenLogprob] = []


def usage_of(
    worker: Mapping[str, Any] | None, prompt_tokens: int, generated: int, reasoned: int | None
) -> dict[str, Any]:
    """Token counts of an answer: the worker's prompt count and details if it sent them, else those counted here.

    ``reasoned``: tokens of thoughts; None: thoughts are not told apart.
    """
    worker = worker or {}
    prompt = worker.get("prompt_tokens")
    prompt = prompt_tokens if prompt is None else prompt
    result: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    for name in ("prompt_tokens_details", "completion_tokens_details"):
        if worker.get(name) is not None:
            result[name] = worker[name]
    if reasoned is not None:
        details = result.get("completion_tokens_details") or {}
        result["completion_tokens_details"] = {"reasoning_tokens": reasoned, **details}
    return result


class OutputPipeline:
    """Output of one worker request with all its choices.

    Call ``push`` for every frame in order, then ``finish`` once. ``cut`` becomes true when all choices are over and
    the worker does not know it yet: tell it, and push nothing more. ``generated`` counts the tokens of all choices,
    ``reasoned`` those of frames that brought thoughts, and of frames after them that brought nothing to see.

    Args:
        tokenizer: Of the model.
        options: How the output is wanted.
        new_call_id: Makes ids of tool calls; needed with ``options.parsing``.
    """

    __slots__ = (
        "_choices",
        "_finished",
        "_new_call_id",
        "_options",
        "_plain",
        "_stop_ids",
        "_tokenizer",
        "cut",
        "generated",
        "reasoned",
        "worker_usage",
    )

    def __init__(
        self, tokenizer: Detokenizer, options: OutputOptions, new_call_id: Callable[[], str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._new_call_id = new_call_id
        self._stop_ids = frozenset(options.stop_ids)
        self._plain = not options.stops
        self.reasoned = 0
        self._choices: dict[int, _Choice] = {}
        self._finished = 0
        self.generated = 0
        self.cut = False
        self.worker_usage: Mapping[str, Any] | None = None

    @property
    def any_finished(self) -> bool:
        """Whether a choice came to a regular end."""
        return self._finished > 0

    def push(self, frame: Mapping[str, Any]) -> Delta | None:
        """What the frame adds, or None if nothing that a client sees.

        Raises:
            OutputError: The frame is malformed or reports a failure; its text is not delivered.
        """
        error = frame.get("error")
        if error is not None:
            raise EngineFailed.of(error)
        reason = frame.get("finish_reason")
        worker_finish = None if reason is None else finish_of_worker(reason)
        usage = frame.get("completion_usage")
        if usage is not None:
            self.worker_usage = usage
        index = frame.get("index") or 0
        choice = self._choices.get(index)
        if choice is None:
            choice = self._open(index)
        if choice.finished:
            return None
        if choice.is_plain and reason is None and not self._options.logprobs and frame.get("text") is None:
            token_ids = frame.get("token_ids") or ()
            if self._stop_ids.isdisjoint(token_ids):
                return self._plain_delta(index, choice, token_ids)
        text, used, ended, stop = self._consume(choice, frame)
        self.generated += used
        finish = "stop" if ended else worker_finish
        if self._options.logprobs:
            self._collect_logprobs(choice, frame, used)
        if finish is not None:
            if stop is None:
                text += self._flush(choice)
                named = frame.get("stop_reason")
                stop = named if named in self._options.stops else None  # The worker stopped at it by itself.
            self._close(choice, by_worker=worker_finish is not None)
        if choice.parser is not None:
            return self._parsed_delta(index, choice, choice.parser, text, used, finish, stop)
        if finish is None and not text:
            return None
        return self._delta(index, choice, Parsed(text), finish, stop)

    def plain_deltas(self, frames: Sequence[Any]) -> list[Delta] | None:
        """As ``push`` of each, if all are tokens in the middle of a choice and nothing but its text is to be seen of
        them; else None, and nothing is done. Frames may be anything.

        Raises whatever decoding raises for token ids that are none.
        """
        if self._options.logprobs:
            return None
        plain: list[tuple[int, _Choice, list[int]]] = []
        for frame in frames:
            if type(frame) is not dict:
                return None
            get = frame.get
            index, token_ids = get("index") or 0, get("token_ids")
            if type(index) is not int or type(token_ids) is not list:
                return None
            choice = self._choices.get(index)
            if choice is None or choice.finished or not choice.is_plain or not self._stop_ids.isdisjoint(token_ids):
                return None
            if not (get("finish_reason") is get("error") is get("completion_usage") is get("text") is None):
                return None
            plain.append((index, choice, token_ids))
        deltas = []
        for one in plain:
            delta = self._plain_delta(*one)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def _plain_delta(self, index: int, choice: _Choice, token_ids: Sequence[int]) -> Delta | None:
        """The short way for most frames: tokens whose text is seen as it is."""
        count = len(token_ids)
        choice.generated += count
        self.generated += count
        text = choice.stream.push(token_ids)
        if not text:
            return None
        tokens, choice.reported = choice.generated - choice.reported, choice.generated
        first, choice.seen = not choice.seen, True
        return Delta(index, text, None, first, tokens)

    def _parsed_delta(
        self,
        index: int,
        choice: _Choice,
        parser: ChoiceParser,
        text: str,
        used: int,
        finish: str | None,
        stop: str | None,
    ) -> Delta | None:
        parsed = parser.feed(text, over=finish is not None)
        thinks = bool(parsed.reasoning) or (choice.thinks and not parsed)
        if thinks:
            self.reasoned += used
        choice.thinks = thinks and not parsed.content
        if finish == "stop" and parser.called:
            finish = "tool_calls"
        if finish is None and not parsed:
            # A stream's first frame may be hidden whole, an opening mark; its client then learns the role at least.
            hidden = text and not choice.seen and parser.idle and self._reads_thoughts
            return self._delta(index, choice, parsed, None, None) if hidden else None
        return self._delta(index, choice, parsed, finish, stop)

    @property
    def _reads_thoughts(self) -> bool:
        parsing = self._options.parsing
        return parsing is not None and parsing.reasoning is not None

    def finish(self) -> list[Delta]:
        """What is held back in choices that came to no end."""
        result = []
        for index, choice in self._choices.items():
            if not choice.finished:
                text = self._flush(choice)
                choice.finished = True
                parsed = Parsed(text) if choice.parser is None else choice.parser.feed(text, over=True)
                if parsed:
                    result.append(self._delta(index, choice, parsed, None, None))
        return result

    def usage(self, prompt_tokens: int) -> dict[str, Any]:
        """As ``usage_of``."""
        return usage_of(
            self.worker_usage, prompt_tokens, self.generated, self.reasoned if self._reads_thoughts else None
        )

    def _open(self, index: int) -> _Choice:
        if type(index) is not int or not 0 <= index <= MAX_CHOICE_INDEX:
            raise OutputError(f"choice index {str(index)[:32]}")
        options = self._options
        matcher = StopMatcher(options.stops, include=options.include_stop) if options.stops else None
        parser, shield, shown = None, None, frozenset[int]()
        if options.parsing is not None:
            assert self._new_call_id is not None
            parser = options.parsing.parser(self._new_call_id)
            if options.parsing.specials:
                shield = Shield(options.parsing.specials)
                shown = frozenset(options.parsing.specials)
        choice = _Choice(self._tokenizer.stream(options.skip_special_tokens, shown), matcher, parser, shield)
        self._choices[index] = choice
        return choice

    def _consume(self, choice: _Choice, frame: Mapping[str, Any]) -> tuple[str, int, bool, str | None]:
        """Text, number of tokens used, whether the choice ended here, and by which stop string."""
        token_ids: Sequence[int] = frame.get("token_ids") or ()
        given = frame.get("text")
        if given is not None:
            return self._consume_text(choice, given, len(token_ids))
        if self._plain and choice.shield is None and self._stop_ids.isdisjoint(token_ids):
            choice.generated += len(token_ids)
            return choice.stream.push(token_ids), len(token_ids), False, None
        return self._consume_tokens(choice, token_ids)

    def _consume_text(self, choice: _Choice, text: str, tokens: int) -> tuple[str, int, bool, str | None]:
        armed = choice.generated >= self._options.min_tokens
        choice.generated += tokens
        if choice.matcher is None or not armed:
            return text, tokens, False, None
        matched = choice.matcher.push(text)
        return matched.text, tokens, matched.stop is not None, matched.stop

    def _consume_tokens(self, choice: _Choice, token_ids: Sequence[int]) -> tuple[str, int, bool, str | None]:
        parts: list[str] = []
        matcher = choice.matcher
        for place, token_id in enumerate(token_ids):
            armed = choice.generated >= self._options.min_tokens
            choice.generated += 1
            if armed and token_id in self._stop_ids:
                return "".join(parts), place + 1, True, None
            text = self._decoded(choice, token_id)
            if matcher is not None and armed and text:
                matched = matcher.push(text)
                text = matched.text
                if matched.stop is not None:
                    parts.append(text)
                    return "".join(parts), place + 1, True, matched.stop
            parts.append(text)
        return "".join(parts), len(token_ids), False, None

    def _decoded(self, choice: _Choice, token_id: int) -> str:
        text = choice.stream.push((token_id,))
        if choice.shield is None:
            return text
        return choice.shield.push(token_id, text)

    def _flush(self, choice: _Choice) -> str:
        tail = choice.stream.finish()
        if choice.shield is not None:
            tail = choice.shield.finish(tail)
        if choice.matcher is None:
            return tail
        matched = choice.matcher.push(tail) if tail else None
        return (matched.text if matched else "") + choice.matcher.finish()

    def _close(self, choice: _Choice, *, by_worker: bool) -> None:
        choice.finished = True
        self._finished += 1
        if not by_worker and self._finished >= self._options.n:
            self.cut = True

    def _collect_logprobs(self, choice: _Choice, frame: Mapping[str, Any], used: int) -> None:
        values = frame.get("log_probs")
        if not values:
            return
        tops = frame.get("top_logprobs") or ()
        token_ids = frame.get("token_ids") or ()
        for place, (token_id, value) in enumerate(zip(token_ids[:used], values, strict=False)):
            choice.logprobs.append(TokenLogprob(token_id, value, tops[place] if place < len(tops) else ()))

    def _delta(self, index: int, choice: _Choice, parsed: Parsed, finish: str | None, stop: str | None) -> Delta:
        logprobs = choice.logprobs or None
        if logprobs is not None:
            choice.logprobs = []
        tokens = choice.generated - choice.reported
        choice.reported = choice.generated
        first = not choice.seen
        choice.seen = True
        return Delta(index, parsed.content, finish, first, tokens, logprobs, stop, parsed.reasoning, parsed.calls)
