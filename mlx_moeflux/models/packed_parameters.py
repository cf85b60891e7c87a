"""A module's parameters in one buffer: see :mod:`mlx_moeflux.kernels.runtime.packing`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.kernels.runtime import packing
from mlx_moeflux.models.layers import Stack, restack

# A block's resident experts: as many bytes as all the rest, and so a buffer of their own.
EXPERTS = "switch_mlp"


def pack(*modules: nn.Module) -> None:
    """Let the parameters of `modules` lie in one buffer, under their own names, those of experts in
    them aside; matrices that were stacked stay so. What somebody assigns later lies elsewhere.

    Of one parameter, or of more bytes than a buffer may have, nothing is done.

    Evaluates: the buffer. It holds all parameters twice for a moment.
    """
    every = [
        each
        for module in modules
        for name, each in module.named_modules()
        if EXPERTS not in name.split(".")
    ]
    stacks = [(each, known) for each in every if (known := _stack_of(each)) is not None]
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
    for leader, known in stacks:
        weights = [
            replace(weight, **{n: new.get(id(a), a) for n, a in weight.stored().items()})
            for weight in known.weights
        ]
        leader._stack = restack(known.linears, weights)
    modules[0]._packing = packed


def release(model: nn.Module) -> None:
    """Let go of buffers none of whose parameters a module has any more: they were replaced."""
    for module in model.modules():
        packed = getattr(module, "_packing", None)
        if packed is None:
            continue
        used = {id(array) for array in _leaves(module.modules())}
        if not used & {id(array) for array in packed.arrays}:
            module._packing = None
        for each in module.modules():
            if getattr(each, "_stack", None) is not None and _stack_of(each) is None:
                each._stack = None


def _stack_of(module: nn.Module) -> Stack | None:
    known = getattr(module, "_stack", None)
    return known if known is not None and known.holds(known.linears) else None


def _leaves(modules: list[nn.Module]) -> Iterator[mx.array]:
    for module in modules:
        for value in module.values():
            if isinstance(value, mx.array):
                yield value
