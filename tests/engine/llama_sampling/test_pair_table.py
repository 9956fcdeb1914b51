from pathlib import Path

import numpy as np
import pytest

from engine.errors import RequestError
from engine.llama_sampling import pair_table as module
from engine.llama_sampling.candidates import Candidates
from engine.llama_sampling.context import Context, Picked
from engine.llama_sampling.draw import Dist
from engine.llama_sampling.pair_table import as_markdown, chance_distance, main, pair_table, total_variation

RECORDED = Path(__file__).parents[2] / "fixtures" / "llama_cpp"


def test_total_variation_is_half_the_difference_of_histograms() -> None:
    assert total_variation(np.array([0, 0, 1, 1]), np.array([1, 1, 0, 0])) == 0
    assert total_variation(np.array([0, 0, 1, 1]), np.array([0, 0, 0, 5])) == 0.5
    assert total_variation(np.array([0]), np.array([3])) == 1


def test_the_distance_by_chance_is_what_repeated_samples_show() -> None:
    shares = np.array([0.5, 0.3, 0.2])
    draw = np.random.Generator(np.random.PCG64(0))
    samples = [draw.choice(3, 1000, p=shares) for _ in range(400)]
    seen = np.mean([total_variation(a, b) for a, b in zip(samples[::2], samples[1::2], strict=True)])
    assert chance_distance(shares, 1000) == pytest.approx(seen, rel=0.1)


def test_the_page_has_a_row_a_sampler_with_equal_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pairs = pair_table(RECORDED, num_draws=20)
    assert len(pairs) == 15
    assert all((p.num_equal, p.num_draws, p.same_seed) == (20, 20, 0) for p in pairs)
    assert any(p.other_generator > 0 for p in pairs)
    monkeypatch.setattr(module, "pair_table", lambda _recorded: pairs)
    page = tmp_path / "reports" / "samplers.md"
    assert main(str(RECORDED), str(page)) == 0
    assert page.read_text() == as_markdown(pairs)
    assert page.read_text().count("\n| ") == len(pairs) + 2


def test_a_draw_that_goes_wrong_shows_in_the_table_and_in_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = Dist.pick

    def second_best(self: Dist, candidates: Candidates, context: Context) -> Picked:
        return real(self, candidates.sorted().taken(slice(1, None), is_sorted=True), context)

    monkeypatch.setattr(Dist, "pick", second_best)
    pairs = pair_table(RECORDED, num_draws=20)
    assert pairs[0].num_equal < 20
    assert pairs[0].same_seed > 0
    monkeypatch.setattr(module, "pair_table", lambda _recorded: pairs)
    assert main(str(RECORDED), str(tmp_path / "samplers.md")) == 1


def test_a_folder_without_a_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refused:
        pair_table(tmp_path)
    assert str(refused.value) == (
        f"the recorded draws of llama.cpp are not there\n  looked at  {tmp_path / 'samplers.json'}\n"
        "  next       name the folder that oracles/llama_cpp/run.py wrote"
    )
