"""Arrays that do not agree are refused by name before any kernel sees them, whichever would run."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from gdn_jax.kernels.agreement import Described, check_agreement, check_groups
from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import DeltaInputs, gdn_advance, gdn_forward, gdn_prefill
from gdn_jax.kernels.gated_delta.cases import CASES, AdvanceCase, PrefillCase, make_advance, make_prefill
from gdn_jax.kernels.paged_attention import paged_attention_advance, paged_attention_prefill

EVERYWHERE = pytest.mark.parametrize("implementation", list(Implementation))


def test_what_agrees_passes_and_what_does_not_is_named() -> None:
    arrays = {
        "q": Described(jnp.zeros((5, 2, 8)), "T Nk dk"),
        "g": Described(jnp.zeros((5, 4)), "T Nv", dtype="float32"),
    }
    check_agreement(arrays, {"Nv": (4, "the model")})
    with pytest.raises(ValueError, match=r"g must be \[T, Nv\] with Nv = 3 as in the model; got \[5, 4\]"):
        check_agreement(arrays, {"Nv": (3, "the model")})
    for array, rule in (
        (jnp.zeros((5, 4, 1)), r"k must be \[T, Nv\]; got \[5, 4, 1\]"),
        (jnp.zeros((6, 4)), r"k must be \[T, Nv\] with T = 5 as in q; got \[6, 4\]"),
        (jnp.zeros((5, 0)), r"k must be \[T, Nv\] with Nv = 1 or more; got \[5, 0\]"),
        (jnp.zeros((5, 4), jnp.bfloat16), "k must be float32; got bfloat16; cast it"),
    ):
        with pytest.raises(ValueError, match=rule):
            check_agreement({"q": arrays["q"], "k": Described(array, "T Nv", dtype="float32")})
    check_agreement({"slots": Described(jnp.zeros((5, 0), jnp.int32), "rows boundaries", dtype="int32")})
    check_groups("Nv", 4, "Nk", 2)
    with pytest.raises(ValueError, match="Nv must be a multiple of Nk; got Nv = 4 and Nk = 3"):
        check_groups("Nv", 4, "Nk", 3)


@EVERYWHERE
def test_a_prefill_refuses_a_pool_and_gates_that_are_not_those_of_its_tokens(implementation: Implementation) -> None:
    case = CASES["test/one-row"]
    assert isinstance(case, PrefillCase)
    args = make_prefill(case)
    halved = args.pool[:, : args.pool.shape[1] // 2]
    with pytest.raises(ValueError, match=r"pool must be \[slots, Nv, dv, dk\] with Nv = \d+ as in inputs.v; got"):
        gdn_prefill(args.q, args.inputs, args.rows, halved, implementation=implementation)
    short = replace(args.inputs, g=args.inputs.g.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"inputs\.g must be float32; got bfloat16; cast it"):
        gdn_prefill(args.q, short, args.rows, args.pool, implementation=implementation)
    rows = replace(args.rows, start=args.rows.start.astype(jnp.int16))
    with pytest.raises(ValueError, match=r"rows\.start must be int32; got int16; cast it"):
        gdn_prefill(args.q, args.inputs, rows, args.pool, implementation=implementation)


# Annotations, which are checked first in tests, see one object at a time.
@EVERYWHERE
def test_an_advance_refuses_rows_that_its_tokens_have_not(implementation: Implementation) -> None:
    case = next(case for case in CASES.values() if isinstance(case, AdvanceCase) and case.name.startswith("test/"))
    args = make_advance(case)
    rows = AdvanceRows(**{name: x[:-1] for name, x in vars(args.rows).items()})
    with pytest.raises(ValueError, match=r"rows.read_slot must be \[rows\] with rows = \d+ as in new.k; got"):
        gdn_advance(args.q, args.new, args.replay, rows, args.pool, implementation=implementation)


@EVERYWHERE
def test_whole_documents_and_attention_refuse_too(implementation: Implementation) -> None:
    case = CASES["test/one-row"]
    assert isinstance(case, PrefillCase)
    args = make_prefill(case)
    inputs = DeltaInputs(**{name: x[None].astype(jnp.float16) for name, x in vars(args.inputs).items()})
    with pytest.raises(ValueError, match=r"inputs\.g must be float32; got float16; cast it"):
        gdn_forward(args.q[None], inputs, jnp.zeros(args.q.shape[:1], bool)[None], implementation=implementation)
    q, pages = jnp.zeros((args.q.shape[0], 4, 64)), jnp.zeros((3, 64, 2, 64))
    tables = jnp.zeros((args.rows.offset.shape[0] + 1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"rows.offset must be \[rows\] with rows = \d+ as in block_tables; got"):
        paged_attention_prefill(q, pages, pages, tables, args.rows, implementation=implementation)
    uneven = jnp.zeros((args.q.shape[0], 3, 64))
    with pytest.raises(ValueError, match="Hq must be a multiple of Hkv; got Hq = 3 and Hkv = 2"):
        paged_attention_prefill(uneven, pages, pages, tables[1:], args.rows, implementation=implementation)
    window, counts = jnp.zeros((2, 1, 4, 64)), jnp.zeros((2,), jnp.int16)
    rows = AdvanceRows(**dict.fromkeys(AdvanceRows.__dataclass_fields__, counts))
    with pytest.raises(ValueError, match=r"rows\.read_slot must be int32; got int16; cast it"):
        paged_attention_advance(window, pages, pages, tables[:2], rows, implementation=implementation)
