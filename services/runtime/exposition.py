"""/metrics of one process: prometheus_client's own server on loopback, over that process's registry."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType

from prometheus_client import start_http_server

from common.errors import ServiceError
from common.metrics import Metrics

ADDRESS = "127.0.0.1"


class Exposition:
    """Serves `metrics` until closed. `port` 0 takes a free one; `url` says where it is."""

    def __init__(self, metrics: Metrics, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, ADDRESS, metrics.registry)
        except OSError as error:
            raise ServiceError(
                f"port {port} for /metrics of {metrics.process} is not free ({error.strerror}): set "
                f"OUTRIGGER_{metrics.process.upper()}_METRICS_PORT to another, or to 0 for any free one"
            ) from error
        self.url = f"http://{ADDRESS}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving, now: the server looks twice a second whether it is to stop, or when somebody connects."""
        stopping = threading.Thread(target=self._server.shutdown)
        stopping.start()
        with suppress(OSError):
            socket.create_connection((ADDRESS, self._server.server_port), timeout=1).close()
        stopping.join()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Exposition:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
