"""Move slots between layers while a model runs: ``python examples/policies/balance.py``."""

from collections import Counter, OrderedDict, defaultdict

import mlx_moeflux
from mlx_moeflux.experts.telemetry.events import Evict, Miss
from mlx_moeflux.loading import BUNDLED_MODEL

PROMPT = "def insert(self, index, value):\n"


class Balance:
    """A listener of a store that says where slots are missed.

    :meth:`move` moves `step` slots from the layer that reads its last victims back least often to
    the one that does so most often, if that is `margin` times as often. A layer's last victims are
    the `step` experts that it would have kept with `step` more slots.
    """

    def __init__(self, step=1, margin=1.5):
        self._step, self._margin = step, margin
        self._wanted = Counter()  # layer -> how many of its last victims it has read back
        self._victims = defaultdict(OrderedDict)

    def __call__(self, event):
        if isinstance(event, Evict):
            victims = self._victims[event.layer]
            victims[event.expert] = None
            if len(victims) > self._step:
                victims.popitem(last=False)
        elif isinstance(event, Miss) and event.expert in self._victims[event.layer]:
            del self._victims[event.layer][event.expert]
            self._wanted[event.layer] += 1

    def move(self, streaming, least):
        """Move slots between two tokens; `least` slots stay in each layer."""
        slots, wanted, self._wanted = streaming.slots, self._wanted, Counter()
        able = [layer for layer in slots if slots[layer] - self._step >= least]
        needy = [layer for layer in slots if slots[layer] + self._step <= streaming.most_slots]
        if not able or not needy:
            return
        giver, taker = min(able, key=wanted.__getitem__), max(needy, key=wanted.__getitem__)
        if wanted[taker] > self._margin * wanted[giver]:
            streaming.resize(giver, slots[giver] - self._step)  # first the one that becomes smaller
            streaming.resize(taker, slots[taker] + self._step)


def main() -> None:
    texts = []
    for period in (0, 8):
        balance = Balance()
        model, tokenizer = mlx_moeflux.load(BUNDLED_MODEL, expert_memory="25%", events=balance)
        with model:
            texts.append("")
            for i, response in enumerate(
                mlx_moeflux.stream_generate(model, tokenizer, PROMPT, max_tokens=150)
            ):
                texts[-1] += response.text
                if period and i % period == period - 1:
                    balance.move(model.store.streaming, model.router.num_experts_per_tok)
            rate = model.store.stats().total.hit_rate
            print(
                f"slots {list(model.store.streaming.slots.values())}, hit rate {100 * rate:.1f} %"
            )
    print(f"same text: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main()
