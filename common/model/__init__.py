"""What a model file says: its header and tensors (gguf), the kind of every layer (spec), how to split it (split).

Runs nothing and holds no state. Used by common/engine and by the commands that write model files.
"""
