"""A fault: one thing that an engine could get wrong, declared as data, with the cases that must see it.

Guarantees: a fault names what is wrong, where it must first be seen, and which cases are asked; nothing is planted by
reading it.
"""

from dataclasses import dataclass
from typing import Final

from parity.mutation.planting import Plant

KINDS: Final = (
    "rope base",
    "rope offset",
    "rope scaling",
    "rope pairing",
    "eps",
    "norm offset",
    "scale",
    "mask",
    "window",
    "softcap",
    "head grouping",
    "bias",
    "activation",
    "router order",
    "router scale",
    "router bias",
    "expert index",
    "state order",
    "convolution window",
    "quantisation group",
    "quantisation bits",
    "quantisation zero",
    "KV conversion",
    "cache offset",
    "trim",
    "padding",
    "sampler order",
    "sampler window",
    "sampler seed",
    "dtype",
    "one ULP",
    "swapped layers",
    "tied head",
    "tokenizer",
    "chat template",
)
NOT_MODULES: Final = ("logits", "token_ids", "uniforms", "xtc_uniforms", "cache", "tokenizer", "chat_template")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One seeded fault.

    Attributes:
        name: Unique: `<kind>/<model or part>/<what>`.
        kind: One of `KINDS`.
        says: What is wrong, in one line.
        at: Where it must first be seen: the path of the first module whose output holds it, or one of `NOT_MODULES`: the
            logits where no module lies between the fault and them, a sampler case's ids or uniforms, the words of the caches.
        cases: Names of the cases that are asked, in this order, until one sees it.
        plant: How it is planted.
        hidden: Why no recorded output of that module can show it, though later ones do; empty for a fault that must be
            localised.
    """

    name: str
    kind: str
    says: str
    at: str
    cases: tuple[str, ...]
    plant: Plant
    hidden: str = ""

    def __post_init__(self) -> None:
        """Refuse a fault of no known kind, and one that no case is asked about."""
        if self.kind not in KINDS or not self.name.startswith(f"{self.kind.replace(' ', '-')}/") or not self.cases:
            raise ValueError(f"fault {self.name!r} of kind {self.kind!r} is not as declared in KINDS, or has no cases")


def fault(
    kind: str, part: str, what: str, *, says: str, at: str, cases: tuple[str, ...] | str, plant: Plant, hidden: str = ""
) -> Fault:
    """A fault whose name is made of its kind, the part of the engine and a few words."""
    return Fault(
        name=f"{kind.replace(' ', '-')}/{part}/{what}",
        kind=kind,
        says=says,
        at=at,
        cases=(cases,) if isinstance(cases, str) else cases,
        plant=plant,
        hidden=hidden,
    )


def taps(model: str, *, feed: str = "tail-split", kv: str = "fp", dtype: str = "f32") -> str:
    """Name of the tiny case of a model that records every module's output."""
    plain = (feed, kv, dtype) == ("tail-split", "fp", "f32") and "-" not in model
    return f"{model}-tiny/{dtype}/{kv}/forced/p40-{'taps' if plain else 'mutation'}-{feed}"


def drawn(options: str, rows: str = "ties", *, batch: int = 1, seed: int = 0, chain: str = "mlx-lm") -> str:
    """Name of a sampler case in float32."""
    return f"samplers/{chain}/{options}-{rows}/f32/b{batch}/s{seed}"
