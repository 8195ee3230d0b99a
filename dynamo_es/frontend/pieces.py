"""A whole choice as the dialects other than OpenAI's chat see it: thoughts, text, calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dynamo_es.frontend.responses import ChoiceText


class WholeCall(NamedTuple):
    """A function call; ``arguments`` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class Whole(NamedTuple):
    """A whole choice."""

    reasoning: str
    text: str
    calls: Sequence[WholeCall]
    finish_reason: str | None
    stop: str | None


def whole_of(choice: ChoiceText) -> Whole:
    """What a choice came to."""
    calls = [WholeCall(call.id, call.name, "".join(call.parts)) for call in choice.calls]
    return Whole("".join(choice.reasoning), "".join(choice.parts), calls, choice.finish_reason, choice.stop)
