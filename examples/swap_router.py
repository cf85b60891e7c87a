"""Replace the router by an object of your own and measure its cost.

This router adds a small bonus to the logits of the last token's experts, which are in memory. It is
lossy on purpose; the table shows the reads that it saves and the bits per token that it costs.
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_moeflux.loading import BUNDLED_MODEL, load
from mlx_moeflux.models.moe import SoftmaxRouter


class StickyRouter(SoftmaxRouter):
    """Softmax top-k after a bonus for the experts of the token before."""

    def __init__(self, num_experts_per_tok: int, bonus: float):
        super().__init__(num_experts_per_tok)
        self.bonus, self.last = bonus, {}

    def __call__(self, logits: mx.array, *, layer: int) -> tuple[mx.array, mx.array]:
        if layer in self.last and logits.shape[0] == 1:
            logits = logits.at[:, self.last[layer]].add(self.bonus)
        ids, weights = super().__call__(logits)
        self.last[layer] = ids[-1]
        return ids, weights


def main() -> None:
    text = "def read(self, size=-1):\n    if self.closed:\n        raise ValueError('closed')\n" * 2
    print("bonus  hit rate  MB read  bits per token")
    for bonus in (0.0, 0.5, 1.0, 2.0):
        model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%", router=StickyRouter(4, bonus))
        with model:
            model.router.last.clear()  # load() tried the router in each layer
            ids = mx.array(tokenizer.encode(text))
            cache, bits = model.make_cache(), 0.0
            for t in range(len(ids) - 1):
                logits = model(ids[None, t : t + 1], cache)[0, -1]
                loss = nn.losses.cross_entropy(logits[None], ids[t + 1][None])
                bits += loss.item() / mx.log(mx.array(2.0)).item()
            total = model.store.stats().total
        print(
            f"{bonus:5.1f}  {100 * total.hit_rate:6.1f} %  {total.bytes_read / 1e6:7.1f}  "
            f"{bits / (len(ids) - 1):.3f}"
        )


if __name__ == "__main__":
    main()
