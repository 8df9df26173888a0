"""What a user can do wrong, and how a command ends then: UserError, Ctrl-C, and what is left to remove."""

import sys

if sys.platform == "win32":
    sys.exit("error: Windows lacks signals that a run needs; use WSL, the Linux in Windows: wsl --install")

import difflib
import errno
import gc
import os
import re
import shlex
import shutil
import signal
import subprocess
import textwrap
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

UNFINISHED = set()  # folders that a command removes if it fails: a run before its first step, half an export
# what PyTorch and Triton say
NO_COMPILER = ("No working C++ compiler found", "Failed to find C compiler")


class UserError(ValueError):
    """One sentence for the user, with the value, the rule and the remedy. Commands print it without a traceback."""


def require(condition, message):
    """Raise UserError unless the condition holds."""
    if not condition:
        raise UserError(message)


def quote(path):
    """A path or name as a shell needs it in a command that is printed."""
    return shlex.quote(str(path))


def perhaps(name, names, before=""):
    """The one of some names that a user may have meant, in brackets; "" if none is like it."""
    return "".join(f" (perhaps {before}{found})" for found in difflib.get_close_matches(name, names, 1))


def fold(text, indent=0):
    """A line broken between words, to the terminal's width or else 100 columns; the lines after it are indented."""
    return textwrap.fill(
        text, shutil.get_terminal_size((100, 24)).columns, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def is_first_on_host():
    """Whether this process is the first of those that torchrun starts on a host, or the only one."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def tell(text):
    """Print to standard error, once on each host."""
    if is_first_on_host():
        print(text, file=sys.stderr)


def start_command(imports=None):
    """Let Ctrl-C end the process. A command calls this before its imports, and names those that take seconds."""
    # Imports and compilers make many objects that stay. To search them all for garbage each time takes seconds.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    if imports and sys.stderr and sys.stderr.isatty() and "--help" not in sys.argv:
        tell(f"importing {imports} ...")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def end_at_once(*_):
    """Handler of Ctrl-C. It raises nothing, because libraries swallow a KeyboardInterrupt or print its traceback."""
    remove_unfinished()
    os._exit(130)


def remove_unfinished():
    while UNFINISHED:
        shutil.rmtree(UNFINISHED.pop(), ignore_errors=True)


def sentence_of(error, out_of_memory):
    """The sentence to print in place of a traceback; None if the error may be a mistake in the code."""
    if type(error).__name__ == "OutOfMemoryError":  # PyTorch's; this module does not import it
        return f"{str(error).split('. ')[0]}; {out_of_memory}"
    if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_COMPILER):
        return "there is no C++ compiler, which --compile and Triton need; install g++, or give --compile off on a CPU"
    if type(error).__name__ == "OutOfResources":  # Triton's
        return f"{str(error).split('. ')[0]}; the kernels do not fit this GPU: give --attention sdpa"
    if type(error).__name__ == "AcceleratorError":  # PyTorch's
        return f"{str(error).splitlines()[0]}; start again, and if it comes back, give --device cpu"
    if isinstance(error, subprocess.CalledProcessError) and re.search(r"cc|clang|\+\+", Path(error.cmd[0]).name):
        return f"{error.cmd[0]} failed; install a C compiler and Python's headers, as python3-dev, or give --device cpu"
    if isinstance(error, OSError) and error.filename is not None:  # a file that is missing or cannot be read
        return f"{error.filename}: {error.strerror}"
    return str(error) if isinstance(error, UserError) else None


def fail(sentence):
    sys.exit(f"error: {sentence}")


class Output:
    """A standard stream whose reader, terminal or disk may go away: what cannot be written is dropped.

    needed: end the command instead; silently if the reader has gone.
    """

    def __init__(self, stream, needed=False):
        self.stream, self.needed = stream, needed
        if stream is None:  # it was closed before Python began
            self.stream = open(os.devnull, "w")  # noqa: SIM115, it stays open
        self.isatty = self.stream.isatty  # each line asks for it
        if hasattr(self.stream, "reconfigure"):  # a notebook's stream has no such method
            self.stream.reconfigure(errors="replace")  # characters that the terminal lacks, and names of files

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self._try(self.stream.write, text)
        return len(text)

    def flush(self):
        self._try(self.stream.flush)

    def _try(self, function, *arguments):
        try:
            function(*arguments)
        except OSError as error:
            if self.needed:
                nobody_reads = error.errno in (errno.EPIPE, errno.EIO)
                sys.exit(1 if nobody_reads else f"error: cannot write to standard output ({error.strerror})")

    def end(self):
        """Drop what is still buffered if it cannot be written, because Python writes it once more when it ends."""
        try:
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


@contextmanager
def command(out_of_memory="", fail=fail, needs_output=False):
    """End a command with exit code 1 and one sentence if the user made a mistake, and with 130 after Ctrl-C.

    Args:
        out_of_memory: what to do if a GPU has too little memory.
        fail: prints the sentence and exits; None raises UserError, in a notebook or another program.
        needs_output: whether the command ends when its standard output cannot be written.
    """
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:  # else a file of the run gets the number of a closed stream
        pass
    os.close(spare)
    out, err = Output(sys.stdout, needs_output), Output(sys.stderr)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # what is typed or piped in another encoding
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
            UNFINISHED.clear()
            out.flush()
        except KeyboardInterrupt:  # of sample.py --interactive, or of a notebook
            if not fail:
                raise
            sys.exit(130)
        except Exception as error:
            sentence = sentence_of(error, out_of_memory)
            if sentence is None:
                raise
            if not fail:
                raise UserError(sentence) from None
            fail(sentence)
        finally:
            out.end()
            err.end()
            remove_unfinished()
