import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.models.tiny import build_tiny, draw, write_tiny

SHAPES = {
    "model.embed_tokens.weight": (24, 16),
    "model.norm.weight": (16,),
    "model.layers.0.self_attn.q_proj.weight": (32, 16),
    "model.layers.0.self_attn.q_proj.bias": (32,),
    "lm_head.weight": (24, 16),
}


def test_the_file_is_the_pinned_one(tmp_path: Path) -> None:
    write_tiny(tmp_path, {"model_type": "llama", "b": 1}, SHAPES, seed=7, dtype="BF16")
    digests = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(tmp_path.iterdir())}
    assert digests == {
        "config.json": "7925379b87bff498ffc1f53109054d00f5d870b4bbae50d027dd94534c1db13d",
        "model.safetensors": "17b8a2124bf743fdd9acae225ffd01200627bf19f398de4160d23cd1f6f9606c",
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "llama", "b": 1}


@given(st.permutations(list(SHAPES)))
def test_a_tensor_does_not_depend_on_the_others(names: list[str]) -> None:
    all_of_them = build_tiny(SHAPES)
    assert build_tiny({name: SHAPES[name] for name in names}) == all_of_them
    assert build_tiny({names[0]: SHAPES[names[0]]})[names[0]] == all_of_them[names[0]]


def test_name_and_seed_decide() -> None:
    rows = {name: draw(0, name, 100).tobytes() for name in ("a", "b")}
    rows |= {"seed 1": draw(1, "a", 100).tobytes()}
    assert len(set(rows.values())) == 3


def test_draws_are_exact_multiples_with_the_moments_of_a_normal() -> None:
    values = draw(0, "moments", 200_000)
    steps = values * 65536
    assert np.array_equal(steps, np.round(steps))
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert abs((np.abs(values) < 1).mean() - 0.683) < 0.01
    assert np.abs(values).max() <= 6


def test_each_kind_of_tensor_has_its_spread() -> None:
    big = {
        "model.embed_tokens.weight": (512, 64),
        "model.norm.weight": (4096,),
        "x.weight": (512, 64),
        "x.bias": (4096,),
        "lm_head.weight": (512, 64),
    }
    tensors = build_tiny(big, dtype="F32")
    found = {name: (tensor.values().mean(), tensor.values().std()) for name, tensor in tensors.items()}
    expected = {
        "model.embed_tokens.weight": (0, 0.16),
        "model.norm.weight": (1, 0.1),
        "x.weight": (0, 0.125),
        "x.bias": (0, 0.05),
        "lm_head.weight": (0, 0.375),
    }
    for name, (mean, spread) in expected.items():
        assert abs(found[name][0] - mean) < 0.05 * spread
        assert abs(found[name][1] / spread - 1) < 0.05


def test_what_goes_into_an_activation_that_clips_is_spread_wider() -> None:
    shapes = {
        f"model.layers.0.mlp.experts.{name}.weight": (8, 64, 64) for name in ("gate_proj", "up_proj", "down_proj")
    }
    for model_type, spreads in (("gpt_oss", (0.5, 0.5, 0.125)), ("mixtral", (0.125, 0.125, 0.125))):
        tensors = build_tiny(shapes, dtype="F32", model_type=model_type).values()
        found = [tensor.values().std() for tensor in tensors]
        assert np.allclose(found, spreads, rtol=0.05)


def test_bfloat16_is_the_rounded_float32() -> None:
    wide, narrow = build_tiny(SHAPES, dtype="F32"), build_tiny(SHAPES)
    for name in SHAPES:
        assert narrow[name].dtype == "BF16"
        gap = np.abs(narrow[name].values() - wide[name].values())
        assert (gap <= np.abs(wide[name].values()) * 2.0**-8).all()


@pytest.mark.parametrize(
    ("shapes", "dtype", "said"),
    [(SHAPES, "F16", "BF16 or F32, not 'F16'")],
)
def test_what_no_rule_covers_is_refused(shapes: dict[str, tuple[int, ...]], dtype: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_tiny(shapes, dtype=dtype)
