"""The process that owns the model on the host: layer spans, read pipeline, decode, sampling."""
