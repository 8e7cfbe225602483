"""Owns reading Triton's own log: its end, and the line in it that says what went wrong."""

import os
import re
import signal
from pathlib import Path

from export.contract import UserError

TAIL_BYTES = 4096

_COMPLAINT = re.compile(r"^(?:E\d{4} \S+\s+\d+ \S+\]\s*|error: )(?P<text>.*)$", re.MULTILINE)
"""An error line of glog (``E1130 21:05:10.614066 14015 main.cc:245] "…"``), or what is printed before there is a log."""


_LOG_LINE = re.compile(r"[IWEF]\d{4} ")

_NOISE = ("CudaDriverHelper has not been initialized", "Failed to initialize NVML")
"""Errors that every start without a GPU logs, and that stop nothing."""


class TritonStartError(UserError):
    """Triton did not come up; the message is one line with its reason.

    Attributes:
        log_tail: The end of Triton's own log.
    """

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail


def read_tail(path: Path, start: int) -> str:
    """The last ``TAIL_BYTES`` of a log, nothing from before byte ``start``; empty if there is no log."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def find_complaint(tail: str) -> str:
    """The last error in the end of a log, on one line; without one, what was said before there was a log, if that is all."""
    found = [match["text"].strip(' "') for match in _COMPLAINT.finditer(tail)]
    telling = [text for text in found if not any(text.startswith(noise) for noise in _NOISE)]
    if telling:
        return telling[-1]
    last = tail.rstrip().splitlines()[-1].strip() if tail.strip() else ""
    return "" if _LOG_LINE.match(last) else last


def first_line(text: str) -> str:
    """The first line of a reason that Triton gives; what follows are stack frames."""
    return text.strip().splitlines()[0] if text.strip() else "no reason given"


def describe_end(code: int) -> str:
    """How a server ended, from its exit code."""
    number = code - 128 if code > 128 else -code
    try:
        return f"Triton was ended by {signal.Signals(number).name}"
    except ValueError:
        return f"Triton ended with code {code}"
