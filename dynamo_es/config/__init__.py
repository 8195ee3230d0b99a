"""Configuration: one tree of frozen dataclasses; flags, environment variables and the reference come from it."""
