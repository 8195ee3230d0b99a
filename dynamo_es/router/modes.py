"""Router modes (Dynamo's ``RouterMode``)."""

from __future__ import annotations

from enum import IntEnum


class RouterMode(IntEnum):
    """How a worker is chosen. Numbers and texts are Dynamo's.

    Attributes:
        RoundRobin: Workers in turn.
        Random: Any worker.
        PowerOfTwoChoices: Of two random workers the one with fewer requests.
        KV: By cached prefix and booked load.
        Direct: The worker that the request names.
        LeastLoaded: The worker with the fewest requests.
        DeviceAwareWeighted: CPU and GPU workers by the share that they can carry, then the least loaded.
    """

    RoundRobin = 0
    Random = 1
    PowerOfTwoChoices = 2
    KV = 3
    Direct = 4
    LeastLoaded = 5
    DeviceAwareWeighted = 6

    def __repr__(self) -> str:
        return f"RouterMode.{self.name}"

    __str__ = __repr__


_BY_NAME = {
    "round-robin": RouterMode.RoundRobin,
    "random": RouterMode.Random,
    "power-of-two": RouterMode.PowerOfTwoChoices,
    "kv": RouterMode.KV,
    "direct": RouterMode.Direct,
    "least-loaded": RouterMode.LeastLoaded,
    "device-aware-weighted": RouterMode.DeviceAwareWeighted,
}
_NAMES = {mode: name for name, mode in _BY_NAME.items()}


def mode_named(name: str) -> RouterMode:
    """The mode of a ``--router-mode`` value. Raises KeyError."""
    return _BY_NAME[name]


def mode_name(mode: RouterMode) -> str:
    """Its ``--router-mode`` value."""
    return _NAMES[mode]
