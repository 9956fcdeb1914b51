"""A small Gemma 3 in parts: joined, converted exactly, opened by the engine; terms first, and damage refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from engine.model import open_model
from parity import safetensors_file
from parity.errors import SnapshotError
from parity.models.catalogue import Entry, GgufPartsSource
from parity.models.fetch import ensure_entry
from parity.models.gguf_gemma3 import LAYER_NAMES, convert, hub_name
from parity.models.terms import Terms, is_accepted
from parity.models.wheel import WheelMember
from parity.snapshot import Snapshot

D, F, H, E, V = 64, 96, 2, 32, 24
TERMS = Terms(title="Toy Terms", address="toy.example/terms", restrictions="toy.example/not", version="1 May 2020")
SHAPES = {
    "attn_q": (H * E, D),
    "attn_k": (E, D),
    "attn_v": (E, D),
    "attn_output": (D, H * E),
    "ffn_gate": (F, D),
    "ffn_up": (F, D),
    "ffn_down": (D, F),
    "attn_q_norm": (E,),
    "attn_k_norm": (E,),
}


def write_gguf(path: Path, *, architecture: str = "gemma3", norm: float = 1.25, extra: str | None = None) -> Path:
    """Two layers: norms F32 and all alike, the rest Q5_0, which mlx cannot read."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(1)
    writer.add_key_length(E)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<pad>", "<eos>", "<bos>", "<unk>", *(chr(97 + i) for i in range(V - 4))])
    writer.add_token_types([3] * 4 + [1] * (V - 4))
    writer.add_token_scores([float(-i) for i in range(V)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    shapes = {f"blk.{i}.{name}": SHAPES.get(name, (D,)) for i in range(2) for name in LAYER_NAMES}
    shapes |= {"token_embd": (V, D), "output_norm": (D,)} | ({extra: (D,)} if extra else {})
    for seed, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.full(shape, norm, np.float32))
            continue
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        kind = GGMLQuantizationType.Q5_0
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert(write_gguf(tmp_path / "small.gguf"), folder)
    return folder


@pytest.fixture
def entry(tmp_path: Path, converted: Path, make_wheel: Callable[..., WheelMember]) -> Entry:
    whole = (tmp_path / "small.gguf").read_bytes()
    cuts = (whole[:1000], whole[1000:])
    return Entry(
        name="small",
        title="small",
        dtype="float32",
        licence="Toy",
        source=GgufPartsSource(
            parts=tuple(make_wheel(part, f"assay-part{i}") for i, part in enumerate(cuts)),
            sha256=sha256(whole).hexdigest(),
        ),
        files=Snapshot.read(converted).files,
        terms=TERMS,
    )


def test_norms_lose_their_one(converted: Path) -> None:
    tensors = safetensors_file.loads((converted / "model.safetensors").read_bytes())
    assert len(tensors) == 2 * len(LAYER_NAMES) + 2
    for name, tensor in tensors.items():
        assert tensor.dtype == "F32"
        if name.endswith("norm.weight"):
            assert set(tensor.values().ravel()) == {0.25}


def test_the_embedding_is_dequantised_exactly(converted: Path) -> None:
    tensor = safetensors_file.loads((converted / "model.safetensors").read_bytes())["model.embed_tokens.weight"]
    seed = 2 * len(LAYER_NAMES)
    drawn = np.random.default_rng(seed).standard_normal((V, D)).astype(np.float32)
    kind = GGMLQuantizationType.Q5_0
    expected = dequantize(quantize(drawn, kind), kind).astype(np.float32)
    assert np.array_equal(tensor.bits(), expected.view(np.uint32))


def test_the_engine_opens_it_with_a_tied_head_and_windows(converted: Path) -> None:
    model = open_model(converted, dtype="f32")
    assert [cache.kind for cache in model.make_caches()] == ["rotating-w16-k0"] * 2
    hidden, _ = model.hidden(mx.array([[2, 5, 7]]), model.make_caches())
    assert model.logits(hidden).shape == (1, 3, V)
    config = json.loads((converted / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["query_pre_attn_scalar"], config["rms_norm_eps"]) == (True, E, 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "llama"}, "the GGUF file is not of a gemma3 model"),
        ({"norm": 1e-9}, "a norm of the GGUF file is not one more than any float32 weight"),
        ({"extra": "blk.0.ffn_exps"}, "the GGUF file holds a tensor that no Gemma 3 text model has"),
    ],
)
def test_what_has_no_exact_form_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        convert(write_gguf(tmp_path / "other.gguf", **options), tmp_path)


def test_names_are_the_hubs() -> None:
    assert hub_name("blk.3.ffn_norm.weight") == "model.layers.3.pre_feedforward_layernorm.weight"
    assert hub_name("blk.3.post_attention_norm.weight") == "model.layers.3.post_attention_layernorm.weight"
    assert hub_name("output_norm.weight") == "model.norm.weight"


def test_terms_come_before_any_download_and_are_remembered(entry: Entry, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with pytest.raises(SnapshotError, match="terms of use that nobody has accepted"):
        ensure_entry(entry, home)
    assert not (home / "downloads").exists()
    said: list[str] = []
    snapshot = ensure_entry(entry, home, accept_terms=True, report=said.append)
    assert snapshot.files == entry.files
    assert said[0] == TERMS.notice("small")
    assert said[-3:] == ["joining 2 parts", "converting small", "hashing small"]
    assert is_accepted("small", TERMS, home)
    assert sorted(f.name for f in snapshot.path.iterdir()) == sorted([*entry.files, ".assay.json"])
    ensure_entry(entry, home, again=True)


def test_a_snapshot_that_is_there_is_not_used_under_terms_that_nobody_accepted(entry: Entry, tmp_path: Path) -> None:
    home = tmp_path / "home"
    ensure_entry(entry, home, accept_terms=True)
    newer = replace(entry, terms=replace(TERMS, version="2 May 2020"))
    with pytest.raises(SnapshotError, match="version of 2 May 2020"):
        ensure_entry(newer, home)


def test_parts_that_do_not_join_to_the_pinned_file_are_refused(entry: Entry, tmp_path: Path) -> None:
    assert isinstance(entry.source, GgufPartsSource)
    swapped = replace(entry, source=replace(entry.source, parts=entry.source.parts[::-1]))
    with pytest.raises(SnapshotError, match="the file joined from its parts is not the pinned one"):
        ensure_entry(swapped, tmp_path / "home", accept_terms=True)
    assert not (tmp_path / "home" / "models" / "small").exists()
