"""What an engine tells the log: KV events, forward passes and load. See ``kv_events`` for the way of a KV event."""
