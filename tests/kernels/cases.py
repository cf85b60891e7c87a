"""Every kernel of the package with a few small calls, as the test modules here declare them.

A module says ``CASES = {"kernel's name": [Case(...), ...]}``; see
:class:`~tests.kernels.harness.Case`. What must hold for all kernels is tested on these. It may say
``EQUIVALENT = {"file.metal": {"a mutation's name": "why it changes nothing"}}``, names as
:class:`~tests.kernels.metal.mutations.Mutation` gives them, and name in
``SCRATCH`` kernels of its own, which hold what is shared between files.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import mlx_moeflux.kernels
from mlx_moeflux.kernels.runtime.launcher import KERNELS, MetalKernel
from tests.kernels.harness import Case, emulated
from tests.kernels.metal.variant import Variant, plain_name

HERE = Path(__file__).parent


@functools.cache
def registered() -> dict[str, MetalKernel]:
    """Name -> kernel, all modules of the package imported."""
    package = mlx_moeflux.kernels
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return dict(KERNELS)


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    registered()
    files = [f for f in sorted(HERE.rglob("test_*.py")) if "\nCASES = " in f.read_text()]
    names = (".".join(f.relative_to(HERE).with_suffix("").parts) for f in files)
    return tuple(importlib.import_module(f"{__package__}.{name}") for name in names)


@functools.cache
def kernels() -> dict[str, MetalKernel]:
    """Name -> kernel: those of the test modules, then those of the package."""
    scratch = [k for module in _modules() for k in getattr(module, "SCRATCH", ())]
    return {k.name: k for k in scratch} | registered()


@functools.cache
def all_cases() -> dict[str, list[Case]]:
    """Kernel's name -> its cases."""
    found: dict[str, list[Case]] = {}
    for module in _modules():
        for name, cases in module.CASES.items():
            found.setdefault(name, []).extend(cases)
    return found


# Why a case may find a mutation or not: the compiler decides what lies there.
PAST = "past the end of a thread's array, where anything may lie"
UNSET = "what is not set may be anything, and 0 too"


def equivalent(file: str) -> dict[str, str]:
    """Mutations of a file that change nothing, and why."""
    found: dict[str, str] = {}
    for module in _modules():
        found |= getattr(module, "EQUIVALENT", {}).get(file, {})
    return found


@functools.cache
def texts(name: str) -> tuple[tuple[str, str], ...]:
    """header and body of the kernel `name` for Metal as its cases launch it: one for each choice of
    types (:meth:`~mlx_moeflux.kernels.runtime.launcher.MetalKernel.using`)."""
    return tuple(dict.fromkeys(v.kernel.metal_text() for v in variants(name)))


@functools.cache
def variants(name: str) -> tuple[Variant, ...]:
    """Every text that MLX generates for the kernel `name` in its cases."""
    seen: list[Variant] = []
    for case in all_cases()[name]:
        with emulated(inspect=seen.append, runs=False), case.within():
            case.call()
    return tuple(v for v in seen if plain_name(v.kernel.name) == name)
