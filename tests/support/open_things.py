"""What a process holds open, for tests in which things come and go and must leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading


def open_things() -> tuple[int, int, int]:
    """Tasks, threads, file descriptors of this process.

    Threads of the loop's default pool do not count: the pool starts one whenever none is idle at that instant, up to
    its limit, so how many there are says how busy the machine was, and not what was left behind.
    """
    gc.collect()
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    return len(asyncio.all_tasks()), len(threads), len(os.listdir("/proc/self/fd"))


def open_files_under(folder: str) -> list[str]:
    """The files below a folder that this process holds open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(f"{folder}/")]
