"""Door of the set-up: refuses a Python that is too old or too new, then hands over to services.setup.install.

Any Python 3 can read this file, so that an unfit one is told what to do and does not meet a syntax error.
"""

import platform
import sys

OLDEST, FIRST_TOO_NEW = (3, 11), (3, 14)


def main() -> int:
    """Exit code: 0 set up, 1 a step failed (told on standard error), 130 interrupted."""
    if not OLDEST <= sys.version_info[:2] < FIRST_TOO_NEW:
        sys.stderr.write(
            f"set-up: this is Python {platform.python_version()} ({sys.executable}); it takes 3.11, 3.12 or 3.13.\n"
            "  Debian, Ubuntu:  apt-get install python3.11 python3.11-venv   (or 3.12, 3.13)\n"
            "  macOS:           brew install python@3.13\n"
            "  then:            make PYTHON=python3.13 setup\n"
        )
        return 1
    from services.setup.install import set_up

    return set_up(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
