"""The table of experts and slots of one layer. No MLX, no reading, no policy."""

from __future__ import annotations

import heapq

import numpy as np

EMPTY = -1


class SlotTable:
    """A partial one-to-one map between experts and slots.

    `expert_of` (slot -> expert or ``EMPTY``) is the truth. The rest follows from it, and
    :meth:`rebuild` makes it again after an interrupt: `slot_of` (expert -> slot) and
    `slots_by_expert`, the same as an int64 array ``[E]`` with an arbitrary slot for an expert that
    has none.
    """

    def __init__(self, slots: int, num_experts: int):
        self.num_experts = num_experts
        self.expert_of = [EMPTY] * slots
        self.rebuild()

    def __contains__(self, expert: int) -> bool:
        return expert in self.slot_of

    def __len__(self) -> int:
        return len(self.slot_of)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.expert_of)

    @property
    def free(self) -> int:
        """Number of slots that are empty and not taken."""
        return len(self._free)

    @property
    def complete(self) -> bool:
        """True if every expert of the layer is in a slot."""
        return len(self.slot_of) == self.num_experts

    @property
    def in_order(self) -> bool:
        """True if every expert e is in slot e."""
        return self.expert_of == list(range(self.num_experts))

    def take(self) -> int:
        """Take the lowest free slot; the caller fills it."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """Free `slot`, which was taken and stays empty."""
        heapq.heappush(self._free, slot)

    def put(self, expert: int, slot: int) -> None:
        """Enter `expert`, whose bytes are now in `slot`, which was taken."""
        assert self.expert_of[slot] == EMPTY, "a slot in use was filled"
        assert expert not in self.slot_of, "an expert was read twice"
        self.expert_of[slot] = expert
        self.slot_of[expert] = slot
        self.slots_by_expert[expert] = slot

    def remove(self, expert: int) -> int:
        """Forget `expert` and return its slot, which is free again."""
        slot = self.slot_of.pop(expert)
        self.expert_of[slot] = EMPTY
        heapq.heappush(self._free, slot)
        return slot

    def resize(self, slots: int) -> dict[int, int]:
        """Change the number of slots and return old slot -> new slot of all that are in use.

        Those that stay below the new number keep their slot.
        """
        assert len(self.slot_of) <= slots, "more experts than slots"
        moves = {s: s for s in self.slot_of.values() if s < slots}
        vacant = iter(s for s in range(slots) if s not in moves)
        moves |= {s: next(vacant) for s in sorted(self.slot_of.values()) if s >= slots}
        expert_of = [EMPTY] * slots
        for old, new in moves.items():
            expert_of[new] = self.expert_of[old]
        self.expert_of = expert_of
        self.rebuild()
        return moves

    def rebuild(self) -> None:
        """Derive everything from `expert_of` again; slots that were taken are free."""
        self.slot_of = {e: s for s, e in enumerate(self.expert_of) if e != EMPTY}
        assert len(self.slot_of) == sum(e != EMPTY for e in self.expert_of), "an expert twice"
        self._free = [s for s, e in enumerate(self.expert_of) if e == EMPTY]
        self.slots_by_expert = np.zeros(self.num_experts, np.int64)
        for expert, slot in self.slot_of.items():
            self.slots_by_expert[expert] = slot
