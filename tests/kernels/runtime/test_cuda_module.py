"""Oracle: the text that MLX makes of a kernel, by hand; and a program with the hash of the standard
library."""

from __future__ import annotations

import subprocess

import mlx.core as mx
import pytest

from mlx_moeflux.kernels.runtime.cuda import module as cuda_module

TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define A 1
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_name(
    const __half* x,
    const __grid_constant__ Shape x_shape,
    const bool* mask,
    uint32_t* y,
    float* z) {
y[0] = x_shape[0];

}

} // namespace mlx::core::cu
"""


def test_the_text_is_mlxs():
    kernel = cuda_module.Kernel(
        "name", "#define A 1\n", "y[0] = x_shape[0];\n", inputs=("x", "mask"), outputs=("y", "z")
    )
    module = cuda_module.module(kernel, [mx.float16, mx.bool_], [mx.uint32, mx.float32])
    assert module.text == TEXT
    assert module.function == "mlx::core::cu::custom_kernel_name"
    assert module.name == f"custom_kernel_name_{cuda_module.hash_of(TEXT.encode()):x}"
    assert module.light_text.endswith(TEXT.split("cooperative_groups.h>\n\n")[1])
    assert "utils.cuh" not in module.light_text


def test_the_hash_is_the_standard_librarys(tmp_path):
    """Against a program of this test."""
    texts = ["", "a", "eight by", TEXT]
    program = tmp_path / "hash"
    program.with_suffix(".cpp").write_text(
        "#include <cstdio>\n#include <functional>\n#include <string>\nint main() {\n"
        + "".join(
            f'std::printf("%zx\\n", std::hash<std::string>{{}}(R"--({text})--"));\n'
            for text in texts
        )
        + "}\n"
    )
    try:
        subprocess.run(["g++", "-o", program, program.with_suffix(".cpp")], check=True)
    except FileNotFoundError:
        pytest.skip("needs g++")
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert [f"{cuda_module.hash_of(text.encode()):x}" for text in texts] == said
