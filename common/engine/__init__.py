"""Runs spans of a model's layers: rows in, rows or logits out. Used by services/mac and device/worker.

Engine.load gives an engine, engine.span(first, last) a LayerSpan of it. Knows no text, no sockets and no other process.
"""
