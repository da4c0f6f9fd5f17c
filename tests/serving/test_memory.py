"""The memory plan: bytes as counted by hand, all of the memory used, and clear words where it is too little."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.engine_rig import TINY

from gdn_jax.config import ModelConfig
from gdn_jax.serving.core.errors import StartupError
from gdn_jax.serving.runner.memory import (
    MemoryPlan,
    MemoryRequest,
    available_host_bytes,
    describe_bytes,
    plan_memory,
)
from gdn_jax.sizes import parameter_count

MODEL = ModelConfig.from_folder(TINY)
# By hand, float32: one attention layer and the MTP head's, keys and values of 2 heads of 32; three GDN layers with a
# state of 4 x 16 x 16 and three convolution inputs of 128; a hidden vector of 48.
BLOCK = 64 * 2 * 2 * 2 * 32 * 4
SLOT = 3 * (4 * 16 * 16 + 3 * 128) * 4 + 48 * 4
# Per layer the raw convolution input, k, v, and g and beta of 4 heads.
COUNTS = (MODEL.vocab_size + 31) * 4  # of one lane's history, and the last tokens of its output
LANE = 3 * (128 + 2 * 16 + 4 * 16 + 2 * 4) * 4 + 48 * 4 + COUNTS
MIB = 1 << 20


def request(**changes: Any) -> MemoryRequest:
    settings: dict[str, Any] = {
        "total_bytes": 0,
        "pool_bytes": 8 * MIB,
        "dtype": "float32",
        "state_dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "budget": 256,
        "window": 1,
        "block_size": 64,
    }
    return MemoryRequest(**settings | changes)


def used(plan: MemoryPlan) -> int:
    return plan.num_blocks * BLOCK + plan.num_slots * SLOT + plan.max_num_seqs * LANE


def test_bytes_per_block_slot_and_lane_are_those_counted_by_hand() -> None:
    plan = plan_memory(MODEL, request())
    assert (plan.block_bytes, plan.slot_bytes, plan.lane_bytes) == (BLOCK, SLOT, LANE)
    assert plan.pool_bytes == used(plan)
    half = plan_memory(MODEL, request(dtype="bfloat16"))
    assert (half.block_bytes, half.slot_bytes) == (BLOCK // 2, 3 * (4 * 16 * 16 * 4 + 3 * 128 * 2) + 48 * 2)


@given(
    st.integers(3, 400),
    st.integers(1, 40),
    st.sampled_from([0, 64, 100, 512, 4096]),
    st.sampled_from([0.0, 0.2, 0.9]),
)
def test_a_plan_fits_its_memory_and_serves_at_least_one_longest_sequence(
    quarters: int, seqs: int, length: int, share: float
) -> None:
    pool = quarters * MIB // 4
    try:
        plan = plan_memory(MODEL, request(pool_bytes=pool, max_num_seqs=seqs, max_model_len=length, state_share=share))
    except StartupError:
        # Only where what the states leave is too little for the sequence.
        assert (-(-length // 64) + 2) * BLOCK > pool * (1 - share) - (seqs + 2) * (SLOT + LANE)
        return
    assert used(plan) <= pool
    assert 1 <= plan.max_num_seqs <= min(seqs, plan.num_slots - 1)
    assert plan.num_longest >= 1
    assert plan.max_model_len == (length or min(4096, (plan.num_blocks - 1) * 64))


def test_what_weights_and_activations_leave_goes_to_the_pools() -> None:
    small, large = (plan_memory(MODEL, request(pool_bytes=0, total_bytes=total * MIB)) for total in (8, 14))
    assert used(small) <= 8 * MIB - small.weight_bytes - small.activation_bytes
    assert large.num_blocks > small.num_blocks
    assert large.num_slots > small.num_slots


def test_pools_stop_growing_where_nothing_would_ever_fill_them() -> None:
    plan = plan_memory(MODEL, request(pool_bytes=4096 * MIB))
    assert plan.num_blocks == 4 * 4 * 8 + 1
    assert used(plan) < 32 * MIB


def test_more_running_requests_than_slots_are_clamped_with_a_warning_that_says_the_number(caplog: Any) -> None:
    plan = plan_memory(MODEL, request(num_slots=5, max_num_seqs=16))
    assert (plan.max_num_seqs, plan.num_slots) == (5, 6)
    assert "max_num_seqs is 5 instead of 16" in caplog.text
    caplog.clear()
    tight = plan_memory(MODEL, request(pool_bytes=9 * BLOCK + 4 * (SLOT + LANE), max_num_seqs=16))
    assert tight.max_num_seqs == 3  # beside the blocks of one sequence, and the null block and slot
    assert "max_num_seqs is 3 instead of 16" in caplog.text


def test_a_sequence_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(StartupError, match=r"512 tokens needs .* for the pools: lower max_model_len, .* or raise pool"):
        plan_memory(MODEL, request(pool_bytes=8 * BLOCK))
    with pytest.raises(StartupError, match=r"512 tokens needs 8 blocks and \d fit: lower max_model_len"):
        plan_memory(MODEL, request(pool_bytes=12 * BLOCK, state_share=1.0))
    with pytest.raises(StartupError, match=r"512 tokens needs 8 blocks; got num_blocks=3: raise num_blocks"):
        plan_memory(MODEL, request(num_blocks=3))


def test_a_gpu_too_small_for_the_weights_is_refused_with_what_they_need_and_what_there_is() -> None:
    weights = plan_memory(MODEL, request()).weight_bytes
    with pytest.raises(StartupError) as caught:
        plan_memory(MODEL, request(pool_bytes=0, total_bytes=1000, device_bytes=2000, max_model_len=0))
    assert str(caught.value) == (
        "weights must fit what may be used of the device, 1000 B of 1.95 KiB; held in float32 they need "
        f"{describe_bytes(weights)}: use a smaller model or a device with more memory"
    )


def refusal(**changes: Any) -> str:
    with pytest.raises(StartupError) as caught:
        plan_memory(MODEL, request(**changes))
    return str(caught.value)


@pytest.mark.parametrize(
    ("remedy", "asked", "followed"),
    [
        ("lower max_model_len", {"max_model_len": 4096}, {"max_model_len": 64}),
        ("lower max_num_batched_tokens", {"budget": 4096}, {"budget": 64}),
        ("lower max_num_seqs", {"max_num_seqs": 256}, {"max_num_seqs": 1}),
        ("set dtype to bfloat16", {"dtype": "float32"}, {"dtype": "bfloat16"}),
        ("raise gpu_memory_utilization", {"total_bytes": MIB}, {"total_bytes": 64 * MIB}),
        ("raise pool_memory_gib", {"pool_bytes": SLOT}, {"pool_bytes": 8 * MIB}),
    ],
)
def test_a_remedy_is_named_where_it_helps_alone(remedy: str, asked: dict[str, Any], followed: dict[str, Any]) -> None:
    start: dict[str, Any] = {"max_model_len": 0, "pool_bytes": 0, "device_bytes": 64 * MIB}
    enough = plan_memory(MODEL, request(**start | asked | followed | {"pool_bytes": 8 * MIB}))
    start["total_bytes"] = enough.weight_bytes + enough.activation_bytes + MIB // 2
    assert remedy in refusal(**start | asked)
    assert plan_memory(MODEL, request(**start | asked | followed)).num_longest >= 1


def test_a_remedy_that_would_not_help_is_not_named() -> None:
    weights = plan_memory(MODEL, request()).weight_bytes
    for total in (1000, weights, weights + 1000):
        told = refusal(pool_bytes=0, total_bytes=total, device_bytes=total + 1, max_model_len=4096, dtype="float32")
        assert told.endswith(": use a smaller model or a device with more memory")


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(StartupError, match="max_model_len must be at most the model's 4096; got 4097"):
        plan_memory(MODEL, request(max_model_len=4097))


def test_pools_given_by_hand_that_do_not_fit_are_refused_before_anything_loads() -> None:
    plan = plan_memory(MODEL, request(num_blocks=16, num_slots=6))
    assert (plan.num_blocks, plan.num_slots) == (17, 7)
    for much in ({"num_slots": 100_000}, {"num_blocks": 100_000}):
        with pytest.raises(StartupError, match=r"need .* and 8.00 MiB are there: lower num_blocks or num_state_slots"):
            plan_memory(MODEL, request(**much))


def test_a_context_that_does_not_fit_is_cut_with_a_warning_unless_it_was_asked_for(caplog: Any) -> None:
    plan = plan_memory(MODEL, request(pool_bytes=MIB, max_model_len=0))
    assert plan.max_model_len == (plan.num_blocks - 1) * 64 < 4096
    assert f"max_model_len is {plan.max_model_len}: the model's 4096 tokens do not fit" in caplog.text


def test_a_larger_share_for_states_gives_more_slots_and_fewer_blocks() -> None:
    few, many = (plan_memory(MODEL, request(pool_bytes=2 * MIB, state_share=share)) for share in (0.1, 0.7))
    assert many.num_slots > few.num_slots
    assert many.num_blocks < few.num_blocks


def test_no_head_means_no_pages_and_no_weights_for_it() -> None:
    with_head, without = (plan_memory(replace(MODEL, num_mtp_layers=layers), request()) for layers in (1, 0))
    assert (with_head.block_bytes, without.block_bytes) == (BLOCK, BLOCK // 2)
    head = parameter_count(MODEL)[1]
    assert head > 0
    assert with_head.weight_bytes - without.weight_bytes == 4 * head
    assert (without.slot_bytes, without.lane_bytes) == (SLOT, LANE)


def test_memory_that_the_file_cache_would_give_back_counts_as_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24000000 kB\nMemFree:          200000 kB\nMemAvailable:   18000000 kB\n")
    assert available_host_bytes(meminfo) == 18_000_000 * 1024


@pytest.mark.parametrize("content", [None, "MemFree: 200000 kB\n"], ids=["no-file", "old-kernel"])
def test_half_the_memory_is_taken_to_be_available_where_the_system_does_not_say(
    tmp_path: Path, content: str | None
) -> None:
    meminfo = tmp_path / "meminfo"
    if content is not None:
        meminfo.write_text(content)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_host_bytes(meminfo) == physical // 2


def test_the_description_names_bytes_of_a_block_a_slot_and_all() -> None:
    text = "\n".join(plan_memory(MODEL, request(num_blocks=32, num_slots=9)).lines())
    for part in (
        "32 blocks of 64 tokens (2048 tokens), 64.00 KiB each, 2.06 MiB in all",
        "9 slots, 16.69 KiB each",
        "4 may run, the rest are checkpoints\n",
        "4 sequences of 512 tokens fit at once",
    ):
        assert part in text
    lines = plan_memory(MODEL, request(num_blocks=32, num_slots=4)).lines()
    assert any(line.endswith("4 may run") for line in lines), "nothing is left for checkpoints"


def test_sizes_are_described_in_the_largest_unit_below_them() -> None:
    assert [describe_bytes(size) for size in (0, 1023, 1024, 3 << 19, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 MiB",
        "5.00 GiB",
    ]
