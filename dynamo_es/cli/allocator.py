"""How much freed memory the C library may keep from the system."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_SET_BY_TUNABLES = "GLIBC_TUNABLES"
# Variable of the environment, name among the tunables, and number for mallopt(3) of the same setting of glibc.
_ARENAS = ("MALLOC_ARENA_MAX", "glibc.malloc.arena_max", -8)
_MMAP_THRESHOLD = ("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold", -3)
_TRIM_THRESHOLD = ("MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold", -1)
# Most allocations are made under Python's lock: threads hardly get in each other's way.
MAX_ARENAS = 2
LARGE_BYTES = 256 * 1024
KEPT_BYTES = 512 * 1024


def bound_free_memory(environment: Mapping[str, str]) -> bool:
    """Bound what glibc keeps of freed memory. Call it before threads are started. False: there is no glibc.

    By itself glibc gives each thread a heap of its own, up to eight for a processor, and takes what was large once for
    what is small from then on. RocksDB's threads (buffers of megabytes, for each file that they write) and the readers
    of the log leave tens of megabytes of holes in such heaps, over half an hour, which looks like a leak. Large blocks
    go back at once here, and threads share ``MAX_ARENAS`` heaps.

    Not for a process that computes on the processor: a model's tensors would come from the system one by one.

    Args:
        environment: What an operator set there (``MALLOC_ARENA_MAX`` and others, mallopt(3)) stays as it is.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl and macOS have none, Windows not even the library
        return False
    bounds = ((_ARENAS, MAX_ARENAS), (_MMAP_THRESHOLD, LARGE_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES))
    for (variable, tunable, parameter), bound in bounds:
        if variable not in environment and tunable not in environment.get(_SET_BY_TUNABLES, ""):
            mallopt(parameter, bound)
    return True
