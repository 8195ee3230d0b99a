"""Benchmarks, one ``bench_<what>.py`` a hot path.

Each has a ``main`` function without arguments, plain or a coroutine function. It prints what it likes and may return
its figures as an iterable of ``(what, value, unit)``; an exception (a failed bound) is a failed benchmark.
``python -m tests.bench`` runs them.
"""
