"""The one exception type users see.

Everything that is the input's or the command line's fault is raised as `HloOptError`; the driver
prints it as one line and exits with status 1. Anything else is a bug of ours.
"""

from __future__ import annotations


class HloOptError(Exception):
    """A problem with the user's input, worded for the user.

    Args:
      message: what was expected, what was found and what to do, in one line.
      location: `file:line:column` where known.
    """

    def __init__(self, message: str, *, location: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.location = location

    def __str__(self) -> str:
        return f"{self.location}: {self.message}" if self.location else self.message
