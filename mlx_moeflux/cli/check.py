"""``mlx_moeflux check``: every kernel beside its reference on this machine."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operation", help="only this one, such as gated_delta")


def run(args: argparse.Namespace) -> int:
    """Prints a table; 1 if a kernel failed."""
    from mlx_moeflux.backend import describe_backend
    from mlx_moeflux.errors import InputError
    from mlx_moeflux.kernels import metal, selfcheck
    from mlx_moeflux.kernels.choice import FORMS

    if args.operation is not None and args.operation not in FORMS:
        raise InputError(f"no operation is called '{args.operation}'; there are {list(FORMS)}.")
    print(f"{describe_backend()}\n")
    print(f"{'operation':<18} {'form':<14} {'dtype':<9} {'back end':<8} {'verdict':<8} error")
    failed = 0
    active = metal.backend()
    for operation, forms in FORMS.items():
        if args.operation not in (None, operation):
            continue
        for name, form in forms.items():
            if not hasattr(form, "kernels"):
                continue
            for dtype in selfcheck.LIMITS:
                words = str(dtype).removeprefix("mlx.core.")
                if isinstance(active, metal.NoBackend):
                    verdict, said = "not run", "no GPU"
                else:
                    result = selfcheck.compare(operation, name, forms, dtype)
                    selfcheck.keep({f"{operation}={name} {words}": result}, form)
                    failed += not result.ok
                    verdict = "right" if result.ok else "wrong"
                    said = result.reason or f"{result.error:.1e}"
                print(f"{operation:<18} {name:<14} {words:<9} {active.name:<8} {verdict:<8} {said}")
    if (files := metal.cuda_files()) is not None:
        print(f"\n{files.count}; {files.where}")
    return 1 if failed else 0
