"""Oracle: the order of the house. Imports point one way, and policies know no MLX."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "mlx_moeflux"

# Lower numbers may import from higher ones only.
RANK = {
    "cli": 0,
    "server": 1,
    "mlx_lm_plugin": 1,
    "measure": 1,
    "conversion": 2,
    "loading": 3,
    "generation": 4,
    "tokenizer": 5,
    "sandbox": 6,
    "tokenizer_backends": 7,
    "tokenizer_kinds": 8,
    "detokenizer": 8,
    "tokenizer_patterns": 10,
    "tool_declarations": 7,
    "models": 6,
    "distributed": 6,
    "experts": 7,
    "cache": 7,
    "kernels": 8,
    "checkpoint": 9,
    "backend": 10,
    "awake": 11,
    "checks": 11,
    "errors": 12,
    "user_cache": 11,
    "installation": 11,
    "_version": 11,
    "state_arrays": 8,
}
# models ask the cache and the kernels, stores compute with kernels: the same rank is one's own.


@functools.cache
def statements(file: Path) -> list[ast.Import | ast.ImportFrom]:
    """All imports of a file, under TYPE_CHECKING and in functions too."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(file: Path) -> set[str]:
    found = set()
    for node in statements(file):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert not node.level, f"{file}: relative import"
            names = [node.module or ""]
            if node.module == "mlx_moeflux":
                names = [f"mlx_moeflux.{alias.name}" for alias in node.names]
        found |= {n.split(".")[1] for n in names if n.startswith("mlx_moeflux.")}
    return found


FILES = sorted(f for f in PACKAGE.rglob("*.py") if f.name not in ("__init__.py", "__main__.py")
               or f.parent != PACKAGE)  # fmt: skip


def test_imports_point_one_way():
    wrong = []
    for file in FILES:
        place = file.relative_to(PACKAGE)
        own = place.parts[0].removesuffix(".py")
        upward = [other for other in imports(file) - {own} if RANK[own] >= RANK[other]]
        wrong += [f"{place} imports {other}" for other in upward]
    assert len(FILES) > 300
    assert not wrong


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("mlx_moeflux", "mlx"),
        ("mlx_moeflux", "pydantic"),
        ("mlx_moeflux.server.calls.registry", "pydantic"),
        ("mlx_moeflux.experts.policies.eviction", "mlx"),
        ("mlx_moeflux.cli.policies", "mlx"),
        ("mlx_moeflux.cli.plan", "mlx"),
        ("mlx_moeflux.cli.models", "mlx"),
        ("mlx_moeflux.measure.plots", "mlx"),
        ("mlx_moeflux.measure.plots", "matplotlib"),
        ("mlx_moeflux.checkpoint.tensors", "mlx"),
        ("mlx_moeflux.loading.steps", "mlx_lm"),
        ("mlx_moeflux.loading.options", "mlx"),
        ("mlx_moeflux.cli", "mlx_moeflux.loading"),
        ("mlx_moeflux.cli.generate", "mlx"),
        ("mlx_moeflux.generation.text", "torch"),
    ],
)
def test_importing_loads_no_more_than_it_says(module, banned):
    code = f"import sys, {module}; sys.exit({banned!r} in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode
        == 0
    )


def dependencies(file: Path, modules: dict[str, Path]) -> set[str]:
    """Files that a file imports, under TYPE_CHECKING too."""
    found = set()
    for node in statements(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules and modules[name] != file}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Ways from a file back to itself, one for each place where there is one."""
    found, done, way = [], set(), []

    def walk(name: str) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
            return
        if name in done:
            return
        way.append(name)
        for other in sorted(graph[name]):
            walk(other)
        done.add(way.pop())

    for name in sorted(graph):
        walk(name)
    return found


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Module -> modules of the package that its file imports, under TYPE_CHECKING too."""
    modules = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): file
        for file in PACKAGE.rglob("*.py")
    }
    found = {name: dependencies(file, modules) for name, file in modules.items()}
    assert sum(map(len, found.values())) > 500
    return found


def test_no_files_import_each_other_in_a_circle(graph):
    assert circles(graph) == []
    graph = graph | {"mlx_moeflux.errors": {"mlx_moeflux.loading"}}
    assert circles(graph)


# Of kernels/runtime, what other rooms may import: the seam to the back ends, and modules that are
# the same on all of them.
SEAM = {"device", "packing", "views"}
# Commands print what the files of compiled kernels hold, and the name of the back end.
BELOW_THE_SEAM = {"kernels", "cli"}


def past_the_seam(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports of back ends by rooms that may only ask ``kernels/runtime/device.py``."""
    wrong = []
    for name, imported in graph.items():
        if BELOW_THE_SEAM & {*name.split(".")[1:2]}:
            continue
        for other in imported:
            _, *rooms = other.split(".")
            runtime = rooms[:2] == ["kernels", "runtime"] and not set(rooms[2:3]) & SEAM
            if runtime or rooms[:2] == ["kernels", "cpu"]:
                wrong.append((name, other))
    return sorted(wrong)


def test_only_kernels_know_the_back_ends(graph):
    assert past_the_seam(graph) == []


@pytest.mark.parametrize(
    "module", ["cpu.blas", "runtime.cuda.upload", "runtime.cuda", "runtime.launcher", "runtime"]
)
def test_what_knows_a_back_end_is_found(graph, module):
    other = f"mlx_moeflux.kernels.{module}"
    assert other in graph
    for room in ("models.layers", "experts.streaming.bank"):
        name = f"mlx_moeflux.{room}"
        assert past_the_seam({**graph, name: {*graph[name], other}}) == [(name, other)]


def test_attention_knows_nothing_of_latents(graph):
    """Latent attention extends attention, which imports nothing of it."""
    attention, latents = "mlx_moeflux.kernels.attention.", "mlx_moeflux.kernels.mla."
    imported = {name: own for name, own in graph.items() if name.startswith(attention)}
    assert f"{attention}plan" in graph[f"{latents}latent_attention"]
    assert not [name for own in imported.values() for name in own if name.startswith(latents)]


def test_imports_under_type_checking_and_in_functions_count(tmp_path, graph):
    file = tmp_path / "user.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from mlx_moeflux.kernels.cpu.blas import Kept\n"
        "def upload():\n    import mlx_moeflux.kernels.runtime.cuda.upload\n"
    )
    assert dependencies(file, dict.fromkeys(graph, PACKAGE)) == {
        "mlx_moeflux.kernels.cpu.blas",
        "mlx_moeflux.kernels.runtime.cuda.upload",
    }


def test_other_rooms_ask_mlx_for_no_device():
    """They ask ``device.kind()``."""
    rooms = ("models", "experts", "cache", "generation", "server", "loading", "loading.py")
    words = ("default_device", "is_available")
    asking = [
        file.relative_to(PACKAGE)
        for file in FILES
        if file.relative_to(PACKAGE).parts[0] in rooms
        if any(word in file.read_text() for word in words)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in words
    ]
    assert asking == []
