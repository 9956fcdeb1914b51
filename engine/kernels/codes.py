"""Codes, scales and biases out of slabs, as the packed keys and values that mlx would have made.

Guarantees: words are those of `mx.quantize`; nothing is computed, codes are only moved together.
"""

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.cache.protocol import PackedHeads
from engine.kernels.fields import SLAB

if TYPE_CHECKING:
    from engine.kernels.history import Geometry, History

Bytes = npt.NDArray[np.uint8]


def packed_heads(history: "History", layer: int) -> tuple[PackedHeads, PackedHeads]:
    """A layer's keys and values, packed, of all positions of a history that has codes."""
    geometry = history.geometry
    parts = [_of_slab(geometry, slab.memory, layer) for slab in history.slabs]
    codes, scales = (np.concatenate(part, axis=1)[:, : history.offset] for part in zip(*parts, strict=True))
    keys, values = (
        PackedHeads(
            weight=mx.array(words_of_codes(codes[:, :, which], geometry.bits)[None]),
            scales=_array(scales[:, :, which, :, 0], geometry.dtype),
            biases=_array(scales[:, :, which, :, 1], geometry.dtype),
            bits=geometry.bits,
            group_size=geometry.group_size,
        )
        for which in range(2)
    )
    return keys, values


def words_of_codes(codes: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Codes [.., E] as words [.., E * bits / 32], the first element in the lowest bits."""
    single = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream = np.packbits(single.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    words: npt.NDArray[np.uint32] = np.ascontiguousarray(stream).view("<u4")
    return words


def _array(heads: npt.NDArray[np.float32], dtype: mx.Dtype) -> mx.array:
    """Floats that were rounded to the dtype before, so that nothing is lost."""
    return mx.array(np.ascontiguousarray(heads[None])).astype(dtype)


def _of_slab(geometry: "Geometry", memory: npt.NDArray[np.float32], layer: int) -> tuple[Bytes, Any]:
    """A layer's codes [groups, SLAB, 2, width], and scales beside biases [groups, SLAB, 2, shares, 2]."""
    front = geometry.layers, geometry.groups, SLAB, 2
    scales = memory[geometry.scales_at : geometry.codes_at].reshape(*front, -1, 2)[layer]
    return memory[geometry.codes_at :].view(np.uint8).reshape(*front, geometry.width)[layer], scales
