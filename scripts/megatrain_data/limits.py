# SPDX-License-Identifier: Apache-2.0
"""Limits of time and memory for what templates and data of strangers make us do."""
import contextlib
import os
import resource
import signal

from .errors import DataError

CPU_SECONDS = 300      # a chunk of about a MiB takes one or two
MEMORY = 4 << 30       # beyond what there was before
LINE = 256 << 20       # of a compressed file, uncompressed; an element of an array
_bounded = False


def data_bytes():
    """What counts for RLIMIT_DATA: private memory, not mapped files."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


class TooLong(BaseException):
    """Not an Exception: what a template or a library catches must not swallow it."""


def _too_long(signo, frame):
    raise TooLong


@contextlib.contextmanager
def bounded(what):
    """The work inside ends with a DataError that names `what` where it takes too much; inside another, does nothing.

    The main thread of a process alone: signals come there."""
    global _bounded
    if _bounded:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_bytes() + MEMORY
    old = signal.signal(signal.SIGVTALRM, _too_long)
    _bounded = True
    try:
        if soft == resource.RLIM_INFINITY or soft > limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        yield
    except TooLong:
        raise DataError(f"{what} takes more than {CPU_SECONDS} s for a few samples: given up") from None
    except MemoryError:
        raise DataError(f"{what} takes more than {MEMORY >> 20} MiB for a few samples: given up") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        _bounded = False
