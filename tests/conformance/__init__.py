"""The same random scripts for the reference (ai-dynamo-runtime, in an interpreter of its own) and for dynamo-es."""
