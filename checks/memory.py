"""How much memory the largest run takes, and what a GPU would hold of it: results/memory.json.

    python checks/memory.py              (a quarter of an hour on two quiet cores; 14 GB of memory)
    python checks/memory.py --only device

host: the command itself, on this machine's CPU; the most that the process had (ru_maxrss). device:
ten clients' ResNet-18 in a round, with as many images per client as in that command, on a pretended
GPU (pretend.py): the most bytes that tensors on it held at a time, with what CUDA graphs keep for
themselves between replays. What clients keep lies in the host's memory. clients: SuPerFed's CNN on
images as CIFAR-100's, of ten clients in a round, by the number of all clients.
"""

import argparse
import json
import pathlib
import platform
import subprocess
import sys
import tempfile
import weakref
from datetime import date
from unittest import mock

import numpy as np
import torch

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "tests")]
import fedslr
import fl.machine
import fl.records
import pretend
import superfed

COMMAND = ["fedslr.py", "--dataset", "cifar10", "--limit", "2000", "--rounds", "2", "--device",
           "cpu"]


def host(folder):
    subprocess.run([sys.executable, HERE / COMMAND[0], *COMMAND[1:], "--out", folder], check=True)
    record = fl.records.read(folder / "result.json")
    return {"command": "python " + " ".join(COMMAND),
            "peak_gb": round(record["peak_memory_mb"] * 2**20 / 1e9, 2),
            "seconds_per_round": record["seconds_per_round"], "cores": fl.machine.cores()}


class Memory:
    """Bytes of the pretended GPU's tensors that are alive, and the most there were at a time."""

    def __init__(self):
        self.held, self.peak, self.places, self.label = 0, 0, {}, pretend.label

    def labelled(self, result, device):
        """In place of pretend.label."""
        self.label(result, device)
        for x in pretend.tensors_of(result) if device == pretend.GPU else ():
            storage = pretend.unwrapped(x).untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
            if place and place not in self.places:
                self.places[place] = weakref.finalize(storage, self.drop, place, size)
                self.take(size)
        return result

    def take(self, size):
        self.held += size
        self.peak = max(self.peak, self.held)

    def drop(self, place, size):
        if self.places.pop(place, None):
            self.take(-size)

    def of(self, work):
        """The most bytes that work() has at a time beyond what is there before it."""
        earlier, before, self.peak = self.peak, self.held, self.held
        work()
        taken, self.peak = self.peak - before, max(self.peak, earlier)
        return taken

    def capture(self, function, device):
        """For gpu.capture: what a step takes at most is taken while its graph lives."""
        pool = self.of(function)

        def replay():
            self.take(-pool)
            try:
                return function()
            finally:
                self.take(pool)

        self.take(pool)
        weakref.finalize(replay, self.take, -pool)
        return replay


def on_the_gpu(module, argv, folder, near=False):
    """The most GB that a run's tensors hold on a pretended GPU."""
    memory, room = Memory(), float("inf") if near else 0
    with (mock.patch.object(pretend, "label", memory.labelled),
          pretend.gpu(memory.capture, room=room)):
        taken = memory.of(lambda: module.main([*map(str, argv), "--out", str(folder)]))
    return round(taken / 1e9, 3)


def device(folder):
    with np.load(HERE / "data" / "cifar10.npz") as images:
        few = {name: images[name][:: 50 if "train" in name else 20]
               for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(folder / "few.npz", **few)
    argv = ["--dataset", folder / "few.npz", "--limit", 240, "--clients", 12, "--fraction", 0.84,
            "--epochs", 1, "--rounds", 2]
    return {"gb": on_the_gpu(fedslr, argv, folder / "run")}


def random_images(path, n=2000):
    """A data set like CIFAR-100, but of n random images."""
    rng = np.random.default_rng(0)
    arrays = {f"x_{part}": rng.integers(0, 256, (size, 32, 32, 3), np.uint8)
              for part, size in (("train", n), ("test", 100))}
    np.savez(path, **arrays, y_train=np.arange(n) % 100, y_test=np.arange(100))
    return path


def clients(folder):
    data, rows = random_images(folder / "random.npz"), []
    for where, K in (("host", 100), ("host", 1000), ("device", 100), ("device", 1000)):
        argv = ["--dataset", data, "--mix", "layer", "--split", "iid", "--client-test", 0.5,
                "--batch-size", 1, "--epochs", 1, "--start", 0, "--rounds", 1, "--clients", K,
                "--fraction", 10 / K]
        gb = on_the_gpu(superfed, argv, folder / f"{where}-{K}", near=where == "device")
        rows.append({"clients": K, "kept_on": where, "gb": gb})
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--only", choices=("host", "device", "clients"))
    p.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "memory.json")
    args = p.parse_args()
    torch.set_num_threads(1)
    for part in (host, device, clients):
        if args.only in (None, part.__name__):
            with tempfile.TemporaryDirectory() as folder:
                found = part(pathlib.Path(folder))
            result = json.loads(args.out.read_text()) if args.out.exists() else {"measured": {}}
            result[part.__name__] = found
            result["measured"][part.__name__] = {
                "machine": fl.machine.device_name(torch.device("cpu")),
                "torch": str(torch.__version__),
                "python": platform.python_version(), "date": str(date.today())}
            print(part.__name__, json.dumps(found))
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
