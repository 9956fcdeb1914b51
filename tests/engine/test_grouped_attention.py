"""Grouped attention: positions only where it rotates, its own scale and window, and no seam between two calls."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import mlx.core as mx
import pytest

from engine.attention import attend
from engine.cache.plain import PlainCache
from engine.cache.protocol import Heads
from engine.cache.rotating import RotatingCache
from engine.checkpoint import Checkpoint
from engine.grouped_attention import GroupedAttention
from engine.norm import RMSNorm
from engine.quantization import Quantization
from engine.rope import make_rope

Check = Callable[..., None]
Normal = Callable[..., mx.array]
D, H, K, E = 16, 4, 2, 8


@pytest.fixture
def layer(tmp_path: Path, normal: Normal) -> Callable[..., GroupedAttention]:
    def make(*, rotates: bool, bias: bool = False, out_bias: bool | None = None) -> GroupedAttention:
        shapes = {"q_proj": (H * E, D), "k_proj": (K * E, D), "v_proj": (K * E, D), "o_proj": (D, H * E)}
        tensors = {f"m.{name}.weight": normal(i, shape) / 4 for i, (name, shape) in enumerate(shapes.items())}
        if bias:
            tensors |= {f"m.{name}.bias": normal(9 + i, shape[:1]) for i, (name, shape) in enumerate(shapes.items())}
        if out_bias is False:
            tensors.pop("m.o_proj.bias")
        folder = Path(mkdtemp(dir=tmp_path))  # arrays are read when they are needed: one folder a layer
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
        checkpoint = Checkpoint.open(folder, dtype=mx.float32, quantization=Quantization())
        taken = GroupedAttention.take(
            checkpoint,
            "m",
            width=D,
            heads=H,
            kv_heads=K,
            head_width=E,
            bias=bias,
            scale=0.5,
            rope=make_rope(E, base=100.0) if rotates else None,
            out_bias=out_bias,
        )
        checkpoint.finish(dropped={})
        return taken

    return make


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotates", [False, True])
def test_two_calls_are_one(
    layer: Callable[..., GroupedAttention], normal: Normal, same_bits: Check, *, rotates: bool, bias: bool
) -> None:
    module, x = layer(rotates=rotates, bias=bias), normal(20, (1, 7, D))
    whole, _ = module(x, PlainCache())
    first, cache = module(x[:, :3], PlainCache())
    second, cache = module(x[:, 3:], cache)
    same_bits(whole, mx.concatenate([first, second], axis=1))
    assert cache.offset == 7


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_attention_between_projections(
    layer: Callable[..., GroupedAttention], normal: Normal, same_bits: Check, *, bias: bool
) -> None:
    module, x = layer(rotates=False, bias=bias), normal(20, (2, 5, D))
    q, k, v = (
        projection(x).reshape(2, 5, heads, E).transpose(0, 2, 1, 3)
        for projection, heads in ((module.q, H), (module.k, K), (module.v, K))
    )
    out = attend(q, k, v, scale=0.5, mask="causal").transpose(0, 2, 1, 3).reshape(2, 5, H * E)
    same_bits(module.o(out), module(x, PlainCache())[0])


def test_the_projection_out_may_be_alone_in_having_no_bias(
    layer: Callable[..., GroupedAttention], normal: Normal, same_bits: Check
) -> None:
    with_all, without, x = (
        layer(rotates=True, bias=True),
        layer(rotates=True, bias=True, out_bias=False),
        normal(20, (1, 5, D)),
    )
    assert with_all.o.bias is not None
    assert without.o.bias is None
    same_bits(with_all(x, PlainCache())[0], without(x, PlainCache())[0] + with_all.o.bias)


def test_a_window_bounds_what_is_seen_even_where_the_cache_keeps_all(
    layer: Callable[..., GroupedAttention], normal: Normal, same_bits: Check, other_bits: Check
) -> None:
    module, x = replace(layer(rotates=True), window=3), normal(20, (1, 7, D))
    whole, _ = module(x, PlainCache())
    same_bits(module(x, RotatingCache(max_size=3))[0], whole)
    changed = mx.concatenate([-x[:, :1], x[:, 1:]], axis=1)
    seen, _ = module(changed, PlainCache())
    other_bits(whole[:, :3], seen[:, :3])
    same_bits(whole[:, 3:], seen[:, 3:])


def test_queries_and_keys_are_normalised_head_by_head_before_they_rotate(
    layer: Callable[..., GroupedAttention], normal: Normal, same_bits: Check
) -> None:
    plain, x = layer(rotates=True), normal(20, (2, 5, D))
    q_norm, k_norm = (RMSNorm(path="", weight=normal(i, (E,)), eps=1e-3) for i in (30, 31))
    q, k, v = (p(x).reshape(2, 5, -1, E) for p in (plain.q, plain.k, plain.v))
    assert plain.rope is not None
    q, k = plain.rope(q_norm(q).swapaxes(1, 2), 0), plain.rope(k_norm(k).swapaxes(1, 2), 0)
    out = attend(q, k, v.swapaxes(1, 2), scale=0.5, mask="causal").swapaxes(1, 2).reshape(2, 5, H * E)
    same_bits(plain.o(out), replace(plain, q_norm=q_norm, k_norm=k_norm)(x, PlainCache())[0])


def test_only_a_rotation_tells_when(layer: Callable[..., GroupedAttention], normal: Normal) -> None:
    x = normal(20, (1, 6, D))
    swapped = mx.concatenate([x[:, 1:2], x[:, :1], x[:, 2:]], axis=1)

    def last(module: GroupedAttention, of: mx.array) -> mx.array:
        return module(of, PlainCache())[0][:, -1]

    blind, rotating = layer(rotates=False), layer(rotates=True)
    assert mx.abs(last(blind, x) - last(blind, swapped)).max().item() < 1e-5  # the order of a sum rounds
    assert mx.abs(last(rotating, x) - last(rotating, swapped)).max().item() > 1e-3


def test_the_scale_counts(layer: Callable[..., GroupedAttention], normal: Normal, other_bits: Check) -> None:
    module, x = layer(rotates=True), normal(20, (1, 6, D))
    other_bits(module(x, PlainCache())[0], replace(module, scale=0.25)(x, PlainCache())[0])


def test_the_cache_gets_rotated_keys_and_plain_values(
    layer: Callable[..., GroupedAttention], normal: Normal, same_bits: Check
) -> None:
    module, x = layer(rotates=True), normal(20, (1, 4, D))
    _, cache = module(x, PlainCache())
    _, keys, values = cache.append(mx.zeros((1, K, 1, E)), mx.zeros((1, K, 1, E)))
    assert module.rope is not None

    def heads(of: mx.array) -> mx.array:
        return of.reshape(1, 4, K, E).swapaxes(1, 2)

    same_bits(module.rope(heads(module.k(x)), 0), _four(keys))
    same_bits(heads(module.v(x)), _four(values))


def _four(heads: Heads) -> mx.array:
    assert isinstance(heads, mx.array)
    return heads[:, :, :4]
