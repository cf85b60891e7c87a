"""What MLX makes of a custom kernel on NVIDIA: its text, and what it calls the module.

A mirror of ``custom_kernel.cpp``. MLX looks for a module of that name in its cache folder before it
compiles; nothing but time is lost where the mirror is wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

# dtype -> its type in CUDA, its part of a kernel's name
TYPES = {
    mx.bool_: ("bool", "bool"),
    mx.int8: ("int8_t", "int8_t"),
    mx.int16: ("int16_t", "int16_t"),
    mx.int32: ("int32_t", "int32_t"),
    mx.int64: ("int64_t", "int64_t"),
    mx.uint8: ("uint8_t", "uint8_t"),
    mx.uint16: ("uint16_t", "uint16_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
    mx.uint64: ("uint64_t", "uint64_t"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.float32: ("float", "float"),
}

MLX_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""

# What kernels need of MLX's header, which takes 2 s to compile: its types.
HEADER = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef signed char int8_t;
typedef signed short int16_t;
typedef signed int int32_t;
typedef signed long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
namespace cooperative_groups {}
namespace mlx::core::cu {
struct Shape {
  int32_t sizes[10];
  const int32_t& operator[](int i) const { return sizes[i]; }
};
}

"""

# MLX and libstdc++: std::hash<std::string> is this function with this seed.
_HASH, _SEED = "_ZSt11_Hash_bytesPKvmm", 0xC70F6907
# Longer names are cut into folders there.
LONGEST_NAME = 245


@dataclass(frozen=True)
class Module:
    """name: As MLX calls it. function: The kernel in it, qualified. text: MLX's."""

    name: str
    function: str
    text: str

    @property
    def light_text(self) -> str:
        """The same kernel behind our short header."""
        return HEADER + self.text.removeprefix(MLX_HEADER)


def module(
    name: str,
    header: str,
    body: str,
    *,
    inputs: Sequence[tuple[str, mx.Dtype]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, mx.Dtype | int | bool]],
) -> Module:
    """The module of a kernel as it was given to ``mx.fast.cuda_kernel``, for these dtypes.

    No input is 0-d; no body asks for strides or numbers of dimensions.
    """
    own = f"custom_kernel_{name}{''.join(_in_name(value) for _, value in template)}"
    parameters = []
    for given, dtype in inputs:
        parameters.append(f"    const {TYPES[dtype][0]}* {given}")
        if f"{given}_shape" in body:
            parameters.append(f"    const __grid_constant__ Shape {given}_shape")
    parameters += [f"    {TYPES[dtype][0]}* {given}" for given, dtype in outputs]
    constants = "".join(_constant(*entry) for entry in template)
    text = (
        f"{MLX_HEADER}{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void {own}(\n" + ",\n".join(parameters) + ") {\n"
        f"{constants}{constants and chr(10)}{body}\n}}\n\n}} // namespace mlx::core::cu\n"
    )
    return Module(f"{own}_{hash_of(text.encode()):x}", f"mlx::core::cu::{own}", text)


def _in_name(value: mx.Dtype | int | bool) -> str:
    if isinstance(value, bool):
        return "_t" if value else "_f"
    return f"_{value if isinstance(value, int) else TYPES[value][1]}"


def _constant(name: str, value: mx.Dtype | int | bool) -> str:
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"  constexpr int {name} = {value};\n"
    return f"  using {name} = {TYPES[value][0]};\n"


def hash_of(content: bytes) -> int:
    """``std::hash`` of a C++ string, by the library that MLX is linked with.

    Raises:
        OSError, AttributeError: There is no such library or function.
    """
    function = getattr(ctypes.CDLL("libstdc++.so.6"), _HASH)
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return function(content, len(content), _SEED)
