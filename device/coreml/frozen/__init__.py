"""Frozen pages: old keys of attention layers as page programs, made in the background, used when they are ready.

`plan` decides (which page to build, drop, ask), `load_policy` decides about one load and its failures, `pages` acts,
and the runtimes run programs: Core ML on Apple systems, the interpreter for verification, ordinary kernels elsewhere.
A page that is not ready, failed or is slow is simply not used: its keys stay with the ordinary kernels.
"""
