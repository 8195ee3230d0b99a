"""What an engine must be able to do to take LoRA adapters while it runs."""

from __future__ import annotations

from typing import Protocol


class AdapterHost(Protocol):
    """An engine. On its event loop; the calls for one engine do not overlap."""

    async def load_adapter(self, name: str, folder: str) -> None:
        """Have an adapter, from a folder on this machine; on return its requests are taken.

        Raises:
            InvalidArgument: It does not fit the model; the engine is as before.
            EngineShutdown: The engine broke down.
            AdapterConflict: An earlier adapter of this name is in the way.
            Unknown: The engine failed in a way of its own; it goes on.
        """

    async def unload_adapter(self, name: str) -> None:
        """Give an adapter up: no further requests, the open ones end, and none of its KV blocks is used again.

        It may take as long as those requests, within a bound of the engine's.

        Raises:
            EngineShutdown: The engine broke down.
            Unknown: It did not drop it. No request of it is taken; call again.
        """
