import numpy as np
import pytest

from engine.errors import RequestError
from engine.llama_sampling.draw import draw_discrete
from engine.llama_sampling.generators import Generator, Mt19937, Xoroshiro128Plus, _splitmix64


@pytest.mark.parametrize(
    ("seed", "raw"),
    [(0, [2357136044, 2546248239, 3071714933, 3626093760]), (42, [1608637542, 3421126067, 4083286876, 787846414])],
)
def test_mt19937_gives_the_known_outputs(seed: int, raw: list[int]) -> None:
    generator = Mt19937(seed)
    assert [generator.next_raw() for _ in raw] == raw


@pytest.mark.parametrize(
    ("seed", "doubles"),
    [
        (0, [0.59284461651668263, 0.84426574425659828, 0.85794561998982988, 0.84725173738433124]),
        (42, [0.79654298428784598, 0.18343478789336848]),
    ],
)
def test_mt19937_doubles_are_low_word_then_high_word(seed: int, doubles: list[float]) -> None:
    generator = Mt19937(seed)
    assert [generator.next_double() for _ in doubles] == doubles


def test_mt19937_floats_take_one_output() -> None:
    generator = Mt19937(0)
    assert [float(generator.next_float()) for _ in range(2)] == pytest.approx([0.548813522, 0.592844605], abs=5e-10)


def test_uniforms_that_would_round_to_one_stay_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mt19937, "next_raw", lambda _self: 2**32 - 1)
    generator = Mt19937(0)
    assert generator.next_double() == np.nextafter(1.0, 0.0)
    assert generator.next_float() == np.nextafter(np.float32(1), np.float32(0))


@pytest.mark.parametrize(("seed", "ids"), [(0, [1, 2, 2, 2, 1, 0, 0, 0, 0, 1]), (42, [2, 0, 2, 1, 1, 0, 1, 0, 0, 1])])
def test_a_discrete_distribution_draws_the_known_ids(seed: int, ids: list[int]) -> None:
    generator = Mt19937(seed)
    assert [draw_discrete(np.array([0.4, 0.3, 0.2, 0.1], np.float32), generator) for _ in ids] == ids


def test_a_single_weight_takes_no_draw() -> None:
    generator = Mt19937(0)
    assert draw_discrete(np.array([1], np.float32), generator) == 0
    assert generator.next_raw() == 2357136044


@pytest.mark.parametrize(
    ("seed", "state", "raw", "doubles"),
    [
        (
            0,
            (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4),
            [0x509946A41CD733A3, 0xD805FCAC6824536E, 0xDADC02F3E3CF7BE3, 0x622E4DD99D2720E5],
            [0.3148388052621527, 0.8438413544573831, 0.8549196095880783, 0.38351904452170205],
        ),
        (
            42,
            (0xBDD732262FEB6E95, 0x28EFE333B266F103),
            [0xE6C71559E2525F98, 0x13B69AC93EC06B57, 0x879006CB74F40D36, 0x52D5476EE695F446],
            [0.9014752716487434, 0.07700507558070202, 0.5295414206238577, 0.3235668798211788],
        ),
        (
            1000,
            (0x3C1EBA8B4DCCC148, 0xD07A9D82D4F4BBAF),
            [0xC99580E22C17CF7, 0x672FCFEE38684590, 0xA67A97DBE52F66C0, 0x71D0ABD611D6E595],
            [0.049214843226541904, 0.40307330671240127, 0.6503081237653396, 0.44459032036123913],
        ),
    ],
)
def test_xoroshiro128plus_gives_the_known_outputs(
    seed: int, state: tuple[int, int], raw: list[int], doubles: list[float]
) -> None:
    assert (_splitmix64(seed, 1), _splitmix64(seed, 2)) == state
    generator, twin = Xoroshiro128Plus(seed), Xoroshiro128Plus(seed)
    assert [generator.next_raw() for _ in raw] == raw
    assert [twin.next_double() for _ in doubles] == doubles


@pytest.mark.parametrize("generator", [Mt19937(0), Xoroshiro128Plus(0)])
def test_a_clone_continues_from_the_same_place_by_itself(generator: Generator) -> None:
    generator.next_double()
    twin = generator.clone()
    ahead = [generator.next_double() for _ in range(3)]
    assert [twin.next_double() for _ in range(3)] == ahead
    assert all(0 <= generator.next_float() < 1 for _ in range(100))


@pytest.mark.parametrize("kind", [Mt19937, Xoroshiro128Plus])
def test_seed_0_is_a_seed_and_two_seeds_differ(kind: type[Mt19937] | type[Xoroshiro128Plus]) -> None:
    def first(seed: int) -> list[float]:
        generator = kind(seed)
        return [generator.next_double() for _ in range(4)]

    assert first(0) == first(0)
    assert len({tuple(first(seed)) for seed in range(20)}) == 20


@pytest.mark.parametrize(("kind", "bits"), [(Mt19937, 32), (Xoroshiro128Plus, 64)])
@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True])
def test_what_is_no_seed_is_refused(kind: type[Mt19937], bits: int, seed: int) -> None:
    with pytest.raises(RequestError) as refused:
        kind(seed)
    assert str(refused.value) == (
        f"a seed is out of range\n  given  {seed}\n  range  0 to 2^{bits} - 1\n  next   choose another seed"
    )


def test_the_seed_that_asks_for_a_random_one_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        Mt19937(2**32 - 1)
    assert str(refused.value) == (
        "seed 4294967295 asks llama.cpp for a random seed, so no run can be repeated\n"
        "  next  choose a seed from 0 to 4294967294"
    )
