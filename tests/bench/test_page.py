"""The page says what the result says, and nothing else."""

from typing import Any

from bench.page import page

MACHINE: dict[str, Any] = {
    "processor": "Some CPU",
    "cores": 2,
    "memory_gib": 8,
    "load_before": [0.25, 0.5, 0.5],
    "packages": {"mlx": "0.32.4"},
    "peers": {"mlx-lm": "0.32.2"},
    "kernels": "fused",
}


def figure(name: str, *, bits: bool | None = True, note: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "peer": "mlx-lm",
        "engine": 61.25,
        "peer_value": 6.125,
        "unit": "tok/s",
        "ratio": 10.0,
        "low": 9.5,
        "high": 10.5,
        "bits_identical": bits,
        "note": note,
    }


def test_each_kind_has_a_table_and_each_figure_a_line() -> None:
    result = {
        "machine": MACHINE,
        "figures": [figure("decode/s/f32/p32", note="4 tokens"), figure("load/s/f32", bits=None)],
    }
    text = page(result)
    assert (
        "Some CPU, 2 cores, 8 GiB; mlx 0.32.4; peers: mlx-lm 0.32.2; kernels: fused; load before the run 0.25." in text
    )
    assert "| s/f32/p32 | 61.25 | mlx-lm | 6.125 | tok/s | 10 | 9.5-10.5 | identical | 4 tokens |" in text
    assert "| s/f32 | 61.25 | mlx-lm | 6.125 | tok/s | 10 | 9.5-10.5 | - |  |" in text
    assert text.index("## Decode") < text.index("## Opening a snapshot")
    assert "## Prefill" not in text
    assert "not quiet" not in text


def test_other_bits_noise_and_what_was_not_measured_are_seen_at_once() -> None:
    noisy = {**MACHINE, "noisy": ["load: 3.00 a core, wanted at most 0.5 a core"]}
    text = page({"machine": noisy, "figures": [figure("decode/s", bits=False)], "failures": {"t/f32": "it died"}})
    assert "| **DIFFERENT** |" in text
    assert "**The machine was not quiet:** load: 3.00 a core, wanted at most 0.5 a core." in text
    assert "- t/f32: it died" in text
