"""Oracle: the order of the house. Imports point one way, and policies know no MLX."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mlx_moeflux"

# Lower numbers may import from higher ones only.
RANK = {
    "cli": -1,
    "benchmarking": 0,
    "convert": 1,
    "conversion": 2,
    "synthesize": 1,
    "mlx_lm_plugin": 1,
    "loading": 2,
    "evaluation": 1,
    "tuning": 1,
    "planning": 2,
    "sizes": 3,
    "plots": 3,
    "batch_text": 1,
    "generation": 2,
    "batching": 2,
    "batch_sequence": 3,
    "batch": 4,
    "memory": 8,
    "prompt": 4,
    "steps": 4,
    "detokenizer": 8,
    "sampling": 5,
    "tokenizer": 4,
    "profiling": 4,
    "models": 4,
    "experts": 5,
    "cache": 5,
    "kernels": 6,
    "checkpoint": 7,
    "backend": 8,
    "errors": 9,
    "_version": 9,
}
# models ask the cache and the kernels, stores compute with kernels: the same rank is one's own.


def imports(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
            if node.module == "mlx_moeflux":
                names = [f"mlx_moeflux.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{file}: relative import"
            continue
        found |= {n.split(".")[1] for n in names if n.startswith("mlx_moeflux.")}
    return found


FILES = sorted(f for f in PACKAGE.rglob("*.py") if f.name not in ("__init__.py", "__main__.py")
               or f.parent != PACKAGE)  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in imports(file) - {own}:
        assert RANK[own] < RANK[other], f"{file.name} imports {other}"


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("mlx_moeflux", "mlx"),
        ("mlx_moeflux.experts.policy", "mlx"),
        ("mlx_moeflux.cli.policies", "mlx"),
        ("mlx_moeflux.cli.plan", "mlx"),
        ("mlx_moeflux.plots", "mlx"),
        ("mlx_moeflux.plots", "matplotlib"),
        ("mlx_moeflux.checkpoint.tensors", "mlx"),
        ("mlx_moeflux.loading", "mlx_lm"),
        ("mlx_moeflux.generation", "torch"),
    ],
)
def test_importing_loads_no_more_than_it_says(module, banned):
    code = f"import sys, {module}; sys.exit({banned!r} in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode
        == 0
    )
