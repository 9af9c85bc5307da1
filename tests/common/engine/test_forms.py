"""The form of many rows is measured once and remembered, so that all processes of a machine take the same."""

from __future__ import annotations

from pathlib import Path

from common.engine import forms
from common.ggml.backend import Backend, choose_device


def test_what_was_measured_once_is_what_all_take(tmp_path: Path) -> None:
    backend, folder = Backend(choose_device("cpu")), tmp_path / "checks"
    first = forms.remembered_form(backend, folder)
    (remembered,) = folder.iterdir()
    assert remembered.read_text() == first
    for form in ("products", "kernels"):
        remembered.write_text(form)
        assert forms.remembered_form(backend, folder) == form
    two = Backend(choose_device("cpu"), n_threads=2)
    forms.remembered_form(two, folder)
    assert len(list(folder.iterdir())) == 2  # other threads, another measurement
    two.close()
    backend.close()
