"""Record the experts that a model uses, then replay every policy and budget without the model.

    python examples/trace_and_replay.py [MODEL]

The first lines show that a replay gives the hits of the live store. The table has hit rates in
percent, with Belady's optimum (belady) and the default policy on shuffled tokens (shuffled).
"""

import argparse
import tempfile
from pathlib import Path

import mlx_moeflux
from mlx_moeflux.experts.policies.eviction import EVICTIONS
from mlx_moeflux.experts.telemetry.bounds import shuffled
from mlx_moeflux.experts.telemetry.forecast import Profile, forecast
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import BUNDLED_MODEL

PROMPT = "class Queue:\n    def __init__(self, maxsize=0):\n"
BUDGETS = ("12.5%", "25%", "50%", "75%")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default=BUNDLED_MODEL)
    args = parser.parse_args()
    model, tokenizer = mlx_moeflux.load(args.model, expert_memory="25%")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.trace"
        with model, model.trace(file):
            mlx_moeflux.generate(model, tokenizer, PROMPT, max_tokens=120)
            live = model.store.stats().total
        print(f"{file.name}: {file.stat().st_size / 1e3:.0f} kB for {live.tokens} tokens")
        trace = Trace.open(file)
    replayed = simulate(trace, "25%").total
    print(f"hits live {live.hits}, replayed {replayed.hits}\n")

    print("hit rate  " + "".join(f"{budget:>8}" for budget in BUDGETS))
    mixed = shuffled(trace)
    rows = {name: [simulate(trace, b, eviction=name).hit_rate for b in BUDGETS]
            for name in [*EVICTIONS, "belady"]}  # fmt: skip
    rows["shuffled"] = [simulate(mixed, budget).hit_rate for budget in BUDGETS]
    for name, rates in rows.items():
        print(f"{name:10}" + "".join(f"{100 * rate:8.1f}" for rate in rates))

    # A disk of 1 GB/s, and 2 ms a token if every expert is resident.
    block = trace.info.block_bytes[0]
    profile = Profile.of_disk(1.0, block, token_seconds=0.002)
    for budget in BUDGETS:
        result = forecast(trace, simulate(trace, budget), profile)
        print(f"{budget:>6}: {1e3 * result.seconds:.2f} ms a token, "
              f"{1e3 * result.demand:.2f} of it waiting for reads")  # fmt: skip


if __name__ == "__main__":
    main()
