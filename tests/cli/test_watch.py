# SPDX-License-Identifier: Apache-2.0
"""A report that is written again and again while a run goes on."""
import os
import re
import signal
import subprocess
import tempfile
import time

from tiny import BINARY, megatrain

RELOADS = re.compile(r'<meta http-equiv="refresh" content="1">')


def row(step):
    return (f'{{"step":{step},"epoch":{step / 100},"tokens":{step * 64},"loss_tokens":64,"loss":{5 / step},"lr":0.001,"grad_norm":1,'
            f'"tok_s":1000,"t_step":0.06,"skipped":false}}\n')


def until(what, seconds=30):
    end = time.time() + seconds
    while not what():
        assert time.time() < end, "it did not come"
        time.sleep(0.05)


with tempfile.TemporaryDirectory() as tmp:
    log, page = os.path.join(tmp, "metrics.jsonl"), os.path.join(tmp, "report.html")
    read = lambda: open(page).read() if os.path.exists(page) else ""
    with open(log, "w") as f:
        f.writelines(map(row, range(1, 6)))
    megatrain("-q", "report", tmp)
    still = read()
    assert still and not RELOADS.search(still)
    p = subprocess.Popen([BINARY, "report", tmp, "--watch", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert p.stdout.readline().strip() == page
        first = read()
        assert RELOADS.search(first) and RELOADS.sub("", first).split() == still.split()
        with open(log, "a") as f:
            f.writelines(map(row, range(6, 30)))
        until(lambda: read() != first)
        assert RELOADS.search(read())
        os.rename(log, log + ".away")  # as when a file system is away for a while
        assert "trying again" in p.stderr.readline()
        os.rename(log + ".away", log)
        p.send_signal(signal.SIGINT)
        assert p.wait() == 0
    finally:
        p.kill()
    last = read()
    assert not RELOADS.search(last) and last != still and not os.path.exists(page + ".tmp")
    megatrain("-q", "report", tmp)
    assert read() == last
    megatrain("report", tmp, "--watch", "0", expect=2)
