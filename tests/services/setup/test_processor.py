"""Aim: where AMX kills the process it is left out of the build, elsewhere it stays, and the key tells them apart.

Method: the real decision with the real compiler; instead of the AMX program, small C programs that end as an AMX
program would end: well, by an illegal instruction, by a fault in memory, never, or with a wrong product.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from services.setup import processor, wheel

X86 = platform.machine() in ("x86_64", "AMD64")
GOOD = "int main(void) { return 0; }\n"
ILLEGAL = "int main(void) { __builtin_trap(); }\n"
FAULT = "#include <signal.h>\nint main(void) { raise(SIGSEGV); return 0; }\n"
WRONG_PRODUCT = "int main(void) { return 4; }\n"
NOT_C = "this is not a C program\n"


def verdict(folder: Path, program: str, advertised: bool = True) -> processor.AmxVerdict:
    source = folder / "program.c"
    source.write_text(program)
    return processor.amx_verdict(advertised, shutil.which("cc") or "cc", folder / "probe", source)


@pytest.mark.skipif(not X86, reason="the AMX flags exist on x86 only")
@pytest.mark.parametrize("program", [ILLEGAL, FAULT, WRONG_PRODUCT, NOT_C])
def test_amx_that_does_not_come_back_right_is_left_out(tmp_path: Path, program: str) -> None:
    found = verdict(tmp_path, program)
    assert found == ("faults", ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16"))


@pytest.mark.skipif(not X86, reason="the AMX flags exist on x86 only")
def test_amx_that_works_stays(tmp_path: Path) -> None:
    assert verdict(tmp_path, GOOD) == ("works", ())


@pytest.mark.skipif(not X86, reason="the AMX flags exist on x86 only")
def test_amx_that_hangs_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "PROBE_RUN_TIMEOUT_S", 0.2)
    assert verdict(tmp_path, "int main(void) { for (volatile int i = 0;; i++) {} }\n").word == "faults"


def test_a_processor_without_amx_is_not_asked(tmp_path: Path) -> None:
    assert verdict(tmp_path, ILLEGAL, advertised=False) == ("absent", ())
    assert not (tmp_path / "probe").exists()


def test_a_compiler_that_does_not_know_amx_gets_no_flag_about_it(tmp_path: Path) -> None:
    old_compiler = tmp_path / "cc-old"
    old_compiler.write_text('#!/bin/sh\ncase "$*" in *amx*) exit 1;; esac\nexec cc "$@"\n')
    old_compiler.chmod(0o755)
    found = processor.amx_verdict(True, str(old_compiler), tmp_path / "probe")
    assert found == ("unknown to the compiler", ())


@pytest.mark.skipif(not X86, reason="AMX is an extension of x86")
def test_the_probe_itself_compiles_and_tells_the_truth_about_this_machine(tmp_path: Path) -> None:
    found = processor.amx_verdict(True, "cc", tmp_path / "probe")
    if "amx_tile" not in processor.instruction_sets():
        assert found.word != "works"
    assert (tmp_path / "probe" / "amx_probe").exists() or found.word == "unknown to the compiler"


def test_the_verdict_reaches_compiler_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in wheel.FLAG_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    stock = wheel.recipe(processor.AmxVerdict("absent", ()))
    monkeypatch.setenv("CFLAGS", "-g")
    without = wheel.recipe(processor.AmxVerdict("faults", processor.AMX_OFF))
    assert without.environment["CFLAGS"] == "-g -mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert without.environment["CXXFLAGS"] == "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert stock.environment == {}
    assert without.key != stock.key


@pytest.mark.parametrize("ingredient", ["identity", "libc"])
def test_another_processor_or_c_library_is_another_key(
    monkeypatch: pytest.MonkeyPatch, ingredient: str
) -> None:
    amx = processor.AmxVerdict("absent", ())
    here = wheel.recipe(amx).key
    assert wheel.recipe(amx).key == here
    monkeypatch.setattr(processor, ingredient, lambda: "another")
    assert wheel.recipe(amx).key != here
