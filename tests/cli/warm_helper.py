#!/usr/bin/env -S python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""A Python that has the data helper's libraries loaded already: saves a quarter of a second a call, of hundreds.

`serve()` forks a process that waits on a socket beside this file's caller and forks once more for each call. Run as a
program, as MEGATRAIN_PYTHON names it, this file hands its standard streams over to that process and ends as the
helper does there. Any other script than the helper runs in a Python of its own.
"""
import os
import socket
import sys

HELPER = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "scripts", "prepare_data.py")


def call(path, script):
    if os.path.realpath(script) != os.path.realpath(HELPER):
        os.execv(os.environ["MT_WARM_PYTHON"], [os.environ["MT_WARM_PYTHON"], *sys.argv[1:]])
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        socket.send_fds(s, [b"!"], [0, 1, 2])
        code = s.recv(1)
    sys.exit(code[0] if code else 255)


def answer(connection, main):
    """In a child: the helper, on the streams that came with the call."""
    _, fds, _, _ = socket.recv_fds(connection, 1, 3)
    for k, fd in enumerate(fds):
        os.dup2(fd, k)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", closefd=False), open(2, "w", closefd=False)
    code = 0
    try:
        main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(bytes([code]))
    os._exit(0)


def serve(folder):
    """Starts the waiting process, which ends with ours; returns the environment that makes megatrain use it."""
    import runpy
    import select
    import signal
    path, (ended, ours) = os.path.join(folder, "warm.sock"), os.pipe()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    if os.fork():
        os.close(ended)
        listener.close()
        return {"MEGATRAIN_PYTHON": os.path.abspath(__file__), "MT_WARM_SOCKET": path, "MT_WARM_PYTHON": sys.executable}
    os.close(ours)
    helper = runpy.run_path(HELPER)
    sys.path.insert(0, os.path.dirname(HELPER))
    from megatrain_data import prepare  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, ended], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            answer(connection, helper["main"])
        connection.close()
    os._exit(0)


if __name__ == "__main__":
    call(os.environ["MT_WARM_SOCKET"], sys.argv[-1])
