"""One BLAS thread for products of a chunk's size.

NumPy's BLAS starts a thread per core for each product and lets them spin for one another. For products as small as a
chunk's that gains little on a quiet machine, and on a busy one it costs fifteen times: checking a product page took 136
seconds beside other work and 8 with one thread. Called by the interpreter, the ordinary kernels and the oracle.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from threadpoolctl import ThreadpoolController


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def one_blas_thread() -> AbstractContextManager[Any]:
    """Limit BLAS to one thread inside a `with`; the limit is the process's, and is lifted again."""
    return _controller().limit(limits=1, user_api="blas")
