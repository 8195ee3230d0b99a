"""The whole path: wrk, one frontend process with KV routing, four mock workers, embedded log; two cores for all.

Prompts are drawn from 200 different ones, as in the figures of comparable systems. Needs wrk.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from pathlib import Path

from tests.bench.spread import Row, rounds
from tests.support.fleet import MODEL, Fleet

SCRIPT = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
local number = 0
request = function()
  number = number + 1
  local content = "word" .. (number % 200) .. " " .. string.rep("and another word ", WORDS)
  local body = '{"model":"MODEL","max_tokens":TOKENS,"messages":[{"role":"user","content":"' .. content .. '"}]}'
  return wrk.format(nil, "/v1/chat/completions", nil, body)
end
"""
ROUNDS = 5
SECONDS = 5
CONNECTIONS = 32


async def load(base: str, script: Path) -> float:
    """Requests a second of one round. Raises AssertionError if any failed."""
    process = await asyncio.create_subprocess_exec(
        "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS}s", "-s", str(script), base, stdout=asyncio.subprocess.PIPE
    )
    output = (await process.communicate())[0].decode()
    assert "Non-2xx" not in output, output
    return float(re.search(r"Requests/sec:\s+([\d.]+)", output).group(1))


async def main() -> list[Row]:
    if shutil.which("wrk") is None:
        print("not measured: wrk is not installed")
        return []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(f"embedded://{folder}/log", Path(folder))
        try:
            await fleet.frontend()
            workers = await fleet.start(
                "workers", "worker", "mock", "--model-name", MODEL, "--num-workers", "4", "--speedup-ratio", "0"
            )
            await workers.wait_ready()
            await fleet.wait_workers(4)
            for words, tokens in ((6, 1), (300, 1)):
                script = Path(folder) / f"{words}.lua"
                text = SCRIPT.replace("WORDS", str(words)).replace("TOKENS", str(tokens)).replace("MODEL", MODEL)
                script.write_text(text)
                await load(fleet.base, script)
                found = [await load(fleet.base, script) for _ in range(ROUNDS)]
                rows += rounds(f"whole path, {3 * words + 1} words, max_tokens {tokens}", found, "requests/s")
        finally:
            await fleet.close()
    return rows


if __name__ == "__main__":
    for row in asyncio.run(main()):
        print(*row)
