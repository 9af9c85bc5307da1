"""Aim: the tokenizer.json made from a GGUF tokenizes as llama.cpp does with that GGUF.

Method: merges of a small vocabulary by hand; Gemma 3's whole one through the `tokenizers` package, token by token.
"""

from pathlib import Path

import pytest

from common.errors import ModelError
from common.ggml.stock import StockModel
from common.model.embedded import gemma3_model
from common.model.synthetic import ensure_preset
from device.coreml.convert.calibration import TEXT
from device.coreml.convert.tokenizer import merges_of, tokenizer_json, write_tokenizer

TEXTS = (
    TEXT,
    "  two  spaces\n\n\n   x\t\ty <b>bold</b> 日本語 🎉 naïve ",
    "def f(x):\n    return x\n\n\n\nclass A:\n\tpass",
    "\x00\x7f é̂ 𝔘",
)


def test_merges_are_the_splits_of_pieces_best_first():
    ids = {"a": 0, "b": 1, "ab": 2, "aba": 3}
    assert merges_of(ids, [0, 0, -2.0, -1.0]) == [["ab", "a"], ["a", "b"]]


def test_special_tokens_are_matched_whole():
    made = tokenizer_json(["<unk>", "<bos>", "<b>", "x"], [2, 3, 4, 1], [0.0] * 4, "<bos>")
    assert [(t["content"], t["special"]) for t in made["added_tokens"]] == [
        ("<unk>", True),
        ("<bos>", True),
        ("<b>", False),
    ]
    assert made["model"]["unk_token"] == "<unk>"
    assert made["post_processor"]["special_tokens"]["<bos>"]["ids"] == [1]


def test_other_vocabularies_are_left_out(tmp_path):
    assert write_tokenizer(ensure_preset("tiny-sliding"), tmp_path) == []


@pytest.mark.model
def test_gemmas_vocabulary_token_for_token(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    try:
        path = gemma3_model()
    except ModelError as error:
        pytest.skip(str(error))
    files = write_tokenizer(path, tmp_path)
    made, stock = tokenizers.Tokenizer.from_file(str(files[0])), StockModel(path, repack=False)
    document = Path(__file__).parents[4] / "docs" / "frozen-pages.md"
    for text in (*TEXTS, document.read_text(encoding="utf-8")):
        ids = made.encode(text, add_special_tokens=False).ids
        assert ids == stock.tokenize(text).tolist()
        assert made.decode(ids) == text
    assert made.encode("hi").ids[0] == 2  # <bos>
    stock.close()
