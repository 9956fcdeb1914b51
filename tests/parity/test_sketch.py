import math

import numpy as np

from parity.sketch import STRIDED, TOP, gather, sketch, strided_ids, top_ids
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace, logits_name

V = 1000
ROWS = [((np.arange(V) * 37 + step) % 101).astype("<f4").reshape(1, V) for step in range(2)]
TRACE = Trace(
    tensors={
        **{logits_name(step): Tensor.of(row) for step, row in enumerate(ROWS)},
        TOKEN_IDS: Tensor.of(np.array([0, 0], dtype="<i4")),
    }
)


def test_a_sketch_has_the_largest_values_samples_and_the_sum() -> None:
    made = sketch(TRACE, 2)

    assert {n: (t.dtype, t.shape) for n, t in made.items()} == {
        "logsumexp": ("F32", (2,)),
        "strided": ("F32", (2, STRIDED)),
        "top_ids": ("I32", (2, TOP)),
        "top_values": ("F32", (2, TOP)),
    }
    assert made["top_values"].values()[1].tolist() == sorted(ROWS[1].ravel().tolist(), reverse=True)[:TOP]
    expected = math.log(sum(math.exp(float(v)) for v in ROWS[0].ravel()))
    assert math.isclose(made["logsumexp"].values()[0], expected, rel_tol=1e-6)


def test_the_lower_id_comes_first_on_a_tie() -> None:
    assert top_ids(Tensor.of(np.array([[1, 3, 3, 2]], dtype="<f4")), 3).tolist() == [1, 2, 3]


def test_samples_are_stored_bits() -> None:
    words = np.array([[0x8000, 0x7FC1, 0x3F80]], dtype="<u2")

    assert gather([Tensor.of(words, dtype="BF16")], [np.array([1, 0])]).bits().tolist() == [[0x7FC1, 0x8000]]


def test_strides_cover_the_vocabulary_from_end_to_end() -> None:
    ids = strided_ids(49152)

    assert (ids[0], ids.size, len(set(ids.tolist()))) == (0, STRIDED, STRIDED)
    assert 49152 - 192 <= ids[-1] < 49152
