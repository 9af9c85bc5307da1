"""Attention over part of the keys, and how parts become the whole. Pure: arrays in, arrays out.

Knows no pages, sequences, models or devices. Used by common/engine, the worker and the tests of the merge law.
"""
