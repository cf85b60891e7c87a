"""One plan for the memory of a server: what has which share of what was there at the start."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_moeflux.experts.budget import RESERVE_BYTES, format_bytes
from mlx_moeflux.models.protocol import LoadedModel

# A prompt that must fit at least, in tokens.
LEAST_POSITIONS = 8192


@dataclass(frozen=True)
class ServerMemory:
    """Bytes that a server may fill, and what they are planned for. ``str()`` is one line.

    usable: What `auto` saw before the model was loaded. rows: Of tables on disk. drafts: Head of
    multi-token prediction. activations: With tokenizer and interpreter.
    """

    usable: int
    trunk: int
    rows: int
    drafts: int
    experts: int
    states: int
    prompt_cache: int
    activations: int

    @classmethod
    def of(cls, model: LoadedModel, states: int | None) -> ServerMemory:
        """Return the plan of a loaded model. states: Of all replies; None: half of what the other
        parts leave, but at least one of 8,192 tokens. The other half is for files that the system
        keeps in memory."""
        plan = model.plan
        assert plan is not None  # the server loads no store of a user
        used = plan.trunk_bytes + plan.row_bytes + plan.budget_bytes + plan.reserved_bytes
        used += plan.draft_bytes
        rest = plan.usable_bytes - used - RESERVE_BYTES
        share = max(rest // 2, model.state_bytes(LEAST_POSITIONS))
        return cls(
            usable=plan.usable_bytes,
            trunk=plan.trunk_bytes,
            rows=plan.row_bytes,
            drafts=plan.draft_bytes,
            experts=plan.budget_bytes,
            states=share if states is None else states,
            prompt_cache=plan.reserved_bytes,
            activations=RESERVE_BYTES,
        )

    @property
    def parts(self) -> dict[str, int]:
        """Name -> bytes of each part, which add up to `usable` with :attr:`left`."""
        return {name: n for name, n in vars(self).items() if name != "usable"}

    @property
    def left(self) -> int:
        """Bytes that no part has: files of experts are kept there. Negative if the parts exceed
        what was usable, as numbers that the user gave may."""
        return self.usable - sum(self.parts.values())

    def __str__(self) -> str:
        shown = [
            f"{name.replace('_', ' ')} {format_bytes(count)}"
            for name, count in self.parts.items()
            if count
        ]
        if self.left < 0:
            rest = f"{format_bytes(-self.left)} more than there is"
        else:
            rest = f"left to files {format_bytes(self.left)}"
        return f"memory {format_bytes(self.usable)}: {', '.join(shown)}, {rest}"

    def as_dict(self) -> dict[str, int]:
        """Return `usable`, the parts, and `left`."""
        return {"usable": self.usable, **self.parts, "left": self.left}

    def metrics(self) -> dict[str, tuple[str, str, int]]:
        """Name -> kind, meaning and value, for Prometheus."""
        words = {"left": "left to files; below 0 the parts exceed what is usable"}
        return {
            f"memory_{name}_bytes": (
                "gauge",
                f"Planned at the start: {words.get(name, name.replace('_', ' '))}.",
                n,
            )
            for name, n in self.as_dict().items()
        }
