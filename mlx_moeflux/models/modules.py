"""Modules that notice edits, so that a model computes what it says after one.

A trace of a decode step keeps what it met: parameters, attributes, code. Looking through the
thousands of values of a model takes longer than a twentieth of a step, so modules of this package
count edits instead, and a model looks only when the count has changed (:class:`Survey`). Values of
other modules, lists and routers, which are few, are compared at every call.
"""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeGuard

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.errors import InputError

# Packages whose code may be traced: it depends on its arguments and its module alone.
PACKAGES = ("mlx", "mlx_lm", "mlx_moeflux")


class _Edits:
    """Number of edits of watched modules and classes of this process; classes: of classes alone."""

    count = classes = 0


class _Watched(type):
    """Metaclass that counts replaced methods and knows which ones a class was defined with."""

    _defined: dict[str, Any]

    def __init__(cls, *arguments: Any):
        super().__init__(*arguments)
        type.__setattr__(cls, "_defined", _code_of(cls))

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        _Edits.count, _Edits.classes = _Edits.count + 1, _Edits.classes + 1

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        _Edits.count, _Edits.classes = _Edits.count + 1, _Edits.classes + 1


def _code_of(kind: type) -> dict[str, Any]:
    """Return the public members of a class and its ``__call__``."""
    return {k: v for k, v in vars(kind).items() if k[0] != "_" or k == "__call__"}


class Module(nn.Module, metaclass=_Watched):
    """``nn.Module`` that counts edits of its public attributes and parameters.

    reads: Name of a child -> class, for children whose parameters this module reads and which it
    never calls.
    """

    reads: ClassVar[Mapping[str, type]] = {}
    _stack: Any = None
    """:class:`~mlx_moeflux.models.layers.Stack` that begins with this module, if there is one."""
    _packing: Any = None
    """Buffer of :func:`~mlx_moeflux.models.packed_parameters.pack` that begins with this module, if
    there is one."""

    def stacks(self) -> list[tuple[nn.Module, ...]]:
        """Return groups of projections with a common input; see :meth:`StreamingModel.prepare`."""
        return []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__call__":
            raise InputError(
                f"Python calls the __call__ of a class, never one of a single {_name(self)}; wrap "
                "the module, or set its __class__ to a subclass."
            )
        super().__setattr__(name, value)
        if name[0] != "_" or name == "__class__":
            _Edits.count += 1

    def __setitem__(self, name: str, value: Any) -> None:
        if value is self.get(name) and isinstance(value, mx.array):
            # `weight *= 2` edits the array in place, and others know it by its identity.
            value = copy.copy(value)
        super().__setitem__(name, value)
        _Edits.count += name[0] != "_"

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        _Edits.count += name[0] != "_"

    def pop(self, name: str, *default: Any) -> Any:
        """See ``dict.pop``."""
        if name in self:
            _Edits.count += name[0] != "_"
        return super().pop(name, *default)


class RMSNorm(Module, nn.RMSNorm):
    """``nn.RMSNorm`` that counts edits."""


class LayerNorm(Module, nn.LayerNorm):
    """``nn.LayerNorm`` that counts edits."""


class QuantizedLinear(Module, nn.QuantizedLinear):
    """``nn.QuantizedLinear`` that counts edits."""


class QuantizedEmbedding(Module, nn.QuantizedEmbedding):
    """``nn.QuantizedEmbedding`` that counts edits."""


class Linear(Module, nn.Linear):
    """``nn.Linear`` that counts edits."""

    def to_quantized(self, *arguments: Any, **options: Any) -> nn.Module:
        """See ``nn.Linear.to_quantized``."""
        return _counting(super().to_quantized(*arguments, **options))


class Embedding(Module, nn.Embedding):
    """``nn.Embedding`` that counts edits."""

    def to_quantized(self, *arguments: Any, **options: Any) -> nn.Module:
        """See ``nn.Embedding.to_quantized``."""
        return _counting(super().to_quantized(*arguments, **options))


_COUNTING = {nn.QuantizedLinear: QuantizedLinear, nn.QuantizedEmbedding: QuantizedEmbedding}


def _counting(module: nn.Module) -> nn.Module:
    module.__class__ = _COUNTING.get(type(module), type(module))
    return module


# Norms whose weight and epsilon kernels read; others are called.
RMS_NORMS = {RMSNorm, nn.RMSNorm}


def is_own(module: Any) -> bool:
    """Return True if the code of a module is this package's, MLX's or mlx-lm's, as it was
    defined."""
    kind = type(module)
    if not _is_own_class(kind, _Edits.classes):
        return False
    return not any(hasattr(kind, name) for name in vars(module) if name[0] != "_")


def declares_traceable(part: Any) -> bool:
    """Return True if the class of a module or router has ``traceable = True`` in its own body. A
    subclass does not inherit it: what it overrides may depend on more."""
    return bool(vars(type(part)).get("traceable"))


@functools.lru_cache(maxsize=256)
def _is_own_class(kind: type, edits: int) -> bool:
    """Return True for a class of the packages whose methods, after so many edits of classes, are
    those that it was defined with."""
    return kind.__module__.partition(".")[0] in PACKAGES and not any(
        isinstance(each, _Watched) and _code_of(each) != each._defined for each in kind.__mro__
    )


def _calls_own(module: Any) -> bool:
    """Return True if a module's ``__call__``, if it has one, is the packages' as it was defined."""
    kind = next((kind for kind in type(module).__mro__ if "__call__" in vars(kind)), nn.Module)
    before = kind._defined if isinstance(kind, _Watched) else vars(kind)
    own = kind.__module__.partition(".")[0] in PACKAGES
    return own and vars(kind).get("__call__") is before.get("__call__")


def named_modules(root: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and object of every module in the public values of `root`, itself first, and of
    every other callable that stands in a list."""
    if isinstance(root, nn.Module) or not isinstance(root, (dict, list, tuple)):
        yield path, root
    values: Any = ()
    if isinstance(root, dict):
        values = ((k, v) for k, v in root.items() if not isinstance(k, str) or k[:1] != "_")
    elif isinstance(root, (list, tuple)):
        values = ((i, v) for i, v in enumerate(root) if not isinstance(v, mx.array))
    for name, value in list(values):
        if isinstance(value, (dict, list, tuple)) or (
            isinstance(root, (list, tuple)) and callable(value)
        ):
            yield from named_modules(value, f"{path}.{name}" if path else str(name))


class Survey:
    """The modules of a model as they were when their code or values last changed.

    traceable: True if all code is traceable: the packages', or of classes that declare
    ``traceable = True`` in their own body.
    """

    def __init__(self, model: Module, *others: Any):
        """others: Further objects whose attributes a trace keeps.

        Raises:
            InputError: A module that is never called has a foreign ``__call__``, or another class.
        """
        self._count, self._classes = _Edits.count, _Edits.classes
        modules = list(named_modules(model))
        for path, module in modules:
            _check_reads(path, module)
        self.traceable = all(is_own(m) or declares_traceable(m) for _, m in modules)
        every = [*(module for _, module in modules), *others]
        self._seen = [_reference(value) for module in every for value in _values(module)]
        self._compared: list[tuple[Any, list[Any]]] = []
        for _, module in modules:
            lists = (v for v in module.values() if type(v) is list) if _is_dict(module) else ()
            self._compared += [(value, list(value)) for value in lists]
        # Code that is not traced sees edits by itself, and may make some at every call.
        foreign = [m for _, m in modules if not isinstance(m, Module)] if self.traceable else []
        for each in (*foreign, *others):
            for place in filter(_is_dict, (each, getattr(each, "__dict__", None))):
                known = [(k, v) for k, v in place.items() if not str(k).startswith("_")]
                self._compared.append((place, known))

    def holds(self) -> bool:
        """Return True if nothing was edited since. Takes microseconds."""
        if self._count != _Edits.count:
            return False
        for place, known in self._compared:
            if type(place) is list:
                if len(place) != len(known) or not all(map(operator.is_, place, known)):
                    return False
            elif not all(place.get(name) is value for name, value in known):
                return False
        return True

    def equals(self, other: Survey) -> bool:
        """Return True if both have seen the same objects and code."""
        same = self._classes == other._classes
        return (
            same
            and len(self._seen) == len(other._seen)
            and all(
                a() is not None and a() is b() for a, b in zip(self._seen, other._seen, strict=True)
            )
        )


def _values(module: Any) -> Iterator[Any]:
    """Yield what a trace depends on: a module, its class, and its public values with their
    names."""
    yield module
    yield type(module)
    for place in (module if isinstance(module, dict) else {}, getattr(module, "__dict__", {})):
        for name, value in place.items():
            if not str(name).startswith("_"):
                yield name
                yield type(None) if value is None else value


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value`; arrays and modules may be freed meanwhile."""
    return weakref.ref(value) if isinstance(value, (mx.array, nn.Module)) else lambda: value


def _check_reads(path: str, module: Any) -> None:
    """Raise an InputError if a child that `module` only reads is of another class."""
    for name, kind in module.reads.items() if isinstance(module, Module) else ():
        child = module.get(name)
        if child is None or (isinstance(child, kind) and _calls_own(child)):
            continue
        place = f"{path}.{name}".removeprefix("model.")
        raise InputError(
            f"{place} is a {_name(child)}, which would never be called: its parameters are read as "
            f"those of a {kind.__name__}; wrap {place.rpartition('.')[0]} instead."
        )


def _is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def _name(value: Any) -> str:
    return type(value).__name__
