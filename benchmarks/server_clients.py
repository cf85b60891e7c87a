"""Clients of benchmarks/server.py, in a process of their own that imports nothing large.

Reads one JSON object {"port", "prompts", "tokens"} a line; answers each with one line: tokens a
second of all streams together, and each one's seconds to the first token.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from typing import Any


def measured(port: int, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Run one stream for each prompt, all together."""
    firsts, counts = [0.0] * len(prompts), [0] * len(prompts)
    start = threading.Barrier(len(prompts) + 1)

    def stream(i: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.connect()
        body = {"prompt": prompts[i], "max_tokens": tokens, "stream": True}
        data = json.dumps({**body, "stream_options": {"include_usage": True}})
        start.wait()
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", data)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                firsts[i] = firsts[i] or time.perf_counter() - began
                if b'"usage":{' in line:
                    counts[i] = json.loads(line[6:])["usage"]["completion_tokens"]
        connection.close()

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return {"speed": sum(counts) / (time.perf_counter() - began), "firsts": firsts}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(measured(**json.loads(line))), flush=True)
