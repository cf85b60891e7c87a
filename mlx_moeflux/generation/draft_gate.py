"""Decides by time how many drafts a step reads. Pure Python, no MLX, no clock of its own."""

from __future__ import annotations

from collections import deque

from mlx_moeflux.experts.policies.chooser import Chooser, middle

# The weight that all earlier answers of a position lose with each new one, and the answers that are
# assumed before the first.
FADE, ASSUMED, ASSUMED_WEIGHT = 0.95, 0.5, 2.0
# The rounds of a trial: with drafts, and without.
ROUNDS, PLAIN_STEPS = 2, 4


class DraftGate(Chooser):
    """Chooses the number of drafts, 0 to `most`, with which a token takes least time.

    A round is a step with its drafts; it gives the newest token and those drafts that are accepted.
    With m drafts a token takes cost(m) / (1 + a1 + a1 a2 + ... + a1 ... am) seconds: cost is that
    of the last stretch of that size, misses of its rows included, and ai how often the i-th draft
    was accepted after those before it were. A size that was not tried yet is assumed to take as
    long as the one below.

    A size that is not chosen is tried now and then, since texts and caches change: the best size
    with drafts while none is chosen, else the one that was not seen for longest, after `rest`
    tokens. The first round of a trial builds a graph for the buffers as they are now: it does not
    count.

    The caller asks :meth:`wanted` before a round and calls :meth:`note` after it.

    most: At least 1. seconds: Time of all rounds.
    """

    stretch, settle, warm_up, rest = 16, 1, 1, 128

    def __init__(self, most: int):
        super().__init__(most + 1)
        self._laps = [deque[float](maxlen=self.stretch) for _ in range(most + 1)]
        self._cost = [0.0] * (most + 1)  # 0: not known
        # Of each position: answers, and those of them that accepted, both faded.
        self._asked, self._accepted = [0.0] * (most + 1), [0.0] * (most + 1)
        self._seen_at = [0] * (most + 1)
        self._tokens = self._rounds = 0  # so far, and to come of the trial of `way`
        self.seconds = 0.0

    def wanted(self) -> int:
        """Return the most drafts that the next round should read."""
        if not self._cost[0]:
            return 0
        if not self._rounds and (size := self._due()) is not None:
            self.turn(size)
            self._rounds = ROUNDS if size else PLAIN_STEPS
        return self.way if self._rounds else self.chosen

    def pays(self, drafts: int) -> bool:
        """Return True if a round of so many drafts, fewer than wanted, is better than a plain
        step or tells something."""
        return self._rounds > 0 or self._per_token(drafts) < self._per_token(0)

    def note(self, drafts: int, accepted: int, seconds: float) -> None:
        """Note a round of so many drafts, of which the first `accepted` were accepted."""
        tokens = 1 + accepted
        self._tokens += tokens
        self.seconds += seconds
        self._seen_at[drafts] = self._tokens
        for position in range(1, min(accepted + 1, drafts) + 1):
            self._asked[position] = self._asked[position] * FADE + 1
            taken = position <= accepted
            self._accepted[position] = self._accepted[position] * FADE + taken
        if self.counts(drafts, seconds):
            self._laps[drafts].append(seconds)
            self._cost[drafts] = middle(self._laps[drafts])
        if self._rounds and (drafts > 0) == (self.way > 0):
            self._rounds -= 1
            cost, chosen = self._cost[drafts], self._cost[self.chosen]
            if cost and chosen:
                loss = cost - tokens * chosen / self._expected(self.chosen)
                self.lost = max(self.lost + loss, 0.0)
        if self._cost[0]:
            seconds_of = {size: self._per_token(size) for size in self._known()}
            best = min(seconds_of, key=seconds_of.__getitem__)
            if self.gains(seconds_of[best], seconds_of[self.chosen]):
                self.chosen = best

    def saved_by(self, tokens: int, seconds: float) -> float:
        """Return how many more seconds `tokens` tokens take one by one; 0 while that is unknown."""
        return tokens * self._cost[0] - seconds if self._cost[0] else 0.0

    def report(self) -> str:
        """Return how many drafts are read now and why, as a phrase."""
        costs = ", ".join(f"{1e3 * cost:.2f} ms" if cost else "not tried" for cost in self._cost)
        rates = ", ".join(
            f"{100 * taken / asked:.0f} %"
            for taken, asked in zip(self._accepted[1:], self._asked[1:], strict=True)
            if asked
        )
        return f"{self.chosen} a step; a step with 0 to {len(self._cost) - 1} takes {costs}" + (
            f"; accepted by position: {rates}" if rates else ""
        )

    def _due(self) -> int | None:
        """Return a size that should be tried now."""
        if not self.affords(self.seconds):
            return None
        others = [size for size in self._known() if size != self.chosen]
        if self.chosen == 0:
            return min(others, key=self._per_token)
        size = min(others, key=self._seen_at.__getitem__)
        return size if self._tokens - self._seen_at[size] >= self.rest else None

    def _known(self) -> list[int]:
        """Return the sizes that may be chosen: none, and those above a size of known cost."""
        return [0, *(size for size, below in enumerate(self._cost[:-1], 1) if below)]

    def _per_token(self, drafts: int) -> float:
        """Return the expected seconds of a token in rounds of so many drafts."""
        return (self._cost[drafts] or self._cost[drafts - 1]) / self._expected(drafts)

    def _expected(self, drafts: int) -> float:
        """Return the expected tokens of a round."""
        tokens = share = 1.0
        rate = ASSUMED
        for position in range(1, drafts + 1):
            weight = self._asked[position] + ASSUMED_WEIGHT
            rate = (self._accepted[position] + ASSUMED_WEIGHT * rate) / weight
            share *= rate
            tokens += share
        return tokens
