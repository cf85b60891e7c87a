"""Replace an operation, the norm behind the delta rule, by a kernel for Metal and CUDA alike."""

import mlx.core as mx

from mlx_moeflux import generate, load
from mlx_moeflux.kernels import metal
from mlx_moeflux.kernels.choice import FORMS
from mlx_moeflux.loading import BUNDLED_MODEL

KERNEL = metal.MetalKernel(
    "my_gated_norm", file="common.metal", inputs=("x", "z", "weight"), outputs=("y",), body="""
    const uint lane = thread_index_in_simdgroup, row = threadgroup_position_in_grid.x * D;
    float squares = 0.0f;
    for (uint i = lane; i < D; i += 32) { squares += float(x[row + i]) * float(x[row + i]); }
    const float scale = metal::rsqrt(simd_sum(squares) / D + 1e-6f);
    for (uint i = lane; i < D; i += 32) {
        const float gate = float(z[row + i]);
        const float silu = gate / (1.0f + metal::exp(-gate));
        y[row + i] = T(float(x[row + i]) * scale * float(weight[i]) * silu);
    }""")  # fmt: skip


calls = 0


def my_gated_norm(x: mx.array, z: mx.array, weight: mx.array, *, eps: float) -> mx.array:
    """rms_norm(x) * weight * silu(z): x, z [..., D], weight [D] -> [..., D]; plain without GPU."""
    global calls
    calls += 1
    if isinstance(metal.backend(), metal.NoBackend):
        norm = mx.sqrt(mx.square(x.astype(mx.float32)).mean(axis=-1, keepdims=True) + eps)
        return (x * weight * (z * mx.sigmoid(z)) / norm).astype(z.dtype)
    D = x.shape[-1]
    return KERNEL(
        x, z, weight, template={"T": z.dtype, "D": D}, grid=(32 * (x.size // D), 1, 1),
        threadgroup=(32, 1, 1), output_shapes=[z.shape], output_dtypes=[z.dtype],
    )[0]  # fmt: skip


def main() -> None:
    reference = FORMS["gated_rms_norm"]["reference"]
    x, z, weight = (mx.random.normal(shape) for shape in ((512, 128), (512, 128), (128,)))
    difference = mx.abs(my_gated_norm(x, z, weight, eps=1e-6) - reference(x, z, weight, eps=1e-6))
    print(f"difference from the reference: {difference.max().item():.1e}")
    prompt, texts = "def push(self, item):\n", []
    # The mixer as a whole has a fused form, too, which would not ask for its steps.
    whole = {"delta_mixer": "reference"}
    for kernels in (whole, whole | {"gated_rms_norm": my_gated_norm}):
        model, tokenizer = load(BUNDLED_MODEL, kernels=kernels)
        with model:
            before = calls
            texts.append(generate(model, tokenizer, prompt, max_tokens=24))
            print(f"{model.kernels.gated_rms_norm}: called {calls - before} times")
    print(f"same text: {texts[0] == texts[1]}")


if __name__ == "__main__":
    main()
