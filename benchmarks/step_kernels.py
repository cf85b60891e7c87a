"""The kernels of a decode step of DeepSeek-V3's layers, each timed within it.

    python benchmarks/step_kernels.py --out few --experts 16         # writes 3 GB once
    python benchmarks/step_kernels.py --out few --experts 16 --kernels latent_step=reference

Several of the first layer (dense), and then of the last (MoE), run as a model of their own, one
token ahead of the device; NVIDIA's CUPTI says how long each kernel took, through PyTorch, which
must be installed with CUDA. With the full shapes no layer finds its weights in a GPU's cache; few
experts do no harm, as long as a token takes all of its own from memory.

Compare forms here and not in loops, where a kernel finds what it read before; and each in a process
of its own, since kernels that are loaded later run up to 0.5 us slower.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from latent_layer import Side, split_heads
from timing import kernel_events

from mlx_moeflux.loading import load_model
from mlx_moeflux.synthesize import synthesize

WARM_UP = 4  # Steps that Side.decode makes before those that it is asked for.


def of_a_layer(side: Side, layer: int, args) -> dict[str, list[float]]:
    """Kernel -> microseconds of each time it ran, for those that each step launches for a layer."""
    side.repeat([layer], args.many)
    side.decode(args.seen, args.steps)  # compiles
    times: dict[str, list[float]] = {}
    for event in kernel_events(lambda: side.decode(args.seen, args.steps)):
        name = event.name.partition("custom_kernel_moeflux_")[2].partition("(")[0]
        times.setdefault(name, []).append(event.time_range.end - event.time_range.start)
    times.pop("", None)  # MLX's own
    least = args.many * args.steps
    return {name: own for name, own in times.items() if len(own) >= least}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint, written if missing")
    parser.add_argument("--like", default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=None, help="of a layer, default: all")
    parser.add_argument("--many", type=int, default=5, help="layers of the model")
    parser.add_argument("--seen", type=int, default=2048, help="positions in the cache")
    parser.add_argument("--steps", type=int, default=12, help="tokens of a trial")
    parser.add_argument("--kernels", default=None, help="such as latent_attention=reference")
    args = parser.parse_args()
    if kernel_events(lambda: None) is None:
        raise SystemExit("step_kernels: needs NVIDIA's GPU, and PyTorch with CUDA.")
    if not args.out.exists():
        synthesize(args.like, args.out, layers=args.layers, experts=args.experts)
    model = load_model(args.out, expert_memory="100%", kernels=args.kernels)
    split_heads(model)
    side = Side(model, model.model, model.make_cache)
    side.config, side.dtype = model.config, model.model.norm.weight.dtype
    for layer in sorted({0, len(side.own) - 1}):
        times = of_a_layer(side, layer, args)
        calls = args.many * (args.steps + WARM_UP)
        total = sum(map(sum, times.values())) / calls
        print(f"layer {layer}: {total:.1f} us of kernels, some of which run at once")
        for name, own in sorted(times.items(), key=lambda item: -sum(item[1])):
            # One kernel may have several launches in a layer, of different sizes.
            print(
                f"  {name:<36} {sum(own) / calls:>7.2f} us in {len(own) / calls:.0f} launches, "
                f"median of one {statistics.median(own):.2f}"
            )


if __name__ == "__main__":
    main()
