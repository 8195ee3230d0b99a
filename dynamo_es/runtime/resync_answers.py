"""Readers that miss events of a publisher ask by an event; this hears them for the publishers of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schemas.registry import ResyncAsked
from streams.registry import RegistryState
from streams.runner import FoldRunner


class ResyncAnswers:
    """A listener to the registry. Each question is answered once, by announcing everything anew."""

    def __init__(
        self, registry: FoldRunner[RegistryState], publishers: Callable[[], Mapping[int, Callable[[], None]]]
    ) -> None:
        """``publishers``: by instance id, what lets the publishers of each runtime of this process start over."""
        self._registry = registry
        self._publishers = publishers
        self._answered: dict[bytes, ResyncAsked] = {}

    def look(self) -> None:
        """Answer what is new."""
        asked = self._registry.state.resyncs
        if not asked and not self._answered:
            return
        publishers = self._publishers()
        own = {key: question for key, question in asked.items() if question.worker_id in publishers}
        for key, question in own.items():
            if self._answered.get(key) != question:
                publishers[question.worker_id]()
        self._answered = own
