"""Check and measure this machine, and write a report.

Each step is a command of the package in a process of its own, so that one that crashes the GPU's
driver, or takes too long, costs its own result only. Nothing personal is written: no names of
users, hosts or directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux import user_cache
from mlx_moeflux._version import __version__
from mlx_moeflux.backend import describe_backend
from mlx_moeflux.checkpoint.files import write_output
from mlx_moeflux.errors import InputError
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify import verdicts
from mlx_moeflux.measure.benchmark.pages import cold_reads

# Version of the JSON file.
FORMAT = 1
# Of all steps.
SECONDS = 600.0
# The shape of the synthetic model, its layers and the prompt, on a GPU and on a CPU.
ON_GPU, ON_CPU = ("qwen3.5-35b-a3b", 4, 512), ("qwen3.5-small", 8, 64)
# The prompt of the bundled model, and what each trial does.
PROMPT, TRIALS = 64, ("--generation-tokens", "33", "--num-trials", "3")
# Of mx.device_info().
LIMITS = ("memory_size", "max_recommended_working_set_size", "max_buffer_length", "resource_limit")


@dataclass(frozen=True)
class Step:
    """One command. seconds: The longest that it may take. table: It writes a Markdown table."""

    name: str
    title: str
    arguments: tuple[str, ...]
    seconds: float
    table: bool = False


@dataclass
class Outcome:
    """The result of a step.

    status: "ok", "failed", "too slow", "interrupted" or "not begun".
    """

    name: str
    title: str
    command: str
    status: str = "not begun"
    seconds: float = 0.0
    text: str = ""
    result: Any = None


@dataclass
class MachineReport:
    """Facts of the machine and the outcomes of all steps."""

    machine: dict[str, Any]
    outcomes: list[Outcome]
    refused: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """True if no step was interrupted."""
        return all(outcome.status not in ("interrupted", "not begun") for outcome in self.outcomes)

    def as_json(self) -> str:
        """Return the whole report as JSON."""
        content = {
            "format": FORMAT,
            "machine": self.machine,
            "refused": self.refused,
            "steps": [asdict(outcome) for outcome in self.outcomes],
        }
        return json.dumps(content, indent=1) + "\n"

    def as_markdown(self) -> str:
        """Return the report for people."""
        lines = ["# mlx_moeflux on this machine", "", "| fact | value |", "| --- | --- |"]
        lines += [f"| {name} | {value} |" for name, value in self.machine.items()]
        lines += ["", "| step | status | seconds | command |", "| --- | --- | --- | --- |"]
        lines += [
            f"| {o.title} | {o.status} | {o.seconds:.0f} | `{o.command}` |" for o in self.outcomes
        ]
        if self.refused:
            lines += ["", "Kernels that failed their trials before this report:", ""]
            lines += [f"- `{key}`" for key in self.refused]
        for outcome in self.outcomes:
            if outcome.text:
                lines += ["", f"## {outcome.title}", "", outcome.text]
        return "\n".join(lines) + "\n"


def steps(
    folder: Path, model: str | None, *, strict_config: bool = True, against: str | None = None
) -> list[Step]:
    """Return the steps in order. folder: For files. model: A checkpoint, or None for a synthetic
    one of a few layers. strict_config: See ``load``. against: Of ``check``, for the checkpoint or
    the bundled model; None: no such step."""

    def benchmark(name: str, title: str, seconds: float, *arguments: str) -> Step:
        out = ("--markdown", str(folder / f"{name}.md"))
        return Step(name, title, ("benchmark", *arguments, *TRIALS, *out), seconds, table=True)

    budgets = ("--expert-memory", "100%,50%,25%,12.5%")
    fewer = (*budgets[:1], "100%,50%,25%")
    strict = () if strict_config else ("--no-strict-config",)
    found = [
        Step("check", "Stock operations and kernels", ("check",), 240),
        benchmark("bundled", "The bundled model", 120, "-p", str(PROMPT), *fewer),
    ]
    if model is None:
        shape, layers, prompt = ON_CPU if device.kind() == "cpu" else ON_GPU
        found.append(
            benchmark(
                *("synthetic", f"{layers} layers of {shape}, {cold_reads().title}", 300),
                *("-p", str(prompt), "--synthetic", shape, "--layers", str(layers), *budgets),
                *("--cold", "--synthetic-dir", str(folder / "synthetic")),
            )
        )
    else:
        compare = ("--compare", "mlx-lm") if util.find_spec("mlx_lm") else ()
        prompt = str(ON_GPU[-1])
        arguments = ("-p", prompt, "--model", model, "--expert-memory", "auto,25%", *strict)
        found.append(benchmark("model", "The checkpoint", 400, *arguments, *compare))
    if against is not None:
        named = () if model is None else ("--model", model, *strict)
        arguments = ("check", "--against", against, *named)
        found.append(Step("against", f"Layers against {against}", arguments, 3600))
    if device.kind() == "metal":
        found.append(
            Step("handshake", "Kernels that wait", ("check", "--operation", "handshake"), 180)
        )
    tune = ("tune", "--kernels", "--out", str(folder / "dispatch.json"))
    return [*found, Step("tune", "Which implementation is faster", tune, 240)]


def run_steps(
    chosen: Sequence[Step],
    folder: Path,
    *,
    seconds: float = SECONDS,
    report: Callable[[Step], None] = lambda step: None,
) -> MachineReport:
    """Run the steps one after the other, all within `seconds`; Ctrl-C ends the present one and
    leaves out the others.

    report: Called before each step.
    """
    outcomes = [Outcome(s.name, s.title, _command(s, folder)) for s in chosen]
    end = time.monotonic() + seconds
    for step, outcome in zip(chosen, outcomes, strict=True):
        left = end - time.monotonic()
        if left < 1:
            outcome.status = "too slow"
            continue
        report(step)
        _run(step, outcome, folder, min(step.seconds, left))
        if outcome.status == "interrupted":
            break
    return MachineReport(machine_facts(), outcomes, verdicts.refused())


def _run(step: Step, outcome: Outcome, folder: Path, seconds: float) -> None:
    start = time.monotonic()
    command = [sys.executable, "-m", "mlx_moeflux", *step.arguments]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = child.communicate(timeout=seconds)
        outcome.status = "ok" if child.returncode == 0 else "failed"
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
        out, err = child.communicate()
        slow = isinstance(stop, subprocess.TimeoutExpired)
        outcome.status = "too slow" if slow else "interrupted"
    outcome.seconds = time.monotonic() - start
    table = folder / f"{step.name}.md"
    if step.table and table.exists():
        outcome.text = table.read_text().strip()
        outcome.result = _last_json(out)
    elif not step.table and out.strip():
        outcome.text = f"```\n{out.strip()}\n```"
    if outcome.status == "failed" and err.strip():
        outcome.text += f"\n\n```\n{err.strip().splitlines()[-1][:500]}\n```"
    outcome.text = without_names(outcome.text, folder).strip()


def _last_json(out: str) -> Any:
    try:
        return json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None


def _command(step: Step, folder: Path) -> str:
    return without_names(" ".join(("mlx_moeflux", *step.arguments)), folder)


def without_names(text: str, folder: Path) -> str:
    """Return text without the folder of the report, the user's home and the user's name."""
    home = Path.home()
    for name, instead in ((folder, "FOLDER"), (user_cache.root(), "CACHE"), (home, "~")):
        if str(name) != "/":
            text = text.replace(str(name), instead)
    user = home.name
    return text.replace(f"/{user}/", "/USER/") if user and user != "root" else text


def machine_facts() -> dict[str, Any]:
    """Return what decides correctness and speed, and nothing that says whose machine it is."""
    info = dict(mx.device_info())
    apple = platform.mac_ver()[0]
    facts = {
        "mlx_moeflux": __version__,
        "back end": describe_backend(),
        "system": f"macOS {apple}" if apple else _kernel(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        "GPU or CPU": verdicts.gpu(),
        "float32 products of stock MLX": "TF32" if device.rounds_to_tf32() else "float32",
    }
    facts |= {name.replace("_", " "): info[name] for name in LIMITS if name in info}
    for name in ("mlx-lm", "numpy"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return facts


def _kernel() -> str:
    """Return such as Linux 6.18: what follows names distributions and hosts."""
    return f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def check_outputs(prefix: Path) -> tuple[Path, Path]:
    """Return the Markdown and the JSON file of a report.

    Raises:
        InputError: One cannot be written, or is something else than a file.
    """
    files = prefix.with_name(prefix.name + ".md"), prefix.with_name(prefix.name + ".json")
    if not prefix.parent.is_dir() or not os.access(prefix.parent, os.W_OK):
        raise InputError(f"{prefix.parent} is no directory that can be written; choose another.")
    for file in files:
        if file.exists() and not file.is_file():
            raise InputError(f"{file} is no regular file; choose another name.")
    return files


def write(report: MachineReport, files: tuple[Path, Path]) -> None:
    """Write both files, each atomically.

    Raises:
        InputError: One cannot be written.
    """
    for file, text in zip(files, (report.as_markdown(), report.as_json()), strict=True):
        write_output(file, text.encode())
