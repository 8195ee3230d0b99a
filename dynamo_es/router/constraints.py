"""What a request asks of the worker that serves it (Dynamo's ``RoutingConstraints``; spec: router-core D.6, F.3)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from ctypes import c_float
from typing import Self

from dynamo_es.router.config_arguments import to_real, to_text


class RoutingConstraints:
    """Taints that a worker must carry, and taints that speak for or against it.

    Args:
        required_taints: Set of taints; a worker that lacks one of them is not eligible. None (default): none.
        preferred_taints: Signed weight of each taint, kept in single precision. Positive prefers workers that carry it,
            negative avoids them, 0 is neutral. The weights that a worker carries are added up and squashed (tanh), so
            that its cost is multiplied by 1/e to e. None (default): none.

    Raises:
        TypeError: An argument is of the wrong type; a list is no set.
        OverflowError: A weight is an integer beyond the range of a float.
    """

    __slots__ = ("_preferred", "_required")
    _required: frozenset[str]
    _preferred: Mapping[str, float]

    def __new__(
        cls, required_taints: Set[str] | None = None, preferred_taints: Mapping[str, float] | None = None
    ) -> Self:
        constraints = object.__new__(cls)
        constraints._required = _to_taints("required_taints", required_taints)
        constraints._preferred = _to_weights("preferred_taints", preferred_taints)
        return constraints

    @property
    def required_taints(self) -> set[str]:
        """A copy of the taints that a worker must carry; assigning replaces them."""
        return set(self._required)

    @required_taints.setter
    def required_taints(self, value: Set[str] | None) -> None:
        self._required = _to_taints("value", value)

    @property
    def preferred_taints(self) -> dict[str, float]:
        """A copy of the weights; assigning replaces them."""
        return dict(self._preferred)

    @preferred_taints.setter
    def preferred_taints(self, value: Mapping[str, float] | None) -> None:
        self._preferred = _to_weights("value", value)


def _to_taints(argument: str, value: Set[str] | None) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, set | frozenset):
        raise TypeError(f"argument '{argument}': '{type(value).__name__}' object cannot be converted to 'PySet'")
    return frozenset(to_text(argument, taint) for taint in value)


def _to_weights(argument: str, value: Mapping[str, float] | None) -> dict[str, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"argument '{argument}': '{type(value).__name__}' object cannot be converted to 'PyDict'")
    return {to_text(argument, taint): c_float(to_real(argument, weight)).value for taint, weight in value.items()}
