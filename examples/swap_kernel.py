"""Replace an operation, the end of a MoE layer, by a kernel that runs on Metal and CUDA."""

import mlx.core as mx

from mlx_moeflux import generate, load
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.registry import OPERATIONS
from mlx_moeflux.kernels.runtime import launcher
from mlx_moeflux.loading import BUNDLED_MODEL

KERNEL = launcher.MetalKernel(
    "my_swiglu", file="common.metal", inputs=("gate", "up"), outputs=("y",), body="""
    const uint i = thread_position_in_grid.x;
    const float x = float(gate[i]);
    y[i] = T(x / (1.0f + metal::exp(-x)) * float(up[i]));
    """)  # fmt: skip

calls = 0


def my_add_shared(
    residual: mx.array, experts: mx.array, gate: mx.array, up: mx.array, down: Weight,
    *, score: mx.array,
) -> mx.array:  # fmt: skip
    """Return residual + experts + sigmoid(score) down(silu(gate) up), with plain MLX on a CPU.

    residual [..., C], experts [N, C] float32, gate and up [N, F], score [N, 1] -> like residual."""
    global calls
    calls += 1
    if isinstance(launcher.backend(), launcher.NoBackend):
        inner = gate * mx.sigmoid(gate) * up
    else:
        inner = KERNEL(
            gate, up, template={"T": gate.dtype}, grid=(gate.size, 1, 1), threadgroup=(32, 1, 1),
            output_shapes=[gate.shape], output_dtypes=[gate.dtype],
        )[0]  # fmt: skip
    total = residual.reshape(experts.shape) + experts + mx.sigmoid(score) * down.matmul(inner)
    return total.astype(residual.dtype).reshape(residual.shape)


def main() -> None:
    operation = OPERATIONS["add_shared"]
    args, options = operation.proof.example_call()
    expected = operation.reference(*args, **options)
    difference = mx.abs(my_add_shared(*args, **options) - expected).max().item()
    print(f"difference from the reference: {difference:.1e}")
    prompt, texts = "def push(self, item):\n", []
    for kernels in (None, {"add_shared": my_add_shared}):
        model, tokenizer = load(BUNDLED_MODEL, kernels=kernels)
        with model:
            before = calls
            texts.append(generate(model, tokenizer, prompt, max_tokens=24))
            print(f"{model.kernels.add_shared}: called {calls - before} times")
    print(f"same text: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main()
