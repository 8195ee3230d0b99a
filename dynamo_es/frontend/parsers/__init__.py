"""Reasoning and tool-call parsers: from a choice's text to reasoning, content and calls. Pure, no asyncio.

Every parser is a coroutine that reads its text like a tape (``tape.py``). What it says depends on the text alone,
never on how the text is cut: a stream and a unary answer are the same by construction. ``registry.py`` has the names
that model cards use.
"""
