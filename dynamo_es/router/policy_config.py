"""Policy profiles of the router's queue: what a ``router_policy_config`` file says (spec: router-core D.12).

A profile sorts requests into policy classes. A *matrix class* stands for one policy family and one cache bucket (how
many prompt tokens no cache holds); an *explicit class* has neither and is chosen by its name. Each class has its own
queue, its own threshold above which a worker counts as busy, and its own limits. Everything here is immutable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CacheBucket:
    """A range of uncached prompt lengths, from ``min_tokens`` up to that of the next bucket.

    Attributes:
        min_tokens: Smallest number of uncached prompt tokens (prompt length less the best cached tokens).
        bucket: Its name, by which classes refer to it.
    """

    min_tokens: int
    bucket: str


@dataclass(frozen=True, slots=True)
class PolicyClass:
    """One queue and its rules.

    Attributes:
        name: Unique in the profile.
        policy_family: Family of a matrix class; None for an explicit class.
        cache_bucket: Bucket of a matrix class; None for an explicit class.
        quantum: Uncached tokens that the class may release per round of deficit round robin; at least 1.
        queue_policy: Order inside the class: ``fcfs`` or ``wspt``.
        prefill_busy_threshold: A worker with more booked prefill tokens than this is busy; None: not asked.
        prefill_busy_threshold_frac: The same as a fraction of the worker's ``max_num_batched_tokens``; None: not asked.
            A class with neither threshold never queues.
        request_queue_limit_per_worker: Requests that may wait, per worker; 0 refuses at once when busy; None: no limit.
        raw_isl_token_queue_limit_per_worker: Prompt tokens that may wait, per worker; None: no limit.
        cached_token_queue_limit_per_worker: Cached prompt tokens that may wait, per worker; None: no limit.
    """

    name: str
    policy_family: str | None
    cache_bucket: str | None
    quantum: int
    queue_policy: str = "fcfs"
    prefill_busy_threshold: int | None = None
    prefill_busy_threshold_frac: float | None = None
    request_queue_limit_per_worker: int | None = None
    raw_isl_token_queue_limit_per_worker: int | None = None
    cached_token_queue_limit_per_worker: int | None = None

    @property
    def is_explicit(self) -> bool:
        """Whether it is chosen by its name rather than by family and bucket."""
        return self.policy_family is None


@dataclass(frozen=True, slots=True)
class PolicyProfile:
    """The classes of one model, or of all models that have no profile of their own.

    Attributes:
        default_policy_family: Family of a request that names no class or family of this profile.
        buckets: Cache buckets; the first starts at 0, ``min_tokens`` strictly increasing.
        classes: Policy classes in the order of the file; every family has exactly one class per bucket.
    """

    default_policy_family: str
    buckets: tuple[CacheBucket, ...]
    classes: tuple[PolicyClass, ...]


@dataclass(frozen=True, slots=True)
class WorkerSelectorInstance:
    """A configured worker selector.

    Attributes:
        name: By which stages refer to it; unique, and not ``default``, which is the built-in selector.
        type: Kind of selector.
        parameters: Whatever that kind takes, as plain YAML data.
    """

    name: str
    type: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class WorkerSelection:
    """Which worker selector each stage uses.

    Attributes:
        aggregated, prefill, decode, encode: Name of an instance, or ``default``; None: the built-in selector.
        instances: The selectors that can be named.
    """

    aggregated: str | None = None
    prefill: str | None = None
    decode: str | None = None
    encode: str | None = None
    instances: tuple[WorkerSelectorInstance, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """A whole policy document, checked.

    Attributes:
        root: Profile of models that have none of their own; None when the document has none.
        models: Profiles by model name; one replaces the root profile for that model, nothing is merged.
        worker_selection: Selectors by stage; None when the document does not say.
        router: Router settings that the document sets, by their names in ``KvRouterSettings``; they win over others.
    """

    root: PolicyProfile | None = None
    models: Mapping[str, PolicyProfile] = field(default_factory=dict, hash=False)
    worker_selection: WorkerSelection | None = None
    router: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def profile_for(self, model: str) -> PolicyProfile | None:
        """The profile that requests of ``model`` follow; None: a single queue with the router's own settings."""
        return self.models.get(model, self.root)
