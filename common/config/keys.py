"""The settings as a table: each one's names, type, range in words. Built from tree.py, used by load.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import inspect

from common.config.tree import Settings

PREFIX = "OUTRIGGER_"
AUTO = "auto"


@dataclass(frozen=True)
class Key:
    """One setting: its place in the tree, its flat name, its type with range, its sentence."""

    leaf: str
    field: str
    flat: str
    type: inspect.Type
    text: str
    default: Any

    @property
    def path(self) -> str:
        """Section and key, as in a file."""
        return f"{self.leaf}.{self.field}"

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return PREFIX + self.flat.upper()

    @property
    def flag(self) -> str:
        """Name of its flag."""
        return "--" + self.flat.replace("_", "-")


def allowed_text(kind: inspect.Type) -> str:
    """What a value may be, in words."""
    match bare(kind):
        case inspect.UnionType() as kind:
            return " or ".join(
                AUTO if isinstance(each, inspect.NoneType) else allowed_text(each) for each in kind.types
            )
        case inspect.LiteralType() as kind:
            return "one of " + ", ".join(str(value) for value in kind.values)
        case inspect.IntType() | inspect.FloatType() as kind:
            return _range_text(kind)
        case inspect.StrType() as kind:
            return "text, not empty" if kind.min_length else "text"
    raise TypeError(f"no words for {kind}")


def _range_text(kind: inspect.IntType | inspect.FloatType) -> str:
    noun = "an integer" if isinstance(kind, inspect.IntType) else "a number"
    words = [noun]
    if kind.gt is not None:
        words.append(f"over {kind.gt}")
    if kind.ge is not None and kind.le is not None:
        words.append(f"from {kind.ge} to {kind.le}")
    elif kind.le is not None:
        words.append(f"up to {kind.le}")
    elif kind.ge is not None:
        words.append(f"of at least {kind.ge}")
    if kind.multiple_of is not None:
        words.append(f"that is a multiple of {kind.multiple_of}")
    return " ".join(words)


def bare(kind: inspect.Type) -> inspect.Type:
    """The type itself, without the wrapper that carries its sentence."""
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _described(kind: inspect.Type) -> tuple[str, str | None]:
    """(sentence, flat name) of a field. Bounds that belong to a type leave the text in an outer wrapper."""
    if isinstance(kind, inspect.Metadata):
        schema, extra = kind.extra_json_schema or {}, kind.extra or {}
        return schema.get("description", ""), extra.get("flat")
    return "", None


def _all_keys() -> dict[str, Key]:
    keys = {}
    for leaf in inspect.type_info(Settings).fields:
        for field in inspect.type_info(leaf.type.cls).fields:
            text, flat = _described(field.type)
            key = Key(leaf.name, field.name, flat or field.name, field.type, text, field.default)
            keys[key.path] = key
    return keys


KEYS = _all_keys()
LEAF_TYPES = {leaf.name: leaf.type.cls for leaf in inspect.type_info(Settings).fields}
assert len({key.flat for key in KEYS.values()}) == len(KEYS), "a flat name names one setting"
assert all(key.text for key in KEYS.values()), "every setting says what it is for"
