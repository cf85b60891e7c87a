"""``mlx_moeflux compare-quality``: compare a lossy option with the exact model."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_moeflux.cli.common import add_load_arguments, add_model_arguments
from mlx_moeflux.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--experts-per-token", type=int, help="fewer experts a token")
    add("--bits", type=int, help="a temporary copy quantised to this many bits")
    add("--other", help="another copy of the model, such as a 2-bit one")
    add_load_arguments(parser, "expert_memory")
    add("--max-tokens", type=int, default=120, help="of each JSON reply, default %(default)s")
    add("--json", action="store_true", help="numbers instead of text")
    add_load_arguments(parser, "gguf_file", "strict_config")


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading
    from mlx_moeflux.checkpoint.hub import resolve
    from mlx_moeflux.measure.compare_quality import compare

    if args.experts_per_token is None and args.bits is None and args.other is None:
        raise InputError("choose an option: --experts-per-token, --bits or --other.")
    if args.bits is not None and args.other is not None:
        raise InputError("choose --bits or --other: each is the lossy model.")
    model = resolve(
        args.model or loading.BUNDLED_MODEL, revision=args.revision, gguf_file=args.gguf_file
    )
    with tempfile.TemporaryDirectory() as folder:
        lossy = args.other or model
        if args.bits is not None:
            lossy = _requantised(model, args.bits, Path(folder), strict_config=args.strict_config)
        marks = () if lossy is model else (f"weights of {args.other or f'{args.bits} bits'}",)
        options = {"expert_memory": args.expert_memory, "strict_config": args.strict_config}
        result = compare(
            lambda: loading.load(model, **options),
            lambda: loading.load(lossy, **options, experts_per_token=args.experts_per_token),
            max_tokens=args.max_tokens,
        )
    result = replace(result, lossy=(*marks, *result.lossy))
    if args.json:
        json.dump(result.as_dict(), sys.stdout, indent=2)
        print()
    else:
        print(result)
    return 0


def _requantised(model: Path, bits: int, folder: Path, *, strict_config: bool) -> Path:
    """Write a copy with all weights in `bits` bits; takes disk space for a 16-bit copy as well."""
    from mlx_moeflux.conversion.convert import convert

    options: dict[str, Any] = {"layout": "safetensors", "strict_config": strict_config}
    floats = convert(model, folder / "floats", dequantize=True, **options)
    return convert(floats, folder / "lossy", quantize=True, q_bits=bits, **options)
