"""The contract of every topic: one module a topic, no I/O, nothing of dynamo-es imported.

``python -m schemas`` writes the JSON Schema and AsyncAPI documents for people who use the topics in other languages.
"""
