"""Runs a file as `python FILE ...` does, but ends when the program that started it ends, however
that ends: its standard input is a pipe from there."""

import os
import pathlib
import runpy
import signal
import sys
import threading


def end_with_parent():
    os.read(0, 1)  # returns when the pipe's other end is closed
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    del sys.argv[0]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
