"""The plots of a soak: memory, descriptors, journal and requests over time, faults as ticks; one SVG.

matplotlib is an optional extra and is imported only here. Used by services.bench.soak.run.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from common.errors import SettingError
from common.limits import MIB
from services.bench.soak.samples import Sample

NEEDS = 'the plots need matplotlib: pip install "outrigger[trace]", or leave --report out'


def svg_of(samples: Sequence[Sample], faults_at_s: Sequence[float], title: str) -> str:
    """Four lanes over minutes. Raises SettingError when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise SettingError(NEEDS) from error
    figure = Figure(figsize=(9, 8), layout="constrained")
    FigureCanvasSVG(figure)
    memory, descriptors, journal, requests = figure.subplots(4, 1, sharex=True)
    for process in samples[0].held:
        chosen = [each for each in samples if process in each.held]
        minutes = [each.at_s / 60 for each in chosen]
        memory.plot(minutes, [each.held[process].rss_bytes / MIB for each in chosen], label=process)
        descriptors.plot(minutes, [each.held[process].n_descriptors for each in chosen], label=process)
    minutes = [each.at_s / 60 for each in samples]
    journal.plot(minutes, [each.journal.n_bytes / MIB for each in samples], label="MiB")
    journal.step(minutes, [each.journal.n_files for each in samples], where="post", label="files")
    for name in ("mac.requests_running", "mac.requests_waiting", "gateway.zmq_clients"):
        requests.step(minutes, [each.gauges.get(name, 0.0) for each in samples], where="post", label=name)
    for axes, what in (
        (memory, "memory, MiB"),
        (descriptors, "descriptors"),
        (journal, "journal"),
        (requests, "gauges"),
    ):
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right", fontsize=7, ncols=3)
        axes.vlines(
            [at_s / 60 for at_s in faults_at_s], 0, 0.04, transform=axes.get_xaxis_transform(), colors="#c44"
        )
    memory.set_title(title, fontsize=9)
    requests.set_xlabel("minutes (red ticks: a fault struck)")
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
