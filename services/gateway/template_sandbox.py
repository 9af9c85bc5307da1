"""The sandbox that chat templates run in: nothing outside is in reach, and what does not end is ended.

jinja2's immutable sandbox keeps a template from attributes, files and imports. It bounds no time, so three things are
added: nothing is computed while a template is compiled, every turn of a loop looks at the clock, and operators that
make much of little are held to a size. Knows no messages. Used by template.py.
"""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import jinja2.sandbox

RENDERED_CHARS_MAX = 1 << 26
POWER_BITS_MAX = 4096
"""Size of the largest number that ** may make."""

_LOOPS = (ast.For, ast.While, ast.FunctionDef)
_LOOK = ast.parse("environment.look_at_clock()").body[0]


class RunawayError(Exception):
    """A template runs too long, or makes too much."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates can be given a time: `with sandbox.limited(seconds): template.render(...)`."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            optimized=False,  # else constants are folded when a template is compiled: 9**9**9 would never end
        )
        self._running = threading.local()

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """What this thread renders inside raises RunawayError after so many seconds."""
        self._running.until_s, self._running.seconds = time.monotonic() + seconds, seconds
        try:
            yield
        finally:
            del self._running.until_s

    def look_at_clock(self) -> None:
        """Called by compiled templates on every turn of every loop."""
        until_s = getattr(self._running, "until_s", None)
        if until_s is not None and time.monotonic() > until_s:
            raise RunawayError(f"it did not end within {self._running.seconds:g} s")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Every +, * and ** of a template."""
        if _n_made(operator, left, right) > RENDERED_CHARS_MAX:
            raise RunawayError(f"it makes something of more than {RENDERED_CHARS_MAX} items with {operator}")
        return super().call_binop(context, operator, left, right)

    def _compile(self, source: str, filename: str) -> CodeType:
        """The Python code that jinja2 made of a template, with a look at the clock in every loop and macro."""
        tree = ast.parse(source, filename)
        for node in ast.walk(tree):
            if isinstance(node, _LOOPS):
                node.body.insert(0, _LOOK)
        return compile(ast.fix_missing_locations(tree), filename, "exec")


def _n_made(operator: str, left: Any, right: Any) -> int:
    """Items or characters of what an operator would make, as far as that can be told; 0 for small things."""
    if operator == "+":
        return len(left) + len(right) if hasattr(left, "__len__") and hasattr(right, "__len__") else 0
    if operator == "*":
        whole, times = (left, right) if hasattr(left, "__len__") else (right, left)
        return len(whole) * max(0, times) if hasattr(whole, "__len__") and isinstance(times, int) else 0
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > POWER_BITS_MAX:
        return RENDERED_CHARS_MAX + 1
    return 0
