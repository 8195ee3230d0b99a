"""An OAuth token endpoint on this machine, for clients with id and secret."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

CLIENT_ID = "router:1"
CLIENT_SECRET = "s3cret/+ of=the client"


def unsecured_token(principal: str, life_s: int = 3600, now_s: int = 1_700_000_000) -> str:
    """A JWT without signature, as Kafka's validator for development takes it."""

    def part(content: dict) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    return f"{part({'alg': 'none'})}.{part({'sub': principal, 'iat': now_s, 'exp': now_s + life_s})}."


class _Server(ThreadingHTTPServer):
    def finish_request(self, request: socket.socket, address: object) -> None:
        """A client that does not trust this server leaves before it asks."""
        if isinstance(request, ssl.SSLSocket):
            try:
                request.do_handshake()
            except OSError:
                return
        super().finish_request(request, address)


class TokenEndpoint:
    """Answers as ``answer`` says: status and body; counts and keeps what was asked."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.asked: list[dict[str, list[str]]] = []
        self.answer: tuple[int, bytes] = (200, b"{}")
        self.location = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._answer(self)

            do_GET = do_POST

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        if context is not None:
            # A client that does not trust it must not hold up the accepting thread.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._scheme = "https" if context is not None else "http"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://localhost:{self._server.server_port}/realms/x/token?tenant=1"

    def gives(self, token: str, expires_in: object = 3600) -> None:
        self.answer = (
            200,
            json.dumps({"access_token": token, "token_type": "Bearer", "expires_in": expires_in}).encode(),
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        self.asked.append(parse_qs(body.decode()))
        pair = base64.b64decode(request.headers["Authorization"].removeprefix("Basic "))
        status, content = self.answer
        if pair != b"router%3A1:s3cret%2F%2B+of%3Dthe+client":
            status, content = 401, b'{"error":"invalid_client"}'
        request.send_response(status)
        if self.location:
            request.send_header("Location", self.location)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)
