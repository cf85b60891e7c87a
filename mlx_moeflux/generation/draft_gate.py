"""Decides by time how many drafts a step reads. Pure Python, no MLX, no clock of its own."""

from __future__ import annotations

from collections import deque

from mlx_moeflux.experts.policies.timed_switch import middle

# Rounds of each size whose time is remembered, and the first ones, at all and of a trial, that are
# not counted: they build a graph for the buffers as they are now.
KEPT, FIRST = 16, 1
# The weight that all earlier answers of a position lose with each new one, and the answers that are
# assumed before the first.
FADE, ASSUMED, ASSUMED_WEIGHT = 0.95, 0.5, 2.0
# A gain of less than this share is none.
MARGIN = 0.02
# The share of all time that trials may cost, the tokens after which a size that is not chosen is
# tried again, and the rounds of such a trial: with drafts, and without.
MOST_LOSS, REST, ROUNDS, PLAIN_STEPS = 0.01, 128, FIRST + 1, 4


class DraftGate:
    """Chooses the number of drafts, 0 to `most`, with which a token takes least time.

    A round is a step with its drafts; it gives the newest token and those drafts that are accepted.
    With m drafts a token takes cost(m) / (1 + a1 + a1 a2 + ... + a1 ... am) seconds: cost is the
    mean of the middle half of the last rounds of that size, misses of their rows included, and ai
    how often the i-th draft was accepted after those before it were. A size that was not tried yet
    is assumed to take as long as the one below.

    A size that is not chosen is tried now and then, since texts and caches change: the best size
    with drafts while none is chosen, else the one that was not seen for longest, each while trials
    have cost at most :data:`MOST_LOSS` of the time.

    The caller asks :meth:`wanted` before a round and calls :meth:`note` after it. The same answers
    follow from the same notes.

    seconds: Time of all rounds.
    """

    def __init__(self, most: int):
        self._sizes = range(most + 1)
        self._laps = [deque[float](maxlen=KEPT) for _ in self._sizes]
        self._left = [FIRST] * (most + 1)
        self._cost: list[float | None] = [None] * (most + 1)
        # Of each position: answers, and those of them that accepted, both faded.
        self._asked, self._accepted = [0.0] * (most + 1), [0.0] * (most + 1)
        self._seen_at = [0] * (most + 1)
        self._chosen = self._tokens = 0
        self._trial: tuple[int, int] | None = None  # a size, and its rounds to come
        self._lost = 0.0
        self.seconds = 0.0

    def wanted(self) -> int:
        """Return the most drafts that the next round should read."""
        if self._cost[0] is None:
            return 0
        if self._trial is None and (trial := self._due()) is not None:
            self._trial, self._left[trial[0]] = trial, FIRST
        return self._chosen if self._trial is None else self._trial[0]

    def pays(self, drafts: int) -> bool:
        """Return True if a round of so many drafts, fewer than wanted, is better than a plain
        step or tells something."""
        return self._trial is not None or self._per_token(drafts) < self._per_token(0)

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
        if self._left[drafts]:
            self._left[drafts] -= 1
        else:
            self._laps[drafts].append(seconds)
            self._cost[drafts] = middle(self._laps[drafts])
        if self._trial is not None and (drafts > 0) == (self._trial[0] > 0):
            size, rounds = self._trial
            self._trial = (size, rounds - 1) if rounds > 1 else None
            self._count_loss(drafts, tokens)
        self._choose()

    def saved_by(self, tokens: int, seconds: float) -> float:
        """Return how many more seconds `tokens` tokens take one by one; 0 while that is unknown."""
        return 0.0 if self._cost[0] is None else tokens * self._cost[0] - seconds

    def report(self) -> str:
        """Return how many drafts are read now and why, as a phrase."""
        costs = ", ".join(
            f"{1e3 * cost:.2f} ms" if cost is not None else "not tried" for cost in self._cost
        )
        rates = ", ".join(
            f"{100 * taken / asked:.0f} %"
            for taken, asked in zip(self._accepted[1:], self._asked[1:], strict=True)
            if asked
        )
        return f"{self._chosen} a step; a step with 0 to {self._sizes[-1]} takes {costs}" + (
            f"; accepted by position: {rates}" if rates else ""
        )

    def _count_loss(self, drafts: int, tokens: int) -> None:
        cost, chosen = self._cost[drafts], self._cost[self._chosen]
        if cost is not None and chosen is not None:
            loss = cost - tokens * chosen / self._expected(self._chosen)
            self._lost = max(self._lost + loss, 0.0)

    def _choose(self) -> None:
        if self._cost[0] is None:
            return
        best = min(self._known(), key=self._per_token)
        if self._per_token(best) < (1 - MARGIN) * self._per_token(self._chosen):
            self._chosen = best

    def _due(self) -> tuple[int, int] | None:
        """Return a size that should be tried now, and for how many rounds."""
        if self._lost > MOST_LOSS * self.seconds:
            return None
        others = [size for size in self._known() if size != self._chosen]
        if not others:
            return None
        if self._chosen == 0:
            return min(others, key=self._per_token), ROUNDS
        size = min(others, key=self._seen_at.__getitem__)
        if self._tokens - self._seen_at[size] < REST:
            return None
        return size, ROUNDS if size else PLAIN_STEPS

    def _known(self) -> list[int]:
        """Return the sizes that may be chosen: those up to the first whose cost is not known."""
        return [size for size in self._sizes if size == 0 or self._cost[size - 1] is not None]

    def _per_token(self, drafts: int) -> float:
        """Return the expected seconds of a token in rounds of so many drafts."""
        cost = self._cost[drafts]
        if cost is None:
            cost = self._cost[drafts - 1]
        assert cost is not None, "only known sizes are compared"
        return cost / self._expected(drafts)

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
