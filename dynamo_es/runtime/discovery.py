"""Who can take a request: queries on the registry view. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from schemas.registry import Instance
from streams.registry import RegistryState

T = TypeVar("T")


def serving_instances(state: RegistryState, namespace: str, component: str, endpoint: str) -> list[Instance]:
    """Instances that take new requests, by rising instance id."""
    found = [instance for instance in state.instances_of(namespace, component, endpoint) if instance.state == "serving"]
    return sorted(found, key=lambda instance: instance.instance_id)


@dataclass(slots=True)
class Quarantine:
    """Instances whose connection failed lately. Times are a monotonic clock's seconds."""

    duration_s: float
    until: dict[int, float]

    def inhibit(self, instance_id: int, now: float) -> None:
        """Take the instance out for a while."""
        self.until[instance_id] = now + self.duration_s

    def is_inhibited(self, instance_id: int, now: float) -> bool:
        """Whether it is still out; forgets it when its time is over."""
        end = self.until.get(instance_id)
        if end is None:
            return False
        if now >= end:
            del self.until[instance_id]
            return False
        return True

    def without_inhibited(self, instances: Sequence[Instance], now: float) -> list[Instance]:
        """Those that may be asked now."""
        if not self.until:
            return list(instances)
        return [instance for instance in instances if not self.is_inhibited(instance.instance_id, now)]


class RoundRobin:
    """Takes instances in turn by id, however the set changes."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, instances: Sequence[Instance]) -> Instance:
        """The next one after the last choice. ``instances`` is not empty and sorted by id."""
        for instance in instances:
            if instance.instance_id > self._last:
                break
        else:
            instance = instances[0]
        self._last = instance.instance_id
        return instance


def choose_random(instances: Sequence[Instance], rng: random.Random) -> Instance:
    """Any of them."""
    return instances[rng.randrange(len(instances))]


def choose_device_aware(
    items: Sequence[T],
    device_type: Callable[[T], str],
    in_flight: Callable[[T], int],
    cuda_to_cpu_ratio: float,
    rng: random.Random,
) -> T:
    """Least loaded of the group (CPU or not) with less in flight for its weight (spec: router-core D.14).

    ``items``: instances or ranks, at least one.
    """
    groups: dict[bool, list[T]] = {}
    for item in items:
        groups.setdefault(device_type(item) == "cpu", []).append(item)

    def load(is_cpu: bool) -> float:
        members = groups[is_cpu]
        return sum(map(in_flight, members)) / (len(members) * (1.0 if is_cpu else cuda_to_cpu_ratio))

    group = groups[min(groups, key=load)]
    least = min(map(in_flight, group))
    best = [item for item in group if in_flight(item) == least]
    return best[rng.randrange(len(best))]
