"""Add the reports that users send to docs/results.md: ``python tools/add_report.py FILE.json ...``.

A file is what ``mlx_moeflux report`` writes. Each becomes a row of the page's table; a second
report of the same machine, system and versions replaces the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
COLUMNS = (
    *("machine", "system", "mlx_moeflux, back end", "check"),
    *("bundled: decode tok/s, 100 / 50 / 25 %", "measured model"),
    *("resident: prefill, decode tok/s", "decode tok/s of smaller budgets", "disk GB/s"),
)
HEAD = f"| {' | '.join(COLUMNS)} |"
SAME = 3  # columns that say what a row is about


def row(report: dict[str, Any]) -> str:
    """Return a report as a row of the table.

    Raises:
        ValueError: It has another format.
    """
    if report.get("format") != 1:
        raise ValueError(f"format {report.get('format')!r}; this script reads 1")
    machine, by_name = report["machine"], {step["name"]: step for step in report["steps"]}
    large = by_name.get("synthetic") or by_name.get("model") or {}
    bundled, measured = ((s or {}).get("result") or {} for s in (by_name.get("bundled"), large))
    runs = measured.get("runs", [])
    resident = [run for run in runs if run["resident"]]
    whole = [f"{_median(run, 'prompt_tps')}, {_median(run, 'generation_tps')}" for run in resident]
    smaller = [
        f"{run['expert_memory']}: {_median(run, 'generation_tps')}"
        for run in runs
        if not run["resident"]
    ]
    disk = (measured.get("card") or {}).get("disk")
    cells = (
        f"{machine['GPU or CPU']}, {machine['processor']}",
        machine["system"],
        f"{machine['mlx_moeflux']}, {machine['back end']}",
        by_name.get("check", {}).get("status", "-"),
        " / ".join(_median(run, "generation_tps") for run in bundled.get("runs", [])),
        large.get("title", "-") if runs else f"{large.get('title', '-')}: {large.get('status')}",
        ", ".join(whole),
        ", ".join(smaller),
        "" if disk is None else f"{disk / 1e9:.2f}",
    )
    return f"| {' | '.join(str(cell).replace('|', '/') or '-' for cell in cells)} |"


def _median(run: dict[str, Any], name: str) -> str:
    median = run["ours"][name]["median"]
    return f"{median:,.0f}" if median >= 1000 else f"{median:.3g}"


def added(page: str, new: str) -> str:
    """Return the page with a row more, or with another in the place of that of the same machine."""
    before, _, rest = page.partition(HEAD)
    if not rest:
        raise ValueError(f"{PAGE.name} has no table with the columns of this script")
    line, *lines = rest.lstrip("\n").splitlines()
    count = next((i for i, text in enumerate(lines) if not text.startswith("|")), len(lines))
    rows, after = lines[:count], lines[count:]
    about = new.split(" | ")[:SAME]
    rows = sorted([r for r in rows if r.split(" | ")[:SAME] != about] + [new])
    return before + "\n".join([HEAD, line, *rows, *after]) + "\n"


def main() -> int:
    """Add every file that is named."""
    page = PAGE.read_text()
    for name in sys.argv[1:]:
        page = added(page, row(json.loads(Path(name).read_text())))
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
