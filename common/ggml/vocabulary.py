"""A model's vocabulary: text to token ids and back, read from the GGUF by libllama without touching a weight.

It does not know chats, templates or streams: token ids and bytes only. The gateway calls it for prompts and answers,
the host for the end-of-generation ids. Every argument is checked here: native code would abort the process.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from common.errors import ModelError, RequestError
from common.ggml.llama import llama, load_model_native
from common.limits import N_VOCAB_MAX, PROMPT_BYTES_MAX

VOCAB_TYPE_NONE = 0
VOCAB_TYPE_BPE = 2
TOKEN_ATTR_CONTROL = 1 << 3
TOKEN_ATTR_STRIPS = 1 << 7 | 1 << 8
"""Special tokens that swallow the spaces before or after them."""

SLICE_CHARS = 16_384
"""libllama searches the whole rest of a text behind every special token: its time is quadratic in their number. Long
texts are therefore cut in front of control tokens into slices of about this many characters."""

WORD_CHARS_MAX = 8_192
"""Longest run without (or of) white space where libllama splits words by std::regex, which recurses once a character
and would overflow the stack."""

SPLITTERS_WITHOUT_RECURSION = frozenset(
    {
        "gpt-2",
        "smollm",
        "llama-bpe",
        "llama3",
        "llama-v3",
        "qwen2",
        "qwen35",
        "deepseek-r1-qwen",
        "starcoder",
        "refact",
        "command-r",
        "hunyuan",
    }
)
"""Pre-tokenisers (tokenizer.ggml.pre) for which libllama has a hand-written, iterative splitter (tried with
words of 300,000 characters; the others were seen to fall at 100,000)."""

_LONG_WORD = re.compile(rf"\S{{{WORD_CHARS_MAX + 1}}}|\s{{{WORD_CHARS_MAX + 1}}}")


class Vocabulary:
    """The vocabulary of one GGUF file. Safe to use from several threads; `close` it when nobody uses it any more."""

    def __init__(self, model: int) -> None:
        """Takes over a native model handle; use `load`."""
        self._model: int | None = model
        native = llama()
        self._vocab = native.llama_model_get_vocab(model)
        self.n_vocab: int = native.llama_vocab_n_tokens(self._vocab)
        self.bos_id: int | None = _id_or_none(native.llama_vocab_bos(self._vocab))
        self.eos_id: int | None = _id_or_none(native.llama_vocab_eos(self._vocab))
        self.add_bos: bool = bool(native.llama_vocab_get_add_bos(self._vocab))
        ids = range(self.n_vocab)
        self.end_ids: frozenset[int] = frozenset(i for i in ids if native.llama_vocab_is_eog(self._vocab, i))
        template = native.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._cut = self._control_pattern()
        pre = _metadata(model, "tokenizer.ggml.pre") or "default"
        is_bpe = native.llama_vocab_type(self._vocab) == VOCAB_TYPE_BPE
        self._recurses = is_bpe and pre not in SPLITTERS_WITHOUT_RECURSION

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Reads the vocabulary of a GGUF file. Raises ModelError for a missing, damaged or vocabulary-less file."""
        params = llama().llama_model_default_params()
        params.vocab_only = True
        model = load_model_native(Path(path), params)
        vocab = llama().llama_model_get_vocab(model)
        n_vocab = llama().llama_vocab_n_tokens(vocab)
        if llama().llama_vocab_type(vocab) == VOCAB_TYPE_NONE or not 0 < n_vocab <= N_VOCAB_MAX:
            llama().llama_model_free(model)
            raise ModelError(
                f"the model file {path} has no usable vocabulary ({n_vocab} tokens, or tokenizer 'none')"
            )
        return cls(model)

    def close(self) -> None:
        """Frees the native model. Calling it twice does no harm."""
        if self._model is not None:
            llama().llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        `add_special` adds what the model wants around a text (BOS); `parse_special` reads "<|im_end|>" and its like
        as the control token, not as plain text. Raises RequestError for text too long or not valid Unicode.
        """
        if self._recurses and (found := _LONG_WORD.search(text)):
            raise RequestError(
                f"the text has more than {WORD_CHARS_MAX} characters without a change between words and white space at "
                f"character {found.start()}; this model's tokenizer cannot split that"
            )
        ids: list[int] = []
        for number, piece in enumerate(self._slices(text) if parse_special else (text,)):
            ids += self._tokenize_slice(piece, add_special and number == 0, parse_special)
        return ids

    def piece(self, token_id: int) -> bytes:
        """Bytes a token stands for; control tokens are empty. Raises RequestError for an id outside the vocabulary."""
        self._require_id(token_id)
        known = self._pieces[token_id]
        if known is None:
            known = self._pieces[token_id] = self._piece_native(token_id, special=False)
        return known

    def spelling(self, token_id: int) -> bytes:
        """Bytes a token is written as, control tokens included. Raises RequestError for an id out of range."""
        return self.piece(token_id) or self._piece_native(token_id, special=True)

    def token_text(self, token_id: int) -> str:
        """How a token is written in a template, control tokens included ("<|im_end|>")."""
        self._require_id(token_id)
        return self._piece_native(token_id, special=True).decode("utf-8", "replace")

    def _require_id(self, token_id: int) -> None:
        self._require_open()
        if not 0 <= token_id < self.n_vocab:
            raise RequestError(f"token id {token_id} is outside the vocabulary (0 to {self.n_vocab - 1})")

    def _require_open(self) -> None:
        if self._model is None:
            raise ModelError("this vocabulary was closed")

    def _piece_native(self, token_id: int, *, special: bool) -> bytes:
        native = llama()
        buffer = ctypes.create_string_buffer(128)
        n_bytes = native.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, special)
        if n_bytes < 0:
            buffer = ctypes.create_string_buffer(-n_bytes)
            n_bytes = native.llama_token_to_piece(self._vocab, token_id, buffer, len(buffer), 0, special)
        if n_bytes < 0:
            raise ModelError(f"libllama gives no bytes for token id {token_id}")
        return buffer.raw[:n_bytes]

    def _tokenize_slice(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        self._require_open()
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}"
            ) from error
        if len(data) > PROMPT_BYTES_MAX:
            raise RequestError(f"the text has {len(data)} bytes; at most {PROMPT_BYTES_MAX} are taken")
        # A token covers at least one byte, save for unknown characters (up to one token a byte) and two special tokens.
        native = llama()
        n_max = len(data) + 2
        while True:
            ids = (native.llama_token * n_max)()
            n_ids = native.llama_tokenize(
                self._vocab, data, len(data), ids, n_max, add_special, parse_special
            )
            if n_ids >= 0:
                return ids[:n_ids]
            if -n_ids <= n_max:  # INT32_MIN and its like: a failure, not a size
                raise RequestError("the text could not be tokenised")
            n_max = -n_ids

    def _slices(self, text: str) -> Iterator[str]:
        """Cuts a long text in front of control tokens; libllama treats what lies between them independently."""
        start = 0
        while self._cut is not None and len(text) - start > SLICE_CHARS:
            found = self._cut.search(text, start + SLICE_CHARS)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]

    def _control_pattern(self) -> re.Pattern[str] | None:
        """Matches the control tokens at which a text may be cut; None when some swallow spaces around them."""
        native = llama()
        attrs = [(i, native.llama_vocab_get_attr(self._vocab, i)) for i in range(self.n_vocab)]
        if any(attr & TOKEN_ATTR_STRIPS for _, attr in attrs):
            return None
        texts = {self.token_text(i) for i, attr in attrs if attr & TOKEN_ATTR_CONTROL} - {""}
        # Only tokens of the shape <...>, whose texts cannot overlap one another from the left, are taken.
        plain = sorted(t for t in texts if re.fullmatch(r"<[^<>]+>", t))
        return re.compile("|".join(map(re.escape, plain))) if plain else None


def _id_or_none(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def _metadata(model: int, key: str) -> str | None:
    """One metadata value as text, or None when the file has no such key."""
    buffer = ctypes.create_string_buffer(256)
    n_bytes = llama().llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if n_bytes >= 0 else None
