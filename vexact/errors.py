"""What went wrong outside the program."""

from __future__ import annotations


class BadInput(ValueError):
    """Something a caller gave cannot be used: one line naming the file, tensor, key or flag.

    The command line prints it and exits with 2. Every other exception is a fault of this program and is shown whole.
    """

    abrupt = False  # leave at once, without the interpreter's own end
