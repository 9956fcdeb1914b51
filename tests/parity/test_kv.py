"""The words for KV modes: one a mode, read back to the same mode; parts that do not go together have none."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.errors import CaseError
from parity.kv import KV, KV_BITS, KV_GROUPS, TILED_BITS, LayerWidth

bits, groups = st.sampled_from(KV_BITS), st.sampled_from(KV_GROUPS)
tiles = st.fixed_dictionaries({"tile": st.none() | st.integers(1, 4096)})
lifted = st.fixed_dictionaries({"tile": st.integers(1, 4096), "lifted": st.just(True)})
ring = st.builds(lambda keep, more: {"keep": keep, "max_size": keep + more}, st.integers(0, 9), st.integers(1, 999))
after_forward = st.fixed_dictionaries({"start": st.integers(0, 9999)})
another_order = st.fixed_dictionaries({"order": st.sampled_from(["after-prompt", "from-empty"])})


@st.composite
def configs(draw: st.DrawFn, of: Any = bits) -> tuple[LayerWidth, ...]:
    caches = draw(st.lists(st.integers(0, 60), min_size=1, unique=True))
    return tuple(LayerWidth(cache=cache, bits=draw(of), group_size=draw(groups)) for cache in sorted(caches))


MODES = (
    st.just(KV())
    | ring.map(lambda parts: KV(**parts))
    | st.builds(lambda b, g, when: KV(bits=b, group_size=g, **when), bits, groups, after_forward | another_order)
    | st.builds(lambda b, g, s, r: KV(bits=b, group_size=g, **s, **r), bits, groups, after_forward, ring)
    | st.builds(lambda layers, s: KV(layers=layers, **s), configs(), after_forward)
    | st.builds(lambda layers, t: KV(layers=layers, **t), configs(st.sampled_from(TILED_BITS)), tiles | lifted)
    | st.builds(
        lambda b, g, t, when: KV(bits=b, group_size=g, **t, **when),
        st.sampled_from(TILED_BITS),
        groups,
        tiles | lifted,
        after_forward | another_order,
    )
)


@given(MODES)
def test_a_mode_reads_what_it_writes(kv: KV) -> None:
    assert KV.parse(kv.name) == kv


@given(MODES)
def test_a_word_is_a_safe_part_of_a_path(kv: KV) -> None:
    assert re.fullmatch(r"[a-z0-9_-]+", kv.name)


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        ("fp", KV()),
        ("max16-k4", KV(max_size=16)),
        ("max16-k0-kv4-g32-s7", KV(bits=4, group_size=32, start=7, max_size=16, keep=0)),
        ("kv8-g64-after-prompt", KV(bits=8, order="after-prompt")),
        ("kv8-g64-from-empty-tiled512", KV(bits=8, order="from-empty", tile=512)),
        ("kv4-g64-tiled16-lifted", KV(bits=4, tile=16, lifted=True)),
        (
            "config-8g64_0_2-4g32_3-s5",
            KV(
                layers=(
                    LayerWidth(cache=0, bits=8),
                    LayerWidth(cache=2, bits=8),
                    LayerWidth(cache=3, bits=4, group_size=32),
                ),
                start=5,
            ),
        ),
    ],
)
def test_words_mean_what_they_say(word: str, mode: KV) -> None:
    assert KV.parse(word) == mode
    assert mode.name == word


@pytest.mark.parametrize(
    "word",
    [
        "", "kv8", "kv7-g64", "kv8-g48", "kv8-g64-s", "fp16", "s5", "max16", "max4-k4", "max16-k4-", "lifted",
        "kv8-g64-s3-after-prompt", "kv8-g64-s3-from-empty", "max16-k4-kv8-g64-from-empty", "fp-tiled16",
        "kv8-g64-lifted", "kv6-g64-tiled16", "kv8-g64-tiled0", "config", "config-8g64", "config-8g64_0_0",
        "config-7g64_0", "config-8g64_0-4g64_0", "config-8g64_0-from-empty", "max16-k4-config-8g64_0",
        "config-3g64_0-tiled16",
    ],
)  # fmt: skip
def test_a_word_that_means_nothing_is_refused_by_name(word: str) -> None:
    with pytest.raises(CaseError, match="unknown KV mode") as caught:
        KV.parse(word)
    assert caught.value.next_step == "correct it in parity/cases/*.toml"


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("config-4g32_3-8g64_0", "config-8g64_0-4g32_3"),
        ("config-8g64_2_0", "config-8g64_0_2"),
        ("kv8-g64-s0", "kv8-g64"),
        ("kv08-g64", "kv8-g64"),
    ],
)
def test_a_second_word_for_a_mode_is_refused_with_the_first(word: str, known: str) -> None:
    with pytest.raises(CaseError) as caught:
        KV.parse(word)
    assert str(caught.value) == (
        f"unknown KV mode '{word}'\n"
        f"  known  {known}, which says the same\n"
        "  next   correct it in parity/cases/*.toml"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"bits": 8, "layers": (LayerWidth(cache=0, bits=8),)}, "either kv or config"),
        ({"layers": (LayerWidth(cache=1, bits=8), LayerWidth(cache=0, bits=8))}, "each cache once, by place"),
        ({"order": "from-empty"}, "a start, an order and tiles for packed keys and values alone"),
        ({"bits": 8, "order": "before-forward"}, "a start of 0 or more; the orders after-prompt and from-empty"),
        ({"bits": 8, "start": -1}, "a start of 0 or more; the orders after-prompt and from-empty"),
        ({"bits": 8, "lifted": True}, "lifted tiles"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_with_the_reason(parts: dict[str, Any], reason: str) -> None:
    with pytest.raises(CaseError) as caught:
        KV(**parts)
    assert caught.value.facts == {"known": reason}


def test_widths_are_listed_once_each() -> None:
    assert (KV().widths, KV().packs) == ((), False)
    assert (KV(max_size=16).widths, KV(max_size=16).packs) == ((), False)
    assert KV(bits=4, group_size=32).widths == ((4, 32),)
    assert KV.parse("config-8g64_0_2-4g32_3").widths == ((8, 64), (4, 32))
