"""Compile every text of every kernel with Apple's compiler: ``python tools/compile_metal.py``.

Each text that the tests' cases make is compiled behind MLX's own prelude, with the mathematics that
MLX asks for, in each version of Metal's language that the installed compiler takes. Exits with 1 if
the compiler refuses a text, or takes no version.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.kernels.cases import kernels, variants
from tests.kernels.metal import prelude

METAL = ("xcrun", "-sdk", "macosx", "metal")
SMALLEST = "[[kernel]] void smallest() {}\n"


def no_compiler() -> str:
    """Return why no Metal compiler runs here, or an empty text."""
    mend = "install Xcode, and from Xcode 26 on run `xcodebuild -downloadComponent MetalToolchain`"
    try:
        done = subprocess.run([*METAL, "--version"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return f"There is no xcrun here; on a Mac {mend}."
    if not done.returncode:
        return ""
    said = " ".join((done.stderr.strip() or f"exit status {done.returncode}").split())
    return f"xcrun runs no Metal compiler ({said}); {mend}."


def refused(text: str, options: Sequence[str]) -> str:
    """Return what the compiler says of a text that it refuses, or an empty text."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.metal"
        file.write_text(text, "utf-8")
        command = [*METAL, *options, "-c", str(file), "-o", str(file.with_suffix(".air"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return (done.stderr[:2000] or f"exit status {done.returncode}") if done.returncode else ""


def main() -> int:
    """Print the texts that are refused, with what the compiler says, and their number."""
    if reason := no_compiler():
        print(reason)
        return 1
    taken = {}
    for version, mathematics in prelude.LANGUAGES.items():
        standard = f"-std=metal{version}"
        words = refused(SMALLEST, [standard])
        print(f"Metal {version}: {f'not taken ({words.splitlines()[0]})' if words else 'taken'}")
        if not words:
            taken[version] = [standard, mathematics]
    if not taken:
        print("The compiler takes no version of Metal's language that MLX asks for.")
        return 1
    try:
        before = prelude.text()
    except (prelude.PreludeMissing, prelude.PreludeUnknown) as error:
        print(error)
        return 1
    # Launches of other sizes have the same text.
    texts = {
        f"{variant.header}{variant.generated}": f"{name} {dict(variant.template)}"
        for name in sorted(kernels())
        for variant in variants(name)
    }
    names = [f"{name}, Metal {version}" for name in texts.values() for version in taken]
    work = [(before + text, options) for text in texts for options in taken.values()]
    # The compiler is a process of its own: threads only wait for it.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = list(pool.map(refused, *zip(*work, strict=True)))
    for name, words in zip(names, errors, strict=True):
        if words:
            print(f"{name}:\n{words}")
    failed = sum(map(bool, errors))
    print(
        f"{len(texts)} texts of {len(kernels())} kernels in Metal {', '.join(taken)}: "
        f"{failed} refused"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
