"""The vocabulary gives stable ids and bytes for any text. Method: hypothesis texts against the embedded model."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ModelError, RequestError
from common.ggml import vocabulary as module
from common.ggml.vocabulary import Vocabulary

pytestmark = pytest.mark.model

MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<", "|im_end|>", "<file_sep>", "<<|im_end|>>"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
chats = st.lists(st.sampled_from([*MARKS, " ", "\n", "a word", "čau", "你好", "😀"]), max_size=60).map(
    "".join
)


@pytest.fixture(scope="module")
def vocabulary(smollm2):
    with Vocabulary.load(smollm2) as vocabulary:
        yield vocabulary


def test_names_of_the_special_ids_agree(vocabulary):
    assert vocabulary.n_vocab == 49152
    assert vocabulary.token_text(vocabulary.bos_id) == "<|im_start|>"
    assert vocabulary.eos_id in vocabulary.end_ids
    assert all(vocabulary.piece(i) == b"" for i in vocabulary.end_ids)
    assert "<|im_start|>" in vocabulary.chat_template


@given(text=texts)
def test_pieces_join_to_the_text(vocabulary, text):
    # The embedded vocabulary has no token for some bytes that begin unassigned planes (0xF1): they are left out.
    known = {piece[0] for piece in map(vocabulary.piece, range(vocabulary.n_vocab)) if len(piece) == 1}
    expected = bytes(byte for byte in text.encode() if byte in known)
    assert b"".join(map(vocabulary.piece, vocabulary.tokenize(text))) == expected
    assert known >= set("Příliš žluťoučký 你好 😀 ЖΩ".encode())


@given(text=chats, slice_chars=st.integers(1, 40))
def test_slicing_a_text_changes_no_id(vocabulary, text, slice_chars):
    whole = vocabulary._tokenize_slice(text, False, True)
    normal, module.SLICE_CHARS = module.SLICE_CHARS, slice_chars
    try:
        assert vocabulary.tokenize(text, parse_special=True) == whole
    finally:
        module.SLICE_CHARS = normal


def test_control_tokens_are_read_only_when_asked(vocabulary):
    end = vocabulary.tokenize("<|im_end|>", parse_special=True)
    assert len(end) == 1 and end[0] in vocabulary.end_ids
    assert len(vocabulary.tokenize("<|im_end|>")) > 1


def test_a_long_text_of_control_tokens_stays_linear(vocabulary):
    # One call of libllama needs minutes for this text; in slices it is a matter of a second.
    n = 300_000
    assert vocabulary.tokenize("<|im_end|>" * n, parse_special=True) == [2] * n


@pytest.mark.parametrize("token_id", [-1, 49152, 1 << 31])
def test_ids_outside_the_vocabulary_are_refused(vocabulary, token_id):
    with pytest.raises(RequestError, match=re.escape(f"{token_id} is outside the vocabulary (0 to 49151)")):
        vocabulary.piece(token_id)


def test_a_lone_surrogate_is_refused(vocabulary):
    with pytest.raises(RequestError, match="lone surrogate at character 2"):
        vocabulary.tokenize(json.loads('"ab\\ud800"'))


def test_words_that_would_overflow_native_recursion_are_refused(vocabulary, monkeypatch):
    word = "a" * 100_000
    assert b"".join(map(vocabulary.piece, vocabulary.tokenize(word))) == word.encode()
    monkeypatch.setattr(vocabulary, "_recurses", True)
    with pytest.raises(RequestError, match="more than 8192 characters"):
        vocabulary.tokenize("fine " + word)


def test_unusable_files_are_refused_with_a_cause(tmp_path, smollm2):
    with pytest.raises(ModelError, match="cannot read the model file"):
        Vocabulary.load(tmp_path / "absent.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelError, match="begins with b'hell'"):
        Vocabulary.load(tmp_path / "text.gguf")
    with smollm2.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(100_000))
    with pytest.raises(ModelError, match=r"could not be loaded: .*gguf"):
        Vocabulary.load(tmp_path / "cut.gguf")


def test_a_closed_vocabulary_refuses_instead_of_crashing(smollm2):
    vocabulary = Vocabulary.load(smollm2)
    vocabulary.close()
    vocabulary.close()
    with pytest.raises(ModelError, match="closed"):
        vocabulary.tokenize("hello")
    with pytest.raises(ModelError, match="closed"):
        vocabulary.piece(5)
