"""The one door to coremltools: protobuf classes for reading packages, the builder for making templates.

coremltools says on every platform but macOS, once per missing native class, that it cannot run models; we never ask it
to, so that is kept quiet while it is imported. Imports are made on first use: reading a weight file must not cost them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from common.errors import PackageError

MISSING = 'coremltools is not installed; install it with: pip install "outrigger[coreml]"'


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep coremltools' import notes and progress bars off the terminal; errors still raise."""
    logger = logging.getLogger("coremltools")
    level, disabled = logger.level, logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        logger.setLevel(level)


@functools.cache
def model_proto() -> Any:
    """The protobuf module of Model (a whole model.mlmodel)."""
    return _load("coremltools.proto.Model_pb2")


@functools.cache
def mil_proto() -> Any:
    """The protobuf module of MIL programs: functions, blocks, operations, values."""
    return _load("coremltools.proto.MIL_pb2")


@functools.cache
def coremltools() -> Any:
    """The package itself: the builder, the converter, and on a Mac the runtime."""
    return _load("coremltools")


@functools.cache
def builder() -> Any:
    """`Builder` of MIL programs, usually called mb."""
    return _load("coremltools.converters.mil").Builder


@functools.cache
def mil_types() -> Any:
    """Element types of MIL programs (fp16, int32, ...)."""
    return _load("coremltools.converters.mil.mil").types


def runtime_available() -> bool:
    """Whether Core ML itself can run models here: macOS with coremltools' native part."""
    if sys.platform != "darwin":
        return False
    try:
        _load("coremltools.libcoremlpython")
    except PackageError:
        return False
    return True


def _load(name: str) -> Any:
    import importlib

    with quiet():
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise PackageError(f"{MISSING} ({error})") from error
