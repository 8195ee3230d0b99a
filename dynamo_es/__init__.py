"""dynamo-es: KV-cache-aware routing for LLM inference fleets, event-sourced."""

__version__ = "0.1.0"
