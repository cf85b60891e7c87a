"""``mlx_moeflux plan``: predict memory and speed of a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlx_moeflux.checkpoint.model_name import parse_model_name
from mlx_moeflux.cli.common import (
    MODEL,
    add_load_arguments,
    add_machine_arguments,
    add_model_arguments,
    machine_memory,
    machine_rates,
    required_model,
)
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import KV_POSITIONS, parse_budget
from mlx_moeflux.loading.options import LoadOptions, check_arguments
from mlx_moeflux.measure.plan import ModelPlan, Sizes, described_memory, open_sizes, plan_model
from mlx_moeflux.measure.plan_machines import Link, MachinesPlan, plan_machines

NEEDS_MLX = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser, text=f"{MODEL}, of which only headers are read")
    add_machine_arguments(parser)
    add("--machines", metavar="SIZE,...", help="memory of several, such as 16GB,32GB")
    add("--link", metavar="SPEED", help="between --machines, such as 2.5GB/s")
    add("--link-latency", type=float, default=0.1, help="ms a message, default %(default)s")
    add_load_arguments(parser, "expert_memory", "row_memory")
    add("--context", type=int, help=f"positions, default {KV_POSITIONS} or the model's own limit")
    add("--bits", type=int, help="as if converted to so many bits")
    add_load_arguments(parser, "gguf_file")
    add("--json", action="store_true", help="numbers instead of text")


def run(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in ("expert_memory", "row_memory")}
    check_arguments("plan", LoadOptions, given)
    sizes = open_sizes(
        required_model(args),
        revision=args.revision,
        gguf_file=args.gguf_file,
        context=args.context,
        bits=args.bits,
    )
    # Options are checked before the disk is measured, which takes seconds.
    make_plan = (
        _for_machines(args, sizes) if args.machines is not None else _for_machine(args, sizes)
    )
    rates = machine_rates(args, _place(args.model))
    plan = make_plan(ssd_gbps=rates.ssd_gbps, memory_gbps=rates.memory_gbps)
    if args.json:
        json.dump(plan.as_dict() | rates._asdict(), sys.stdout, indent=2)
        print()
    else:
        print(f"{plan}\n{'rates':8} {rates}")
    return 0


def _place(model: str) -> Path:
    """Return where the model's files are, or will be."""
    from mlx_moeflux.checkpoint.hub import download_folder

    name = parse_model_name(model)
    return Path(name.place).expanduser() if name.is_path else download_folder()


def _for_machine(args: argparse.Namespace, sizes: Sizes) -> Callable[..., ModelPlan]:
    """Return the function of the bandwidths that plans one machine."""
    if args.link is not None:
        raise InputError("--link needs --machines, the memory of each.")
    return partial(
        plan_model,
        args.model,
        sizes,
        memory=machine_memory(args),
        expert_memory=args.expert_memory,
        row_memory=args.row_memory,
    )


def _for_machines(args: argparse.Namespace, sizes: Sizes) -> Callable[..., MachinesPlan]:
    """Return the function of the bandwidths that plans several machines."""
    if args.memory is not None or args.link is None:
        raise InputError("--machines needs --link, and excludes --memory.")
    speed = parse_budget(args.link.removesuffix("/s"), 0, what="speed of --link")
    if speed is None:
        raise InputError("--link is auto; give a speed such as 2.5GB/s.")
    return partial(
        plan_machines,
        args.model,
        sizes,
        memories=[described_memory(one) for one in args.machines.split(",")],
        link=Link(speed, args.link_latency / 1e3),
        expert_memory=args.expert_memory,
        row_memory=args.row_memory,
    )
