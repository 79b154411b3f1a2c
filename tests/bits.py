"""Does today's working tree end with the bits of another commit? tests/test_golden.py asks the same
with a tolerance, and without the other commit.

    python tests/bits.py 6977da5

Trains every algorithm and method for two rounds on a CPU, here and in a clone at that commit.
Compares the states on disk, tensor by tensor, and the measures of all rounds. Prints the commands
that differ; the exit code is 1 if there are any.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
from conftest import same
from test_processes import COMMANDS, SOME
from torch.utils._pytree import tree_flatten

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = [*SOME, "--fraction", "1", "--model", "cnn"]
VGG9 = [*SOME, "--model", "vgg9", "--limit", "200"]
MORE = {  # what the tests with several processes leave out
    "fedavg, augmented": ["fedavg", *SOME, "--transform", "tensorflow", "--model", "tfcnn"],
    "fedavg, bf16": ["fedavg", *SMALL, "--precision", "bf16"],
    "superfed, official": ["superfed", *SMALL, "--as", "official", "--start", "0", "--own-start"],
    "psinet, all groups": ["psinet", *VGG9, "--no-prune"],
    "psinet, FedAvg with BatchNorm": ["psinet", *VGG9, "--groups", "0", "--norm", "bn"],
    "persfl, last teacher": ["persfl", *SMALL, "--model", "mnistnet", "--teacher", "final",
                             "--soft", "ce"],
}


def train(root, out):
    """Runs all commands with the files of a checkout, one after the other, in one process. Records
    go to out/<name>."""
    out.mkdir()
    commands = [[*argv, "--out", str(out / name)] for name, argv in (COMMANDS | MORE).items()]
    (out / "commands.json").write_text(json.dumps(commands))
    program = [sys.executable, root / "tests" / "processes.py", out / "commands.json"]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                   env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})


def differ(a, b):
    """Whether two records or their states differ in more than times."""
    states = [torch.load(out / "state.pt", weights_only=True)["state"] for out in (a, b)]
    states, forms = zip(*map(tree_flatten, states))
    records = [json.loads((out / "result.json").read_text()) for out in (a, b)]
    for name in records[0]["args"].keys() ^ records[1]["args"].keys():  # a flag that one lacks
        for record in records:
            record["args"].pop(name, None)
    if forms[0] != forms[1] or not same(*records):
        return True
    return any(not torch.equal(y, z) if torch.is_tensor(y) else y != z for y, z in zip(*states))


def main(commit):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        subprocess.run(["git", "clone", "-q", ROOT, folder / "old"], check=True)
        subprocess.run(["git", "checkout", "-q", commit], cwd=folder / "old", check=True)
        for root, name in ((folder / "old", "then"), (ROOT, "now")):
            train(root, folder / name)
        names = COMMANDS | MORE
        wrong = [name for name in names if differ(folder / "then" / name, folder / "now" / name)]
    print(f"{len(names) - len(wrong)} of {len(names)} commands end with the bits of {commit}",
          *wrong, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
