"""Write an eviction policy, compare it with LRU and Belady's optimum, then run it live."""

import tempfile
from pathlib import Path

import mlx_moeflux
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import BUNDLED_MODEL


class SecondToLast:
    """LRU-2: evicts the expert whose use before the last is longest ago, so a single use does not
    protect an expert."""

    name = "second-to-last"

    def __init__(self):
        self.reset()

    def touch(self, layer, experts, last, uses):
        for expert, at, n in zip(experts, last, uses, strict=True):
            before = at if n > 1 else self.times.get((layer, expert), (-1, -1))[1]
            self.times[layer, expert] = before, at

    def choose(self, layer, count, *, resident, protected):
        able = [expert for expert in resident if expert not in protected]
        able.sort(key=lambda expert: self.times.get((layer, expert), (-1, -1)))
        return able[:count]

    def evict(self, layer, expert): ...

    def admit(self, layer, expert): ...

    def reset(self):
        self.times = {}  # (layer, expert) -> the last two tokens that used it


def main() -> None:
    prompt = "def insert(self, index, value):\n"
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL)
        with model, model.trace(Path(folder) / "trace"):
            text = mlx_moeflux.generate(model, tokenizer, prompt, max_tokens=150)
        trace = Trace.open(Path(folder) / "trace")
    print("budget     lru  second-to-last  belady")
    for budget in ("20%", "40%", "60%"):
        rates = [100 * simulate(trace, budget, eviction=policy).hit_rate
                 for policy in ("lru", SecondToLast(), "belady")]  # fmt: skip
        print("{:>6}  {:6.1f}  {:14.1f}  {:6.1f}".format(budget, *rates))

    model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL, expert_memory="40%", eviction=SecondToLast())
    with model:
        same = text == mlx_moeflux.generate(model, tokenizer, prompt, max_tokens=150)
        print(f"live at 40%: {100 * model.store.stats().total.hit_rate:.1f}, same text: {same}")


if __name__ == "__main__":
    main()
