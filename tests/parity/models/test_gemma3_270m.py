"""Gemma 3 270M on this machine is the one that the goldens were recorded with; opt-in, so skipped where nobody accepted."""

import pytest
from tokenizers import Tokenizer

from parity.home import assay_home
from parity.matrix import CASES, read_prompts
from parity.models.catalogue import entries
from parity.models.fetch import check_files, is_complete, models_folder
from parity.snapshot import Snapshot

NAME = "gemma3-270m"
FOLDER = models_folder(assay_home()) / NAME  # read before a test redirects it
HERE = is_complete(FOLDER, entries()[NAME].files)

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not HERE, reason=f"opt-in: assay models fetch {NAME} --accept-terms"),
]


def test_every_file_has_the_catalogues_digest() -> None:
    check_files(Snapshot.read(FOLDER, name=NAME), entries()[NAME].files)


def test_written_text_tokenises_to_the_written_ids() -> None:
    prompt = read_prompts(CASES / "gemma3_270m.toml")["colours"]
    assert prompt.text is not None
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tuple(tokenizer.encode(prompt.text).ids) == prompt.ids
    assert tokenizer.decode(prompt.ids) == prompt.text
