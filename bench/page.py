"""The table of a run as Markdown, written to reports/bench.md.

Guarantees: a function of the result alone, so that every number in the page is one in the JSON beside it.
"""

from collections.abc import Mapping
from typing import Any, Final

KINDS: Final = {
    "decode": "Decode, tokens a second",
    "prefill": "Prefill, tokens a second",
    "bandwidth": "Bandwidth that decode reaches, beside what the machine reads",
    "memory": "Memory, resident at most",
    "load": "Opening a snapshot, with one token",
    "startup": "From nothing to the first token",
    "gate": "The whole matrix of cases",
}


def page(result: Mapping[str, Any]) -> str:
    """Markdown of a result of `assay bench --full`."""
    machine = result["machine"]
    lines = ["# Bench", "", _machine_line(machine), ""]
    if noisy := machine.get("noisy"):
        lines += ["**The machine was not quiet:** " + "; ".join(noisy) + ".", ""]
    lines += [
        "One interleaved run: all sides of a line were asked in turn, the order rotating. Values are medians, the range",
        "is that of the ratio within repeats. The multiples beside mlx-lm say how slow the scalar CPU backend of mlx's",
        "Linux wheel is; they say nothing about Apple GPUs. llama.cpp computes other sums, so its bits are not compared.",
        "",
    ]
    for kind, title in KINDS.items():
        figures = [figure for figure in result["figures"] if figure["name"].split("/")[0] == kind]
        if figures:
            lines += [f"## {title}", "", *_table(figures), ""]
    if failures := result.get("failures"):
        lines += ["## Not measured", "", *(f"- {name}: {reason}" for name, reason in failures.items()), ""]
    return "\n".join([*lines, "`make bench` writes this page and `bench.json` beside it.", ""])


def _machine_line(machine: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in machine.get("packages", {}).items())
    peers = ", ".join(f"{name} {version}" for name, version in machine.get("peers", {}).items())
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {packages}; peers: {peers}; "
        f"kernels: {machine.get('kernels', 'plain')}; load before the run {machine['load_before'][0]}."
    )


def _table(figures: list[Mapping[str, Any]]) -> list[str]:
    rows = ["| figure | engine | peer | its value | unit | ratio | range | bits | note |"]
    rows.append("| --- | ---: | --- | ---: | --- | ---: | --- | --- | --- |")
    for f in figures:
        bits = {True: "identical", False: "**DIFFERENT**", None: "-"}[f["bits_identical"]]
        name = f["name"].split("/", 1)[1]
        rows.append(
            f"| {name} | {f['engine']:.4g} | {f['peer']} | {f['peer_value']:.4g} | {f['unit']} | {f['ratio']:.3g} | "
            f"{f['low']:.3g}-{f['high']:.3g} | {bits} | {f.get('note', '')} |"
        )
    return rows
