"""Ask three questions about one long text, which is read once, by later processes too.

python examples/shared_prompt.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import inspect
import json
import tempfile
import time

import mlx_moeflux
from mlx_moeflux.loading import BUNDLED_MODEL

TEXT = inspect.getsource(json)[:2000]
QUESTIONS = ["def load(", "def dumps(", "class JSONEncoder("]


def main(directory: str) -> None:
    model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL, expert_memory="25%")
    with model, mlx_moeflux.PromptCache(directory) as known:
        print(f"{'first token':>12} {'known':>6} {'of':>6}")
        for question in QUESTIONS:
            start = time.perf_counter()
            stream = mlx_moeflux.stream_generate(
                model,
                tokenizer,
                tokenizer.encode(TEXT) + tokenizer.encode(question),
                max_tokens=8,
                prompt_cache=known,
                breakpoints=[len(tokenizer.encode(TEXT))],
            )
            first = next(stream)
            seconds = time.perf_counter() - start
            text = first.text + "".join(reply.text for reply in stream)
            print(f"{seconds:11.3f}s {first.cached_tokens:6} {first.prompt_tokens:6}  {text!r}")
        print(f"{len(known)} places, {known.nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", nargs="?", help="of the cache (default: a temporary one)")
    main(parser.parse_args().directory or tempfile.mkdtemp())
