"""The state store: the contract (``base``), RocksDB through rocksdict, and memory."""
