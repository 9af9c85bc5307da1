"""The declared C interface is the installed one: every prototype is compared with the wheel's own headers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import EngineError
from common.ggml import ffi
from common.ggml.prototypes import PROTOTYPES

HEADERS = ("ggml.h", "ggml-cpu.h", "ggml-alloc.h", "ggml-backend.h", "gguf.h")


def normal(prototype: str) -> str:
    """One spelling for prototypes that differ in blanks, `struct` and parameter layout only."""
    text = re.sub(r"\bstruct\b", " ", prototype)
    return re.sub(r"\s*([*(),])\s*", r"\1", " ".join(text.split()))


def header_functions() -> dict[str, str]:
    """name -> normalised prototype, from the headers the wheel installs."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "include"
    found = {}
    for header in HEADERS:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", (folder / header).read_text(), flags=re.DOTALL)
        for match in re.finditer(
            r"GGML_(?:BACKEND_)?API\s+([^;{]*?\b(g(?:gml|guf)_\w+)\s*\([^;{]*?\))", text
        ):
            found[match[2]] = normal(match[1])
    return found


def declared() -> dict[str, str]:
    statements = re.sub(r"//[^\n]*", "", PROTOTYPES).split(";")
    return {re.search(r"(g(?:gml|guf)_\w+)\(", s)[1]: normal(s) for s in statements if s.strip()}


def test_every_prototype_is_the_one_of_the_installed_headers() -> None:
    installed, ours = header_functions(), declared()
    assert len(ours) > 100
    assert ours == {name: installed.get(name) for name in ours}


def test_prototypes_become_the_types_they_name() -> None:
    signatures = ffi.parse_prototypes(PROTOTYPES)
    assert set(signatures) == set(declared())
    assert signatures["ggml_backend_buft_name"] == (ffi.C.c_char_p, [ffi.C.c_void_p])
    assert signatures["ggml_init"] == (ffi.C.c_void_p, [ffi.InitParams])
    assert signatures["ggml_scale"] == (ffi.C.c_void_p, [ffi.C.c_void_p, ffi.C.c_void_p, ffi.C.c_float])


def test_a_type_nobody_declared_is_noticed() -> None:
    with pytest.raises(KeyError):
        ffi.parse_prototypes("quaternion_t ggml_turn(int i);")


def test_other_struct_layouts_are_refused() -> None:
    """A library whose ggml_tensor is 16 bytes longer must not be called any further."""
    other = SimpleNamespace(
        ggml_tensor_overhead=lambda: ffi.lib.ggml_tensor_overhead() + 16,
        ggml_threadpool_params_init=ffi.lib.ggml_threadpool_params_init,
    )
    with pytest.raises(EngineError, match="other struct layouts"):
        ffi.check_layouts(other)


@pytest.mark.parametrize(
    ("given", "set_to"),
    [({}, str(ffi.SPIN_COUNT)), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_waiting_threads_sleep_soon_unless_somebody_chose_otherwise(
    given: dict[str, str], set_to: str
) -> None:
    outside = {key: os.environ[key] for key in os.environ if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    code = "import os, common.ggml.ffi; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=outside | given, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == set_to
