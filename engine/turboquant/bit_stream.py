"""Codes of a few bits as one little-endian stream: element i lies at bits [i * bits, (i + 1) * bits), in words of 8 or of 32.

Guarantees: exact, for every width; a stream of words has the bytes of the stream of bytes where their number is a multiple of
four. The last word is filled with zeros.
Source: spec/kv.md section 6.
"""

import mlx.core as mx


def packed_length(length: int, bits: int, *, word: int) -> int:
    """Words of `word` bits that hold `length` codes."""
    return -(-length * bits // word)


def pack(codes: mx.array, bits: int, *, word: mx.Dtype = mx.uint8) -> mx.array:
    """Pack along the last axis.

    Args:
        codes: [..., N], unsigned, each below 2**bits.
        bits: 1 to 8.
        word: uint8 or uint32.

    Returns:
        Words [..., ceil(N * bits / size of a word)].
    """
    *rest, length = codes.shape
    size = 8 * word.size
    words = packed_length(length, bits, word=size)
    each = (codes.astype(mx.uint32)[..., None] >> mx.arange(bits, dtype=mx.uint32)) & 1
    stream = each.reshape(*rest, length * bits)
    if missing := words * size - length * bits:
        stream = mx.concatenate([stream, mx.zeros((*rest, missing), dtype=mx.uint32)], axis=-1)
    weights = mx.left_shift(mx.array(1, dtype=mx.uint32), mx.arange(size, dtype=mx.uint32))
    return (stream.reshape(*rest, words, size) * weights).sum(axis=-1).astype(word)


def unpack(packed: mx.array, bits: int, length: int) -> mx.array:
    """The codes of a stream.

    Args:
        packed: Words [..., W], uint8 or uint32.
        bits: Width of a code.
        length: N, the number of codes.

    Returns:
        uint32 [..., N].
    """
    *rest, words = packed.shape
    size = 8 * packed.dtype.size
    each = (packed.astype(mx.uint32)[..., None] >> mx.arange(size, dtype=mx.uint32)) & 1
    stream = each.reshape(*rest, words * size)[..., : length * bits].reshape(*rest, length, bits)
    weights = mx.left_shift(mx.array(1, dtype=mx.uint32), mx.arange(bits, dtype=mx.uint32))
    return (stream * weights).sum(axis=-1).astype(mx.uint32)
