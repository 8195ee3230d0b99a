"""How many files a process with a store for each partition may open, and asking the system for so many."""

from __future__ import annotations

import logging
import resource

logger = logging.getLogger(__name__)
# Of the store of one partition: ten table files (a few more while they are merged), its log, folders and lock.
FILES_PER_PARTITION = 32
# Everything else: connections, libraries, the process's own.
_OTHER_FILES = 256


def limit_to_ask_for(partitions: int, soft: int, hard: int) -> int | None:
    """The limit of open files that ``partitions`` need, as far as the system allows; None: it is there.

    ``soft``, ``hard``: limits as of ``resource.getrlimit``, where -1 is none.
    """
    needed = _OTHER_FILES + FILES_PER_PARTITION * partitions
    if soft in range(needed):
        return needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    return None


def allow_open_files(partitions: int) -> None:
    """Raise this process's limit of open files so far that it can own ``partitions``, and tell if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_to_ask_for(partitions, soft, hard)
    if limit is None:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < _OTHER_FILES + FILES_PER_PARTITION * partitions:
        logger.warning(
            "%d open files are allowed, %d partitions may need %d: raise the hard limit (ulimit -Hn, LimitNOFILE=), or "
            "start more workers, which share the partitions",
            limit, partitions, _OTHER_FILES + FILES_PER_PARTITION * partitions,
        )  # fmt: skip
