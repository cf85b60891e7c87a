"""``mlx_moeflux perplexity``: perplexity of a model on a text file, mlx-lm's flags."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from mlx_moeflux.cli.common import (
    LOADING,
    add_load_arguments,
    add_model_arguments,
    add_stats_arguments,
    load_options,
    refuse,
    stats_table,
)
from mlx_moeflux.errors import InputError

SIGN = "±"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--data-path", required=True, metavar="FILE", help="text in UTF-8")
    add("--batch-size", type=int, default=8, help="sequences a call, default %(default)s")
    add("--sequence-length", type=int, default=512, help="tokens, default %(default)s")
    add("--num-samples", type=int, default=256, help="sequences, default %(default)s; -1: all")
    add("--seed", type=int, default=123, help="of the choice of sequences, default %(default)s")
    add_load_arguments(parser, *LOADING)
    add_stats_arguments(parser)
    refuse(parser, ("--trust-remote-code",))


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading

    SIGN.encode(sys.stdout.encoding or "utf-8")  # a result after hours is not to be lost
    if args.batch_size < 1 or args.sequence_length < 2 or args.num_samples < -1 or args.seed < 0:
        raise InputError(
            "give --batch-size 1 or more, --sequence-length 2 or more, --num-samples -1 or more, "
            "--seed 0 or more."
        )
    try:
        text = Path(args.data_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{args.data_path} cannot be read ({error}); give a text file.") from None
    model, tokenizer = loading.load(
        args.model or loading.BUNDLED_MODEL,
        revision=args.revision,
        **load_options(args),
        verbose=True,
    )
    with model:
        ids = tokenizer.encode(text)
        count = len(ids) // args.sequence_length
        if count == 0 or args.num_samples == 0:
            raise InputError(
                f"{args.data_path} gives {len(ids)} tokens and {args.num_samples} samples; at "
                f"least one sequence of {args.sequence_length} is needed."
            )
        value, error = perplexity(model, ids, args)
        print(f"Perplexity: {value:.3f} {SIGN} {error:.3f}")
        if args.stats:
            print(stats_table(model.store.stats(), model, details=args.details), file=sys.stderr)
    return 0


def perplexity(model, ids: list[int], args: argparse.Namespace) -> tuple[float, float]:
    """Return perplexity and its standard error over the tokens of chosen sequences of `ids`."""
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np

    count = len(ids) // args.sequence_length
    sequences = np.array(ids[: count * args.sequence_length]).reshape(count, -1)
    order = np.random.default_rng(args.seed).permutation(count)
    chosen = sequences[order if args.num_samples == -1 else order[: args.num_samples]]
    losses = []
    for start in range(0, len(chosen), args.batch_size):
        batch = mx.array(chosen[start : start + args.batch_size])
        logits = model(batch[:, :-1]).astype(mx.float32)
        losses.append(np.array(nn.losses.cross_entropy(logits, batch[:, 1:])).ravel())
    every = np.concatenate(losses).astype(np.float64)
    value = math.exp(every.mean())
    return value, value * float(every.std(ddof=min(1, every.size - 1))) / math.sqrt(every.size)
