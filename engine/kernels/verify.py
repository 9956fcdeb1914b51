"""Holding a kernel to mlx: random and special values, odd shapes, one row and many; in a fraction of a second.

Guarantees: results are compared as the unsigned words that they are stored as, NaN included; no tolerance. A proof is kept on
disk only when every probe passed, under the identity of what it holds for, and written whole or not at all.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.errors import EngineError
from engine.kernels.driver import SMALL_FLOATS, Driver, Form
from engine.kernels.experts import FastExperts
from engine.kernels.identity import identity
from engine.kernels.layout import NAMES
from engine.kernels.matrix import FastMatrix, plain_product
from engine.kernels.team import Team
from engine.linear import Packed
from engine.moe import gathered_product
from engine.quantization import Format

NUM_EXPERTS: Final = 3
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}

# Words of float32 that are sprinkled over inputs and weights, by what they provoke.
SPECIALS: Final[dict[str, tuple[int, ...]]] = {
    "ordinary": (),
    "tiny": (0x00000001, 0x007FFFFF, 0x80000010, 0x80000000, 0x00000000, 0x33000000),
    "huge": (0x7F7FFFFF, 0xFF7FFFFF, 0x7F000000, 0x477FE000),
    "infinite": (0x7F800000, 0xFF800000, 0x00000000),
    "nan": (0x7FC00000, 0xFFC00000, 0x7FD20000, 0x7F800000),
    "faint input": (),  # every input so small that products are subnormal
    "faint weight": (),  # every weight, likewise
}
FAINT: Final = np.float32(2.0**-122)


class KernelError(EngineError):
    """A kernel, or a model on kernels, does not give mlx's bits."""

    kind = "kernels"
    silence: ClassVar[str] = "report it; ASSAY_KERNELS=plain computes the same without kernels and without this message"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One product to compare.

    Attributes:
        rows: Of x.
        inner: Width of x.
        outputs: Rows of the weight.
        group: Elements a scale, where packed.
        special: Key of `SPECIALS`.
        bias: Whether one is added.
        seed: Of everything random in it.
    """

    rows: int
    inner: int
    outputs: int
    group: int = 32
    special: str = "ordinary"
    bias: bool = False
    seed: int = 0


# Each size is there for a border: one row, a tile's rows, one more, a piece's rows and one more; inner sizes that are no
# multiple of an unrolled turn, of one unit and of several; outputs short of a block, whole blocks, and one over.
PROBES: Final = (
    *(Probe(rows=1, inner=96, outputs=64, special=special) for special in SPECIALS),
    *(Probe(rows=9, inner=64, outputs=67, special=special) for special in SPECIALS),
    Probe(rows=1, inner=128, outputs=33, group=64, bias=True),
    Probe(rows=2, inner=256, outputs=129, group=128),
    Probe(rows=49, inner=32, outputs=64, bias=True),
    Probe(rows=8, inner=512, outputs=192, group=64),
)
EXPERTS: Final = (  # each of three experts has such a matrix, and each row goes through two of them
    Probe(rows=1, inner=64, outputs=64),
    Probe(rows=7, inner=96, outputs=37, special="tiny"),
    Probe(rows=40, inner=64, outputs=64, special="infinite"),
    Probe(rows=3, inner=32, outputs=33, special="nan"),
)
ODD: Final = (  # dense alone: packed weights cannot have such widths
    Probe(rows=1, inner=1, outputs=1),
    Probe(rows=1, inner=39, outputs=65),
    Probe(rows=7, inner=131, outputs=63, bias=True),
)


def verify(form: Form, driver: Driver) -> None:
    """Compare every probe.

    Raises:
        KernelError: A result differs from mlx's.
    """
    for probe in (*PROBES, *(ODD if form.bits is None else ())):
        check_probe(form, driver, probe)
    for probe in EXPERTS:
        check_experts(form, driver, probe)


def check_probe(form: Form, driver: Driver, probe: Probe) -> None:
    """Compare one probe, on one thread and on three.

    Raises:
        KernelError: The result differs from mlx's.
    """
    for x, weight, bias in _products(form, probe):
        expected = words(plain_product(x, weight, bias))
        for threads in (1, 3):
            matrix = FastMatrix(driver=lambda _: driver, team=Team(threads=threads), plain=weight)
            actual = words(matrix.product(x, bias))
            if expected.shape != actual.shape or expected.dtype != actual.dtype or (expected != actual).any():
                raise _mismatch(form, probe, expected, actual)


def check_experts(form: Form, driver: Driver, probe: Probe) -> None:
    """Compare one probe through the choice among three experts, in the order of the tokens and sorted by expert.

    Raises:
        KernelError: The result differs from mlx's.
    """
    stacked = replace(probe, outputs=NUM_EXPERTS * probe.outputs, bias=False)
    for x, flat, _ in _products(form, stacked):
        if form.bits is None and x.dtype != mx.float32:
            continue  # mlx has no dense experts in 16 bits, so nothing is replaced there
        weight = _stacked(flat)
        first = np.random.default_rng(probe.rows).integers(0, NUM_EXPERTS, probe.rows, dtype=np.uint32)
        chosen = np.stack([first, (first + 1) % NUM_EXPERTS], axis=-1)
        order = np.argsort(chosen, axis=None, kind="stable")
        for rows, experts, is_sorted in (
            (mx.expand_dims(x, (-2, -3)), mx.array(chosen), False),
            (mx.expand_dims(x[mx.array(order // 2)], -2), mx.array(chosen.reshape(-1)[order]), True),
        ):
            fast = FastExperts.of(weight, driver=lambda _: driver, team=Team(threads=2))
            expected = words(gathered_product(rows, weight, experts, sorted_experts=is_sorted))
            actual = words(fast.product(rows, experts, sorted_experts=is_sorted))
            if expected.shape != actual.shape or expected.dtype != actual.dtype or (expected != actual).any():
                raise _mismatch(form, probe, expected, actual)


def _stacked(flat: mx.array | Packed) -> mx.array | Packed:
    def stack(array: mx.array) -> mx.array:
        return mx.unflatten(array, 0, (NUM_EXPERTS, -1))

    if not isinstance(flat, Packed):
        return stack(flat)
    biases = None if flat.biases is None else stack(flat.biases)
    return Packed(weight=stack(flat.weight), scales=stack(flat.scales), biases=biases, format=flat.format)


def proven(form: Form, driver: Driver, folder: Path) -> None:
    """Compare every probe, unless that was done before here and under the same identity.

    Raises:
        KernelError: A result differs from mlx's.
    """
    once(folder, form.name, lambda: verify(form, driver))


def once(folder: Path, name: str, proof: Callable[[], None]) -> None:
    """Run a proof that has no record yet, and record it; a proof that raises leaves none."""
    file = folder / "proofs" / identity()[:16] / f"{name}.json"
    record = json.dumps({"identity": identity(), "proved": name}, indent=2) + "\n"
    if file.is_file() and file.read_text(encoding="utf-8") == record:
        return
    proof()
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f"{name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(record)
    Path(temporary).replace(file)


def words(array: mx.array) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The stored words of an array of floats."""
    return np.array(array.view({2: mx.uint16, 4: mx.uint32}[array.dtype.size]))


def _products(form: Form, probe: Probe) -> Iterator[tuple[mx.array, mx.array | Packed, mx.array | None]]:
    """Inputs whose product this form computes; bfloat16 words serve float32 weights too, so those come in both dtypes."""
    seed = hashlib.sha256(f"{form.name} {probe}".encode()).digest()
    random = np.random.default_rng(list(seed))
    faint = {which: FAINT if probe.special == f"faint {which}" else np.float32(1.0) for which in ("input", "weight")}
    for dtype in (mx.bfloat16, mx.float32) if form == Form(stored="bf16") else (DTYPES[form.stored],):

        def values(*shape: int, of: mx.Dtype = dtype) -> mx.array:
            return mx.array(sprinkled(random, shape, probe.special) * faint["weight"]).astype(of)

        x = mx.array(sprinkled(random, (probe.rows, probe.inner), probe.special) * faint["input"]).astype(dtype)
        bias = values(probe.outputs) if probe.bias else None
        if form.bits is None:
            narrow = values(probe.outputs, probe.inner, of=DTYPES[form.stored])
            yield x, narrow.astype(dtype), bias
        elif form.mode in SMALL_FLOATS:
            yield x, small_floats(random, probe, form.mode), bias
        else:
            yield x, packed(random, probe, form.bits, values), bias
            if form.stored == "f32":  # scales of a 16-bit checkpoint, which have a product of their own
                yield (
                    x,
                    packed(random, probe, form.bits, lambda *shape: values(*shape, of=mx.bfloat16).astype(mx.float32)),
                    bias,
                )


def packed(random: np.random.Generator, probe: Probe, bits: int, values: Callable[..., mx.array]) -> Packed:
    """Packed weights of random words, with the scales and biases that `values` makes."""
    count = (probe.outputs, probe.inner * bits // 32)
    return Packed(
        weight=mx.array(random.integers(0, 2**32, count, dtype=np.uint32)),
        scales=values(probe.outputs, probe.inner // probe.group),
        biases=values(probe.outputs, probe.inner // probe.group),
        format=Format(bits=bits, group_size=probe.group, mode="affine"),
    )


def small_floats(random: np.random.Generator, probe: Probe, mode: str) -> Packed:
    """Weights of random small floats, NaN among them only where the probe is about NaN, with scales around 1.

    Where the probe is about special values, three scales in a hundred are any byte at all.
    """
    bits, group = SMALL_FLOATS[mode]
    codes = random.integers(0, 256, (probe.outputs, probe.inner * bits // 8), dtype=np.uint8)
    if bits == 8 and probe.special != "nan":
        codes[codes & 0x7F == 0x7F] ^= 1
    one = {"mxfp4": 127, "nvfp4": 56, "mxfp8": 127}[mode]
    scales = random.integers(one - 6, one + 7, (probe.outputs, probe.inner // group)).astype(np.uint8)
    if probe.special != "ordinary":
        places = random.integers(0, scales.size, max(1, scales.size // 33))
        scales.reshape(-1)[places] = random.integers(0, 256, places.size)
    return Packed(
        weight=mx.array(codes.view(np.uint32)),
        scales=mx.array(scales),
        biases=None,
        format=Format(bits=bits, group_size=group, mode=mode),
    )


def sprinkled(random: np.random.Generator, shape: tuple[int, ...], special: str) -> npt.NDArray[np.float32]:
    """Normal values over twelve binades, with about three words in a hundred from `SPECIALS`."""
    drawn = random.standard_normal(shape) * np.exp2(random.integers(-6, 6, shape))
    flat = drawn.astype(np.float32).reshape(-1)
    if SPECIALS[special]:
        places = random.integers(0, flat.size, max(1, flat.size // 33))
        flat.view(np.uint32)[places] = random.choice(np.array(SPECIALS[special], np.uint32), places.size)
    return flat.reshape(shape)


def _mismatch(form: Form, probe: Probe, expected: npt.NDArray[Any], actual: npt.NDArray[Any]) -> KernelError:
    facts: dict[str, object] = {"probe": f"{probe.rows} x {probe.inner} by {probe.outputs}, {probe.special} values"}
    if expected.shape == actual.shape:
        differing = np.argwhere(expected != actual)
        first = tuple(int(i) for i in differing[0])
        digits = 2 * expected.dtype.itemsize + 2
        facts["first"] = f"{list(first)}: expected {expected[first]:#0{digits}x}, actual {actual[first]:#0{digits}x}"
        facts["count"] = f"{len(differing)} of {expected.size} elements"
    return KernelError(
        f"kernel {form.name} does not give mlx's bits here",
        **facts,
        instead="plain mlx operations",
        next_step=KernelError.silence,
    )
