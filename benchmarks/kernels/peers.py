"""Kernels of others, timed on the same shapes where they are installed: torch and what runs on it."""

import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.kernels.device_time import Times


def has_fla() -> bool:
    """Return whether flash-linear-attention and a torch with a GPU are here."""
    if find_spec("fla") is None or find_spec("torch") is None:
        return False
    return import_module("torch").cuda.is_available()


def time_fla_advance(arrays: dict[str, np.ndarray], *, repeats: int = 7) -> tuple[Times, np.ndarray]:
    """Time flash-linear-attention's fused recurrence, which reads a state and writes the one after all tokens.

    Args:
        arrays: float32 `q`, `k` `[rows, T, Nk, dk]`, `v` `[rows, T, Nv, dv]`, `g`, `beta` `[rows, T, Nv]` and `states`
            `[calls, rows, Nv, dk, dv]`, one set for each call of the graph; q, k and v are run in bfloat16.
        repeats: timed runs.

    Returns:
        Times of one call, replayed from a CUDA graph, and its outputs.
    """
    torch = import_module("torch")
    recurrence = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    narrow = {name: torch.tensor(arrays[name], device="cuda", dtype=torch.bfloat16) for name in ("q", "k", "v")}
    wide = {name: torch.tensor(arrays[name], device="cuda", dtype=torch.float32) for name in ("g", "beta")}
    states = torch.tensor(arrays["states"], device="cuda", dtype=torch.float32)

    def call(state: Any) -> Any:
        return recurrence(**narrow, **wide, scale=1.0, initial_state=state, output_final_state=True)

    outputs = call(states[0])[0].float().cpu().numpy()
    return _time_graph(torch, [partial(call, state) for state in states], repeats), outputs


def torch_prefills() -> dict[str, str]:
    """Return modules of torch's chunked prefills that are here, by the name of who made them; empty without a GPU."""
    found = {"fla": "fla.ops.gated_delta_rule", "flash_qla": "flash_qla"}
    here = {name: module for name, module in found.items() if find_spec(module.partition(".")[0]) is not None}
    if not here or find_spec("torch") is None or not import_module("torch").cuda.is_available():
        return {}
    return here


def time_torch_prefill(
    module: str, arrays: dict[str, np.ndarray], lengths: Sequence[int], *, repeats: int = 7
) -> tuple[Times, np.ndarray]:
    """Time one of `torch_prefills` from empty states, its final states computed too.

    Args:
        module: that has it.
        arrays: float32 `q`, `k` `[T, Nk, dk]`, `v` `[T, Nv, dv]`, `g`, `beta` `[T, Nv]`; q, k and v run in bfloat16.
        lengths: of the rows, packed one after the other.
        repeats: timed runs.

    Returns:
        Times of one call, replayed from a CUDA graph, and its outputs `[T, Nv, dv]`.
    """
    os.environ["FLA_FLASH_QLA"] = "0"  # else FLA runs FlashQLA where that is installed, and one is timed twice
    torch, prefill = import_module("torch"), import_module(module).chunk_gated_delta_rule
    rows = (len(lengths), lengths[0]) if len(set(lengths)) == 1 else (1, sum(lengths))
    dtypes = {"q": torch.bfloat16, "k": torch.bfloat16, "v": torch.bfloat16, "g": torch.float32, "beta": torch.float32}
    inputs = {
        name: torch.tensor(arrays[name].reshape(*rows, *arrays[name].shape[1:]), device="cuda", dtype=dtype)
        for name, dtype in dtypes.items()
    }
    if len(set(lengths)) > 1:
        inputs["cu_seqlens"] = torch.tensor(np.cumsum([0, *lengths]), device="cuda", dtype=torch.int64)

    def call() -> Any:
        with torch.no_grad():
            return prefill(**inputs, scale=1.0, output_final_state=True)

    outputs = call()[0].float().cpu().numpy().reshape(arrays["v"].shape)
    return _time_graph(torch, [call] * 4, repeats), outputs


def has_jla() -> bool:
    """Return whether jax-linear-attention is here."""
    return find_spec("jla") is not None


def jla_prefill() -> Callable[..., Any]:
    """Return jax-linear-attention's chunked prefill of rows of one length."""
    return import_module("jla.ops.mosaic_gpu.gated_delta_rule").gated_delta_rule


def _time_graph(torch: Any, calls: Sequence[Callable[[], Any]], repeats: int) -> Times:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls[0]()  # what is compiled or tuned must be so before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]  # so that each writes to memory of its own
    timed = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        timed.append(1e-3 * start.elapsed_time(end) / len(kept))
    timed = timed[1:]
    deciles = statistics.quantiles(timed, n=10, method="inclusive")
    return Times(median=statistics.median(timed), p10=deciles[0], p90=deciles[-1])
