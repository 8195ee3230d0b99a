"""Time to the first token that the frontend and its router add: engines that take no time, prompts that come again.

From the last byte of the request that the client sends to the first token that it reads: HTTP, template, tokenization,
the router's decision, the way to the worker and back. A few prompts of about 3,000 tokens take turns, one request at a
time, as the turns of agents do; each was seen once before. The frontend is the command itself, with KV routing, on the
first core; four mock workers and the client are on the second.

``python -m tests.bench.bench_first_token [--requests 500] [--tokens 3000]``
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import time
from urllib.parse import urlsplit

from dynamo_es.frontend.tokenizer_files import load_tokenizer
from tests.bench.bench_frontend import pin
from tests.bench.bench_many_streams import fleet
from tests.bench.spread import Row, latencies
from tests.bench.stream_engines import MODEL, NAME

PROMPTS = 20
ROUNDS = 5


def prompts(tokens: int) -> list[str]:
    """Of about so many tokens."""
    tokenizer, _ = load_tokenizer(MODEL)
    vary = random.Random(3)
    found = []
    for number in range(PROMPTS):
        words = [f"{number}:"]
        while len(tokenizer.encode(" ".join(words), False)) < tokens:
            words += ["".join(vary.choices("etaoinshrdlucmfwyp", k=vary.randint(2, 9))) for _ in range(100)]
        found.append(" ".join(words))
    return found


def ask(connection: socket.socket, request: bytes) -> float:
    """Milliseconds to the first token; reads the answer to its end."""
    connection.sendall(request)
    sent, first, answer = time.perf_counter(), 0.0, b""
    while not answer.endswith(b"0\r\n\r\n"):
        data = connection.recv(65536)
        assert data, answer
        answer += data
        if not first and b'"content":"' in answer:
            first = time.perf_counter()
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert first, answer
    return (first - sent) * 1000


def main() -> list[Row]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=3000)
    options = parser.parse_args()
    rows: list[Row] = []
    texts = prompts(options.tokens)
    with fleet(0) as shape:
        pin(1)
        address = urlsplit(shape.base)
        requests = []
        for text in texts:
            body = json.dumps(
                {"model": NAME, "stream": True, "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
            ).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            requests.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rows += latencies(
                "first time that a prompt comes", [ask(connection, request) for request in requests], "ms"
            )
            for number in range(ROUNDS):
                took = [ask(connection, requests[count % PROMPTS]) for count in range(options.requests)]
                rows += latencies(f"it comes again, round {number + 1}", took, "ms")
    for what, value, unit in rows:
        print(f"{what:<60} {value:10.2f} {unit}")
    return rows


if __name__ == "__main__":
    main()
