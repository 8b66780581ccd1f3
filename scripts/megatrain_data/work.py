# SPDX-License-Identifier: Apache-2.0
"""An ordered map over processes with bounded memory: each worker has at most a few chunks at a time."""
import multiprocessing
import os
import queue
import signal
import threading
from multiprocessing import connection

AHEAD = 3  # chunks for each worker


class WorkerDied(Exception):
    """A worker was ended with the next chunk in its hands."""


def serve(pipe, others, work):
    for p in others:  # close the parent's ends, which we inherit: else its death is not noticed
        p.close()
    chunks = queue.Queue()

    def receive():  # at all times: the parent must never wait for us to read while we wait for it
        try:
            while True:
                chunks.put(pipe.recv())
        except (EOFError, OSError):
            chunks.put(None)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            chunk = chunks.get()
            if chunk is None:
                os._exit(0)
            result = (True, work(chunk))
        except KeyboardInterrupt:
            return
        except Exception as e:
            result = (False, e)
        try:
            pipe.send(result)
        except (BrokenPipeError, KeyboardInterrupt):
            return


class Workers:
    """Processes made by fork, which share what is loaded. n = 1: none, the work is done in this process."""

    def __init__(self, n, work):
        self.work, self.pipes, self.processes = work, [], []
        context = multiprocessing.get_context("fork")
        for _ in range(n if n > 1 else 0):
            ours, theirs = context.Pipe()
            p = context.Process(target=serve, args=(theirs, [ours, *self.pipes], work), daemon=True)
            p.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(p)

    def died(self, pipe):
        process = self.processes[self.pipes.index(pipe)]
        process.join(5)
        code = process.exitcode
        if code == -signal.SIGXCPU:
            return WorkerDied("it took too much time")
        if code is not None and code < 0:
            return WorkerDied(f"{signal.Signals(-code).name}: it may have had too little memory")
        return WorkerDied("it may have had too little memory")

    def map(self, source):
        """Yields (item, result) in order for (chunk, item) of `source`; raises a worker's exception in place of its result."""
        if not self.pipes:
            for chunk, item in source:
                yield item, self.work(chunk)
            return
        source, results, items, sent, given, ended = iter(source), {}, {}, 0, 0, False
        busy = {p: [] for p in self.pipes}
        while True:
            while not ended and sent - given < AHEAD * len(self.pipes):
                pipe = min(busy, key=lambda p: len(busy[p]))
                if len(busy[pipe]) >= 2:
                    break
                try:
                    chunk, items[sent] = next(source)
                except StopIteration:
                    ended = True
                    break
                try:
                    pipe.send(chunk)
                except (BrokenPipeError, ConnectionResetError):
                    raise self.died(pipe) from None
                busy[pipe].append(sent)
                sent += 1
            while given in results:
                good, value = results.pop(given)
                if not good:
                    raise value
                yield items.pop(given), value
                given += 1
            if ended and given == sent:
                return
            if given in results or (not ended and sent - given < AHEAD * len(self.pipes)
                                    and any(len(b) < 2 for b in busy.values())):
                continue
            for pipe in connection.wait([p for p, b in busy.items() if b]):
                try:
                    results[busy[pipe].pop(0)] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise self.died(pipe) from None

    def close(self):
        for p in self.pipes:
            p.close()
        for p in self.processes:
            p.join(5)
            if p.is_alive():
                p.kill()
