"""mlx's random numbers with numpy alone: keys, bits, uniforms, Gumbel noise.

A key is a pair of 32-bit words, `(int, int)`. Guarantees: bits, splits and uniforms are mlx's on every platform; Gumbel noise
goes through `numpy_floats.log` and can differ by an ULP or so.
Source: Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (2011); spec/oracles.md section 5.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from engine.sampling.numpy_floats import Floats, log

Key = tuple[int, int]
Words = npt.NDArray[np.uint32]

ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY: Final = 0x1BD11BDA
BELOW_ONE: Final = np.nextafter(np.float32(1), np.float32(0))
GOLDEN_RATIO: Final = 0x9E3779B97F4A7C15


def key_of(seed: int) -> Key:
    """The key of a 64-bit seed: high word, low word."""
    return seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF


def counter_key(seed: int, step: int) -> Key:
    """The key of a step in the counter mode of `engine.sampling.keys.CounterKeys`."""
    return key_of(seed ^ ((step + 1) * GOLDEN_RATIO % (1 << 64)))


def threefry(key: Key, first: Words, second: Words) -> tuple[Words, Words]:
    """Threefry-2x32 with 20 rounds of counters (first[i], second[i])."""
    schedule = [np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0] ^ key[1] ^ PARITY)]
    with np.errstate(over="ignore"):
        x, y = first + schedule[0], second + schedule[1]
        for group in range(5):
            for rotation in ROTATIONS[group % 2]:
                x = x + y
                y = ((y << np.uint32(rotation)) | (y >> np.uint32(32 - rotation))) ^ x
            x = x + schedule[(group + 1) % 3]
            y = y + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x, y


def random_bits(key: Key, count: int) -> Words:
    """`count` words: counters i and i + half make words i and i + half; an odd count pairs its middle counter with 0."""
    half = (count + 1) // 2
    first = np.arange(half, dtype=np.uint32)
    second = first + np.uint32(half)
    if count % 2:
        second[-1] = 0
    x, y = threefry(key, first, second)
    return np.concatenate([x, y])[:count]


def split(key: Key, count: int = 2) -> tuple[Key, ...]:
    """The keys that a key splits into."""
    words = random_bits(key, 2 * count).tolist()
    return tuple(zip(words[::2], words[1::2], strict=True))


def uniforms(key: Key, count: int) -> Floats:
    """Uniforms in [0, 1): words over 2**32 - 1 in float32, at most the largest float below 1."""
    drawn: Floats = np.minimum(random_bits(key, count).astype(np.float32) / np.float32(0xFFFFFFFF), BELOW_ONE)
    return drawn


def gumbel(drawn: Floats) -> Floats:
    """Gumbel noise of uniforms: -log(-log(u)), each step rounded to float32."""
    return -log(-log(drawn))
