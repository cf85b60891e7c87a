"""Functions that see or replace arrays between the parts of a layer; cost nothing while unused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_moeflux.checks import has_parameter
from mlx_moeflux.errors import InputError, ShapeError
from mlx_moeflux.kernels.nested import describe

MIXER = "mixer"
# Point -> the part of a layer before or after which it lies. A function gets, with N = B * T:
# before_mixer: x [B, T, C], which enters the layer; after_mixer: x [B, T, C], residual included.
# before_router: logits [N, E]; after_router: ids [N, K] uint32 and weights [N, K] float32.
# before_experts: what the routed experts read, [N, C]; after_experts: their weighted sum, [N, C]
# float32, to which shared expert and residual are added. One with a parameter `mask` also gets
# bool [B, T] at the mixer and [N] elsewhere, False for padding, or None if there is none.
POINTS = {
    "before_mixer": MIXER,
    "after_mixer": MIXER,
    "before_router": "router",
    "after_router": "router",
    "before_experts": "experts",
    "after_experts": "experts",
}


def check_point(point: str) -> None:
    """Raise an InputError unless `point` is one of :data:`POINTS`."""
    if point not in POINTS:
        raise InputError(f"no point is called {point!r}; there are {', '.join(POINTS)}.")


class Hook:
    """A function at a point of a layer, until :meth:`remove`; a context manager, which removes it.

    :meth:`~mlx_moeflux.models.base.StreamingModel.hook` makes it. It belongs to the module that the
    layer had then. Any thread may remove it between two calls of the model.
    """

    def __init__(
        self,
        module: Any,
        layer: int,
        point: str,
        function: Callable[..., Any],
        removed: Callable[[], None],
    ):
        self.layer, self.point = layer, point
        self._module, self._function, self._removed = module, function, removed
        self._takes_mask = has_parameter(function, "mask")
        others = () if module._hooks is None else module._hooks.entries
        module._hooks = Hooks((*others, self))

    def remove(self) -> None:
        """Stop calling the function; a second call does nothing."""
        if self._module is None:
            return
        left = tuple(hook for hook in self._module._hooks.entries if hook is not self)
        self._module._hooks = Hooks(left) if left else None
        self._module = None
        self._removed()

    def call(self, arrays: tuple[mx.array, ...], mask: mx.array | None) -> tuple[mx.array, ...]:
        """Return what the function makes of `arrays`. mask: Of their tokens, in whatever shape.

        Raises:
            ShapeError: That is neither None nor as many arrays of the same shapes and dtypes.
        """
        if self._takes_mask:
            shape = arrays[0].shape[: 2 if POINTS[self.point] == MIXER else 1]
            found = self._function(*arrays, mask=None if mask is None else mask.reshape(shape))
        else:
            found = self._function(*arrays)
        if found is None:
            return arrays
        if len(arrays) == 1 and isinstance(found, mx.array):
            found = (found,)
        if describe(found) != describe(arrays):
            expected = ", ".join(map(describe, arrays))
            raise ShapeError(
                f"the hook {self.point} of layer {self.layer} returned {describe(found)}; return "
                f"None or {expected}."
            )
        return tuple(found)

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


class Hooks:
    """The hooks of a module, which holds them as `_hooks`, None while there are none."""

    def __init__(self, entries: tuple[Hook, ...]):
        self.entries = entries

    def apply(self, point: str, *arrays: mx.array, mask: mx.array | None) -> tuple[mx.array, ...]:
        """Return what the functions at `point` make of `arrays`, one after the other. mask: False
        for padding; None if there is none."""
        for hook in self.entries:
            if hook.point == point:
                arrays = hook.call(arrays, mask)
        return arrays
