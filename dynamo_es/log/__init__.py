"""The event log: the contract (``base``) and its backends, opened by URL (``open_log``)."""
