"""A Hugging Face hub with one small repository, as far as ``snapshot_download`` asks it."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves while it is entered. ``asked``: paths of requests that were answered, in order."""

    def __init__(self, repository: str, files: dict[str, bytes]) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer(head=True)

            def do_GET(self) -> None:
                self._answer(head=False)

            def log_message(self, *_: object) -> None:
                return

            def _answer(self, *, head: bool) -> None:
                path = self.path.split("?")[0]
                hub.asked.append(path)
                resolve = f"/{repository}/resolve/{COMMIT}/"
                if path in (f"/api/models/{repository}/revision/{name}" for name in ("main", COMMIT)):
                    siblings = [{"rfilename": name} for name in files]
                    body = json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()
                    self._send(200, body, {"Content-Type": "application/json"}, head)
                elif path == f"/api/models/{repository}/tree/{COMMIT}":
                    tree = [
                        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for name, data in files.items()
                    ]
                    self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, head)
                elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                    data = files[path.removeprefix(resolve)]
                    headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
                    self._send(200, data, headers, head)
                else:
                    self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, head)

            def _send(self, status: int, body: bytes, headers: dict[str, str], head: bool) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if not head:
                    self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
