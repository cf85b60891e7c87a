"""Run a checkpoint that is larger than its process's memory limit, and mlx-lm without a limit.

Writes random weights in the shape of Qwen3.5-35B-A3B with a few layers (2.4 GB with the default),
then starts two processes: one runs this package with its data segment limited to `--limit` (Linux),
the other runs mlx-lm. Prints the peak memory of each.

    python examples/bigger_than_memory.py [--layers 4] [--limit 1.6e9]
"""

import argparse
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

OURS = """
    import resource, sys
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (int(float({limit!r})),) * 2)
    import mlx_moeflux
    model, tokenizer = mlx_moeflux.load({path!r}, expert_memory="200MB")
    with model:
        last = mlx_moeflux.generate(model, tokenizer, [1, 2, 3, 4, 5, 6], max_tokens={tokens},
                                    return_response=True)
    print(last.experts)
"""

THEIRS = """
    from mlx_lm.utils import load_model
    from mlx_lm.generate import generate_step
    import mlx.core as mx
    model, _ = load_model(__import__("pathlib").Path({path!r}))
    for token, _ in generate_step(mx.array([1, 2, 3, 4, 5, 6]), model, max_tokens={tokens}):
        pass
"""

PEAK = """
    import resource, sys
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(peak * (1 if sys.platform == "darwin" else 1024))
"""


def run(code: str, **values) -> tuple[str, float]:
    """Run `code` in a child; return its output without the last line, and its peak memory in GB."""
    source = textwrap.dedent(code).format(**values) + textwrap.dedent(PEAK)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1]}", float("nan")
    *output, peak = done.stdout.splitlines()
    return "\n".join(output), int(peak) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shape", default="qwen3.5-35b-a3b")
    parser.add_argument(
        "--limit", default="1.6e9", help="bytes of data that this package's process may hold"
    )
    parser.add_argument("--tokens", type=int, default=3)
    args = parser.parse_args()

    from mlx_moeflux.conversion.synthesize import synthesize

    with tempfile.TemporaryDirectory() as folder:
        path = synthesize(args.shape, Path(folder) / "model", layers=args.layers)
        size = sum(file.stat().st_size for file in path.iterdir()) / 1e9
        print(f"checkpoint {size:.2f} GB, limit of our process {float(args.limit) / 1e9:.2f} GB")
        output, ours = run(OURS, path=str(path), limit=args.limit, tokens=args.tokens)
        print(f"mlx_moeflux  peak {ours:.2f} GB  {output}")
        output, theirs = run(THEIRS, path=str(path), tokens=args.tokens)
        print(f"mlx-lm       peak {theirs:.2f} GB  {output}")


if __name__ == "__main__":
    main()
