"""Gemma 3 models as Core ML bundles: read, palettised, built, proven through the interpreter; no Mac and no torch.

    model = open_model(path)              a Hugging Face folder or a GGUF, described once, weights read when asked for
    convert(model, folder, options)       embeddings, transformer chunks, head: packages, and what a phone app reads
    lint(folder)                          what would go wrong on a device, each with its remedy

Nothing here has run on Apple hardware. Called by services.cli.convert and services.cli.bundle.
"""
