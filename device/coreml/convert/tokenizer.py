"""tokenizer.json and tokenizer_config.json from a GGUF's vocabulary, for models that come without a checkpoint folder.

Gemma's vocabulary is a byte-pair encoding with a score a piece: of all neighbours the pair is merged first whose union
scores highest. The same rule as a list is every split of every piece into two pieces, ordered by the union's score.
Other kinds of vocabulary are left out (the bundle's README then says that the file is missing).
Called by bundle_files.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.ggml.header import read_header

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Kinds of tokens that are matched as they stand, before any merging."""
SPACE = "▁"


def write_tokenizer(gguf: Path, folder: Path) -> list[Path]:
    """Write both files; returns their paths, or nothing where the vocabulary is of another kind. Raises ModelError."""
    metadata = read_header(gguf, strings=True).metadata
    if metadata.get("tokenizer.ggml.model") != "llama" or "tokenizer.ggml.scores" not in metadata:
        return []
    tokens = [str(token) for token in metadata["tokenizer.ggml.tokens"]]
    kinds = [int(kind) for kind in metadata["tokenizer.ggml.token_type"]]
    scores = [float(score) for score in metadata["tokenizer.ggml.scores"]]
    paths = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    whole = tokenizer_json(tokens, kinds, scores, _token(metadata, tokens, "bos"))
    paths[0].write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    names = {name: _token(metadata, tokens, key) for name, key in NAMES.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "GemmaTokenizer",
        **{name: token for name, token in names.items() if token is not None},
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", True)),
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    paths[1].write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
    return paths


NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_json(
    tokens: list[str], kinds: list[int], scores: list[float], bos: str | None
) -> dict[str, Any]:
    """The content of tokenizer.json."""
    ids = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    if bos is not None:
        template.insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
        special[bos] = {"id": bos, "ids": [ids[bos]], "tokens": [bos]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, kinds),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special,
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
            "vocab": ids, "merges": merges_of(ids, scores),
        },
    }  # fmt: skip


def merges_of(ids: dict[str, int], scores: list[float]) -> list[list[str]]:
    """[left, right] of every way to make a piece of two, best first."""
    found = []
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                found.append((-scores[i], ids[left], ids[right], left, right))
    found.sort()
    return [[left, right] for *_, left, right in found]


def _added(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    matched = (UNKNOWN, CONTROL, USER_DEFINED)
    return [
        {
            "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in matched
    ]  # fmt: skip


def _token(metadata: dict[str, Any], tokens: list[str], key: str) -> str | None:
    i = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[i] if isinstance(i, int) and 0 <= i < len(tokens) else None
