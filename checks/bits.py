"""Does today's working tree end with the bits of another commit?

    python checks/bits.py 1e9c188                    (every algorithm and method)
    python checks/bits.py 1e9c188 fedavg scaffold

Trains for two rounds on a CPU, here and in a clone at that commit. Compares the states on disk,
tensor by tensor, and the measures of all rounds. Prints the commands that differ; the exit code is
1 if there are any.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
from torch.utils._pytree import tree_flatten

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from commands import COMMANDS
from fl import records


def train(root, out, names):
    """Runs commands with the files of a checkout, one after the other, in one process. Records go
    to out/<name>."""
    out.mkdir()
    commands = [[*COMMANDS[name], "--out", str(out / name)] for name in names]
    (out / "commands.json").write_text(json.dumps(commands))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, root / "tests" / "processes.py", out / "commands.json"],
                          capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{root}: {done.stderr[-2000:]}")


def differ(a, b):
    """Whether two runs' states or measures differ. Measures are those of both."""
    (one, form), (two, other) = (
        tree_flatten(torch.load(out / "state.pt", weights_only=True)["state"]) for out in (a, b))
    if form != other or any(not torch.equal(y, z) if torch.is_tensor(y) else y != z
                            for y, z in zip(one, two)):
        return True
    rounds = [records.measures(records.read(out / "result.json")).values() for out in (a, b)]
    return any(x[name] != y[name] for x, y in zip(*rounds) for name in x.keys() & y.keys())


def main(commit, *names):
    names = names or (*COMMANDS,)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        subprocess.run(["git", "clone", "-q", ROOT, folder / "old"], check=True)
        subprocess.run(["git", "checkout", "-q", commit], cwd=folder / "old", check=True)
        for root, out in ((folder / "old", folder / "then"), (ROOT, folder / "now")):
            train(root, out, names)
        wrong = [name for name in names if differ(folder / "then" / name, folder / "now" / name)]
    print(f"{len(names) - len(wrong)} of {len(names)} commands end with the bits of {commit}",
          *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
