"""Every kernel on this GPU: error against float64, time, best stock MLX, and the hardware's limit.

    python benchmarks/kernels.py [--only delta] [--targets]

"us" is the slope over the number of calls in one `mx.eval`, the median of five, over inputs of more
than 200 MB. No slope is less than what the host takes for a launch (4 to 12 us on CUDA), so with
PyTorch installed "kernels" is what CUPTI saw the call's kernels take, and the smaller of the two
is held against the target. "ratio" is stock's slope over ours; "of limit" the time that the call's
bytes at the memory's speed or its products at the tensor cores' would take, whichever is more,
over its own. Errors are the largest difference relative to the largest value, of the kernel and of
stock MLX.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import cases_attention
import cases_delta
import cases_experts
import cases_router
from timing import CallTime, call_time

# Bytes a second that a copy reaches, and 16-bit operations a second of the data sheet.
LIMITS = {"H100": (3.0e12, 989e12), "H200": (4.2e12, 989e12)}


@dataclass(frozen=True)
class Line:
    """One kernel at one size. target: Microseconds; least_ratio: Of stock's time to ours."""

    name: str
    time: CallTime
    stock: float
    error: float
    stock_error: float
    moved: float
    products: float
    target: float | None = None
    least_ratio: float | None = None

    @property
    def ratio(self) -> float:
        return self.stock / self.time.wall

    def met(self) -> str:
        """Whether the target is met."""
        if self.target is not None:
            met = 1e6 * self.time.gpu <= self.target
            return f"<= {self.target:g} us: {'yes' if met else 'NO'}"
        if self.least_ratio is not None:
            return f">= {self.least_ratio:g} x: {'yes' if self.ratio >= self.least_ratio else 'NO'}"
        return ""

    def of_limit(self, memory: float, compute: float) -> str:
        """The share of the nearer limit, and which it is."""
        least = {"memory": self.moved / memory, "compute": 2 * self.products / compute}
        which = max(least, key=least.__getitem__)
        return f"{100 * least[which] / self.time.gpu:3.0f} % {which}"


@dataclass(frozen=True)
class Wanted:
    """Which cases are measured."""

    part: str
    targets: bool

    def takes(self, family: str, name: str, aimed: bool) -> bool:
        return self.part in f"{family} {name}" and (aimed or not self.targets)


def delta(wanted: Wanted) -> Iterator[Line]:
    for case in cases_delta.cases():
        if not wanted.takes("delta", case.name, case.target is not None):
            continue
        mx.clear_cache()
        time, stock = (
            call_time(
                cases_delta.calls(form, case),
                *cases_delta.counts(case, form),
                profiled=form is case.ours,
            )
            for form in (case.ours, case.stock)
        )
        ours, naive = cases_delta.errors(case)
        yield Line(
            case.name, time, stock.wall, max(ours), max(naive), case.moved, case.products,
            case.target,
        )  # fmt: skip


def attention(wanted: Wanted) -> Iterator[Line]:
    for case in cases_attention.cases():
        aimed = case.target is not None or case.least_ratio is not None
        if not wanted.takes("attention", case.name, aimed):
            continue
        times = []
        for form in (case.ours, *case.stock):
            mx.clear_cache()
            made = cases_attention.calls(form, case)
            counts = cases_attention.counts(case, made)
            times.append(call_time(made, *counts, profiled=form is case.ours))
        stock = min((time.wall for time in times[1:]), default=math.nan)
        errors = [math.nan, math.nan]
        if case.truth is not None:
            inputs = case.inputs(1)
            truth, where = case.truth(inputs)
            forms = (case.ours, *case.stock)
            errors = [cases_attention.error(f(**inputs), truth, where) for f in forms]
        yield Line(
            case.name, times[0], stock, errors[0],
            min(errors[1:], default=math.nan), case.moved, case.products, case.target,
            case.least_ratio,
        )  # fmt: skip


def experts(wanted: Wanted) -> Iterator[Line]:
    for case in cases_experts.cases(
        lambda name, target: wanted.takes("experts", name, target is not None)
    ):
        stock = cases_experts.STOCK & case.forms.keys()
        times, errors = {}, {}
        for name, call in case.forms.items():
            made = cases_experts.calls(call)
            times[name] = call_time(made, *case.counts, profiled=name not in stock)
            errors[name] = cases_experts.error(call, case)
        best = min(stock, key=lambda name: times[name].wall)
        for name in (name for name in case.forms if name not in stock):
            yield Line(
                f"{case.name} {name}", times[name], times[best].wall, errors[name], errors[best],
                case.moved, case.products, case.target if name == case.ours else None,
            )  # fmt: skip


def router(wanted: Wanted) -> Iterator[Line]:
    for case in cases_router.cases():
        if not wanted.takes("router", case.name, case.target is not None):
            continue
        rotated = cases_router.rotated(case)
        time = call_time(cases_router.calls(case.ours, rotated), 50, 250, profiled=True)
        stock = call_time(cases_router.calls(case.stock, rotated), 10, 40)
        truth = case.truth(**rotated[0])
        errors = [cases_router.error(f(**rotated[0]), truth) for f in (case.ours, case.stock)]
        yield Line(case.name, time, stock.wall, *errors, case.moved, 0.0, case.target)


FAMILIES = {"delta": delta, "attention": attention, "experts": experts, "router": router}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="part of a case's name, or a family's")
    parser.add_argument("--targets", action="store_true", help="only cases that have one")
    parser.add_argument("--memory", type=float, help="the memory's GB/s, where it is not known")
    parser.add_argument("--compute", type=float, help="TFLOP/s in 16 bits, where not known")
    args = parser.parse_args()
    if not (mx.metal.is_available() or mx.cuda.is_available()):
        print("kernels: MLX drives no GPU here")
        return
    device = str(mx.device_info().get("device_name", "?"))
    memory, compute = next((v for k, v in LIMITS.items() if k in device), (math.nan, math.nan))
    memory = args.memory * 1e9 if args.memory else memory
    compute = args.compute * 1e12 if args.compute else compute
    print(f"{device}, MLX {mx.__version__}, {memory / 1e12:.2f} TB/s, {compute / 1e12:.0f} TFLOP/s")
    times = f"{'us':>9} {'kernels':>8} {'stock us':>9} {'ratio':>7}"
    heads = f"{times}  {'of limit':13} {'error':>8} {'stock':>8}"
    print(f"{'kernel':50} {heads}  target", flush=True)
    wanted = Wanted(args.only, args.targets)
    for family in FAMILIES.values():
        for line in family(wanted):
            kernels = line.time.kernels
            seen = "-" if kernels is None else f"{1e6 * kernels:.1f}"
            print(
                f"{line.name:50} {1e6 * line.time.wall:9.1f} {seen:>8} "
                f"{1e6 * line.stock:9.1f} {line.ratio:7.1f}  "
                f"{line.of_limit(memory, compute):13} {line.error:8.1e} {line.stock_error:8.1e}  "
                f"{line.met()}",
                flush=True,
            )


if __name__ == "__main__":
    main()
