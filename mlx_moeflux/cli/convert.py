"""``mlx_moeflux convert``: mlx-lm's flags, and a layout of experts."""

from __future__ import annotations

import argparse
import sys

from mlx_moeflux.cli.common import (
    MODEL,
    add_load_arguments,
    add_model_arguments,
    refuse,
    required_model,
)
from mlx_moeflux.cli.messages import Bar

REFUSED = {
    "--upload-repo": "upload with 'hf upload'",
    "--trust-remote-code": "no code from a checkpoint runs",
    "--quant-predicate": "mixed-bit recipes are not offered yet",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser, "--hf-path", text=MODEL)
    add("--mlx-path", "--out", default="mlx_model", help="directory to write, default %(default)s")
    add("--layout", choices=["packed", "safetensors"], default="packed", help="default %(default)s")
    add("-q", "--quantize", action="store_true", help="quantise float weights")
    add("--q-bits", type=int, help="default 4, or the mode's")
    add("--q-group-size", type=int, help="default 64, or the mode's")
    add("--q-mode", default="affine", help="or mxfp4, mxfp8, nvfp4; default %(default)s")
    add("-d", "--dequantize", action="store_true", help="make quantised weights floats")
    add("--dtype", choices=["float16", "bfloat16", "float32"], help="of the floats")
    add("--verify", action="store_true", help="read back what was written and compare hashes")
    add("--no-mtp", dest="mtp", action="store_false", help="leave out multi-token prediction")
    add("--shard", metavar="I/N", help="write the experts of rank I of N only, from 0")
    rules = "of --shard: id (default), memory:16GB,32GB or popularity:TRACE"
    add("--placement", default="id", help=rules)
    add_load_arguments(parser, "gguf_file", "requantize", "strict_config")
    refuse(parser, REFUSED, REFUSED)


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux.checkpoint.source import open_checkpoint
    from mlx_moeflux.conversion.convert import convert
    from mlx_moeflux.experts.budget import format_bytes
    from mlx_moeflux.measure.plan import open_sizes

    model = required_model(args)
    with Bar("convert", "B") as bar:
        out = convert(
            model,
            args.mlx_path,
            layout=args.layout,
            quantize=args.quantize,
            q_bits=args.q_bits,
            q_group_size=args.q_group_size,
            q_mode=args.q_mode,
            dequantize=args.dequantize,
            requantize=args.requantize,
            dtype=args.dtype,
            verify_written=args.verify,
            strict_config=args.strict_config,
            revision=args.revision,
            gguf_file=args.gguf_file,
            shard=args.shard,
            placement=args.placement,
            progress=bar.update,
            mtp=args.mtp,
        )
    print(f"wrote {out}", file=sys.stderr)
    sizes = open_sizes(model, revision=args.revision, gguf_file=args.gguf_file)
    if sizes.prediction_bytes and not open_sizes(out).prediction_bytes:
        what = f"{format_bytes(sizes.prediction_bytes)} of multi-token prediction"
        print(f"left out {what}", file=sys.stderr)
    if lossy := open_checkpoint(out).approximated:
        print(lossy, file=sys.stderr)
    return 0
