"""The quantisation of a checkpoint's weights: MLX's forms, ggml's blocks; a default and exceptions.

A quantised weight [out, in] is stored as ``weight`` [out, in * bits / 32] uint32, the lowest bits
first, with a scale for each group of a row. config.json says bits, group size and mode as mlx-lm
writes them, with one entry for each module that differs.

    affine  element = q * scale + bias; ``scales`` and ``biases`` [out, in / group_size], floats
    mxfp4   element = E2M1(q) * 2^(scale - 127); ``scales`` uint8 (E8M0), groups of 32
    mxfp8   element = E4M3(q) * 2^(scale - 127); ``scales`` uint8 (E8M0), groups of 32
    nvfp4   element = E2M1(q) * E4M3(scale); ``scales`` uint8, groups of 16; with ``global_scale``,
            a float32 for the whole matrix, element = E2M1(q) * E4M3(scale) * global_scale / 2688

2688 is 6 * 448, the largest numbers of E2M1 and E4M3. Other modes are blocks of bytes, ``weight``
[out, bytes of a row] uint8 alone, whose stored dtype is the mode's name: see
:mod:`mlx_moeflux.checkpoint.blocks`.

Source: OCP Microscaling Formats 1.0, sections 5 and 6; MLX 0.32.4's ``quantize``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES, BlockMode
from mlx_moeflux.checkpoint.config import QUANTIZATION_KEYS
from mlx_moeflux.checkpoint.formats.foreign import (
    check_compressed_tensors,
    check_fp8,
    check_modelopt,
    check_quark,
)
from mlx_moeflux.checkpoint.names import PARTS
from mlx_moeflux.errors import ConfigError, ShapeError, UnsupportedError

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64
AFFINE = "affine"


@dataclass(frozen=True)
class Mode:
    """A quantisation mode.

    bits, group_sizes: A matrix has one of each; of blocks a group is a block.
    scales: dtypes that ``scales`` may have; floats have ``biases`` beside them; (): there are none.
    global_scale: A matrix may have one.
    block: What blocks of bytes hold, or None.
    """

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    scales: tuple[str, ...] = ("U8",)
    global_scale: bool = False
    block: BlockMode | None = None

    def __post_init__(self) -> None:
        if not self.bits or not self.group_sizes or bool(self.scales) == (self.block is not None):
            raise TypeError(f"a mode needs bits, group sizes and either scales or blocks: {self}")

    @property
    def fixed(self) -> tuple[int, int] | None:
        """Bits and group size, if there is one of each."""
        one = len(self.bits) == len(self.group_sizes) == 1
        return (self.bits[0], self.group_sizes[0]) if one else None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the arrays of a matrix, besides a global scale."""
        return PARTS[:1] if not self.scales else PARTS[:2] if self.scales == ("U8",) else PARTS


MX_MODES = {
    "mxfp4": Mode((4,), (32,)),
    "mxfp8": Mode((8,), (32,)),
    "nvfp4": Mode((4,), (16,), global_scale=True),
}
"""Those of MLX whose scales are bytes, by name."""
MODES = {
    AFFINE: Mode(BITS, GROUP_SIZES, ("BF16", "F16", "F32")),
    **MX_MODES,
    **{n: Mode((b.bits,), (b.elements,), (), block=b) for n, b in BLOCK_MODES.items()},
}
"""All, by name."""

_SETTINGS = ("bits", "group_size", "mode", "global_scale")


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Quantisation of one weight; UnsupportedError for values that MLX has no kernel for.

    global_scale: Each matrix has one, besides the scales of its groups.
    """

    bits: int
    group_size: int = DEFAULT_GROUP_SIZE
    mode: str = AFFINE
    global_scale: bool = False

    def __post_init__(self) -> None:
        fault = _fault(self.bits, self.group_size, self.mode, self.global_scale)
        if fault:
            raise UnsupportedError(f"Quantisation with {fault}.")

    @classmethod
    def of_mode(
        cls, mode: str, bits: int | None = None, group_size: int | None = None
    ) -> QuantSpec:
        """Return the quantisation of a mode; what is None is the mode's, or 4 bits in groups of
        64."""
        known = _fixed(mode) or (4, DEFAULT_GROUP_SIZE)
        return cls(
            known[0] if bits is None else bits, known[1] if group_size is None else group_size, mode
        )

    @classmethod
    def of_shapes(
        cls,
        width: int,
        words: int,
        groups: int,
        *,
        byte_scales: bool,
        global_scale: bool = False,
    ) -> QuantSpec:
        """Return the quantisation that packs rows of `width` elements into so many uint32 words and
        groups.

        byte_scales: The scales are uint8, which no affine quantisation has. global_scale: There is
        one besides.

        Raises:
            ShapeError: They do not divide each other.
            UnsupportedError: MLX has no kernel for it.
        """
        if groups < 1 or width % groups or words < 1 or words * 32 % width:
            raise ShapeError(
                f"{words} words and {groups} groups are no quantisation of a row of {width} "
                "elements."
            )
        bits, size = words * 32 // width, width // groups
        if not byte_scales:
            return cls(bits, size, global_scale=global_scale)
        for mode, known in MX_MODES.items():
            if known.fixed == (bits, size):
                return cls(bits, size, mode, global_scale)
        raise UnsupportedError(
            f"Quantisation with {bits} bits in groups of {size} and scales of one byte is not "
            f"supported, only {_words(MX_MODES)} are."
        )

    @property
    def is_affine(self) -> bool:
        """True for scales and biases in floats, False for scales in bytes alone, or blocks."""
        return self.mode == AFFINE

    @property
    def block(self) -> BlockMode | None:
        """The blocks that hold scales and numbers, or None."""
        return MODES[self.mode].block

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the arrays of a matrix, besides a global scale."""
        return MODES[self.mode].parts

    def row(self, width: int) -> tuple[str, int]:
        """dtype (see :data:`~mlx_moeflux.checkpoint.tensors.ITEMSIZE`) and number of what holds the
        numbers of a row of ``width`` elements: uint32 words, or bytes of blocks."""
        if self.block is not None:
            return self.mode, self.groups(width) * self.block.nbytes
        return "U32", self.words(width)

    def width(self, count: int) -> int:
        """Elements of a row of `count` words or bytes; see :meth:`row`."""
        if self.block is not None:
            return count // self.block.nbytes * self.block.elements
        return count * 32 // self.bits

    def words(self, width: int) -> int:
        """uint32 words in a packed row of ``width`` elements."""
        return self.groups(width) * (self.group_size * self.bits // 32)

    def groups(self, width: int) -> int:
        """Groups, so scales and biases or blocks, in a row of ``width`` elements."""
        if width < 1 or width % self.group_size:
            raise ShapeError(
                f"A row of {width} elements does not divide into groups of {self.group_size};"
                " choose a group size that divides the width."
            )
        return width // self.group_size

    def to_config(self) -> dict[str, int | str]:
        """The form of config.json."""
        found: dict[str, int | str] = {
            "group_size": self.group_size,
            "bits": self.bits,
            "mode": self.mode,
        }
        return found | ({"global_scale": True} if self.global_scale else {})


@dataclass(frozen=True, slots=True)
class Quantization:
    """What config.json says: a default, and exceptions by module path; None is not quantised.

    Paths are those of the config: see :meth:`renamed`. Stored shapes decide: a module whose
    checkpoint has no ``scales`` is not quantised, even if this object says so (mlx-lm's rule too).
    """

    default: QuantSpec | None = None
    overrides: Mapping[str, QuantSpec | None] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Quantization:
        """Read ``quantization`` of a config.json, or ``quantization_config`` where that says
        nothing, as mlx-lm means them. Stored shapes decide over what is read here.

        Raises ConfigError if an entry is malformed, UnsupportedError for another library's method
        or for bits, group size or mode unknown here.
        """
        found = []
        for key in QUANTIZATION_KEYS:
            block = config.get(key)
            if block is not None and not isinstance(block, Mapping):
                raise ConfigError(f"{key} of config.json is {block!r}, but must be an object.")
            ours = _without_foreign_method(block or {})
            if ours:
                found.append(_read(ours, key))
        return found[0] if found else cls()

    def spec(self, module_path: str) -> QuantSpec | None:
        """Return the quantisation of a module's weight; the path is exactly the config's."""
        return self.overrides.get(module_path, self.default)

    def renamed(self, rename: Callable[[str], str | None]) -> Quantization:
        """The same with every module path mapped by ``rename``; None drops the entry. Of two for
        one module the first counts."""
        result: dict[str, QuantSpec | None] = {}
        for path, spec in self.overrides.items():
            new = rename(path)
            if new is not None:
                result.setdefault(new, spec)
        return Quantization(self.default, result)

    def to_config(self) -> dict[str, object]:
        """Return the object that mlx-lm reads from ``quantization``; {} without quantisation."""
        entries = {
            path: False if spec is None else spec.to_config()
            for path, spec in self.overrides.items()
        }
        return {**(self.default.to_config() if self.default else {}), **entries}


def _fault(bits: object, group_size: object, mode: object, global_scale: object) -> str | None:
    """Return the fault of the values of an entry, or None."""
    known = _mode(mode)
    if known is None:
        return f"mode {mode!r} is not supported, only {_words(MODES)} are"
    if global_scale not in (False, None) and (global_scale is not True or not known.global_scale):
        may = (name for name, other in MODES.items() if other.global_scale)
        return (
            f"global_scale {global_scale!r} of mode {mode!r} is none; {_words(may)} may have true"
        )
    if (fixed := known.fixed) is not None:
        if (bits, group_size) == fixed:
            return None
        return (
            f"mode {mode!r} has {fixed[0]} bits in groups of {fixed[1]}, not {bits!r} in groups of "
            f"{group_size!r}"
        )
    if type(bits) is not int or bits not in known.bits:
        return f"bits {bits!r} is not supported, only {_words(known.bits)} are"
    if type(group_size) is not int or group_size not in known.group_sizes:
        return f"group_size {group_size!r} is not supported, only {_words(known.group_sizes)} are"
    return None


def _mode(name: object) -> Mode | None:
    return MODES.get(name) if isinstance(name, str) else None


def _fixed(mode: object) -> tuple[int, int] | None:
    """Return bits and group size of a mode that fixes them."""
    known = _mode(mode)
    return None if known is None else known.fixed


def _without_foreign_method(block: Mapping) -> Mapping:
    """The block if it is mlx's, {} if it says nothing or is of a form that is decoded when read;
    UnsupportedError names a foreign method."""
    method = block.get("quant_method")
    if method in (None, "none", "mlx"):
        return {key: value for key, value in block.items() if key != "quant_method"}
    # What is decoded when read, or says its form by its names, has nothing of MLX's to say.
    if method == "mxfp4":
        return {}
    if method == "fp8":
        check_fp8(block)
        return {}
    if method == "compressed-tensors":
        check_compressed_tensors(block)
        return {}
    if method == "modelopt":
        check_modelopt(block)
        return {}
    if method == "quark":
        check_quark(block)
        return {}
    raise UnsupportedError(
        f"quantization_config of config.json has quant_method {method!r}, which cannot be read"
        " here; use a checkpoint in bf16, in FP8, in NVFP4 or one quantised by mlx-lm."
    )


def _read(block: Mapping, key: str) -> Quantization:
    settings = {name: block[name] for name in _SETTINGS if name in block}
    default = _spec(settings, key) if settings else None
    overrides = {
        path: _override(path, value, key, default)
        for path, value in block.items()
        if path not in _SETTINGS
    }
    return Quantization(default, overrides)


def _override(path: str, value: object, key: str, default: QuantSpec | None) -> QuantSpec | None:
    if value is None or value is False:
        return None
    if value is True and default is not None:
        return default
    if isinstance(value, Mapping):
        return _spec(value, f"{key}[{path!r}]")
    raise ConfigError(
        f"{key}[{path!r}] of config.json is {value!r}, but must be false, true or an object with"
        " bits and group_size."
    )


def _spec(entry: Mapping, place: str) -> QuantSpec:
    unknown = sorted(set(entry) - set(_SETTINGS))
    if unknown:
        raise ConfigError(
            f"{place} of config.json has the unknown key {unknown[0]!r}; known are"
            f" {_words(_SETTINGS)}."
        )
    mode = entry.get("mode", AFFINE)
    if mode == AFFINE and "bits" not in entry:
        raise ConfigError(f"{place} of config.json has no bits; add them.")
    bits, group_size = _fixed(mode) or (None, DEFAULT_GROUP_SIZE)
    bits, group_size = entry.get("bits", bits), entry.get("group_size", group_size)
    global_scale = entry.get("global_scale")
    fault = _fault(bits, group_size, mode, global_scale)
    if fault:
        raise UnsupportedError(f"{place} of config.json: {fault}.")
    return QuantSpec(bits, group_size, mode, bool(global_scale))


def _words(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
