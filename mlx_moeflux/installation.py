"""The command that adds an extra or a package to the environment that runs this copy."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Where a clone has pyproject.toml; an installed wheel has none there.
ROOT = Path(__file__).parents[1]


def install_command(requirement: str) -> str:
    """Return the shell command that adds `requirement` to this environment.

    requirement: An extra of this package, such as ``mlx_moeflux[server]``, or another package. The
    command keeps the extras and packages that ``uv tool`` and ``pipx`` have a record of. In a clone
    it names the clone.
    """
    prefix = Path(sys.prefix)
    match = re.fullmatch(r"mlx_moeflux\[(\w+)\]", requirement)
    extras = [match[1]] if match else []
    if (prefix / "uv-receipt.toml").is_file():
        receipt = tomllib.loads((prefix / "uv-receipt.toml").read_text(encoding="utf-8"))
        recorded = receipt["tool"]["requirements"]
        own = next(one for one in recorded if one["name"] == "mlx-moeflux")
        others = [_requirement(one) for one in recorded if one is not own]
        others += [] if match else [requirement]
        added = [word for one in others for word in ("--with", one)]
        kept = own.get("extras", [])
        return shlex.join(["uv", "tool", "install", *_own([*kept, *extras]), *added])
    if (prefix / "pipx_metadata.json").is_file():
        record = json.loads((prefix / "pipx_metadata.json").read_text(encoding="utf-8"))
        found = re.search(r"\[([^\]]*)\]", record["main_package"]["package_or_url"])
        kept = [name.strip() for name in found[1].split(",")] if found else []
        wanted = _own([*kept, *extras]) if match else [requirement]
        return shlex.join(["pipx", "inject", prefix.name, *wanted])
    wanted = _own(extras) if match else [requirement]
    python = sys.executable or "python3"
    if importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", python, *wanted])
    return shlex.join([python, "-m", "pip", "install", *wanted])


def _own(extras: list[str]) -> list[str]:
    """Return the arguments that name this package with `extras`."""
    names = f"[{','.join(dict.fromkeys(extras))}]" if extras else ""
    if (ROOT / "pyproject.toml").is_file():
        return ["-e", f"{ROOT}{names}"]
    return [f"mlx_moeflux{names}"]


def _requirement(recorded: Mapping[str, Any]) -> str:
    """Return an entry of a receipt of ``uv tool`` as a requirement."""
    extras = f"[{','.join(recorded['extras'])}]" if recorded.get("extras") else ""
    return f"{recorded['name']}{extras}{recorded.get('specifier', '')}"
