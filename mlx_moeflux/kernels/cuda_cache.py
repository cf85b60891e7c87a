"""Kernels on NVIDIA: their text in files, so that MLX has little to hash at a launch.

MLX hashes the text of a custom kernel at every launch, 1.3 us for one of 10 KB. So the definitions
and the body lie in files that are named after their content, and MLX's compiler includes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from mlx_moeflux.kernels import kept_files

FOLDER = "cuda"

# What a path must be made of to stand in an #include.
_PLAIN = re.compile(r"[\w./+@~ -]+", re.ASCII)


def outsource(header: str, body: str, inputs: Sequence[str]) -> tuple[str, str]:
    """header, body of a kernel -> the same as files to include; unchanged where there is no
    private folder for them.

    MLX finds by their names which shapes a body reads: they are named in a comment.
    """
    folder = kept_files.private(FOLDER)
    if folder is None or not _PLAIN.fullmatch(str(folder)):
        return header, body
    try:
        files = [stored(folder, text) for text in (header, body)]
    except OSError:
        return header, body
    shapes = [f"{name}_shape" for name in inputs if f"{name}_shape" in body]
    header, body = (f'#include "{file}"\n' for file in files)
    return header, body + (f"// {' '.join(shapes)}\n" if shapes else "")


def stored(folder: Path, text: str) -> Path:
    """A file with this text, named after it.

    Raises:
        OSError: It cannot be written.
    """
    content = text.encode("ascii")
    file = folder / f"{hashlib.blake2b(content, digest_size=12).hexdigest()}.cuh"
    try:
        if file.read_bytes() == content:
            return file
    except OSError:
        pass
    kept_files.write(file, content)
    return file
