"""Replay what prefetchers could hide: none, look-ahead, and a scout.

    python benchmarks/prefetch_replay.py [--tokens 200] [--budget 25%]

A scout runs the same token first on resident experts alone, and its routers guess the experts of
all layers. The script measures on the bundled model how many experts look-ahead and scout guess
right, then replays decode steps on one disk and one device. Traces are the bundled model's own and
drawn ones (Zipf), whose guesses are right as often as the bundled model's. Blocks and computing are
those of a 35B model in 4 bits: 1.77 MB; 0.4 ms a layer (100 GB/s of memory) or 0.1 ms.

The replay favours prefetchers: a wrong guess takes disk time, but no slot of a resident expert.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_moeflux import load
from mlx_moeflux.experts.policies.eviction import LFU
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.loading import BUNDLED_MODEL

BLOCK = 1.77e6
TEXT = "def insert(self, index, value):\n    "
# One layer's call: what it needs and misses, and what look-ahead and scout guessed to be missing.
Step = list[tuple[set[int], set[int], set[int]]]


class ResidentOnly(ExpertStore):
    """Computes the experts of `inner` that are in `residents`; others contribute nothing."""

    def __init__(self, inner: ExpertStore):
        self.inner, self.layers, self.num_experts = inner, inner.layers, inner.num_experts
        self.residents: dict[int, set[int]] | None = None
        self.chosen: dict[int, set[int]] = {}

    def experts(self, layer, x, ids, weights):
        host = np.array(ids)
        self.chosen[layer] = set(host[-1].tolist())
        if self.residents is not None:
            kept = np.isin(host, list(self.residents[layer]))
            weights = mx.where(mx.array(kept), weights, 0.0)
        return self.inner.experts(layer, x, ids, weights)

    def stats(self):
        return self.inner.stats()


def bundled(tokens: int, share: float) -> list[Step]:
    """Decode the bundled model's own text; all experts of it are resident, an LFU bank is not."""
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="100%", kernels="reference")
    store = ResidentOnly(model.store)
    model.set_store(store)
    slots = round(share * store.num_experts)
    banks = {layer: Bank(slots) for layer in store.layers}
    cache, ids = model.make_cache(), tokenizer.encode(TEXT)
    model(mx.array([ids[:-1]]), cache)
    token, steps = ids[-1], []
    for _ in range(tokens):
        kept = cache.snapshot()
        store.residents = {layer: set(bank.held) for layer, bank in banks.items()}
        mx.eval(model(mx.array([[token]]), cache))
        scouted = dict(store.chosen)
        cache.restore(kept)
        store.residents = None
        with model.record(names=["h_mid", "ids"]) as seen:
            logits = model(mx.array([[token]]), cache)
            mx.eval(logits)
        step = []
        for i, layer in enumerate(store.layers):
            ahead: set[int] = set()
            if i:
                block = model.layers[layer].mlp
                norm = model.layers[layer].post_attention_layernorm
                hidden = seen[store.layers[i - 1]]["h_mid"].reshape(1, -1)
                ahead = set(np.array(block.route(block.gate(norm(hidden)))[0])[0].tolist())
            held, needed = banks[layer].held, store.chosen[layer]
            step.append((needed - held, ahead - held, scouted[layer] - held))
            banks[layer].use(layer, needed)
        steps.append(step)
        token = int(mx.argmax(logits[0, -1]).item())
    model.close()
    return steps


class Bank:
    """One layer's residents under LFU."""

    def __init__(self, slots: int):
        self.slots, self.policy, self.held, self.clock = slots, LFU(), set(), 0

    def use(self, layer: int, needed: set[int]) -> None:
        order = sorted(needed)
        self.policy.touch(layer, order, [self.clock] * len(order), [1] * len(order))
        self.clock += 1
        for expert in needed - self.held:
            if len(self.held) == self.slots:
                out = self.policy.choose(layer, 1, resident=self.held, protected=needed)[0]
                self.policy.evict(layer, out)
                self.held.remove(out)
            self.policy.admit(layer, expert)
            self.held.add(expert)


def recall(steps: Sequence[Step], which: int) -> tuple[float, float]:
    """Share of misses that were guessed, and guesses for each miss."""
    missed = sum(len(m) for step in steps for m, *_ in step)
    right = sum(len(m & guess[which]) for step in steps for m, *guess in step)
    return right / missed, sum(len(g[which]) for step in steps for _, *g in step) / missed


def drawn(tokens: int, share: float, ahead: tuple, scout: tuple, skew: float) -> list[Step]:
    """40 layers of 256 experts, 8 a token, half of them those of the token before; guesses as good
    as `ahead` and `scout`."""
    random, E, K = np.random.default_rng(0), 256, 8
    odds = -skew * np.log(np.arange(1, E + 1))
    banks = [Bank(round(share * E)) for _ in range(40)]
    last = [np.arange(K)] * 40
    steps = []
    for t in range(tokens + 60):
        step = []
        for layer, bank in enumerate(banks):
            noisy = np.roll(odds, 7 * layer) + random.gumbel(size=E)
            noisy[last[layer][random.random(K) < 0.4]] = np.inf
            last[layer] = np.argpartition(-noisy, K - 1)[:K]
            missed = set(last[layer].tolist()) - bank.held
            guesses = []
            for right, count in (ahead, scout):
                good = {e for e in missed if random.random() < right}
                wrong = random.poisson(max(count - right, 0) * len(missed))
                guesses.append(good | {-1 - i for i in range(wrong)})
            step.append((missed, guesses[0] if layer else set(), guesses[1]))
            bank.use(layer, set(last[layer].tolist()))
        if t >= 60:
            steps.append(step)
    return steps


def seconds(steps: Sequence[Step], mode: str, compute: float, read: float) -> float:
    """Seconds a token. The disk reads one block after the other, those that a layer waits for
    first. A scout's guesses are known layer by layer, while it runs."""
    total = 0.0
    for step in steps:
        now = disk = 0.0
        queue: list[tuple[float, int, int]] = []  # known when, layer, expert
        there: dict[tuple[int, int], float] = {}
        if mode == "scout":
            now = len(step) * compute
            for i, (*_, guess) in enumerate(step):
                queue += [((i + 1) * compute, i, expert) for expert in sorted(guess)]
        for i, (missed, *_) in enumerate(step):
            # The disk works on guesses until this layer's router has spoken.
            while queue and max(disk, queue[0][0]) < now:
                known, layer, expert = queue.pop(0)
                disk = there[layer, expert] = max(disk, known) + read
            queue = [guess for guess in queue if guess[1] > i]
            late = sum((i, expert) not in there for expert in missed)
            if late:
                disk = max(disk, now) + read * late
            arrived = [there.get((i, expert), disk) for expert in missed]
            if mode == "look-ahead" and i + 1 < len(step):
                queue = [(now, i + 1, expert) for expert in sorted(step[i + 1][1])]
            now = max(now, *arrived, 0.0) + compute
        total += now
    return total / len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--budget", type=float, default=25, help="percent of the experts")
    args = parser.parse_args()
    share = args.budget / 100
    own = bundled(args.tokens, share)
    ahead, scout = recall(own, 0), recall(own, 1)
    print(f"misses guessed by look-ahead {ahead[0]:.0%} ({ahead[1]:.2f} blocks a miss), "
          f"by a scout {scout[0]:.0%} ({scout[1]:.2f})")  # fmt: skip
    traces = {"bundled": own} | {
        f"Zipf {skew}": drawn(args.tokens // 4, share, ahead, scout, skew) for skew in (0.5, 1.0)
    }
    print(
        "| trace | ms a layer | GB/s | none, ms a token | look-ahead | scout |\n"
        + "| --- " * 6
        + "|"
    )
    for name, steps in traces.items():
        for compute in (0.4e-3, 0.1e-3):
            for speed in (1, 3, 5, 7):
                base, *others = (
                    seconds(steps, mode, compute, BLOCK / speed / 1e9)
                    for mode in ("none", "look-ahead", "scout")
                )
                gains = " | ".join(f"{base / t - 1:+.0%}" for t in others)
                print(f"| {name} | {1e3 * compute} | {speed} | {1e3 * base:.1f} | {gains} |")


if __name__ == "__main__":
    main()
