"""Is a kernel right on this machine? Its first use on Metal asks, and ``mlx_moeflux check``.

A form runs beside its reference on a small case. Verdicts are kept in a file, for this version of
MLX, this GPU, this build of macOS and this text of the kernels.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import plistlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.examples import example
from mlx_moeflux.kernels.runtime import failures, user_cache

Implementation = Callable[..., Any]

# Of the largest value; the reference rounds too.
LIMITS = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}

# Of macOS.
SYSTEM_VERSION = Path("/System/Library/CoreServices/SystemVersion.plist")


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison: the largest error relative to the largest value, or why none."""

    ok: bool
    error: float | None = None
    reason: str = ""


_verdicts: dict[str, Verdict] = {}


def compare(
    operation: str, name: str, forms: Mapping[str, Implementation], dtype: mx.Dtype
) -> Verdict:
    """Run a form and the reference on a small case; the reference on the CPU, because on CUDA stock
    products of float32 are TF32."""
    args, kwargs = example(operation, dtype, form=name)
    with mx.stream(mx.cpu):
        expected = _arrays(forms["reference"](*args, **kwargs))
        mx.eval(expected)
    try:
        returned = forms[name](*args, **kwargs)
        actual = _arrays(returned)
        mx.eval(actual)
    except (ShapeError, UnsupportedError) as error:
        return Verdict(False, reason=f"refuses the small case: {error}")
    except (RuntimeError, ValueError) as error:
        if failures.lacks_memory(error):
            raise  # it says nothing of the kernel
        # What MLX raises when Metal's compiler or a launch fails.
        return Verdict(False, reason=" ".join(str(error).split())[:300])
    if describe(actual) != describe(expected):
        return Verdict(False, reason=f"returns {describe(actual)}, not {describe(expected)}")
    worst, limit = largest_error(actual, expected), LIMITS[dtype]
    return Verdict(worst <= limit, worst, "" if worst <= limit else f"error {worst:.2g}")


def largest_error(actual: Any, expected: Any) -> float:
    """Return the largest error of arrays, nested alike, each relative to the largest expected
    value; infinite for NaN, and where integers differ."""
    pairs = zip(_arrays(actual), _arrays(expected), strict=True)
    return max((_error(a, b) for a, b in pairs), default=0.0)


def _arrays(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if not isinstance(value, (tuple, list)):
        return []
    return [array for entry in value for array in _arrays(entry)]


def _error(actual: mx.array, expected: mx.array) -> float:
    """Relative to the largest value; infinite on NaN, and where integers differ."""
    if not mx.issubdtype(expected.dtype, mx.floating):
        return 0.0 if mx.array_equal(actual, expected).item() else float("inf")
    a, b = actual.astype(mx.float32), expected.astype(mx.float32)
    error: Any = (mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-6)).item()
    return error if error == error else float("inf")


def describe(value: Any) -> str:
    """Dtypes and shapes, nested as `value` is."""
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe(v) for v in value)})"
    if isinstance(value, mx.array):
        return f"{str(value.dtype).removeprefix('mlx.core.')}{list(value.shape)}"
    return type(value).__name__


def trusted(
    operation: str, name: str, forms: Mapping[str, Implementation], args: Sequence[Any]
) -> bool:
    """Return True if an implementation may run on this GPU; compare it once, warn of a failure
    once."""
    # An operation's first argument may be several arrays, such as keys and values.
    dtypes = (array.dtype for array in _arrays(args) if array.dtype in LIMITS)
    dtype = next(dtypes, mx.float32)
    key = f"{operation}={name} {str(dtype).removeprefix('mlx.core.')}"
    if key not in _verdicts:
        verdict = kept(key, forms[name])
        if verdict is None:
            # For want of memory this raises, and the next call compares again.
            verdict = compare(operation, name, forms, dtype)
            keep({key: verdict}, forms[name])
        _verdicts[key] = verdict
        if not verdict.ok:
            warnings.warn(
                f"{operation}={name} is not used on {gpu()} because its check failed "
                f"({verdict.reason}); stock MLX computes instead, see 'mlx_moeflux check'.",
                RuntimeWarning,
                stacklevel=2,
            )
    return _verdicts[key].ok


# ---- What is kept between processes


def file() -> Path:
    """Return the file of verdicts."""
    return user_cache.root() / "kernels.json"


def gpu() -> str:
    """The device's name."""
    return str(mx.device_info().get("device_name", "unknown GPU"))


def _place() -> str:
    """Return the place for which a verdict holds: Metal's compiler is a part of macOS."""
    version, build = mx.__version__, _macos_build()  # pyright: ignore[reportAttributeAccessIssue]
    return f"MLX {version} on {gpu()}" + (f", macOS {build}" if build else "")


@functools.cache
def _macos_build() -> str:
    """Such as 24G90; nothing elsewhere."""
    try:
        return str(plistlib.loads(SYSTEM_VERSION.read_bytes())["ProductBuildVersion"])
    except (OSError, ValueError, KeyError):
        return ""


def _text_hash(form: Implementation) -> str:
    texts = "".join("".join(kernel.metal_text()) for kernel in form.kernels)
    return hashlib.blake2b(texts.encode(), digest_size=8).hexdigest()


def _read() -> dict[str, dict[str, Any]]:
    try:
        return json.loads(file().read_text())
    except (OSError, ValueError):
        return {}


def kept(key: str, form: Implementation) -> Verdict | None:
    """The verdict of an earlier process on the same text, if there is one."""
    entry = dict(_read().get(_place(), {}).get(key, {}))
    if entry.pop("text", None) != _text_hash(form):
        return None
    return Verdict(**entry)


def keep(verdicts: Mapping[str, Verdict], form: Implementation) -> None:
    """Write verdicts for other processes; where the file cannot be written, they check again."""
    known = _read()
    place = known.setdefault(_place(), {})
    place.update({k: {**asdict(v), "text": _text_hash(form)} for k, v in verdicts.items()})
    with contextlib.suppress(OSError):
        file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        user_cache.write(file(), json.dumps(known, indent=1).encode())
