"""`hlo-opt` for tests: `--load=MODULE` imports modules that register passes first."""

from __future__ import annotations

import importlib
import sys

from hlo_opt import driver

LOAD = "--load="


def main() -> int:
    """Imports the modules asked for and runs the driver on the other arguments."""
    arguments = []
    for argument in sys.argv[1:]:
        if argument.startswith(LOAD):
            importlib.import_module(argument.removeprefix(LOAD))
        else:
            arguments.append(argument)
    sys.argv[1:] = arguments
    return driver.main()


if __name__ == "__main__":
    sys.exit(main())
