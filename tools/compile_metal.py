"""Compile every text of every kernel with Apple's compiler: ``python tools/compile_metal.py``.

Each text that the tests' cases make is compiled by ``xcrun metal`` behind MLX's prelude, which
is modelled here as far as the kernels use it. Exits with 1 if the compiler refuses one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.kernels.cases import kernels, variants

# What MLX puts before a custom kernel, as far as the kernels here use it.
PRELUDE = """#include <metal_stdlib>
using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;
"""
STANDARD = "-std=metal3.1"


def refused(text: str) -> str:
    """What the compiler says of a text that it does not take; nothing of others."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.metal"
        file.write_text(text)
        command = ["xcrun", "-sdk", "macosx", "metal", STANDARD, "-c", str(file), "-o"]
        done = subprocess.run(
            [*command, str(file.with_suffix(".air"))], capture_output=True, text=True, check=False
        )
        return done.stderr[:2000] if done.returncode else ""


def main() -> int:
    """Prints a line for each text that is refused, and how many there were."""
    texts = [
        (name, f"{PRELUDE}{variant.header}{variant.generated}")
        for name in sorted(kernels())
        for variant in variants(name)
    ]
    with ThreadPoolExecutor() as pool:
        errors = list(pool.map(refused, [text for _, text in texts]))
    for (name, _), words in zip(texts, errors, strict=True):
        if words:
            print(f"{name}:\n{words}")
    failed = sum(map(bool, errors))
    print(f"{len(texts)} texts of {len(kernels())} kernels, {failed} refused")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
