"""The texts that MLX generates for Metal, taken apart: what the emulator and the lint read."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_moeflux.kernels.runtime.launcher import MetalKernel

C_TYPES = {
    mx.bool_: "bool", mx.uint8: "uint8_t", mx.uint16: "uint16_t", mx.uint32: "uint32_t",
    mx.uint64: "uint64_t", mx.int8: "int8_t", mx.int16: "int16_t", mx.int32: "int32_t",
    mx.int64: "int64_t", mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float",
}  # fmt: skip

_SIGNATURE = re.compile(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", re.S)


class EmulatorError(AssertionError):
    """A kernel did what it must not: one sentence with its name and the place."""


def plain_name(name: str) -> str:
    """Without the digests of a text for some types, and for inputs that lie in one buffer, or of
    which one is given twice while a model is loaded."""
    return re.sub(r"(_[0-9a-f]{6})+$", "", name)


@dataclass(frozen=True)
class Argument:
    """One parameter of the generated kernel: a buffer of the given C type, or an attribute."""

    name: str
    type: str
    buffer: bool
    output: bool


@dataclass(frozen=True)
class Variant:
    """One text that MLX generates for a kernel: for given template values and dtypes.

    generated: The text after the header: template line, signature, body.
    threads: Of a threadgroup in one of its launches.
    """

    kernel: MetalKernel
    header: str
    generated: str
    template: tuple[tuple[str, mx.Dtype | int | bool], ...]
    input_dtypes: tuple[mx.Dtype, ...]
    output_dtypes: tuple[mx.Dtype, ...]
    threads: int

    @functools.cached_property
    def signature(self) -> re.Match[str]:
        """Group 2: the lines between the function's parentheses."""
        return _SIGNATURE.search(self.generated)

    @functools.cached_property
    def arguments(self) -> list[Argument]:
        """Parameters of the generated function, in order."""
        return [_argument(line, self.kernel) for line in self.signature[2].splitlines()]

    @property
    def parameters(self) -> str:
        """The text between the function's parentheses, without attributes."""
        return re.sub(r" \[\[[^\]]*\]\]", "", self.signature[2])

    @property
    def body(self) -> str:
        """Declarations and statements inside the function's braces."""
        text = self.generated[self.signature.end() :].partition("\ntemplate [[host_name")[0]
        return text.rstrip().removesuffix("}")

    def template_values(self) -> dict[str, str]:
        """Parameter -> value in C++."""
        return {name: _template_value(value) for name, value in self.template}


def generated_text(call, header: str, inputs: Sequence[mx.array], **options) -> str:
    """What MLX would hand to Metal's compiler, but for MLX's own prelude.

    Tracing for export is the only way to generate it without a Metal device.
    """
    with tempfile.NamedTemporaryFile(suffix=".mlxfn") as file:
        mx.export_function(file.name, lambda *arrays: call(inputs=list(arrays), **options), *inputs)
        written = file.read()
    begin = header or ("template <" if options["template"] else "[[kernel]]")
    start = written.index(begin.encode("ascii"))
    length = int.from_bytes(written[start - 8 : start], "little")
    return written[start : start + length].decode("ascii")


def _argument(line: str, kernel: MetalKernel) -> Argument:
    line = line.strip().rstrip(",")
    attribute = re.fullmatch(r"uint3? (\w+) \[\[\1\]\]", line)
    if attribute:
        return Argument(attribute[1], "uint", False, False)
    buffer = re.fullmatch(
        r"(?:const )?(?:device|constant) (\w+)\* (\w+) \[\[buffer\(\d+\)\]\]", line
    )
    if not buffer:
        raise EmulatorError(f"kernel '{kernel.name}': unknown parameter '{line}'")
    return Argument(buffer[2], buffer[1], True, buffer[2] in kernel.outputs)


def _template_value(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else C_TYPES[value]
