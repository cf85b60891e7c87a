"""Read the prelude that MLX compiles before each kernel, and list how it compiles the whole.

MLX's library for macOS holds the prelude as a string. It is read there: out of the installed MLX on
a Mac, elsewhere out of the wheel for macOS of the same version, which pip fetches once.
"""

from __future__ import annotations

import functools
import importlib.metadata
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx

from mlx_moeflux import user_cache
from tests.kernels.metal.emulator import cache_directory

# Version of Metal's language -> the compiler's option for the mathematics that MLX asks for. MLX
# takes one version each on macOS 14, 15, 26 and 27, and a custom kernel's mathematics are safe. On
# macOS 14 it says so by `fastMathEnabled`, later by `mathMode`, which leaves functions fast.
SAFE = "-fmetal-math-mode=safe"
LANGUAGES = {"3.1": "-fno-fast-math", "3.2": SAFE, "4.0": SAFE, "4.1": SAFE}

# Where there is no network pip must soon say so.
OPTIONS = shlex.split(
    "--quiet --no-input --disable-pip-version-check --retries 0 --timeout 30 --no-deps "
    "--only-binary=:all: --platform macosx_26_0_arm64"
)
LIBRARY = "mlx/lib/libmlx.dylib"
_MARK = b"// Auto generated source for mlx/backend/metal/kernels/utils.h\n"
# Kernels here rely on the first three.
_HELD = ("#include <metal_stdlib>\n", "using namespace metal;\n", " bfloat16_t;\n", " elem_to_loc(")
_LEAST, _MOST = 10_000, 1_000_000


class PreludeMissing(RuntimeError):
    """There is no library of MLX for macOS here, and none can be had."""


class PreludeUnknown(RuntimeError):
    """MLX's library for macOS does not hold the prelude as this module knows it."""


@functools.cache
def missing() -> str | None:
    """Return why the prelude cannot be read here, or None.

    Raises:
        PreludeUnknown: See :func:`text`.
    """
    try:
        text()
    except PreludeMissing as error:
        return str(error)
    return None


@functools.cache
def text() -> str:
    """Return what the installed MLX puts before each text of ``mx.fast.metal_kernel``.

    Raises:
        PreludeMissing: No library for macOS of this version is here, and pip gets none.
        PreludeUnknown: The library holds no such text.
    """
    version = importlib.metadata.version("mlx")
    installed = Path(mx.__file__).parent.parent / LIBRARY
    if installed.exists():
        return cut(installed.read_bytes(), str(installed))
    kept = cache_directory() / f"mlx-prelude-{version}.metal"
    if not kept.exists():
        user_cache.write(kept, cut(*_fetched(version)).encode())
    return kept.read_text("utf-8")


def cut(library: bytes, name: str) -> str:
    """Cut the prelude out of a library's bytes. name: The library's, for errors.

    Raises:
        PreludeUnknown: It is not there once, or is not what it should be.
    """
    if library.count(_MARK) != 1:
        raise PreludeUnknown(
            f"{name} holds '{_MARK.decode().strip()}' {library.count(_MARK)} times, not once: MLX "
            f"builds its kernels' prelude in another way; change {Path(__file__).name}."
        )
    at = library.index(_MARK)
    begin, end = library.rfind(b"\0", 0, at) + 1, library.find(b"\0", at)
    found = library[begin : end if end >= 0 else None].decode("utf-8", "replace")
    lacking = [held.strip() for held in _HELD if held not in found]
    if lacking or "\ufffd" in found or not _LEAST < len(found) < _MOST:
        raise PreludeUnknown(
            f"{name} holds a text of {len(found)} characters where MLX's prelude should be, "
            f"without {lacking}; change {Path(__file__).name}."
        )
    return found


def _fetched(version: str) -> tuple[bytes, str]:
    """Fetch the library of MLX's wheel for macOS, and name it."""
    wanted = f"mlx-metal=={version}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", *OPTIONS, "--dest", folder, wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            words = done.stderr.strip().splitlines() or ["it said nothing"]
            raise PreludeMissing(f"pip gets no wheel {wanted} for macOS: {words[-1]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            if LIBRARY not in wheel.namelist():
                raise PreludeUnknown(f"{wheels[0].name} holds no {LIBRARY}.")
            return wheel.read(LIBRARY), f"{LIBRARY} of {wheels[0].name}"
