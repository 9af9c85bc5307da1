"""One watched system for all tests that ask its Prometheus; test_prometheus.py sees it before faults strike it."""

from __future__ import annotations

import pytest

from tests.system.watched import use, watching


@pytest.fixture(scope="session")
def watched(checkout, smollm2, tmp_path_factory):
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model."""
    with watching(checkout, tmp_path_factory.mktemp("watched")) as watched:
        use(watched)
        yield watched
