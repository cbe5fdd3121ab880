"""Learners that start at once: what takes seconds to load is loaded here, and each is forked from it.

A line of JSON on stdin, {"argv", "log", "file_bytes_max"}, starts one; {"pid"} comes back on stdout. The child is the
command `echo2-learner` in a session of its own, and lives on when this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import traceback


def become(job) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job.get("file_bytes_max"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes_max"], resource.RLIM_INFINITY))
    sys.argv = ["echo2-learner", *job["argv"]]
    from echo2.learner.main import main

    main()


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: they are looked for by their pid
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                become(job)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError):
                        stream.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    import echo2.learner.main
    import echo2.learner.trainer
    import echo2.p2p.libp2p_transport  # noqa: F401 - to have them loaded

    print(json.dumps({"ready": True}), flush=True)
    serve()
