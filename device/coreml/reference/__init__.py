"""The reference interpreter: runs a saved .mlpackage in NumPy, as the oracle of every Core ML artefact made here.

    program = Program.load("page.mlpackage", Arithmetic("block64", subnormals="flushed"))
    outputs = program.predict({"queries": queries})

`package` reads what is on disk, `arithmetic` says how fp16 hardware may add, `ops/` holds the operations by kind, and
`runner` walks a function. It aims at being right and readable; it is not fast and claims nothing about real hardware.
"""

from device.coreml.reference.arithmetic import Arithmetic
from device.coreml.reference.package import Package
from device.coreml.reference.runner import Program, State

__all__ = ["Arithmetic", "Package", "Program", "State"]
