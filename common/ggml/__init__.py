"""The one room that touches native code: libggml and libllama of the installed llama-cpp-python wheel.

Everything above speaks of tensors, graphs and backends; only here are there pointers, ctypes and `llama_cpp`.
Knows nothing of models' layers, sequences or sockets. Used by common/model, common/state and common/engine.
"""

# First of all, before anybody imports llama_cpp: a wheel holds each library under several names, as copies. A process
# that loads ggml's once for libllama and once more for us computes with one copy on buffers of the other: no numbers.
from . import ffi as ffi
