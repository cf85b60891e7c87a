"""The text and the module name that MLX makes of a custom kernel on NVIDIA.

A mirror of ``custom_kernel.cpp``. MLX looks for a module of that name in its cache folder before it
compiles; a wrong mirror costs only time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

TYPES = {
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
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


@dataclass(frozen=True)
class Kernel:
    """The arguments of ``mx.fast.cuda_kernel``: a text, the names of its arrays, and bytes of
    threadgroup memory beyond those that the text declares."""

    name: str
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    memory: int = 0

    def with_constants(self, template: Mapping[str, mx.Dtype | int | bool]) -> Kernel:
        """The same for these template arguments. MLX would put them into the kernel's name too,
        which it looks up at every launch."""
        constants = "".join(_constant(*entry) for entry in template.items())
        return replace(self, body=constants + self.body)

    def build(self) -> Callable[..., list[mx.array]]:
        """Build MLX's launcher."""
        return mx.fast.cuda_kernel(  # pyright: ignore[reportReturnType]  # stubs say: object
            name=self.name,
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            header=self.header,
            source=self.body,
            shared_memory=self.memory,
        )


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


def module(kernel: Kernel, inputs: Sequence[mx.Dtype], outputs: Sequence[mx.Dtype]) -> Module:
    """The module of a kernel for these dtypes.

    No input is 0-d; no body asks for strides or numbers of dimensions.
    """
    own = f"custom_kernel_{kernel.name}"
    parameters = []
    for name, dtype in zip(kernel.inputs, inputs, strict=True):
        parameters.append(f"    const {TYPES[dtype]}* {name}")
        if f"{name}_shape" in kernel.body:
            parameters.append(f"    const __grid_constant__ Shape {name}_shape")
    for name, dtype in zip(kernel.outputs, outputs, strict=True):
        parameters.append(f"    {TYPES[dtype]}* {name}")
    text = (
        f"{MLX_HEADER}{kernel.header}namespace mlx::core::cu {{\n\n"
        f"namespace cg = cooperative_groups;\n\n__global__ void {own}(\n"
        + ",\n".join(parameters)
        + f") {{\n{kernel.body}\n}}\n\n}} // namespace mlx::core::cu\n"
    )
    return Module(f"{own}_{hash_of(text.encode()):x}", f"mlx::core::cu::{own}", text)


def _constant(name: str, value: mx.Dtype | int | bool) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};\n"
    return f"using {name} = {TYPES[value]};\n"


def hash_of(content: bytes) -> int:
    """``std::hash`` of a C++ string, by the library that MLX is linked with.

    Raises:
        OSError, AttributeError: There is no such library or function.
    """
    function = getattr(ctypes.CDLL("libstdc++.so.6"), _HASH)
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return function(content, len(content), _SEED)
