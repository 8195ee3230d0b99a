"""What glibc keeps of freed memory, in processes of their own: it cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Threads that are all there at once, each with blocks of its own; how many heaps there are then.
_COUNT_HEAPS = """
import ctypes, os, re, sys, threading
from dynamo_es.cli.allocator import bound_free_memory
if not bound_free_memory(os.environ):
    sys.exit("no glibc")
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
met = threading.Barrier(9)
def work():
    libc.malloc(ctypes.c_size_t(1000))
    met.wait()
    met.wait()
for _ in range(8):
    threading.Thread(target=work).start()
met.wait()
text, size = ctypes.c_char_p(), ctypes.c_size_t()
libc.open_memstream.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)
print(text.value.count(b"<heap nr="))
met.wait()
"""


def heaps(**environment: str) -> int:
    told = {name: text for name, text in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT_HEAPS], env=told | environment, capture_output=True, text=True, check=False
    )
    if "no glibc" in done.stderr:
        pytest.skip("no glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_threads_share_two_heaps():
    assert heaps() == 2


@pytest.mark.parametrize(
    "setting", [{"MALLOC_ARENA_MAX": "5"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=5"}], ids=["variable", "tunable"]
)
def test_what_an_operator_set_stays(setting):
    assert heaps(**setting) == 5
