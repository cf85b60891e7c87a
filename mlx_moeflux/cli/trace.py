"""``mlx_moeflux trace``: plots and policy replays of a recorded run."""

from __future__ import annotations

import argparse

from mlx_moeflux.errors import InputError

NEEDS_MLX = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=["show", "replay"], help="pictures, or a table of policies")
    add("file", help="recorded with generate --trace FILE")
    add("--out", default="trace-pictures", help="directory of the pictures, default %(default)s")
    add("--profile", help="of this machine, as tune writes it (default: times of the trace)")
    shares = ["12.5%", "25%", "50%", "75%"]
    shown = " ".join(shares).replace("%", "%%")
    add("--budget", nargs="+", default=shares, help=f"of the table, default {shown}")


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux.experts.telemetry.forecast import Profile
    from mlx_moeflux.experts.telemetry.trace import Trace

    trace = Trace.open(args.file)
    if not trace.calls:
        raise InputError(f"{args.file} holds no call; record one that generates text.")
    profile = Profile.open(args.profile) if args.profile else None
    if args.action == "replay":
        print(replays(trace, args.budget))
        return 0
    from mlx_moeflux.measure.plots import show

    for file in show(trace, args.out, profile=profile):
        print(file)
    return 0


def replays(trace, budgets: list[str]) -> str:
    """Return a table of hit rates in percent, one line a policy."""
    from mlx_moeflux.experts.policies.eviction import EVICTIONS
    from mlx_moeflux.experts.telemetry.simulate import simulate

    lines = ["hit rate " + "".join(f"{budget:>9}" for budget in budgets)]
    for name in (*EVICTIONS, "belady"):
        rates = (100 * simulate(trace, budget, eviction=name).hit_rate for budget in budgets)
        lines.append(f"{name:9}" + "".join(f"{rate:9.1f}" for rate in rates))
    return "\n".join(lines)
