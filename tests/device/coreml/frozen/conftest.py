"""A device that fails by cause, a clock, and a source of rows, for the tests of frozen pages.

The device is a runtime over ordinary kernels whose loads follow a script: each load takes the next word ("ok" when the
script has ended). It remembers a failed compilation as real devices do: until then every load fails at once, with an
error that misleads.
"""

import time

import numpy as np
import pytest

from common.errors import PageLoadError
from device.coreml.accuracy import make_inputs
from device.coreml.frozen.load_policy import DeviceFacts, LoadLimits
from device.coreml.frozen.pages import FrozenPages
from device.coreml.frozen.runtime import KernelRuntime
from device.coreml.frozen.table import FrozenSettings
from device.coreml.geometry import PageGeometry
from device.coreml.template import build_template

GEOMETRY = PageGeometry(2, 32, 32, 6, 256)
AMPLE = DeviceFacts(1 << 40, 1 << 40)


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class Page:
    """A page whose placement, speed and answer can be wrong."""

    def __init__(self, page, word, clock):
        self.page, self.word, self.clock, self.closed = page, word, clock, False
        self.placement = "cpu" if word == "wrong placement" else "neural engine"

    def ask(self, queries, centre=None):
        assert not self.closed, "asked after it was closed"
        if self.word == "slow":
            self.clock.now_s += 5
        if self.word == "breaks later" and centre is not None:
            raise RuntimeError("espresso: status -7")
        answer = self.page.ask(queries, centre)
        return answer._replace(o=answer.o * 2) if self.word == "wrong answer" else answer

    def close(self):
        self.closed = True


class Device(KernelRuntime):
    engine, placement = "fake", "neural engine"
    memory_s = 120.0

    def __init__(self, clock, script=()):
        self.clock, self.script = clock, list(script)
        self.loads, self.pages, self.cleaned, self.slots = [], [], [], []
        self.failed_at_s = None

    def write(self, template, constants, path, slot):
        self.slots.append(slot)
        if self.script[:1] == ["disk full"]:
            self.script.pop(0)
            raise OSError(28, "No space left on device")
        super().write(template, constants, path, slot)

    def load(self, template, path):
        self.loads.append(self.clock.now_s)
        if self.failed_at_s is not None and self.clock.now_s < self.failed_at_s + self.memory_s:
            raise PageLoadError(
                ".functionName must be nil unless the model type is ML Program.", cause="other"
            )
        word = self.script.pop(0) if self.script else "ok"
        if word == "compile":
            self.failed_at_s = self.clock.now_s
            raise PageLoadError("ANECCompile() FAILED (11)", cause="compile")
        if word == "memory":
            raise PageLoadError("MIL->EIR: not enough memory", cause="memory")
        if word == "odd":
            raise ValueError("unknown to everyone")
        if word == "late":
            time.sleep(0.4)
        page = Page(super().load(template, path), word, self.clock)
        self.pages.append(page)
        return page

    def clean(self, path, since_unix_s):
        self.cleaned.append(path.name)


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    return build_template(GEOMETRY, tmp_path_factory.mktemp("template"))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="session")
def inputs():
    """Six pages of keys, the same for every layer."""
    return make_inputs("realistic", GEOMETRY, n_keys=6 * GEOMETRY.page_tokens)


@pytest.fixture
def rows(inputs):
    def read(layer, first, n):
        k, v = (
            np.ascontiguousarray(x[:, first : first + n].transpose(1, 0, 2)).reshape(n, -1).view(np.uint8)
            for x in (inputs.k, inputs.v)
        )
        return k, v, 1

    return read


@pytest.fixture
def frozen(template, clock, rows, tmp_path):
    """frozen(script, ...) -> FrozenPages over a Device; `.device` and `.facts` may be changed by the test."""
    made = []

    def make(script=(), layers=(3, 7), n_pages=4, shares=((1, 1.0),), runtime=None, **limits):
        device = runtime or Device(clock, script)
        settings = FrozenSettings(
            layers, n_pages * len(layers) * GEOMETRY.weight_bytes, shares, LoadLimits(**limits)
        )
        state = {"facts": AMPLE}
        pages = FrozenPages(
            settings, template, device, rows, lambda: state["facts"], tmp_path / "pages", clock
        )
        pages.device, pages.state = device, state
        made.append(pages)
        return pages

    yield make
    for pages in made:
        pages.close()
