"""``mlx_moeflux check``: compare operations with exact results, and layers with mlx-lm's."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Iterable, Sequence

from mlx_moeflux.cli.common import add_load_arguments, add_model_arguments, model_or_bundled
from mlx_moeflux.errors import InputError

DTYPES = ("float32", "float16", "bfloat16")
# Values of --operation for all stock operations, for all of the package, and for kernels that wait.
STOCK, KERNELS, HANDSHAKE = "stock", "kernels", "handshake"
MLX_LM = "mlx-lm"
COMMAND = (sys.executable, "-m", "mlx_moeflux", "check")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operation",
        help=f"only this one, such as gated_delta; {STOCK} or {KERNELS}: only these; {HANDSHAKE}: "
        "steps of the bundled model whose kernels wait for experts, and their time",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="only this one")
    parser.add_argument(
        "--link",
        action="store_true",
        help="time sums over the ranks of mlx.launch, and print what plan --machines takes",
    )
    parser.add_argument(
        "--against",
        choices=(MLX_LM,),
        help="compare each layer of MODEL with stock mlx-lm, both against float32",
    )
    add_model_arguments(parser, text="of --against (default: the bundled model)")
    add_load_arguments(parser, "strict_config")


def run(args: argparse.Namespace) -> int:
    """Print two tables for each dtype, the table of ``--against``, or a line on the handshake or
    the link of ranks; return 1 if a stock operation, a kernel or a layer failed."""
    if args.against is not None:
        if args.operation is not None or args.dtype is not None or args.link:
            raise InputError("--against takes a model; leave out --operation, --dtype and --link.")
        return _check_against(args)
    if args.model is not None or args.revision is not None:
        raise InputError(f"MODEL and --revision are for --against {MLX_LM}; give that too.")
    if args.link:
        return _check_link()
    from mlx_moeflux.backend import describe_backend
    from mlx_moeflux.kernels.registry import OPERATIONS, unknown_operation

    if args.operation == HANDSHAKE:
        return _check_handshake()
    if args.operation not in (None, STOCK, KERNELS, *OPERATIONS):
        raise unknown_operation(args.operation, STOCK, KERNELS, HANDSHAKE)
    parts = (STOCK, KERNELS) if args.operation is None else (args.operation,)
    dtypes = DTYPES if args.dtype is None else (args.dtype,)
    if len(parts) == len(dtypes) == 1:
        return 1 if _check(dtypes[0], parts[0]) else 0
    print(f"{describe_backend()}\n", flush=True)
    pairs = itertools.product(dtypes, parts)
    program = (*COMMAND, "--allow-sleep") if args.allow_sleep else COMMAND
    commands = [("--dtype", dtype, "--operation", part) for dtype, part in pairs]
    return _in_processes(commands, program)


def _in_processes(commands: Sequence[Sequence[str]], program: Sequence[str] = COMMAND) -> int:
    """Run commands of `program` side by side, because most of their time goes to compiling, and
    print what they print in order; return 1 if one failed."""
    children = [
        subprocess.Popen((*program, *command), stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for command, child in zip(commands, children, strict=True):
            print(child.communicate()[0], flush=True)
            if child.returncode < 0:
                print(f"check {' '.join(command)} was ended by signal {-child.returncode}\n")
        return next((1 for child in children if child.returncode), 0)
    finally:
        for child in children:
            child.kill()
            child.wait()


def _check(dtype: str, part: str) -> int:
    """Check stock operations, all others or one of them; return the failures."""
    import mlx.core as mx

    from mlx_moeflux.kernels.registry import OPERATIONS
    from mlx_moeflux.kernels.runtime import launcher

    if part == STOCK:
        return _check_stock(getattr(mx, dtype))
    failed = _check_kernels(getattr(mx, dtype), OPERATIONS if part == KERNELS else (part,))
    if (files := launcher.cuda_files()) is not None:
        print(f"\n{files.count}; {files.where}")
    return failed


def _check_handshake() -> int:
    """Print a line; return 1 if its bits are wrong."""
    from mlx_moeflux.measure.handshake import compare

    found = compare()
    print(found.text)
    return int(found.wrong)


def _check_link() -> int:
    """Print a line on rank 0."""
    from mlx_moeflux.distributed.ranks import Ranks
    from mlx_moeflux.experts.budget import format_bytes
    from mlx_moeflux.measure.link import measure_link

    ranks = Ranks()
    try:
        with ranks.reporting():
            link = measure_link(ranks)
    finally:
        ranks.close()
    if ranks.leads:
        speed = format_bytes(link.bytes_per_second).replace(" ", "")
        print(f"{ranks.size} ranks: --link {speed}/s --link-latency {1e3 * link.latency:.3g}")
    return 0


def _check_against(args: argparse.Namespace) -> int:
    """Print a line for each part of the model, as soon as it is compared."""
    from tqdm import tqdm

    from mlx_moeflux.checkpoint.hub import resolve
    from mlx_moeflux.measure import against
    from mlx_moeflux.tokenizer import load_tokenizer

    model = model_or_bundled(args, "give a directory or a hub id")
    path = resolve(model, revision=args.revision)
    against.check_readable(path, strict_config=args.strict_config)
    tokenizer = load_tokenizer(path)
    silent = not sys.stderr.isatty()
    with tqdm(bar_format="{desc}", leave=False, disable=silent) as bar:

        def say(line: str) -> None:
            bar.clear()
            print(line, flush=True)

        say(against.HEAD)
        found = against.compare(
            path,
            tokenizer.encode(against.text())[: against.PROMPT],
            reply=against.REPLY,
            strict_config=args.strict_config,
            found=lambda part: say(str(part)),
            say=bar.set_description_str,
        )
    for line in found.lines(lambda token: tokenizer.decode([token])):
        print(line)
    return 0 if found.right else 1


def _check_stock(dtype) -> int:
    """Print the worst error of every stock operation against float64; return the failures."""
    import mlx.core as mx

    from mlx_moeflux.kernels.runtime import device
    from mlx_moeflux.kernels.verify import stock

    if dtype == mx.float32 and device.rounds_to_tf32():
        print("stock MLX rounds float32 products to TF32 here; MLX_ENABLE_TF32=0 keeps all bits\n")
    print(f"{'stock operation':<33} {'dtype':<9} {'verdict':<8} error")
    failed = 0
    for entry in stock.worst(dtype):
        right = entry.error <= stock.LIMITS[dtype]
        failed += not right
        detail = f"{entry.error:.1e}" if right else f"{entry.error:.1e} ({entry.what})"
        cells = f"{entry.operation:<33} {_name(dtype):<9} {'right' if right else 'wrong':<8}"
        print(f"{cells} {entry.reason or detail}")
    return failed


def _check_kernels(dtype, operations: Iterable[str]) -> int:
    """Print the error of every implementation of operations on a small call; return the
    failures."""
    from mlx_moeflux.kernels.verify.check import check

    print(f"{'operation':<18} {'implementation':<14} {'dtype':<9} {'verdict':<8} error")
    failed = 0
    for operation, name, result in check(dtype, operations):
        if result is None:
            verdict, detail = "not run", "no GPU"
        else:
            failed += not result.ok
            verdict = "right" if result.ok else "wrong"
            detail = result.reason or f"{result.error:.1e}"
        print(f"{operation:<18} {name:<14} {_name(dtype):<9} {verdict:<8} {detail}")
    return failed


def _name(dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
