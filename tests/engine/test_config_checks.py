"""Checks that families share: what they refuse, word for word, and what they let through."""

import pytest

from engine.config_checks import check_experts, check_fixed, check_heads, check_layer_types
from engine.errors import ConfigError


@pytest.mark.parametrize("raw", [{}, {"act": None}, {"act": "silu"}])
def test_a_key_that_is_absent_null_or_right_passes(raw: dict[str, object]) -> None:
    check_fixed({"model_type": "toy", **raw}, {"act": "silu"})


@pytest.mark.parametrize(
    ("value", "only", "found"),
    [("gelu", "silu", '"gelu"'), (True, False, "true"), ({"factor": 2}, None, '{"factor": 2}')],
)
def test_a_key_with_another_value_is_refused(value: object, only: object, found: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fixed({"model_type": "toy", "key": value}, {"key": only})
    words = {"silu": '"silu"', False: "false", None: "null"}[only]  # type: ignore[index]
    assert str(caught.value) == (
        f"toy computes key {words} only\n"
        f"  found  {found}\n"
        "  next   use a snapshot whose config.json says so"
    )  # fmt: skip


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 4, "kv_heads": 4, "head_width": 8},
        {"heads": 4, "kv_heads": 1, "head_width": 9, "rotated": 4},
        {"heads": 4, "kv_heads": 2, "head_width": 8, "rotated": 8},
        {"heads": 4, "kv_heads": 2, "head_width": 8, "width": 32},
    ],
)
def test_heads_that_fit_pass(sizes: dict[str, int]) -> None:
    check_heads(**sizes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_width", "rotated"),
    [
        pytest.param(4, 3, 8, 8, id="groups"),
        pytest.param(4, 8, 8, 8, id="more-keys-than-queries"),
        pytest.param(0, 1, 8, 8, id="none"),
        pytest.param(4, 0, 8, 8, id="no-keys"),
        pytest.param(4, 2, 8, 5, id="odd"),
        pytest.param(4, 2, 8, 0, id="nothing-rotated"),
        pytest.param(4, 2, 8, 10, id="more-rotated-than-there-is"),
    ],
)
def test_heads_that_do_not_fit_are_refused(*, heads: int, kv_heads: int, head_width: int, rotated: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_heads(heads=heads, kv_heads=kv_heads, head_width=head_width, rotated=rotated)
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  num attention heads  {heads}\n"
        f"  num key value heads  {kv_heads}\n"
        f"  head dim             {head_width}\n"
        f"  rotated              {rotated}\n"
        "  next                 mend config.json"
    )


def test_all_of_an_odd_head_cannot_rotate() -> None:
    with pytest.raises(ConfigError, match="rotated              7"):
        check_heads(heads=2, kv_heads=1, head_width=7)


@pytest.mark.parametrize(("experts", "chosen"), [(8, 0), (8, 9), (0, 0)])
def test_a_choice_without_enough_experts_is_refused(experts: int, chosen: int) -> None:
    check_experts(experts=8, chosen=8)
    check_experts(experts=8, chosen=1)
    with pytest.raises(ConfigError) as caught:
        check_experts(experts=experts, chosen=chosen)
    assert str(caught.value) == (
        "the experts of config.json do not fit together\n"
        f"  experts              {experts}\n"
        f"  num experts per tok  {chosen}\n"
        "  next                 mend config.json"
    )


@pytest.mark.parametrize("width", [31, 33, 64])
def test_heads_that_do_not_share_out_the_width_are_refused(width: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_heads(heads=4, kv_heads=2, head_width=8, width=width)
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  hidden size          {width}\n"
        "  num attention heads  4\n"
        "  num key value heads  2\n"
        "  head dim             8\n"
        "  rotated              8\n"
        "  next                 mend config.json"
    )


@pytest.mark.parametrize(
    ("kinds", "window", "slides"),
    [
        (["full_attention"] * 2, None, False),
        (["full_attention"] * 2, 0, True),
        (["sliding_attention", "full_attention"], 1, True),
    ],
)
def test_layers_that_are_computed_pass(kinds: list[str], *, window: int | None, slides: bool) -> None:
    check_layer_types({}, kinds, layers=2, window=window, slides=slides)


@pytest.mark.parametrize(
    ("kinds", "window", "told"),
    [
        (["sliding_attention"] * 2, None, "2 of kind sliding_attention"),
        (["sliding_attention"] * 2, -1, "2 of kind sliding_attention"),
        (["full_attention"] * 3, 4, "3 of kind full_attention"),
        (["full_attention", "none"], 4, "2 of kind full_attention, none"),
        ([], 4, "0 of kind none"),
    ],
)
def test_layers_that_are_not_computed_are_refused(kinds: list[str], window: int | None, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_layer_types({"model_type": "toy"}, kinds, layers=2, window=window)
    assert str(caught.value) == (
        "toy has no such layers\n"
        f"  layer types        {told}\n"
        "  num hidden layers  2\n"
        f"  sliding window     {window}\n"
        "  known              full_attention, or sliding_attention with a sliding_window of at least 1\n"
        "  next               mend config.json"
    )


def test_a_family_without_windows_refuses_a_layer_that_slides() -> None:
    with pytest.raises(ConfigError) as caught:
        check_layer_types({"model_type": "toy"}, ["sliding_attention"], layers=1, window=4, slides=False)
    assert str(caught.value) == (
        "toy has no such layers\n"
        "  layer types        1 of kind sliding_attention\n"
        "  num hidden layers  1\n"
        "  known              full_attention\n"
        "  next               mend config.json"
    )
