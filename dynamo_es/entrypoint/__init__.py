"""An engine and an input put together by a script, as in Dynamo: ``EntrypointArgs``, ``make_engine``, ``run_input``."""
