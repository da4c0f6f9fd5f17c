"""A whole prefill step on Mosaic kernels, compiled for an H200: it needs at most what is estimated, at least half."""

import pytest
from compile.aot import compile_for_h200, spec
from oracles.abstract_steps import abstract_call, short

from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.serving.runner.activations import mosaic_prefill_bytes

pytestmark = pytest.mark.compile
LAYER = ["gdn_prefill_inputs", "gdn_prefill_chunks", "gdn_prefill_states", "gdn_prefill_norm"]


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_blocks", "attention"),
    [
        (8192, 8, 512, ["paged_attention_prefill"]),
        (64, 1, 4096, ["paged_attention_prefill_parts", "paged_attention_combine"]),
    ],
    ids=["many tokens", "few tokens before a long context"],
)
def test_a_prefill_call_stays_within_its_estimate(
    num_tokens: int, num_rows: int, num_blocks: int, attention: list[str]
) -> None:
    config = short("qwen3.5-4b", vocab_size=1024)
    sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "num_blocks": num_blocks}
    call = abstract_call(config, dtype="bfloat16", implementation=Implementation.MOSAIC, **sizes)
    described = [spec(leaf.shape, leaf.dtype) for leaf in call.leaves]
    report = compile_for_h200(call.function, *described, donate=call.donated)
    assert [kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in report.kernels] == [*LAYER, *attention]
    needed = report.temporary_bytes + report.output_bytes - report.aliased_bytes
    assert needed <= mosaic_prefill_bytes(config, 2, **sizes) <= 2 * needed
