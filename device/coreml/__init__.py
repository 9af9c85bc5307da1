"""Core ML artefacts, made and checked without a Mac: weight files, page programs, an interpreter, frozen pages.

Only this package imports coremltools, and inside it only `toolchain.py` does. It knows nothing of links and services.
"""
