"""The LoRA adapters that an engine takes requests for: they come and go while it runs. On the engine's event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dynamo_es.engines.frame_stream import OpenStreams
from dynamo_es.engines.lora.errors import AdapterNotHere
from dynamo_es.engines.scheduling.scheduler import Scheduler
from dynamo_es.errors import StreamIncomplete

# How long the open requests of an adapter that is unloaded may go on; then they end, to be tried at another worker.
FINISH_S = 30.0


class AdapterSet:
    """Who may ask for what. ``open`` an adapter when it is loaded, ``close`` it before it goes."""

    def __init__(
        self,
        names: Iterable[str] | None,
        streams: OpenStreams,
        schedulers: Sequence[Scheduler],
        on_change: Callable[[int], None],
    ) -> None:
        """``names``: loaded from the start; None: whichever is asked for. ``on_change`` is told the number of a
        rank whose cache has fewer blocks now.
        """
        self._takes_any = names is None
        self._names = set(names or ())
        self._streams = streams
        self._schedulers = schedulers
        self._on_change = on_change

    def check(self, lora_name: str | None) -> None:
        """Raises ``AdapterNotHere``: requests of this adapter are not taken."""
        if lora_name is not None and not self._takes_any and lora_name not in self._names:
            raise AdapterNotHere(lora_name)

    def open(self, lora_name: str) -> None:
        """Take requests for it."""
        self._names.add(lora_name)

    async def close(self, lora_name: str, finish_s: float = FINISH_S) -> None:
        """Take no more, let the open ones end within ``finish_s``, and forget its KV blocks: whatever is loaded under
        this name next has other ones.
        """
        self._names.discard(lora_name)
        late = StreamIncomplete(f"the LoRA adapter {lora_name!r} is being unloaded here")
        await self._streams.finish_adapter(lora_name, finish_s, late)
        for rank, scheduler in enumerate(self._schedulers):
            if scheduler.blocks.forget_adapter(lora_name):
                self._on_change(rank)
