"""Print what a change of structure must not change: ``python tools/fingerprint.py``.

A line for each thing: hashes of logits of every family, of saved states, of what replayed policies
hit, of a conversion's files and of kernels' texts; and how many lines of code there are. Compare
two commits with ``diff``. Runs on the CPU, in about a minute.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlx_moeflux import convert, load_model
from mlx_moeflux.cli import main as command_line
from tests.kernels.cases import registered

ROOT = Path(__file__).parents[1]
FAMILIES = ("qwen3.5-tiny", "qwen3-tiny", "qwen3-next-tiny", "deepseek-tiny")
TOKENS = 40
# Where a prompt is cut: whole, in chunks, token by token.
CUTS = {
    "prompt": [0, TOKENS],
    "chunked": [0, 1, 17, 33, TOKENS],
    "steps": [0, 30, *range(31, TOKENS + 1)],
}
BUDGETS = {"resident": "100%", "25%": "25%"}
FOLDERS = ("mlx_moeflux", "benchmarks", "tools")
_SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def digest(parts: Iterable[bytes]) -> str:
    """A short hash of all parts."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()[:16]


def quietly(*arguments: str) -> str:
    """What a command prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        if command_line(arguments) != 0:
            raise SystemExit(f"mlx_moeflux {' '.join(arguments)} failed")
    return output.getvalue()


def of_family(directory: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """(what, hash) of logits and of saved states."""
    tokens = mx.array(np.random.default_rng(3).integers(1, 1000, (3, TOKENS)))
    for memory, budget in BUDGETS.items():
        for batch in (1, 3):
            for how, cuts in CUTS.items():
                with load_model(directory, expert_memory=budget) as model:
                    cache = model.make_cache()
                    parts = []
                    for a, b in pairwise(cuts):
                        logits = model(tokens[:batch, a:b], cache)
                        mx.eval(logits)
                        parts.append(np.array(logits.astype(mx.float32)).tobytes())
                    yield f"logits {memory} batch {batch} {how}", digest(parts)
                    if batch == 1:
                        file = scratch / "state.safetensors"
                        cache.save(file)
                        yield f"state {memory} {how}", digest([file.read_bytes()])


def of_replays(directory: Path, scratch: Path) -> str:
    """The hash of what policies hit on a recorded run."""
    trace = str(scratch / "trace")
    quietly("generate", "--model", str(directory), "--prompt", "t1 t2 t3 t4 t5 t6 t7 t8", "--temp",
            "0", "--max-tokens", "24", "--expert-memory", "25%", "--trace", trace)  # fmt: skip
    return digest([quietly("trace", "replay", trace).encode()])


def of_conversion(directory: Path, scratch: Path) -> Iterator[tuple[str, str]]:
    """(layout, hash of weights and config: other files say from where and when)."""
    for layout in ("packed", "safetensors"):
        out = convert(directory, scratch / layout, layout=layout, dequantize=layout != "packed")
        kinds = ("*.bin", "*.safetensors", "config.json")
        files = sorted(file for kind in kinds for file in out.rglob(kind))
        yield layout, digest(b for f in files for b in (f.name.encode(), f.read_bytes()))


def code_lines(file: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    text, code, documented = file.read_text(), set(), set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            documented.update(range(node.lineno, node.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def main() -> int:
    """Prints all lines."""
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as scratch:
        for family in FAMILIES:
            directory = Path(scratch) / family
            quietly("synthesize", "--like", family, "--out", str(directory), "--measure", "0")
            for what, value in of_family(directory, Path(scratch)):
                print(f"{family:16} {what:34} {value}", flush=True)
        first = Path(scratch) / FAMILIES[0]
        print(f"{FAMILIES[0]:16} {'replays':34} {of_replays(first, Path(scratch))}")
        for layout, value in of_conversion(first, Path(scratch)):
            print(f"{FAMILIES[0]:16} {'converted: ' + layout:34} {value}")
    for name, kernel in sorted(registered().items()):
        print(f"{'kernel':16} {name:34} {digest(t.encode() for t in kernel.metal_text())}")
    lines = [code_lines(file) for name in FOLDERS for file in (ROOT / name).rglob("*.py")]
    print(f"{'code lines':16} {len(lines):6} files {sum(lines):21}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
