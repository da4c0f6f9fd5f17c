"""Which files of a folder count, what a sound header is, and reading rows."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file
from weight_folders import BF16, FP8, save, save_shards, write_raw

from gdn_jax.errors import WeightsError
from gdn_jax.tensor_files import TensorFiles, first_few, list_tensors, read_header

TENSORS = {"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.float32), "c": np.ones((1, 2, 2), np.float32)}
SHARDS = ["one.safetensors", "two.safetensors"]


def edit_index(folder, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_single_file_lists_its_tensors_as_stored(tmp_path):
    save(tmp_path, TENSORS | {"d": np.ones((4, 4), FP8), "e": np.ones(3, np.uint8)})
    found = list_tensors(tmp_path)
    assert {name: (t.dtype, t.shape, t.num_bytes) for name, t in found.items()} == {
        "a": ("BF16", (2, 3), 12),
        "b": ("BF16", (5,), 10),
        "c": ("BF16", (1, 2, 2), 8),
        "d": ("F8_E4M3", (4, 4), 16),
        "e": ("U8", (3,), 3),
    }


def test_an_empty_tensor_and_metadata_are_sound(tmp_path):
    save_file({"a": np.ones((0, 3), np.float32)}, tmp_path / "model.safetensors", metadata={"format": "np"})
    assert list_tensors(tmp_path)["a"].shape == (0, 3)


def test_shards_are_those_of_the_index_and_strays_are_left_out_and_named(tmp_path, caplog):
    caplog.set_level("INFO")
    save_shards(tmp_path, TENSORS, SHARDS)
    save(tmp_path, {"a": np.full((2, 3), 9, np.float32)})
    found = TensorFiles(tmp_path).tensors
    assert {name: tensor.file.name for name, tensor in found.items()} == {
        "a": SHARDS[0],
        "b": SHARDS[1],
        "c": SHARDS[0],
    }
    assert "not read" in caplog.text
    assert "model.safetensors" in caplog.text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], ["has neither", "load_format='dummy'"]),
        (["pytorch_model.bin"], ["pytorch_model.bin", "only safetensors is read"]),
        (["consolidated.pth", "config.json"], ["consolidated.pth", "only safetensors is read"]),
        (["model-00001-of-00002.safetensors"], ["model-00001-of-00002.safetensors", "fetch the index"]),
        (["x.safetensors", "x.bin"], ["x.bin, x.safetensors", "fetch the index"]),
    ],
)
def test_a_folder_without_weights_says_what_it_has(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(WeightsError) as error:
        list_tensors(tmp_path)
    for word in ["weights must be in model.safetensors", str(tmp_path), *words]:
        assert word in str(error.value)


def test_a_broken_link_and_a_folder_are_no_weights_and_said_to_be_none(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(WeightsError, match=r"model\.safetensors must be a file; it is a link to a file that is not"):
        list_tensors(tmp_path)
    (tmp_path / "gone").mkdir()
    with pytest.raises(WeightsError, match="it is no file; fetch it again"):
        list_tensors(tmp_path)


def test_a_folder_that_does_not_exist_is_a_weights_error(tmp_path):
    with pytest.raises(WeightsError, match="has neither"):
        list_tensors(tmp_path / "nowhere")


def test_missing_shards_are_all_named(tmp_path):
    save_shards(tmp_path, TENSORS, [*SHARDS, "three.safetensors"])
    for name in SHARDS:
        (tmp_path / name).unlink()
    with pytest.raises(WeightsError, match=r"names files that are missing .*: one\.safetensors, two\.safetensors$"):
        list_tensors(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path):
    save_shards(tmp_path, TENSORS, SHARDS)
    edit_index(tmp_path, lambda weight_map: weight_map.update(a=SHARDS[1], z=SHARDS[0]))
    with pytest.raises(
        WeightsError, match=r"not in the file it gives .*: a in two\.safetensors, z in one\.safetensors"
    ):
        list_tensors(tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path):
    save_shards(tmp_path, TENSORS, SHARDS)
    edit_index(tmp_path, lambda weight_map: weight_map.pop("c"))
    with pytest.raises(WeightsError, match=r"must name every tensor of its files .*: c in one\.safetensors"):
        list_tensors(tmp_path)


def test_a_tensor_in_two_shards_is_named_with_both(tmp_path):
    save_shards(tmp_path, TENSORS, SHARDS)
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, tmp_path / SHARDS[1])
    with pytest.raises(WeightsError, match=r"one file only .*: a in one\.safetensors and two\.safetensors"):
        list_tensors(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "non-empty object weight_map; got None"),
        (b"{}", "non-empty object weight_map; got None"),
        (b'{"weight_map": {}}', "non-empty object weight_map; got {}"),
        (b'{"weight_map": ["a"]}', "non-empty object weight_map"),
        (b'{"weight_map": {"a": 3}}', "files of its own folder; got 3 for a"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "files of its own folder; got '../x.safetensors' for a"),
        (b'{"weight_map": {"a": "/x.safetensors"}}', "files of its own folder"),
        (b'{"weight_map": {"a": ""}}', "files of its own folder"),
        (b'{"weight_map": {"a": ".."}}', "files of its own folder"),
        (b'{"weight_map": {"a": "x\\u0000"}}', "files of its own folder"),
    ],
)
def test_a_damaged_index_is_a_weights_error(tmp_path, content, words):
    save(tmp_path, TENSORS)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(WeightsError) as error:
        list_tensors(tmp_path)
    assert words in str(error.value)
    assert "index.json" in str(error.value)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", 8, "header cannot be read"),
        (b'{"a":\xff}', 8, "header cannot be read"),
        (b"[" * 100_000, 8, "header cannot be read"),
        (b'{"a":' + b"1" * 5000 + b"}", 8, "header cannot be read"),
        (b'{"a": {}, "a": {}}', 8, "a name comes twice"),
        ([], 8, "not a JSON object"),
        (3, 8, "not a JSON object"),
        ({"a": 3}, 8, "tensor a has dtype None"),
        ({"a": ENTRY | {"dtype": "F99"}}, 8, "tensor a has dtype 'F99'"),
        ({"a": ENTRY | {"dtype": ["F32"]}}, 8, "tensor a has dtype ['F32']"),
        ({"a": ENTRY | {"shape": [-2]}}, 8, "shape [-2]"),
        ({"a": ENTRY | {"shape": [2.0]}}, 8, "shape [2.0]"),
        ({"a": ENTRY | {"shape": [2, True]}}, 8, "shape [2, True]"),
        ({"a": ENTRY | {"shape": None}}, 8, "shape None"),
        ({"a": ENTRY | {"data_offsets": [0]}}, 8, "offsets [0]"),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, 8, "needs 8 bytes; its offsets are [8, 0]"),
        ({"a": ENTRY | {"data_offsets": [0, 12]}}, 12, "needs 8 bytes; its offsets are [0, 12]"),
        ({"a": ENTRY, "b": ENTRY}, 8, "tensor b overlaps the tensor before it"),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, 12, "tensor a leaves a gap before it"),
        ({"a": ENTRY, "b": ENTRY | {"data_offsets": [16, 24]}}, 24, "tensor b leaves a gap before it"),
        ({"a": ENTRY}, 7, "describes"),
        ({"a": ENTRY}, 9, "describes"),
    ],
)
def test_a_damaged_header_is_a_weights_error_that_says_where(tmp_path, header, data, words):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, bytes(data))
    with pytest.raises(WeightsError) as error:
        read_header(path)
    assert words in str(error.value)
    assert str(error.value).startswith(f"{path} must be a whole safetensors file")
    assert "fetch the file again" in str(error.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (bytes(8), "its header length reads 0"),
        (bytes(100), "its header length reads 0"),
        ((3).to_bytes(8, "little") + b"{}", "its header length reads 3"),
        (b"\xff" * 8 + b"{}", "its header length reads 18446744073709551615"),
        (b"PK\x03\x04 a zip archive, as pickled weights are", "its header length reads"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "its header length reads"),
    ],
)
def test_a_file_that_is_not_safetensors_is_a_weights_error(tmp_path, content, words):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError) as error:
        list_tensors(tmp_path)
    assert words in str(error.value)


def test_a_header_beyond_the_formats_limit_is_refused_unread(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)  # sparse
    with pytest.raises(WeightsError, match="header length reads 100000001"):
        read_header(path)


def test_rows_are_read_from_any_place_into_callers_memory(tmp_path):
    matrix = np.arange(24, dtype=np.float32).reshape(6, 4)
    cube = np.arange(24, dtype=np.float32).reshape(2, 3, 4) + 100
    save(tmp_path, {"x": np.ones(3, np.float32), "matrix": matrix, "cube": cube}, np.dtype("float32"))
    files = TensorFiles(tmp_path)
    out = np.full((4, 4), -1, np.float32)
    files.read_rows(files.tensors["matrix"], 3, out[:2])
    files.read_rows(files.tensors["cube"], 2, out[2:])
    np.testing.assert_array_equal(out, np.concatenate([matrix[3:5], cube.reshape(6, 4)[2:4]]))
    files.close()


def test_a_read_that_comes_in_parts_is_completed(tmp_path, monkeypatch):
    matrix = np.arange(60, dtype=np.float32).reshape(6, 10)
    save(tmp_path, {"matrix": matrix}, np.dtype("float32"))
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:7]], offset))
    files = TensorFiles(tmp_path)
    out = np.full((6, 10), -1, np.float32)
    files.read_rows(files.tensors["matrix"], 0, out)
    files.close()
    np.testing.assert_array_equal(out, matrix)


def test_a_file_that_is_gone_when_it_is_read_is_a_weights_error(tmp_path):
    save(tmp_path, {"matrix": np.ones((2, 2), np.float32)})
    files = TensorFiles(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read .*check the file"):
        files.read_rows(files.tensors["matrix"], 0, np.empty((2, 2), BF16))


def test_closing_gives_the_file_descriptors_back(tmp_path):
    save_shards(tmp_path, TENSORS, SHARDS)
    files = TensorFiles(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a", "b", "a"):
        files.read_rows(files.tensors[name], 0, np.empty((1, TENSORS[name].shape[-1]), BF16))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    files.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_long_lists_are_cut_to_five_and_a_count():
    assert first_few(["a", "b"]) == "a, b"
    assert first_few("abcde") == "a, b, c, d, e"
    assert first_few("abcdefg") == "a, b, c, d, e, ... (7 in all)"
