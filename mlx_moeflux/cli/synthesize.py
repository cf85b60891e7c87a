"""``mlx_moeflux synthesize``: write a checkpoint of random weights in a published shape."""

from __future__ import annotations

import argparse
import sys

from mlx_moeflux.cli.messages import Bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--like", required=True, help="published shape, see 'shapes', such as qwen3.5-tiny")
    add("--out", required=True, help="directory to write")
    add("--layers", type=int, help="instead of the shape's")
    add("--experts", type=int, help="instead of the shape's")
    add("--bits", type=int, default=4, help="default %(default)s")
    add(
        "--skew",
        type=float,
        default=1.0,
        help="of the choice of experts, default %(default)s; 0: even",
    )
    add("--seed", type=int, default=0, help="of the weights, default %(default)s")
    add(
        "--measure",
        type=int,
        default=256,
        metavar="N",
        help="tokens to measure the skew on, default %(default)s; 0: none",
    )


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux.conversion.synthesize import measure_skew, synthesize

    with Bar("write", "B") as bar:
        out = synthesize(
            args.like,
            args.out,
            layers=args.layers,
            experts=args.experts,
            bits=args.bits,
            skew=args.skew,
            seed=args.seed,
            progress=bar.update,
        )
    print(f"wrote {out}", file=sys.stderr)
    if args.measure:
        print(f"skew on {measure_skew(out, tokens=args.measure, seed=args.seed)}")
    return 0
