"""How long launches take on a GPU by arithmetic, and how MLX divides them into command buffers.

A launch takes as long as the larger of its operations at the rate of the GPU's units and its bytes
at that of its memory. Operations follow from a kernel's name and its arrays' shapes, by a table
that has an entry for every kernel that may be launched.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.runtime.launcher import MetalKernel, set_backend
from tests.kernels.metal.command_buffers import CHIPS, Encoder
from tests.kernels.metal.emulator import owners_of
from tests.kernels.metal.recording import Recorder, recorded
from tests.kernels.metal.variant import plain_name

# M1: float operations and bytes of memory a second.
OPERATIONS_RATE, BYTES_RATE = 2.6e12, 68e9
CHIP = CHIPS["base, pro"]

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Rule = Callable[[Shapes, Shapes, dict[str, Any]], float]


@dataclass(frozen=True)
class Work:
    """One launch. held: A buffer's identity -> elements of the array that is passed of it; made:
    Elements of its outputs, which are buffers of their own."""

    name: str
    shapes: tuple[Shape, ...]
    operations: float
    nbytes: int
    held: dict[int, int]
    made: int

    @property
    def seconds(self) -> float:
        return max(self.operations / OPERATIONS_RATE, self.nbytes / BYTES_RATE)

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s {self.name} {list(self.shapes)}"


# ---- Operations by kernel. Each rule gets the shapes of inputs and outputs, and the template.


def _products(matrices: int = 1) -> Rule:
    """Rows of the first input times matrices that have a row for each column of the outputs."""

    def rule(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
        width = template.get("IN") or next(iter(inputs.values()))[-1]
        return 2.0 * matrices * width * sum(map(math.prod, outputs.values()))

    return rule


def _light(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """Some operations for each element that is read or written."""
    return 32.0 * sum(map(math.prod, (*inputs.values(), *outputs.values())))


def _attention(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """Every query sees every row of the buffers, or those of the chosen pages."""
    width = template["D1"] + template.get("D2", 0) + template["DV"]
    rows = inputs["k"][2]
    if template.get("PAGE"):
        rows = inputs["table"][1] * template["PAGE"]
    # Queries may lie as projected, those that are not meant beside them.
    queries = math.prod(next(iter(outputs.values()))[:-1])
    if "partial" in outputs:
        queries //= outputs["partial"][1]
    return 2.0 * queries * rows * width


def _latents(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    *_, rows, R = inputs["k"]
    rows = inputs["chosen"][-1] if "chosen" in inputs else rows
    heads = math.prod(inputs["q"][:-1])
    return 2.0 * heads * rows * (2 * R + inputs["k2"][-1])


def _state(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """Each token of each head decays, reads, writes and reads a state."""
    *_, Dv, Dk = outputs["new_state"]
    heads = outputs["new_state"][-3]
    tokens = math.prod(outputs["y"]) / (heads * Dv)
    return 8.0 * tokens * heads * Dv * Dk


def _factors(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """Products of the keys of a chunk, and the inversion of a matrix for each value head."""
    C, tokens, heads = template["C"], math.prod(inputs["q"][:2]), outputs["factors"][2]
    return 2.0 * tokens * C * (2 * math.prod(inputs["q"][2:]) + heads * C)


def _walk(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """Three products with the state, and two within a chunk."""
    tokens, heads, Dv = math.prod(inputs["v"][:2]), *inputs["v"][2:]
    return 2.0 * tokens * heads * Dv * (3 * inputs["q"][-1] + 2 * template["C"])


def _scores(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    return 2.0 * math.prod(outputs["scores"]) * template["H"] * template["DI"]


def _values(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    width = inputs["partial"][-1]
    return 2.0 * width * math.prod(outputs["y"]) + _light(inputs, outputs, template)


def _latent_step(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """A head's query times its matrix."""
    return 2.0 * math.prod(outputs["q_latent"]) * inputs["q"][-1] + _light(
        inputs, outputs, template
    )


def _finish(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """Inner values of a token's experts and of the shared one times their matrices."""
    return 4.0 * math.prod(inputs["h"]) * outputs["y"][-1]


def _pairs_down(inputs: Shapes, outputs: Shapes, template: dict[str, Any]) -> float:
    """Inner values ``[pairs, F]`` times matrices of as many rows as the output has columns."""
    return 2.0 * math.prod(inputs["h"]) * next(iter(outputs.values()))[-1]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("project_", "project_rows_", "project_blocks_"), _products()),
    **dict.fromkeys(("head_matvec", "head_narrow", "head_vecmat"), _products()),
    **dict.fromkeys(("add_shared", "add_shared_blocks", "add_shared_rows"), _products()),
    **dict.fromkeys(("shared_product", "streams_down", "streams_down_inject"), _products()),
    **dict.fromkeys(("expert_inner", "expert_inner_biased", "expert_inner_wide"), _products(2)),
    **dict.fromkeys(("block_inner", "expert_rows_inner", "moe_step_inner"), _products(2)),
    **dict.fromkeys(("expert_tiles_gated", "expert_tiles_gated_biased"), _products(2)),
    **dict.fromkeys(("block_tiles_gated", "moe_step_inner_blocks"), _products(2)),
    **dict.fromkeys(("expert_tiles_down", "expert_tiles_down_biased"), _products()),
    **dict.fromkeys(("block_tiles_down", "streams_up"), _products()),
    **dict.fromkeys(("expert_outer", "expert_outer_biased", "expert_outer_wide"), _pairs_down),
    **dict.fromkeys(
        ("block_outer", "expert_own", "expert_own_biased", "moe_step_own"), _pairs_down
    ),
    "expert_rows_outer": _pairs_down,
    **dict.fromkeys(("moe_step_finish", "moe_step_finish_blocks"), _finish),
    "moe_step_finish_all_blocks": _finish,
    **dict.fromkeys(("attend_rows", "attend_rows_parts"), _attention),
    **dict.fromkeys(("attend_shared", "attend_shared_parts"), _attention),
    **dict.fromkeys(("attend_latents", "attend_chosen_latents"), _latents),
    "attend_values": _values,
    **dict.fromkeys(("gated_delta_recurrent", "delta_step", "delta_step_of_rows"), _state),
    "gated_delta_factors": _factors,
    "gated_delta_walk": _walk,
    **dict.fromkeys(("position_scores", "block_scores"), _scores),
    "latent_step": _latent_step,
    **dict.fromkeys(("attend_combine", "add_products", "append_row", "best_blocks"), _light),
    **dict.fromkeys(("best_positions", "delta_prepare", "dequantise", "gated_rms_norm"), _light),
    **dict.fromkeys(("dequantise_blocks", "expert_combine", "expert_lists"), _light),
    **dict.fromkeys(("expert_table", "expert_total", "latent_prepare", "latent_turn"), _light),
    **dict.fromkeys(("moe_combine", "moe_step_end", "norm_rope", "sigmoid_top_k"), _light),
    "softmax_top_k": _light,
}
# Beginnings of the names of inputs ``[slots, ...]`` of kernels of experts, which have these names.
_IN_BANK = ("gate", "up", "down", "scales", "biases", "bias")
_OF_EXPERTS = ("expert_", "block_", "moe_step_")
# Their names end in how many matrices there are.
_PROJECTIONS = ("project_rows_", "project_blocks_", "project_")


def rule_of(name: str) -> Rule:
    """The entry of a kernel."""
    name = plain_name(name)
    family = next((one for one in _PROJECTIONS if name.startswith(one)), name)
    if family not in RULES:
        raise AssertionError(
            f"tests/kernels/metal/work.py has no entry for kernel '{name}': how many operations "
            "does a launch have?"
        )
    return RULES[family]


def _bytes(name: str, array: mx.array, pairs: int | None) -> int:
    """Bytes that are read of an input: of a bank a slot for each of `pairs`."""
    if pairs is None or array.ndim != 3 or not name.startswith(_IN_BANK):
        return array.nbytes
    return array.nbytes // array.shape[0] * pairs


class Counter:
    """Takes down work in the order in which it is built. work: None where a buffer is ended."""

    def __init__(self) -> None:
        self.work: list[Work | None] = []
        # Identities are those of arrays that live.
        self._kept: list[Any] = []

    def add(
        self,
        name: str,
        operations: float,
        inputs: Mapping[str, mx.array],
        outputs: Sequence[mx.array],
        pairs: int | None,
    ) -> None:
        """Take a launch down. pairs: Of a bank it reads so many slots; None: all."""
        self._kept += [*inputs.values(), *outputs]
        # One array under two names is read once.
        owners = owners_of(inputs.values())
        once = {
            id(owner): (name, owner, a)
            for owner, (name, a) in zip(owners, inputs.items(), strict=True)
        }
        read = sum(_bytes(name, owner, pairs) for name, owner, _ in once.values())
        self.work.append(
            Work(
                name,
                tuple(owner.shape for owner in owners),
                operations,
                read + sum(y.nbytes for y in outputs),
                {buffer: a.size for buffer, (_, _, a) in once.items()},
                sum(y.size for y in outputs),
            )
        )

    def end_buffer(self) -> None:
        if self.work and self.work[-1] is not None:
            self.work.append(None)

    @property
    def launches(self) -> list[Work]:
        return [one for one in self.work if one is not None]

    def longest(self) -> Work:
        """The launch that takes longest."""
        return max(self.launches, key=lambda one: one.seconds)

    def buffers(self) -> list[list[Work]]:
        """The launches of each command buffer, by MLX's rule."""
        buffers: list[list[Work]] = [[]]
        encoder = Encoder(CHIP)
        for number, one in enumerate(self.work):
            full = one is None
            if one is None:
                encoder.end()
            else:
                buffers[-1].append(one)
                full = encoder.add([*one.held.items(), (("made", number), one.made)])
            if full:
                buffers.append([])
        return [each for each in buffers if each]

    def longest_buffer(self) -> float:
        """Seconds of the buffer that takes longest."""
        return max(sum(one.seconds for one in each) for each in self.buffers())


class _CountingRecorder(Recorder):
    """A recorder that counts the work of launches too."""

    def __init__(self, counter: Counter):
        super().__init__()
        self.counter = counter

    def build(self, kernel: MetalKernel):
        launch, rule = super().build(kernel), rule_of(kernel.name)

        def counted(*, inputs, template, output_shapes, **options):
            outputs = launch(
                inputs=inputs, template=template, output_shapes=output_shapes, **options
            )
            passed = dict(zip(kernel.inputs, inputs, strict=True))
            arrays = dict(zip(kernel.inputs, owners_of(inputs), strict=True))
            made = dict(zip(kernel.outputs, outputs, strict=True))
            taken, given = ({n: a.shape for n, a in each.items()} for each in (arrays, made))
            operations = rule(taken, given, dict(template or ()))
            name, pairs = plain_name(kernel.name), None
            if name.startswith(_OF_EXPERTS):
                # Pairs of one expert read it once.
                pairs = math.prod(arrays.get("h", outputs[0]).shape[:-1])
                banks = [a for n, a in arrays.items() if n.startswith(_IN_BANK) and a.ndim == 3]
                pairs = min(pairs, *(a.shape[0] for a in banks)) if banks else None
            self.counter.add(name, operations, passed, outputs, pairs)
            return outputs

        return counted


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Launch nothing, as :func:`recorded`, and count the work of kernels and of stock products."""
    counter = Counter()

    def stock(name: str, function: Callable, operations: Callable[..., float]) -> Callable:
        def call(*args, **kwargs):
            y = function(*args, **kwargs)
            given = {str(i): a for i, a in enumerate(args)} | kwargs
            if (slots := kwargs.get("rhs_indices")) is not None:
                # The second, third and fourth are of a bank.
                given = dict(zip(("x", "gate", "scales", "biases"), args, strict=False)) | kwargs
            arrays = {n: a for n, a in given.items() if isinstance(a, mx.array)}
            pairs = None if slots is None else slots.size
            counter.add(name, operations(*args, y=y, **kwargs), arrays, [y], pairs)
            return y

        return call

    def product(a, *others, y, **options):
        return 2.0 * y.size * a.shape[-1]

    def attention(q, k, v, *, y, **options):
        return 2.0 * q.size // q.shape[-1] * k.shape[2] * (q.shape[-1] + v.shape[-1])

    def ended(*arrays) -> None:
        counter.end_buffer()

    with recorded() as recorder, pytest.MonkeyPatch.context() as patch:
        set_backend(_CountingRecorder(counter))
        for where, name, operations in (
            (mx.array, "__matmul__", product),
            (mx, "quantized_matmul", product),
            (mx, "gather_qmm", product),
            (mx, "gather_mm", product),
            (mx.fast, "scaled_dot_product_attention", attention),
        ):
            patch.setattr(where, name, stock(name, getattr(where, name), operations))
        patch.setattr(mx, "eval", ended)
        patch.setattr(mx, "async_eval", ended)
        try:
            yield counter
        finally:
            set_backend(recorder)
