"""Compile a function for an NVIDIA H200 on a machine that has no GPU, and report what the compiler made of it.

Needs the extra `compile` (the CUDA plugin, nvcc and nvvm), no driver and no card. A test that uses this
carries the mark `compile`. The target is described to XLA by `h200.txtpb`, a GpuTargetConfig in text form.
"""

import ctypes
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.mosaic.gpu import core as mosaic_core
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

TARGET = Path(__file__).with_name("h200.txtpb")
_PTXAS_LINES = "MOSAIC_GPU_DUMP_PTXAS"  # where this variable is set, ptxas says what each Pallas kernel takes
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SWIZZLED = re.compile(r"tile<\[(?:(?:\d+, )*(\d+), )?\d+\]>, #mosaic_gpu\.swizzle<")
_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* copy(?:-start)?\(")
_PIECES = re.compile(r"^%dynamic-slice-fusion.*?^}", re.MULTILINE | re.DOTALL)  # a kernel and slices that it is handed
_SHAPE = re.compile(r"^ *(?:ROOT )?(%\S+) = (\w+)\[([\d,]*)\]", re.MULTILINE)
_BITS = re.compile(r"\d+")
_ALIGNED_BYTES = 256  # where arrays of Pallas kernels begin
_SLICE = re.compile(r" slice\((%\S+)\), slice={([^}]*)}")
_LAUNCH = re.compile(r" (?:fusion|custom-call|copy|copy-start|sort|while|conditional)\(")


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """What ptxas made of one Pallas kernel."""

    name: str
    registers: int  # per thread
    stack_bytes: int
    spill_bytes: int  # stores and loads together; any at all means that values did not fit in the registers


@dataclass(frozen=True, kw_only=True)
class Report:
    """What XLA made of one function; sizes in bytes."""

    kernels: tuple[KernelReport, ...]  # the Pallas kernels, in the order in which they were compiled
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int  # a copy of a pool shows here
    aliased_bytes: int  # a donated argument that is updated in place shows here
    copies: tuple[str, ...]  # shapes of the arrays that the compiled program copies, such as "bf16[4,64]"
    custom_calls: tuple[str, ...]
    launches: int  # of kernels and copies by the compiled program itself, loops and branches counted as one

    @property
    def registers(self) -> int:
        """The most registers that a thread of any Pallas kernel takes."""
        return max(kernel.registers for kernel in self.kernels)

    @property
    def spill_bytes(self) -> int:
        """Bytes spilled by all Pallas kernels."""
        return sum(kernel.spill_bytes for kernel in self.kernels)


def spec(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """Describe an array argument that lies on the H200."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(_mesh(), PartitionSpec()))


def compile_for_h200(function: Callable, *arguments: Any, donate: Sequence[int] = (), **static: Any) -> Report:
    """Compile `function` and report on it.

    Args:
        function: what to compile.
        arguments: pytrees of `spec`.
        donate: indices of the arguments that the function may overwrite.
        static: keyword arguments that are not arrays.

    Raises:
        RuntimeError: memory is swizzled in a way that slices of it are not read in; or a kernel is handed a slice as it
            lies, which it would refuse.
    """
    jitted = jax.jit(function, donate_argnums=tuple(donate), static_argnames=tuple(static))
    # Without an abstract device that names the GPU, lowering does not know for which one a kernel is meant.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    abstract = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(abstract), _swizzles_checked():
        lowered = jitted.trace(*arguments, **static).lower()
    with _everything_compiled_anew(), _native_output() as printed:
        executable = lowered.compile()
    text, memory = executable.as_text(), executable.memory_analysis()
    _check_alignment(text)
    report = Report(
        kernels=tuple(_kernels(printed[0])),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        copies=tuple(f"{dtype}[{shape}]" for dtype, shape in _COPY.findall(text)),
        custom_calls=tuple(re.findall(r'custom_call_target="([^"]+)"', text)),
        launches=len(_LAUNCH.findall(text[text.index("\nENTRY ") :])),
    )
    if any(name.startswith("mosaic_gpu") for name in report.custom_calls) and not report.kernels:
        raise RuntimeError(
            "ptxas speaks once per process of each Pallas kernel, and has spoken of this one: keep reports"
        )
    return report


@cache
def _mesh() -> Mesh:
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology="1x1x1")
    return topologies.make_mesh(topology, (1,), ("x",))


def _check_alignment(text: str) -> None:
    """Refuse programs that hand a Pallas kernel a slice of an array, uncopied, from where no array may begin."""
    for piece in _PIECES.findall(text):
        shapes = {
            name: (dtype, [int(size) for size in sizes.split(",") if size])
            for name, dtype, sizes in _SHAPE.findall(piece)
        }
        for operand, ranges in _SLICE.findall(piece):
            dtype, sizes = shapes[operand]
            begins = [int(begin) for begin in re.findall(r"\[(\d+):", ranges)]
            strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
            first = sum(begin * stride for begin, stride in zip(begins, strides, strict=True))
            if offset := first * int(_BITS.findall(dtype)[0]) // 8 % _ALIGNED_BYTES:
                raise RuntimeError(
                    f"a slice that a kernel is handed must begin at a multiple of {_ALIGNED_BYTES} bytes; got one "
                    f"{offset} bytes beyond: align it, as `packed.py` does, or have it copied"
                )


@contextmanager
def _swizzles_checked() -> Iterator[None]:
    """Refuse kernels in which Mosaic swizzles memory in tiles of fewer than eight rows, as it may when left alone.

    The hardware counts a swizzle's pattern from multiples of eight rows, Mosaic from where a slice begins. Interpreted
    kernels cannot show that what is read then is not what was copied there.
    """
    infer = mosaic_core.layout_inference.infer_layout

    def infer_and_check(module: Any, **options: Any) -> None:
        infer(module, **options)
        heights = [int(height or 1) for height in _SWIZZLED.findall(str(module))]
        if odd := {height for height in heights if height % 8}:
            raise RuntimeError(f"swizzled tiles must have 8 rows; got {sorted(odd)}: say that memory is `row_by_row`")

    with patch.object(mosaic_core.layout_inference, "infer_layout", infer_and_check):
        yield


@contextmanager
def _everything_compiled_anew() -> Iterator[None]:
    """Have ptxas speak, and leave the cache of compiled programs aside: ptxas says nothing of what is read back."""
    enabled, asked = jax.config.jax_enable_compilation_cache, os.environ.get(_PTXAS_LINES)
    os.environ[_PTXAS_LINES] = "1"
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # whether it is used is decided once, at the first compilation after this
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
        if asked is None:
            del os.environ[_PTXAS_LINES]


@contextmanager
def _native_output() -> Iterator[list[str]]:
    """Catch what native code prints to standard output or standard error; after the block, the list holds it."""
    flush = partial(ctypes.CDLL(None).fflush, None)  # standard output is buffered where Python does not see it
    sys.stdout.flush()
    flush()
    kept, caught = {number: os.dup(number) for number in (1, 2)}, []
    with tempfile.TemporaryFile() as file:
        for number in kept:
            os.dup2(file.fileno(), number)
        try:
            yield caught
        finally:
            flush()
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            caught.append(file.read().decode(errors="replace"))


def _kernels(printed: str) -> Iterator[KernelReport]:
    """Yield one report for each kernel that ptxas speaks of."""
    for part in re.split(r"(?=ptxas info\s*: Compiling entry function)", printed)[1:]:
        entry, spills, registers = _ENTRY.search(part), _SPILLS.search(part), _REGISTERS.search(part)
        if not (entry and spills and registers):
            raise RuntimeError(f"ptxas speaks in another form than the one known here: {part}")
        stack, stores, loads = map(int, spills.groups())
        yield KernelReport(name=entry[1], registers=int(registers[1]), stack_bytes=stack, spill_bytes=stores + loads)
