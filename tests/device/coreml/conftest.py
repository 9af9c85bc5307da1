"""Shared by the Core ML tests: small programs built by coremltools, saved, and opened by the interpreter."""

import pytest

from device.coreml import toolchain
from device.coreml.reference import Arithmetic, Program


def pytest_collection_modifyitems(config, items):
    """Slow proofs run when they are asked for: -m coreml, as `make verify` does."""
    if "coreml" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("coreml")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.fixture(scope="session", autouse=True)
def coremltools():
    """Without the extra every test here is skipped, and says so."""
    pytest.importorskip(
        "coremltools", reason="needs the extra: pip install 'outrigger[coreml]'", exc_type=ImportError
    )


@pytest.fixture(scope="session")
def mil():
    """The builder, the element types and the newest opset: (mb, types, opset)."""
    coremltools = toolchain.coremltools()
    return toolchain.builder(), toolchain.mil_types(), coremltools.target.iOS18


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(program) -> path of the saved package."""

    def save(program, name="model"):
        path = tmp_path_factory.mktemp("package") / f"{name}.mlpackage"
        toolchain.save_program(program, path)
        return path

    return save


@pytest.fixture(scope="session")
def load(build):
    """load(program, arithmetic...) -> an interpreter Program over the saved package."""
    return lambda program, *arithmetic: Program.load(build(program), Arithmetic(*arithmetic))
