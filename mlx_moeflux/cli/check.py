"""``mlx_moeflux check``: compare stock operations and kernels with exact results."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operation", help="only this one, such as gated_delta")


def run(args: argparse.Namespace) -> int:
    """Print two tables; return 1 if a stock operation or a kernel failed."""
    from mlx_moeflux.backend import describe_backend
    from mlx_moeflux.errors import InputError
    from mlx_moeflux.kernels import stock, trials
    from mlx_moeflux.kernels.registry import IMPLEMENTATIONS, REFERENCE
    from mlx_moeflux.kernels.runtime import metal

    if args.operation is not None and args.operation not in IMPLEMENTATIONS:
        raise InputError(
            f"no operation is called '{args.operation}'; there are {list(IMPLEMENTATIONS)}."
        )
    print(f"{describe_backend()}\n")
    failed = 0 if args.operation else _check_stock(stock)
    print(f"{'operation':<18} {'form':<14} {'dtype':<9} {'back end':<8} {'verdict':<8} error")
    active = metal.backend()
    for operation, forms in IMPLEMENTATIONS.items():
        if args.operation not in (None, operation):
            continue
        for name, form in forms.items():
            # A reference on the GPU is compared with the same reference on the CPU.
            if not (hasattr(form, "kernels") or name == REFERENCE):
                continue
            for dtype in stock.DTYPES:
                words = str(dtype).removeprefix("mlx.core.")
                if isinstance(active, metal.NoBackend):
                    verdict, detail = "not run", "no GPU"
                else:
                    result = trials.on_example(operation, name, forms, dtype)
                    failed += not result.ok
                    verdict = "right" if result.ok else "wrong"
                    detail = result.reason or f"{result.error:.1e}"
                cells = f"{operation:<18} {name:<14} {words:<9} {active.name:<8} {verdict:<8}"
                print(f"{cells} {detail}")
    if (files := metal.cuda_files()) is not None:
        print(f"\n{files.count}; {files.where}")
    return 1 if failed else 0


def _check_stock(stock) -> int:
    """Print the worst error of every stock operation against float64; return the failures."""
    print(f"{'stock operation':<30} {'dtype':<9} {'verdict':<8} error")
    failed = 0
    for dtype in stock.DTYPES:
        words = str(dtype).removeprefix("mlx.core.")
        for entry in stock.worst(dtype):
            right = entry.error <= stock.limit(dtype)
            failed += not right
            detail = f"{entry.error:.1e}" if right else f"{entry.error:.1e} ({entry.what})"
            print(
                f"{entry.operation:<30} {words:<9} {'right' if right else 'wrong':<8} "
                f"{entry.reason or detail}"
            )
    print()
    return failed
