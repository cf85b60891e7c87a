"""What a model is that no family here computes, and which program runs it. No MLX."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlx_moeflux.checks import shown
from mlx_moeflux.errors import ConfigError, UnsupportedError

# Names of what drafts for another model: EAGLE, Medusa, DFlash, vLLM's speculators, MTP alone,
# Gemma's assistants.
_DRAFTS = re.compile(r"eagle|medusa|draft|speculator|dflash|assistant|(^|_)mtp(_|$)|MTP")
_DRAFT_KEYS = ("draft_vocab_size", "eagle_config", "dflash_config", "speculators_model_type")


def refuse_draft_head(config: Mapping[str, Any], file: Path | str) -> None:
    """Raise UnsupportedError if config.json is that of a head that drafts for another model."""
    architectures = config.get("architectures")
    named = [config.get("model_type"), *(architectures if isinstance(architectures, list) else ())]
    found = [name for name in named if isinstance(name, str) and _DRAFTS.search(_lower(name))]
    found += [key for key in _DRAFT_KEYS if config.get(key)]
    if found:
        raise UnsupportedError(
            f"{file} is of a draft head ({found[0]!r}) and no model; pass the model that it drafts "
            "for. vLLM and SGLang run such heads; here mtp_path takes heads of multi-token "
            "prediction."
        )


def _lower(name: str) -> str:
    """Return a name in lower case, but for MTP, which other words hold in lower case."""
    return name if "MTP" in name else name.lower()


def refuse_unknown(config: Mapping[str, Any], known: Iterable[str], file: Path | str) -> None:
    """Raise UnsupportedError unless the ``model_type`` of config.json is one of `known`, and
    ConfigError if it is no text."""
    name = config.get("model_type")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{file}: 'model_type' is {shown(name)}, expected the name of a type.")
    if name in known:
        return
    kind = "a Mixture-of-Experts model" if has_experts(config) else "a dense model"
    runs = runs_in_mlx_lm(name)
    if runs is None:
        who = f"it is {kind}, which mlx-lm may run"
    elif runs:
        who = f"mlx-lm runs it, {kind}"
    else:
        who = f"it is {kind} that mlx-lm does not run either"
    raise UnsupportedError(
        f"{file}: model_type {name!r} is not one of those that are computed here (docs/formats.md "
        f"lists them); {who}."
    )


def has_experts(config: Any) -> bool:
    """Return True if some key of config.json, in any section, counts several experts."""
    if not isinstance(config, Mapping):
        return False
    return any(
        has_experts(value) or ("expert" in str(key) and _several(value))
        for key, value in config.items()
    )


def _several(value: Any) -> bool:
    counts = value if isinstance(value, list) else [value]
    return any(type(count) is int and count > 1 for count in counts)


def runs_in_mlx_lm(model_type: Any) -> bool | None:
    """Return whether the installed mlx-lm has a `model_type`; None: none is installed. Nothing of
    it is imported."""
    if not isinstance(model_type, str):
        return False
    try:
        found = importlib.util.find_spec("mlx_lm")
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    name = _remapped(folder / "utils.py").get(model_type, model_type)
    return f"{name}.py" in {file.name for file in folder.glob("models/*.py")}


def _remapped(file: Path) -> dict[str, str]:
    """Return mlx-lm's table of types that others' code computes, from its source."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tables = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "MODEL_REMAPPING" for t in node.targets)
        )
        return next(tables, {})
    except (OSError, ValueError, SyntaxError):
        return {}
