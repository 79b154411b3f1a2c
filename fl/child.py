"""Child runs a file as `python FILE ...` does, in a process that ends when the program that started
it ends, however that ends: its standard input is a pipe from there."""

import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import threading

# A variable of the environment: the file with what the first round of this process must give (see
# Run.repetition); "": no round is repeated
REPEATS = "REPEATED_ROUND"
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Child:
    """A process that runs a file with its flags, argv. more: variables of its environment."""

    def __init__(self, argv, **more):
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}
        self.error = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [sys.executable, __file__, *argv], env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.error)

    def ended(self):
        return self.process.poll() is not None

    def result(self):
        """Waits for its end. Returns the exit code and the last line of the error, with a note on
        it."""
        code = self.process.wait()
        self.error.seek(0)
        said = self.error.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in said if line.strip()]
        if code < 0 or not said:  # below 0: a signal ended it, which no line explains
            return code, f"exit code {code}"
        note = f" {said.pop()}" if said[-1].startswith("(in ") and len(said) > 1 else ""
        return code, said[-1].rpartition("error: ")[2] + note

    def stop(self):
        self.process.terminate()
        self.process.wait()


def end_with_parent():
    os.read(0, 1)  # returns when the pipe's other end is closed
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    del sys.argv[0]
    sys.path[0] = str(pathlib.Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
