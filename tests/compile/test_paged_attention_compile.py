"""The attention kernels compile for an H200 at the models' shapes: nothing spills, and no page is copied."""

import jax.numpy as jnp
import pytest
from compile.aot import Report, compile_for_h200, spec

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention import mosaic_advance, paged_attention_prefill, write_pages

NUM_PAGES, KV_HEADS = 70_000, 4  # 8.5 GiB of keys at width 256, more than 2^32 numbers

pytestmark = pytest.mark.compile


def pages_of(width: int, dtype: type):
    return spec((NUM_PAGES, CHUNK, KV_HEADS, width), dtype)


def advance_rows(counts) -> AdvanceRows:
    names = ("read_slot", "write_slot", "save_slot", "save_at", "folded", "num_replay", "num_new")
    return AdvanceRows(**dict(zip(names, counts, strict=True)))


def compile_advance(*, rows: int, blocks: int, window: int, group: int, width: int, dtype: type) -> Report:
    def attend(q, k_pages, v_pages, block_tables, counts):
        return mosaic_advance.paged_attention_advance(q, k_pages, v_pages, block_tables, advance_rows(counts), 1)

    pages = pages_of(width, dtype)
    q = spec((rows, window, KV_HEADS * group, width), dtype)
    counts = [spec((rows,), jnp.int32)] * 7
    return compile_for_h200(attend, q, pages, pages, spec((rows, blocks), jnp.int32), counts)


def prefill_rows(offset, length, start) -> PrefillRows:
    anchors = {"read_slot": offset, "write_slot": offset, "export_slot": jnp.zeros((offset.shape[0], 1), jnp.int32)}
    return PrefillRows(offset=offset, length=length, start=start, **anchors)


def compile_prefill(*, tokens: int, rows: int, group: int, width: int = 256, dtype: type = jnp.bfloat16) -> Report:
    def attend(q, k_pages, v_pages, block_tables, counts):
        arrays = q, k_pages, v_pages, block_tables, prefill_rows(*counts)
        return paged_attention_prefill(*arrays, first_key=1, implementation=Implementation.MOSAIC)

    pages, q = pages_of(width, dtype), spec((tokens, KV_HEADS * group, width), dtype)
    return compile_for_h200(attend, q, pages, pages, spec((rows, 256), jnp.int32), [spec((rows,), jnp.int32)] * 3)


def check_prefill(report: Report, *, split: bool) -> None:
    names = ["paged_attention_prefill_parts", "paged_attention_combine"] if split else ["paged_attention_prefill"]
    assert [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in report.kernels] == names
    # Three warpgroups share the registers of a multiprocessor, 168 for a thread at the start.
    assert report.registers <= 168
    assert report.spill_bytes == sum(kernel.stack_bytes for kernel in report.kernels) == 0
    assert not any(shape.startswith(("bf16[", "f16[")) for shape in report.copies)  # of pages, queries or outputs


def check(report: Report, *, width: int, registers: int) -> None:
    attend, combine = report.kernels
    assert attend.name.startswith("paged_attention_advance")
    assert combine.name.startswith("paged_attention_combine")
    assert attend.registers <= registers
    assert combine.registers <= 128  # four programs of it on a multiprocessor
    assert report.spill_bytes == attend.stack_bytes == combine.stack_bytes == 0
    assert not any(shape.startswith(("bf16[70000", "f16[70000")) for shape in report.copies)
    assert report.temporary_bytes < NUM_PAGES * CHUNK * KV_HEADS * width * 2 / 8  # the parts' results, no copy of pages


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 2048), (64, 512)])
def test_advance_attention_fits_in_registers_and_leaves_the_pages_in_place(rows, blocks, window, group) -> None:
    report = compile_advance(rows=rows, blocks=blocks, window=window, group=group, width=256, dtype=jnp.bfloat16)
    # Three warpgroups share the registers of a multiprocessor, 168 for a thread at the start; two have 255 each.
    check(report, width=256, registers=168 if window * group > 64 else 255)


@pytest.mark.parametrize(("window", "registers"), [(1, 255), (9, 168)])
def test_rows_that_are_never_split_take_one_kernel(window: int, registers: int) -> None:
    report = compile_advance(rows=64, blocks=17, window=window, group=8, width=256, dtype=jnp.bfloat16)
    (attend,) = report.kernels
    assert attend.name.startswith("paged_attention_advance")
    assert attend.registers <= registers
    assert report.spill_bytes == attend.stack_bytes == 0


@pytest.mark.parametrize(("width", "dtype"), [(64, jnp.bfloat16), (128, jnp.bfloat16), (256, jnp.float16)])
def test_other_widths_and_float16_compile(width, dtype) -> None:
    check(compile_advance(rows=8, blocks=128, window=4, group=3, width=width, dtype=dtype), width=width, registers=255)


def test_pages_that_a_step_writes_and_then_reads_stay_in_place() -> None:
    def step(k_pages, v_pages, q, new, slots, block_tables, counts):
        k_pages, v_pages = (
            write_pages(pages, values, slots) for pages, values in zip((k_pages, v_pages), new, strict=True)
        )
        rows = advance_rows(counts)
        return k_pages, v_pages, mosaic_advance.paged_attention_advance(q, k_pages, v_pages, block_tables, rows, 0)

    rows, window, width = 8, 4, 256
    pages, new = pages_of(width, jnp.bfloat16), spec((rows, window, KV_HEADS, width), jnp.bfloat16)
    q = spec((rows, window, 4 * KV_HEADS, width), jnp.bfloat16)
    tables, slots = spec((rows, 128), jnp.int32), spec((rows, window), jnp.int32)
    counts = [spec((rows,), jnp.int32)] * 7
    report = compile_for_h200(step, pages, pages, q, (new, new), slots, tables, counts, donate=(0, 1))
    assert report.aliased_bytes == 2 * NUM_PAGES * CHUNK * KV_HEADS * width * 2
    check(report, width=width, registers=255)


@pytest.mark.parametrize("group", [4, 6, 8, 16])
@pytest.mark.parametrize(("tokens", "rows"), [(64, 1), (2048, 1), (2048, 8)])
def test_prefill_attention_fits_in_registers_and_copies_nothing(tokens: int, rows: int, group: int) -> None:
    report = compile_prefill(tokens=tokens, rows=rows, group=group)
    check_prefill(report, split=tokens == 64)
    # The results of parts, or a table of strips: no copy of queries or pages.
    assert report.temporary_bytes < (64 << 20 if tokens == 64 else 1 << 20)


@pytest.mark.parametrize(
    ("width", "dtype", "group"), [(64, jnp.bfloat16, 1), (128, jnp.bfloat16, 3), (256, jnp.float16, 4)]
)
def test_prefill_attention_of_other_widths_and_float16_compiles(width, dtype, group) -> None:
    check_prefill(compile_prefill(tokens=2048, rows=1, group=group, width=width, dtype=dtype), split=False)


def test_pages_that_a_prefill_writes_and_then_reads_stay_in_place() -> None:
    def step(k_pages, v_pages, q, new, slots, block_tables, counts):
        k_pages, v_pages = (
            write_pages(pages, values, slots) for pages, values in zip((k_pages, v_pages), new, strict=True)
        )
        arrays = q, k_pages, v_pages, block_tables, prefill_rows(*counts)
        return k_pages, v_pages, paged_attention_prefill(*arrays, first_key=1, implementation=Implementation.MOSAIC)

    tokens, rows, width = 512, 8, 256
    pages, new = pages_of(width, jnp.bfloat16), spec((tokens, KV_HEADS, width), jnp.bfloat16)
    q, slots = spec((tokens, 4 * KV_HEADS, width), jnp.bfloat16), spec((tokens,), jnp.int32)
    tables, counts = spec((rows, 256), jnp.int32), [spec((rows,), jnp.int32)] * 3
    report = compile_for_h200(step, pages, pages, q, (new, new), slots, tables, counts, donate=(0, 1))
    assert report.aliased_bytes == 2 * NUM_PAGES * CHUNK * KV_HEADS * width * 2
    assert not any(shape.startswith("bf16[70000") for shape in report.copies)
    assert report.spill_bytes == 0
