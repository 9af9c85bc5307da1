"""The one room that touches native code: libggml and libllama of the installed llama-cpp-python wheel.

Everything above speaks of tensors, graphs and backends; only here are there pointers, ctypes and `llama_cpp`.
Knows nothing of models' layers, sequences or sockets. Used by common/model, common/state and common/engine.
"""
