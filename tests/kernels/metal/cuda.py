"""The CUDA text of a kernel, compiled by nvcc without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

from tests.kernels.metal.variant import C_TYPES, Variant

ARCHITECTURE = "sm_90a"
SMALL = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16"}

# What MLX puts before a kernel's own text, as far as it matters here. NVRTC takes every function
# as one for the device; nvcc must be told.
PRELUDE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>
struct Shape {
  int32_t sizes[10];
  __device__ int32_t operator[](int i) const { return sizes[i]; }
};
#define inline __device__ __forceinline__
"""


def missing() -> str | None:
    """Why CUDA text cannot be compiled here, or None."""
    return None if shutil.which("nvcc") else "compiling CUDA text needs nvcc"


def _type(dtype: mx.Dtype) -> str:
    return SMALL.get(dtype) or C_TYPES[dtype]


def unit(variant: Variant) -> str:
    """A CUDA file with the kernel as MLX would generate it for the same template and dtypes."""
    kernel = variant.kernel
    header, body = kernel.cuda_text()
    parameters = []
    for name, dtype in zip(kernel.inputs, variant.input_dtypes, strict=True):
        parameters.append(f"const {_type(dtype)}* {name}")
        if f"{name}_shape" in body:
            parameters.append(f"const __grid_constant__ Shape {name}_shape")
    for name, dtype in zip(kernel.outputs, variant.output_dtypes, strict=True):
        parameters.append(f"{_type(dtype)}* {name}")
    values = "".join(
        f"constexpr {'bool' if isinstance(v, bool) else 'int'} {name} = {str(v).lower()};\n"
        if isinstance(v, int)
        else f"using {name} = {_type(v)};\n"
        for name, v in variant.template
    )
    return (
        f"{PRELUDE}{header}\nnamespace mlx::core::cu {{\n#undef inline\n"
        f"__global__ void custom({', '.join(parameters)}) {{\n{values}{body}\n}}\n}}\n"
    )


def compile_unit(text: str) -> tuple[str, str]:
    """errors, resources: nvcc's words; no errors if it compiles without spilling."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cu"
        file.write_text(text)
        done = subprocess.run(
            ["nvcc", f"-arch={ARCHITECTURE}", "-std=c++17", "-Xptxas", "-v", "-cubin",
             "-o", str(file.with_suffix(".cubin")), str(file)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    words = done.stdout + done.stderr
    if done.returncode:
        return words, ""
    resources = re.findall(r"(\d+ registers|\d+ bytes smem|[1-9]\d* bytes spill \w+)", words)
    return "", ", ".join(resources)
