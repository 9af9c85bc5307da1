"""Aim: `inspect_package` tells what is in a package, for pages and for any other program.

Method: a page template, and a small program with a state and an operation the interpreter does not run.
"""

import numpy as np

from device.coreml.geometry import PageGeometry
from device.coreml.inspection import inspect_package
from device.coreml.template import build_template


def test_a_template(tmp_path):
    geometry = PageGeometry(2, 16, 32, 4, 512, 256)
    view = inspect_package(build_template(geometry, tmp_path).path)
    (main,) = view.functions
    assert main.features == {"queries": "float16 [1 x 34 x 1 x 4]"}
    assert main.outputs == {
        "o": "float16 [1 x 128 x 1 x 4]",
        "m": "float16 [1 x 4 x 1 x 4]",
        "l": "float16 [1 x 4 x 1 x 4]",
    }
    assert main.operations["conv"] == 8 and main.unknown == () and main.states == {}
    assert [(c.name, c.n_bytes) for c in view.constants] == [
        (name, 2 * int(np.prod(shape))) for name, shape in geometry.constants()
    ]
    assert view.metadata == {"outrigger.page": geometry.name}
    assert view.weight_bytes > geometry.weight_bytes and view.specification >= 9


def test_states_and_unknown_operations(mil, build):
    mb, types, opset = mil
    specs = [mb.TensorSpec((4,), types.fp16), mb.StateTensorSpec((4,), types.fp16)]

    @mb.program(input_specs=specs, opset_version=opset)
    def program(x, memory):
        kept = mb.coreml_update_state(state=memory, value=mb.erf(x=x))
        return mb.identity(x=kept, name="y")

    view = inspect_package(build(program))
    assert view.functions[0].states == {"memory": "float16 [4]"}
    assert view.functions[0].unknown == ("erf",)
    assert view.weight_bytes == 0 and view.constants == ()
