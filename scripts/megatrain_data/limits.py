# SPDX-License-Identifier: Apache-2.0
"""Limits of time and memory for work that templates and data of strangers cause."""
import contextlib
import os
import resource
import signal

from .errors import DataError

CPU_SECONDS = 300      # for a chunk of about a MiB, which usually takes one or two
NATIVE_SECONDS = 30    # more than that: code that is not Python's does not see the first limit, and is ended
MEMORY = 4 << 30       # in addition to what was used before
LINE = 256 << 20       # of a compressed file, uncompressed; an element of an array
_bounded = False


def data_bytes():
    """The memory that RLIMIT_DATA limits: private memory, not mapped files."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


class TooLong(BaseException):
    """Not an Exception, so that no `except Exception` of a template or library catches it."""


def _too_long(signo, frame):
    raise TooLong


@contextlib.contextmanager
def bounded(what):
    """Ends the work inside with a DataError that names `what` if it takes too much. Inside another, it does nothing.

    Only for the main thread, which receives the signals."""
    global _bounded
    if _bounded:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    cpu = resource.getrlimit(resource.RLIMIT_CPU)
    limit = data_bytes() + MEMORY
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = int(used.ru_utime + used.ru_stime + CPU_SECONDS) + NATIVE_SECONDS
    old = signal.signal(signal.SIGVTALRM, _too_long)
    _bounded = True
    try:
        if soft == resource.RLIM_INFINITY or soft > limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
        if cpu[0] == resource.RLIM_INFINITY or cpu[0] > end:
            resource.setrlimit(resource.RLIMIT_CPU, (end, cpu[1]))
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
        yield
    except TooLong:
        raise DataError(f"{what} takes more than {CPU_SECONDS} s for a few samples: given up") from None
    except MemoryError:
        raise DataError(f"{what} takes more than {MEMORY >> 20} MiB for a few samples: given up") from None
    except BaseException as e:
        if type(e).__name__ != "PanicException":  # of a library in Rust; it has no name in Python
            raise
        raise DataError(f"{what} fails: {e}") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        resource.setrlimit(resource.RLIMIT_CPU, cpu)
        _bounded = False
