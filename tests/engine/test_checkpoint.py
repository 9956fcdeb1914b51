"""Whatever is wrong with the weights is a `CheckpointError` before the first forward, and never another type."""

import json
import struct
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.model import open_model
from engine.quantization import Quantization

UP = "model.layers.1.mlp.up_proj.weight"
GOOD = {"a": ("F16", [2], [0, 4]), "b": ("F32", [1, 2], [4, 12])}
FETCH = "fetch the snapshot again"


def file_of(entries: dict[str, tuple[str, list[int], list[int]]] | bytes, data: bytes) -> bytes:
    """A safetensors file of a header that may be wrong."""
    if isinstance(entries, dict):
        keys = ("dtype", "shape", "data_offsets")
        entries = json.dumps({name: dict(zip(keys, entry, strict=True)) for name, entry in entries.items()}).encode()
    return struct.pack("<Q", len(entries)) + entries + data


def opened(folder: Path, content: bytes | None = None) -> Checkpoint:
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    return Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization())


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    return str(caught.value)


def take_all(folder: Path, content: bytes) -> None:
    checkpoint = opened(folder, content)
    mx.eval(checkpoint.take("a", (2,)), checkpoint.take("b", (1, 2)))
    checkpoint.finish(dropped={})


# a model folder as a whole


def test_weights_that_belong_to_the_config_open(write_llama: Callable[..., Path]) -> None:
    assert open_model(write_llama(), dtype="f32").vocabulary == 128


def test_a_missing_tensor_is_named_with_the_near_ones(
    write_llama: Callable[..., Path], edit_weights: Callable[..., None]
) -> None:
    folder = write_llama()
    edit_weights(folder, {UP: None, "model.layers.1.mlp.up_porj.weight": mx.zeros((96, 64))})
    assert refusal(lambda: open_model(folder, dtype="f32")) == (
        f"the checkpoint has no tensor {UP}\n"
        f"  folder  {folder.name}\n"
        "  near    model.layers.1.mlp.up_porj.weight, model.layers.1.mlp.down_proj.weight\n"
        "  next    take the weights that belong to this config.json"
    )


def test_a_missing_tensor_without_near_ones_says_so(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, file_of(GOOD, bytes(12)))
    assert "\n  near    none\n" in refusal(lambda: checkpoint.take("model.norm.weight", (2,)))


@pytest.mark.parametrize(
    ("extra", "first", "named"),
    [
        (["x"], "the checkpoint has 1 tensor that the config does not account for", "x"),
        (["z", "x"], "the checkpoint has 2 tensors that the config does not account for", "x, z"),
        (list("vwxyz"), "the checkpoint has 5 tensors that the config does not account for", "v, w, x and 2 more"),
    ],
)
def test_tensors_left_over_are_refused(
    write_llama: Callable[..., Path], edit_weights: Callable[..., None], extra: list[str], first: str, named: str
) -> None:
    folder = write_llama()
    edit_weights(folder, {name: mx.zeros((1,)) for name in extra})
    assert refusal(lambda: open_model(folder, dtype="f32")) == (
        f"{first}\n  tensors  {named}\n  next     take the config.json that belongs to these weights"
    )


def test_one_layer_more_than_the_config_has_is_refused(
    write_llama: Callable[..., Path], edit_json: Callable[..., None]
) -> None:
    folder = write_llama()
    edit_json(folder / "config.json", num_hidden_layers=1)
    assert "9 tensors that the config does not account for" in refusal(lambda: open_model(folder, dtype="f32"))


@pytest.mark.parametrize(
    ("array", "found"), [(mx.zeros((64, 96)), [64, 96]), (mx.zeros((96, 65)), [96, 65]), (mx.zeros((6144,)), [6144])]
)
def test_a_wrong_shape_is_refused(
    write_llama: Callable[..., Path], edit_weights: Callable[..., None], array: mx.array, found: list[int]
) -> None:
    folder = write_llama()
    edit_weights(folder, {UP: array})
    assert refusal(lambda: open_model(folder, dtype="f32")) == (
        f"tensor {UP} has the wrong shape\n"
        "  expected  [96, 64]\n"
        f"  found     {found}\n"
        "  next      take the weights that belong to this config.json"
    )


@pytest.mark.parametrize("dtype", [mx.uint32, mx.int32, mx.uint8, mx.bool_, mx.complex64])
def test_a_dense_tensor_that_is_not_floating_is_refused(
    write_llama: Callable[..., Path], edit_weights: Callable[..., None], dtype: mx.Dtype
) -> None:
    folder = write_llama()
    edit_weights(folder, {UP: mx.zeros((96, 64), dtype=dtype)})
    assert refusal(lambda: open_model(folder, dtype="f32")) == (
        f"tensor {UP} has the wrong dtype\n"
        "  expected  a floating dtype\n"
        f"  found     {dtype}\n"
        "  next      compare the quantization entry of config.json with the weights"
    )


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32, mx.uint16])
def test_packed_words_that_are_not_uint32_are_refused(
    write_llama: Callable[..., Path],
    edit_weights: Callable[..., None],
    edit_json: Callable[..., None],
    dtype: mx.Dtype,
) -> None:
    folder, module = write_llama(), UP.removesuffix(".weight")
    edit_json(folder / "config.json", quantization={"bits": 4, "group_size": 32})
    scales = {f"{module}.{part}": mx.zeros((96, 2)) for part in ("scales", "biases")}
    edit_weights(folder, {UP: mx.zeros((96, 8), dtype=dtype), **scales})
    assert refusal(lambda: open_model(folder, dtype="f32")) == (
        f"tensor {UP} has the wrong dtype\n"
        "  expected  mlx.core.uint32\n"
        f"  found     {dtype}\n"
        "  next      compare the quantization entry of config.json with the weights"
    )


# handing out


def test_a_tensor_is_handed_out_once(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, file_of(GOOD, bytes(12)))
    checkpoint.take("a", (2,))
    assert "a" not in checkpoint
    assert refusal(lambda: checkpoint.take("a", (2,))) == (
        "tensor a is used twice\n  next  report it: the family is at fault"
    )


def test_floating_tensors_are_cast_and_packed_words_are_not(tmp_path: Path) -> None:
    entries = {"f": ("BF16", [2], [0, 4]), "p": ("U32", [1], [4, 8])}
    checkpoint = opened(tmp_path, file_of(entries, bytes([0x80, 0x3F, 0, 0xC0, 1, 2, 3, 0xFF])))
    cast, words = checkpoint.take("f", (2,)), checkpoint.take("p", (1,), stored=mx.uint32)
    assert (cast.dtype, cast.tolist()) == (mx.float32, [1.0, -2.0])
    assert (words.dtype, words.tolist()) == (mx.uint32, [0xFF030201])


def test_a_drop_pattern_covers_whole_names_only(tmp_path: Path) -> None:
    opened(tmp_path, file_of(GOOD, bytes(12))).finish(dropped={"a": "reason", r"[bc]": "reason"})
    entries = {"rotary.inv_freq": ("F16", [2], [0, 4]), "rotary.inv_freq2": ("F16", [2], [4, 8])}
    checkpoint = opened(tmp_path, file_of(entries, bytes(8)))
    assert "\n  tensors  rotary.inv_freq2\n" in refusal(lambda: checkpoint.finish(dropped={r"rotary\.inv_freq": "it"}))


@pytest.mark.parametrize(
    ("tied", "name"),
    [
        (True, "model.layers.0.self_attn.rotary_emb.inv_freq"),
        (False, "model.layers.11.self_attn.rotary_emb.inv_freq"),
        (True, "lm_head.weight"),
        (True, "lm_head.scales"),
    ],
)
def test_what_the_family_drops_may_be_there(
    write_llama: Callable[..., Path], edit_weights: Callable[..., None], tied: bool, name: str
) -> None:
    folder = write_llama(tie_word_embeddings=tied)
    edit_weights(folder, {name: mx.zeros((128, 64))})
    open_model(folder, dtype="f32")


@pytest.mark.parametrize("name", ["model.layers.x.self_attn.rotary_emb.inv_freq", "lm_head2.weight", "xlm_head.weight"])
def test_what_only_resembles_a_dropped_name_may_not(
    write_llama: Callable[..., Path], edit_weights: Callable[..., None], name: str
) -> None:
    folder = write_llama()
    edit_weights(folder, {name: mx.zeros((128, 64))})
    assert name in refusal(lambda: open_model(folder, dtype="f32"))


# damaged files


def test_the_file_that_the_damages_start_from_is_good(tmp_path: Path) -> None:
    take_all(tmp_path, file_of(GOOD, bytes(12)))


def test_a_file_cut_at_any_length_is_refused(tmp_path: Path) -> None:
    whole = file_of(GOOD, bytes(12))
    for length in range(len(whole)):
        message = refusal(lambda length=length: opened(tmp_path, whole[:length]))  # type: ignore[misc]
        assert message.startswith(f"model.safetensors cannot be used\n  folder  {tmp_path.name}\n  reason  ")
        assert message.endswith(f"\n  next    {FETCH}")


@pytest.mark.parametrize("fraction", [0.0, 0.0005, 0.01, 0.5, 0.99999])
def test_the_truncated_weights_of_a_model_are_refused(write_llama: Callable[..., Path], fraction: float) -> None:
    folder = write_llama()
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * fraction)])
    assert refusal(lambda: open_model(folder, dtype="f32")).startswith("model.safetensors cannot be used\n")


def test_any_flipped_bit_of_a_header_is_refused(tmp_path: Path) -> None:
    whole = file_of(GOOD, bytes(12))
    for place, bit in product(range(len(whole) - 12), range(8)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        refusal(lambda damaged=damaged: take_all(tmp_path, bytes(damaged)))  # type: ignore[misc]


@given(content=st.binary(max_size=64))
@settings(max_examples=60)
def test_arbitrary_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    refusal(lambda: take_all(folder, content))


@pytest.mark.parametrize(
    ("entries", "size"),
    [
        pytest.param({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [4, 12])}, 12, id="overlap"),
        pytest.param({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [0, 8])}, 8, id="shared-data"),
        pytest.param({"a": ("F32", [2], [0, 8]), "b": ("F32", [2], [12, 20])}, 20, id="gap"),
        pytest.param({"a": ("F32", [2], [4, 12])}, 12, id="gap-at-the-start"),
        pytest.param({"a": ("F32", [2], [0, 8])}, 9, id="bytes-after-the-last"),
        pytest.param({"a": ("F32", [2], [0, 16])}, 8, id="ends-outside"),
        pytest.param({"a": ("F32", [2], [8, 0])}, 8, id="ends-before-it-begins"),
        pytest.param({"a": ("F32", [3], [0, 8])}, 8, id="shape-and-size-disagree"),
        pytest.param({"a": ("F32", [-2], [0, 8])}, 8, id="negative-size"),
        pytest.param({"a": ("F32", [2**33, 2**33], [0, 0])}, 0, id="size-overflows"),
        pytest.param({"a": ("Q4", [2], [0, 8])}, 8, id="unknown-dtype"),
        pytest.param(b"[]", 0, id="not-an-object"),
        pytest.param(b"{", 0, id="not-json"),
        pytest.param(b'{"__metadata__": {"format": 1}}', 0, id="metadata-that-is-no-text"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, entries: Any, size: int) -> None:
    assert refusal(lambda: opened(tmp_path, file_of(entries, bytes(size)))).startswith(
        f"model.safetensors cannot be used\n  folder  {tmp_path.name}\n  reason  "
    )


@pytest.mark.parametrize("length", [2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    refusal(lambda: opened(tmp_path, struct.pack("<Q", length) + b'{"a":{}}'))


@pytest.mark.parametrize("dtype", ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64", "F8_E4M3"])
def test_a_dtype_that_no_model_computes_in_is_refused(tmp_path: Path, dtype: str) -> None:
    width = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4}.get(dtype, 8)
    checkpoint = opened(tmp_path, file_of({"a": (dtype, [2], [0, 2 * width])}, bytes(2 * width)))
    assert refusal(lambda: checkpoint.take("a", (2,))).startswith("tensor a has the wrong dtype\n")


@pytest.mark.parametrize(("dtype", "bits"), [("F64", 64), ("F8_E5M2", 8), ("F4", 4)])
def test_a_dtype_that_mlx_does_not_read_is_refused(tmp_path: Path, dtype: str, bits: int) -> None:
    size = 2 * bits // 8
    refusal(lambda: opened(tmp_path, file_of({"a": (dtype, [2], [0, size])}, bytes(size))))


# shards


def shard(folder: Path, weight_map: object, files: dict[str, bytes]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, content in files.items():
        (folder / name).write_bytes(content)


A = file_of({"a": ("F16", [2], [0, 4])}, bytes(4))
B = file_of({"b": ("F32", [1, 2], [0, 8])}, bytes(8))


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert refusal(lambda: opened(tmp_path)) == (
        "the snapshot has no weights\n"
        f"  looked for  {tmp_path.name}/*.safetensors\n"
        "  next        fetch it again"
    )  # fmt: skip


def test_the_shards_that_the_index_names_are_one_checkpoint(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}, {"1.safetensors": A, "2.safetensors": B})
    (tmp_path / "other.safetensors").write_bytes(b"not named, so not read")
    checkpoint = opened(tmp_path)
    checkpoint.take("a", (2,))
    checkpoint.take("b", (1, 2))
    checkpoint.finish(dropped={})


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "sub/1.safetensors", ".hidden.safetensors", "..", ".", "a\\b", "./1.safetensors"]
)
def test_a_shard_name_that_leaves_the_folder_or_hides_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "snapshot"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "x", folder / "sub" / "1.safetensors", folder / ".hidden.safetensors", folder / "a\\b"):
        place.write_bytes(A)  # so that only the name can be at fault
    shard(folder, {"a": name}, {"1.safetensors": A})
    assert refusal(lambda: opened(folder)) == (
        "model.safetensors.index.json cannot be used\n"
        "  folder  snapshot\n"
        f"  reason  {name!r} is not a plain file name\n"
        f"  next    {FETCH}"
    )


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\0b",
        "x" * 300,
    ],
)
def test_a_shard_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    shard(tmp_path, {"a": name}, {"1.safetensors": A})
    refusal(lambda: opened(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}, {"1.safetensors": A})
    assert refusal(lambda: opened(tmp_path)) == (
        "shard 2.safetensors is missing\n"
        "  named by  model.safetensors.index.json\n"
        f"  folder    {tmp_path.name}\n"
        f"  next      {FETCH}"
    )


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"}, {"1.safetensors": A, "2.safetensors": A})
    assert refusal(lambda: opened(tmp_path)) == (
        "2.safetensors cannot be used\n"
        f"  folder  {tmp_path.name}\n"
        "  reason  a is in another shard too\n"
        f"  next    {FETCH}"
    )


@pytest.mark.parametrize("weight_map", [None, [], "1.safetensors", {"a": 1}, {"a": None}])
def test_an_index_without_file_names_is_refused(tmp_path: Path, weight_map: object) -> None:
    shard(tmp_path, weight_map, {"1.safetensors": A})
    assert refusal(lambda: opened(tmp_path)) == (
        "model.safetensors.index.json cannot be used\n"
        f"  folder  {tmp_path.name}\n"
        "  reason  it has no weight_map of file names\n"
        f"  next    {FETCH}"
    )


def test_a_shard_that_is_not_called_safetensors_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "weights.bin"}, {"weights.bin": A})
    refusal(lambda: opened(tmp_path))
