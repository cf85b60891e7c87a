"""Oracle: the arrays that mx.quantize gives, whose sizes and settings are known."""

import mlx.core as mx
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.tensors import StackedRefs, TensorRef
from mlx_moeflux.errors import CheckpointError, ShapeError, UnsupportedError
from mlx_moeflux.experts.io.layout import BlockLayout, Component
from tests.experts.helpers import MIXED, affine_layout, random_experts


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_shapes_are_those_of_mlx(bits, group_size):
    hidden, inner = 128, 384
    spec = QuantSpec(bits, group_size)
    layout = affine_layout(hidden, inner, gate=spec, up=spec, down=spec)
    for rows, width, projection in ((inner, hidden, "up_proj"), (hidden, inner, "down_proj")):
        arrays = mx.quantize(mx.zeros((rows, width), mx.bfloat16), group_size, bits)
        found = [c for c in layout.components if c.name.startswith(projection)]
        assert [c.shape for c in found] == [a.shape for a in arrays]
        assert [c.nbytes for c in found] == [a.nbytes for a in arrays]
    assert layout.specs == dict.fromkeys(("gate_proj", "up_proj", "down_proj"), spec)


def test_mixed_layout_is_a_running_sum():
    layout = random_experts(MIXED).layouts[3]
    position = 0
    for component in layout.components:
        assert layout.offsets[component.name] == position
        position += component.nbytes
    assert layout.nbytes == position
    assert tuple(layout.specs.values()) == MIXED
    assert (layout.hidden, layout.intermediate) == (64, 128)


def _plain(**changes):
    shapes = {"gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96)} | changes
    return tuple(Component(f"{p}.weight", "BF16", s) for p, s in shapes.items())


def test_plain_layout_is_accepted():
    assert BlockLayout(_plain()).nbytes == 3 * 64 * 96 * 2


@pytest.mark.parametrize(
    ("components", "message"),
    [
        (_plain()[:2], "no 'down_proj.weight'"),
        (_plain()[::-1], "in this order"),
        (_plain(up_proj=(64, 96)), r"must be .* \[96, 64\]"),
        (_plain(up_proj=(96, 0)), "none empty"),
        (_plain(up_proj=(96, 64, 1)), "axes: 2"),
        ((*_plain()[:1], Component("gate_proj.scales", "BF16", (96, 2)), *_plain()[1:]), "both"),
        ((Component("gate_proj.weight", "U8", (96, 64)), *_plain()[1:]), "BF16 or"),
    ],
)
def test_wrong_components_are_refused(components, message):
    with pytest.raises(ShapeError, match=message):
        BlockLayout(components)


def test_shapes_that_no_quantisation_has():
    def gate(words, groups):
        parts = (("weight", "U32", words), ("scales", "BF16", groups), ("biases", "BF16", groups))
        named = [Component(f"gate_proj.{p}", d, (96, n)) for p, d, n in parts]
        return (*named, *_plain()[1:])

    assert BlockLayout(gate(8, 2)).specs["gate_proj"] == QuantSpec(4, 32)
    with pytest.raises(ShapeError, match="no quantisation of a row"):
        BlockLayout(gate(7, 2))
    with pytest.raises(UnsupportedError, match="bits 7"):
        BlockLayout(gate(14, 2))
    with pytest.raises(UnsupportedError, match="group_size 16"):
        BlockLayout(gate(8, 4))


def test_of_reads_shapes_and_names_the_file(tmp_path):
    file = tmp_path / "x.bin"
    names = {c.name: c for c in _plain()}
    refs = {
        n: StackedRefs(TensorRef(n, file, 0, "BF16", (7, *names[n].shape))) for n in reversed(names)
    }
    assert BlockLayout.of(refs) == BlockLayout(_plain())
    refs["gate_proj.bias"] = refs["gate_proj.weight"]
    with pytest.raises(CheckpointError, match=r"x\.bin.*gate_proj\.bias"):
        BlockLayout.of(refs)
