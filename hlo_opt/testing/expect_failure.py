"""`not COMMAND …` for tests: succeeds where the command fails by itself, not where it crashes."""

from __future__ import annotations

import subprocess
import sys


def main(command: list[str]) -> int:
    """Runs a command and turns its exit status around; a death by signal stays a failure."""
    status = subprocess.run(command, check=False).returncode
    if status < 0:
        print(f"not: the command died of signal {-status}", file=sys.stderr)
        return 1
    return int(status == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
