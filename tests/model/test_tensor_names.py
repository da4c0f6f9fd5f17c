"""The name table, by example."""

import pytest
from weight_folders import FAMILIES, make_config, shapes

from gdn_jax.tensor_names import Piece, canonical_name, is_mtp, num_rows, pieces_of, stored_form


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
        ("model.mtp.fc.weight", "model.mtp.fc.weight"),
        ("norm.weight", "norm.weight"),
        ("model.visual.merger.norm.bias", None),
        ("visual.pos_embed.weight", None),
        ("model.visually.x", "model.visually.x"),
    ],
)
def test_only_known_prefixes_are_taken_off(stored, name):
    assert canonical_name(stored) == name


def test_only_the_mtp_prefix_makes_an_mtp_tensor():
    assert is_mtp("mtp.fc.weight")
    assert not is_mtp("model.mtp.fc.weight")
    assert not is_mtp("mtpx.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_family_has_a_tensor_of_its_own(family):
    config = make_config(family)
    seen: set[tuple[str, int]] = set()
    for path, shape in shapes(config).items():
        pieces = pieces_of(path, shape, config, ())
        runs = {(piece.name, piece.first_row) for piece in pieces}
        assert sum(piece.num_rows for piece in pieces) == num_rows(shape)
        assert len(runs) == len(pieces)
        assert not runs & seen
        seen |= runs


def test_an_unknown_parameter_is_a_key_error():
    with pytest.raises(KeyError):
        pieces_of(("decoder", "layers", 0, "mixer", "other", "weight"), (2, 2), make_config("q35"), ())


def rows_of(pieces: list[Piece]) -> list[int]:
    """Return, for each row of the parameter, the row of the tensor that goes there."""
    placed = {piece.target_row + i: piece.first_row + i for piece in pieces for i in range(piece.num_rows)}
    return [placed[row] for row in range(len(placed))]


def test_packed_projections_are_unpacked_by_key_head():
    # Key heads 0 and 1, dk = 1, two value heads each, dv = 1: packed rows are q0 k0 v0 v1 z0 z1 q1 k1 v2 v3 z2 z3.
    sizes = {"linear_key_head_dim": 1, "linear_value_head_dim": 1, "linear_num_value_heads": 4}
    config = make_config("next", **sizes)
    prefix = ("decoder", "layers", 0, "mixer")

    def pieces(leaf: str, rows: int) -> list[Piece]:
        return pieces_of((*prefix, leaf, "weight"), (rows, 8), config, ())

    qkv = pieces("in_proj_qkv", 8)
    assert {(piece.name, piece.shape) for piece in qkv} == {("model.layers.0.linear_attn.in_proj_qkvz.weight", (12, 8))}
    assert rows_of(qkv) == [0, 6, 1, 7, 2, 3, 8, 9]
    assert rows_of(pieces("in_proj_z", 4)) == [4, 5, 10, 11]
    # Packed gates: b0 b1 a0 a1 b2 b3 a2 a3.
    gate_b = pieces("in_proj_b", 4)
    assert {(piece.name, piece.shape) for piece in gate_b} == {("model.layers.0.linear_attn.in_proj_ba.weight", (8, 8))}
    assert rows_of(gate_b) == [0, 1, 4, 5]
    assert rows_of(pieces("in_proj_a", 4)) == [2, 3, 6, 7]


def test_the_form_that_exists_is_taken_whatever_the_family():
    path, shape = ("mtp", "layer", "mlp", "experts_down"), (3, 8, 5)
    fused, single = "mtp.layers.0.mlp.experts.down_proj", "mtp.layers.0.mlp.experts.2.down_proj.weight"
    for family in ("next", "q35_moe"):
        config = make_config(family)
        assert [piece.name for piece in pieces_of(path, shape, config, {fused})] == [fused]
        assert pieces_of(path, shape, config, {single})[2].name == single


@pytest.mark.parametrize(
    ("family", "experts", "gates"),
    [
        ("next", "mlp.experts.0.down_proj.weight", "linear_attn.in_proj_ba.weight"),
        ("q35_moe", "mlp.experts.down_proj", "linear_attn.in_proj_b.weight"),
    ],
)
def test_where_no_form_exists_the_familys_usual_one_is_asked_for(family, experts, gates):
    config, layer = make_config(family), ("decoder", "layers", 0)
    assert pieces_of((*layer, "mlp", "experts_down"), (3, 8, 5), config, ())[0].name == f"model.layers.0.{experts}"
    assert pieces_of((*layer, "mixer", "in_proj_b", "weight"), (6, 8), config, ())[0].name == f"model.layers.0.{gates}"


def test_what_is_written_is_what_is_read_of_the_newer_dense_family():
    config = make_config("q35")
    for path, shape in [(("decoder", "layers", 0, "mixer", "conv_weight"), (8, 4)), (("mtp", "fc", "weight"), (4, 8))]:
        (piece,) = pieces_of(path, shape, config, ())
        assert stored_form(path, shape) == (piece.name, piece.shape)
    assert stored_form(("decoder", "layers", 0, "mixer", "conv_weight"), (8, 4))[1] == (8, 1, 4)
