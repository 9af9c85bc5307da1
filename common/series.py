"""Every Prometheus series, declared once: name, kind, who owns it, what its labels may be.

Label values are a closed list; where the list holds "other", whatever is not in it counts there. Names carry base
units. What docs, dashboards and alerts may ask for is in this table, and nothing else. Read by common.metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.limits import FROZEN_ASK_BUCKETS_S

PREFIX = "outrigger_"
