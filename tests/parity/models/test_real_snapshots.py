"""The real snapshots on this machine are the ones that the goldens were recorded with."""

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from parity.models.catalogue import entries
from parity.models.fetch import check_files, snapshot_path
from parity.snapshot import Snapshot

pytestmark = pytest.mark.model
REAL = ["smollm2-135m", "smollm2-135m-f32", "smollm2-135m-q4"]


@pytest.mark.parametrize("name", REAL)
def test_every_file_has_the_catalogues_digest(name: str) -> None:
    snapshot = Snapshot.read(snapshot_path(name), name=name)
    check_files(snapshot, entries()[name].files)
    assert len(snapshot.files) == 5


def test_the_packed_form_dequantises_to_the_dense_form_bit_for_bit() -> None:
    dense = mx.load(str(snapshot_path("smollm2-135m-f32") / "model.safetensors"))
    packed = mx.load(str(snapshot_path("smollm2-135m-q4") / "model.safetensors"))
    assert isinstance(dense, dict)
    assert isinstance(packed, dict)
    config = Snapshot.read(snapshot_path("smollm2-135m-q4")).quantization
    assert config is not None
    paths = [name.removesuffix(".scales") for name in packed if name.endswith(".scales")]
    assert len(paths) == 211
    for path in paths:
        module = config.get(path, config)
        parts = (packed[f"{path}.weight"], packed[f"{path}.scales"], packed[f"{path}.biases"])
        values = mx.dequantize(*parts, group_size=module["group_size"], bits=module["bits"])
        expected = np.array(dense[f"{path}.weight"].view(mx.uint32))
        assert np.array_equal(np.array(values.view(mx.uint32)), expected), path


def test_the_tokenizer_splits_digits_and_keeps_specials_whole() -> None:
    tokenizer = Tokenizer.from_file(str(snapshot_path("smollm2-135m") / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert len(tokenizer.encode("2024").ids) == 4
    text = "The quick brown fox: naïve café, 12 €.\n\n  def f(x):\treturn x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
