"""What a setting is made of: its sentence, its range, its flat name. Used by the files that declare settings."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common import limits


def says(text: str, flat: str | None = None, **bounds: Any) -> Meta:
    """What a setting is for, its flat name when that differs, and its range."""
    return Meta(description=text, extra={"flat": flat} if flat else None, **bounds)


LayerNumber = Annotated[int, Meta(ge=1, le=limits.N_LAYER_MAX)]
Port = Annotated[int, Meta(ge=0, le=65_535)]
Mebibytes = Annotated[int, Meta(ge=0, le=1 << 24)]


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one process or purpose."""
