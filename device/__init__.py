"""The far end of the cable: the worker, its Core ML tools and its stand-in. Speaks the link and nothing else."""
