"""What a run says, which must not be the end of it: the terminal may be gone, the disk behind the output full."""

import os
import sys
from contextlib import suppress


def say(text, file=None, renew=False):
    """Print a line to standard output, or another stream, if that is possible.

    On a terminal the line takes the place of one that was said with `renew`, as progress is.
    """
    stream = file or sys.stdout
    terminal = stream is not None and stream.isatty()
    with suppress(OSError):
        print(f"\r\x1b[K{text}" if terminal else text, end="" if renew and terminal else "\n", file=stream, flush=True)


def last_word():
    """Call it at the end of the program: Python would exit with 120 for what could not be printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
