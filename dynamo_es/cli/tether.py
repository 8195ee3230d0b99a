"""A ``dynamo-es`` command that ends when the process that started it does: ``python -m dynamo_es.cli.tether VERB ...``.

Standard input is the read end of a pipe that nobody writes to; its write end is the parent's alone. However the parent
ends, kill -9 included, the kernel closes it, and that is what this process waits for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from dynamo_es.cli.main import main

# Long enough to give back leases, too short to drain streams for which nobody waits any more.
GRACE_S = 3.0


def end_with_parent(descriptor: int) -> None:
    """Block until ``descriptor`` is at its end, then end this process: by SIGTERM, and if that takes too long, hard."""
    while os.read(descriptor, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=(sys.stdin.fileno(),), name="tether", daemon=True).start()
    sys.exit(main())
