"""A task whose scorer does whatever the response asks for: stands in for a scorer that evaluates its response."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from echo2.tasks.task import Prompt, Score


def loop():
    while True:
        pass


def sleep():
    time.sleep(3600)


def exit_politely():
    sys.exit(0)


def exit_at_once():
    os._exit(7)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)


def fork():
    if os.fork() == 0:
        time.sleep(3600)
    return 1.0


def run_shell():
    subprocess.run(["/bin/sh", "-c", "true"], check=True)
    return 1.0


def start_thread():
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return 1.0


def open_socket():
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    return 1.0


def read_file():
    Path("/etc/passwd").read_text()
    return 1.0


def write_file():
    Path("/tmp/echo2-hostile").write_text("x")
    return 1.0


def delete_file():
    Path("/tmp/echo2-hostile-nothing").unlink()
    return 1.0


def environment():
    return 1.0 if any(name in os.environ for name in ("ECHO2_SECRET", "HOME", "USER")) else 0.5


def allocate():
    return float(len(bytearray(10 << 30)))


def print_garbage():
    print("x" * 100_000)
    os.write(1, b"\xff" * 1000)
    os.write(2, b"\xff" * 1000)
    return 1.0


def close_everything():
    os.closerange(0, 64)
    return 1.0


def garbage_on_the_pipe():
    for descriptor in range(3, 16):
        try:
            os.write(descriptor, b"\x00\x00\x00\x05hello" + b"\xff" * 64)
        except OSError:
            continue
    return 1.0


def recurse():
    return recurse()


def recurse_in_c():
    nested = []
    for _ in range(1_000_000):
        nested = [nested]
    return float(nested == [nested])


def crash():
    ctypes.string_at(0)


def many_forks():
    for _ in range(100):
        os.fork()
    return 1.0


def raise_in_a_thread():
    thread = threading.Thread(target=exit_politely)
    thread.start()
    thread.join()
    return 1.0


def long_reason():
    raise ValueError("y" * 1_000_000)


def unprintable():
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no")

    raise Unprintable


def surrogate():
    raise ValueError("\ud800")


ACTIONS = {
    action.__name__: action
    for action in (
        loop,
        sleep,
        exit_politely,
        exit_at_once,
        kill_itself,
        kill_parent,
        fork,
        run_shell,
        start_thread,
        open_socket,
        read_file,
        write_file,
        delete_file,
        environment,
        allocate,
        print_garbage,
        close_everything,
        garbage_on_the_pipe,
        recurse,
        recurse_in_c,
        crash,
        many_forks,
        raise_in_a_thread,
        long_reason,
        unprintable,
        surrogate,
    )
}

VALUES = {
    "nan": float("nan"),
    "infinite": float("inf"),
    "huge": 1e300,
    "text": "1.0",
    "nothing": None,
    "truth": True,
    "half": 0.5,
    "minus": -2.0,
}


class HostileTask:
    name = "file"
    train_size = 1
    heldout_size = 1

    def prompt(self, split, index):
        return Prompt(split, index, "")

    def score(self, prompt, response):
        if response in ACTIONS:
            return Score(ACTIONS[response]())
        if response == "no score":
            return None
        return Score(VALUES[response])


task = HostileTask()
