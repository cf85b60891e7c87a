"""Parameters of modules in one buffer; see :mod:`mlx_moeflux.kernels.runtime.packing`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.kernels.runtime import device, packing, views
from mlx_moeflux.models.layers import Stack, restack, stack_of
from mlx_moeflux.models.modules import Module

# Resident experts of a block are large and get a buffer of their own.
EXPERTS = "switch_mlp"


def pack(*modules: nn.Module) -> None:
    """Move the parameters of `modules` into one buffer, except those of experts inside them. Names
    and stacks stay. A parameter assigned later has a buffer of its own.

    A single parameter, or more bytes than a buffer may have, is left as it is; so is everything if
    the first of `modules` is none of this package.

    Evaluates: the buffer. Peak memory grows by its size.
    """
    leader = modules[0]
    if not isinstance(leader, Module):
        return
    every = [
        each
        for module in modules
        for name, each in module.named_modules()
        if EXPERTS not in name.split(".")
    ]
    stacks = [(each, known) for each in every if (known := _held(each)) is not None]
    rows = {id(array) for _, known in stacks for array in known.parts()}
    found: dict[int, mx.array] = {}
    for array in (*(a for _, known in stacks for a in known.arrays()), *_leaves(every)):
        if id(array) not in rows and array.dtype in packing.TYPES and array.size:
            found[id(array)] = array
    if not packing.fits([(array.shape, array.dtype) for array in found.values()]):
        return
    packed = packing.Packing.of(list(found.values()))
    new = dict(zip(found, packed.arrays, strict=True))
    for each in every:
        for name, value in each.items():
            if isinstance(value, mx.array) and id(value) in new:
                each[name] = new[id(value)]
    for first, known in stacks:
        weights = [
            replace(weight, **{n: new.get(id(a), a) for n, a in weight.stored().items()})
            for weight in known.weights
        ]
        first._stack = restack(known.linears, weights)
    leader._packing = packed


def is_packed(module: nn.Module) -> bool:
    """Return True after :func:`pack` with this module as the first."""
    return isinstance(module, Module) and module._packing is not None


def keep_views(model: nn.Module) -> None:
    """Make short views of large parameters and of stacks outside of buffers, see
    :mod:`mlx_moeflux.kernels.runtime.views`; none on NVIDIA's GPUs, where no launch takes them and
    a look at an array moves it. Evaluates: the arrays and their views."""
    if device.kind() != "cuda":
        views.keep(filter(views.is_dense, unpacked(model)))


def unpacked(model: nn.Module) -> list[mx.array]:
    """Return the large parameters of `model` and the arrays of its stacks, but for those that have
    short views."""
    modules = list(model.modules())
    stacks = (known for each in modules if (known := _held(each)) is not None)
    every = [*_leaves(modules), *(array for known in stacks for array in known.arrays())]
    return [a for a in every if a.size >= views.LEAST_ELEMENTS and id(a) not in views.SHORTS]


def release(model: nn.Module) -> None:
    """Free buffers and stacks whose parameters were all replaced."""
    for module in filter(is_packed, model.modules()):
        used = {id(array) for array in _leaves(module.modules())}
        if not used & {id(array) for array in module._packing.arrays}:
            module._packing = None
        for each in module.modules():
            if stack_of(each) is not None and _held(each) is None:
                each._stack = None


def _held(module: nn.Module) -> Stack | None:
    """Return the stack that begins with `module` if no parameter was replaced, or None."""
    known = stack_of(module)
    return known if known is not None and known.holds(known.linears) else None


def _leaves(modules: list[nn.Module]) -> Iterator[mx.array]:
    for module in modules:
        for value in module.values():
            if isinstance(value, mx.array):
                yield value
