"""Seconds per round of FedAvg: a plain PyTorch loop against this project's, and how the cost grows.

    python checks/bench.py                   (make bench: three models, then the cost over K)
    python checks/bench.py --only fedavg     (one of them, or of MORE's)

Every entrant trains the same clients, images and model for one round. Repetitions are interleaved,
so that a machine that slows down slows all of them. The medians are printed and written as JSON.
"share of peak" is the floating-point work of the model (counted by torch's FlopCounterMode: forward
and backward) per second, over that of a large matrix product in the same precision on the same
device at the same time. "MiB" is the most that one of the first two rounds took over what lay there
before it, on a GPU or in the process. The plain loop has PyTorch's and glibc's own settings; they
are set anew for each round. Run it on a quiet machine.
"""

import argparse
import contextlib
import copy
import ctypes
import json
import pathlib
import statistics
import sys
from collections import OrderedDict
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import baselines
import common
import fl.building
import fl.gpu
import fl.machine
import fl.models
import fl.provenance


class LeafCNN(nn.Sequential):
    """Two 5x5 convolutions and two linear layers: 878,538 weights, 43.2 MFLOP per trained image of
    32x32x3."""

    start = staticmethod(fl.models.pytorch_default)

    def __init__(self, channels, classes, size):
        super().__init__(OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 5), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
            flatten=nn.Flatten(), fc1=nn.Linear(1600, 512), relu3=nn.ReLU(),
            fc2=nn.Linear(512, classes)))


LEAF = f"{pathlib.Path(__file__).resolve()}:LeafCNN"


class Workload(NamedTuple):
    model: str
    B: int
    cuda: tuple = (10, 500)  # clients, and images of each
    cpu: tuple = (10, 500)


WORKLOADS = {"fedavg": Workload(LEAF, 50), "superfed-cnn": Workload("cnn", 20),
             "resnet18": Workload("resnet18", 20, cpu=(4, 60))}
MORE = {  # those of docs/speed.md's table of ways that are measured only if asked for
    "2nn": Workload("2nn", 20), "mnistcnn": Workload("mnistcnn", 20),
    "tfcnn": Workload("tfcnn", 50), "vgg9": Workload("vgg9", 64, cuda=(10, 640), cpu=(4, 64)),
}


def plain_model(name, tidy=False):
    """The model as most people write it, with ReLU before pooling; tidy: as ours."""
    module = fl.building.builder(name, (3, 32, 32), 10)()
    if tidy or not isinstance(module, nn.Sequential):
        return module
    layers = list(module)
    for i, layer in enumerate(module):
        if isinstance(layer, nn.MaxPool2d):
            layers[i], layers[i + 1] = layers[i + 1], layer
    return nn.Sequential(*layers)


def arguments(model, device, **more):
    words = {"dataset": "shapes", "model": model, "device": device, "split": "iid", "fraction": 1,
             "epochs": 1, **more}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in words.items()]
    return common.parse(common.parser("bench", **baselines.DEFAULTS), {}, argv)


def plain(args, tidy=False):
    """One round: deepcopy, nn.Module, torch.optim.SGD, one client after the other. tidy: with what
    makes our loop fast on a CPU, but on one thread: images and weights channels-last, pooling
    before ReLU."""
    federation = common.Federation(args)
    device, model = federation.device, plain_model(args.model, tidy).to(federation.device)
    images = federation.images.permute(0, 3, 1, 2)
    if tidy:
        model = model.to(memory_format=torch.channels_last)
    else:
        images = images.contiguous()  # as torchvision's ToTensor gives them

    def one_round(t):
        if tidy:
            fl.machine.keep_memory()
        else:
            forget_memory()
        torch.set_num_threads(1 if tidy else fl.machine.cores())
        torch.backends.cudnn.allow_tf32 = True  # PyTorch's default, which find_device takes back
        states, sizes = [], []
        for k in federation.sample(t):
            local = copy.deepcopy(model)
            optimiser = torch.optim.SGD(local.parameters(), args.lr, args.momentum)
            own = torch.as_tensor(federation.split.train[k], device=device)
            for _ in range(args.epochs):
                order = own[torch.randperm(len(own), device=device)]
                for index in order.split(args.batch_size):
                    optimiser.zero_grad()
                    logits = local(images[index].float() / 255)
                    F.cross_entropy(logits, federation.labels[index]).backward()
                    optimiser.step()
            states.append(local.state_dict())
            sizes.append(len(own))
        model.load_state_dict({name: sum(n * z[name] for n, z in zip(sizes, states)) / sum(sizes)
                               for name in states[0]})
        torch.backends.cudnn.allow_tf32 = False

    return one_round


def ours(args, way=None):
    """One round of FedAvg, in its fastest way or, at first, in the given one. Returns w."""
    ways = fl.gpu.ways_to_try
    if way:
        ways = lambda *_: fl.gpu.WAYS[fl.gpu.WAYS.index(way) :]
    with mock.patch.object(fl.gpu, "ways_to_try", ways):
        federation = common.Federation(args)
    client_update = baselines.local_sgd(federation.net, args)
    eta, w = torch.tensor(args.lr, device=federation.device), federation.initial_weights()

    def one_round(t):
        nonlocal w
        fl.machine.keep_memory()
        torch.set_num_threads(1)
        S = federation.sample(t)
        w_k = federation.train(client_update, S, t, own=[w.expand(len(S), -1)], shared=[eta])
        n = federation.n[S]
        w = n @ w_k / n.sum()
        return w

    one_round.federation = federation
    return one_round


def forget_memory():
    """Undoes fl.machine.keep_memory, for the plain loop: what glibc comes to by itself where large
    tensors come and go."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        # M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
        for name, value in ((-4, 65536), (-3, 32 << 20), (-1, 64 << 20)):
            libc.mallopt(name, value)


def memory_of(work, device):
    """The most MiB that work() took over what lay there before: of the GPU, or of the process
    (Linux; else 0)."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    status, clear = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
    if not clear.exists():
        work()
        return 0
    ctypes.CDLL(None).malloc_trim(0)
    clear.write_text("5")  # the high-water mark starts anew
    kib = lambda name: int(status.read_text().partition(f"{name}:")[2].split()[0])
    before = kib("VmRSS")
    work()
    return (kib("VmHWM") - before) / 1024


def interleaved(entrants, device, repetitions):
    """Seconds of each entrant's rounds, and the MiB that its first two took at most."""
    seconds, memory = {name: [] for name in entrants}, dict.fromkeys(entrants, 0)
    for t in range(repetitions + 2):  # the first two warm up, and capture graphs
        for name, one_round in entrants.items():
            if t < 2:
                memory[name] = max(memory[name], memory_of(lambda: one_round(t), device))
                continue
            start = fl.machine.now(torch.device(device))
            one_round(t)
            seconds[name].append(fl.machine.now(torch.device(device)) - start)
    return seconds, memory


def peak(device, precision):
    """Floating-point operations per second of a large matrix product."""
    n = 8192 if device == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.set_num_threads(fl.machine.cores())
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(7):
        start = fl.machine.now(torch.device(device))
        with fl.gpu.fast_kernels(precision):
            a @ b
        times.append(fl.machine.now(torch.device(device)) - start)
    return 2 * n**3 / min(times)


def flops(model, batch):
    """Of one training step of the plain model, per image."""
    module, x = plain_model(model), torch.zeros(batch, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    return counter.get_total_flops() / batch


def entrants_of(model, device, base):
    """Those of a workload by name; the first is the plain loop."""
    if device == "cpu":
        args = arguments(model, device, **base)
        return {"plain loop, fp32": plain(args), "ours, fp32": ours(args),
                "ours, one thread, fp32": ours(arguments(model, device, parallel=1, **base)),
                "tidy nn.Module loop, one thread, fp32": plain(args, tidy=True),
                "ours, bf16": ours(arguments(model, device, precision="bf16", **base))}
    old = fl.machine.lacks_tf32()
    found = {f"plain loop, {'fp32' if old else 'tf32'}": plain(arguments(model, device, **base))}
    for precision in ("fp32",) if old else ("fp32", "tf32", "bf16"):
        args = arguments(model, device, precision=precision, **base)
        for way in fl.gpu.WAYS:
            found[f"ours, {way}, {precision}"] = ours(args, way)
    return found


def workload(name, device, repetitions):
    model, B, cuda, cpu = (WORKLOADS | MORE)[name]
    clients, images = cpu if device == "cpu" else cuda
    base = dict(clients=clients, limit=clients * images, client_test=0, batch_size=B)
    entrants = entrants_of(model, device, base)
    every, memory = interleaved(entrants, device, repetitions)
    seconds = {name: statistics.median(s) for name, s in every.items()}
    precision = {entrant: entrant.split(", ")[-1] for entrant in entrants}
    peaks = {kind: peak(device, kind) for kind in dict.fromkeys(precision.values())}
    work = flops(model, B)
    rows = [{"entrant": entrant, "seconds": s, "all": every[entrant],
             "share_of_peak": clients * images * work / s / peaks[precision[entrant]],
             "times_plain": next(iter(seconds.values())) / s, "memory_mb": memory[entrant],
             "images_per_second": clients * images / s} for entrant, s in seconds.items()]
    print(f"\n{name}: {clients} clients x {images} images, B={B}, "
          f"{work / 1e6:.1f} MFLOP per trained image; peak "
          + ", ".join(f"{kind} {value / 1e9:.0f} GFLOP/s" for kind, value in peaks.items()))
    print(f"{'':<42}{'s/round':>9}{'x plain':>9}{'images/s':>10}{'of peak':>9}{'MiB':>8}")
    for row in rows:
        print(f"{row['entrant']:<42}{row['seconds']:>9.3f}{row['times_plain']:>9.2f}"
              f"{row['images_per_second']:>10.0f}{row['share_of_peak']:>9.1%}"
              f"{row['memory_mb']:>8.0f}")
    return {"name": name, "clients": clients, "images": images, "batch_size": B, "peak": peaks,
            "rows": rows}


def growth(device, repetitions):
    """Seconds and seconds per client as more clients are sampled, and as the population grows with
    10 sampled."""
    print(f"\ncnn, 100 images per client, B=20\n{'population':>12}{'sampled':>9}{'s/round':>9}"
          f"{'ms/client':>11}{'MiB':>8}")
    sizes = [*((100, m) for m in (1, 2, 5, 10, 20, 50, 100)), (1000, 10), (10_000, 10)]
    rows = []
    for K, m in sizes:
        args = arguments("cnn", device, clients=K, fraction=m / K, client_test=0, batch_size=20)
        one_round = ours(args)
        federation = one_round.federation
        # clients may share images
        own = [np.arange(100 * k, 100 * k + 100) % federation.data.n_train for k in range(K)]
        federation.split = common.Split(own, own, own)
        federation.K, federation.everyone = K, np.arange(K)
        federation.n = torch.full((K,), 100.0, device=federation.device)
        every, memory = interleaved({"": one_round}, device, repetitions)
        s = statistics.median(every[""])
        rows.append({"population": K, "sampled": m, "seconds": s, "ms_per_client": 1000 * s / m,
                     "memory_mb": memory[""]})
        print(f"{K:>12}{m:>9}{s:>9.3f}{1000 * s / m:>11.1f}{memory['']:>8.0f}")
    return rows


def machine(device, file):
    """Returns where the check `file` runs, and on which commit."""
    sources = [file, *(fl.provenance.ROOT / shared for shared in fl.provenance.SHARED)]
    return {"device": fl.machine.device_name(torch.device(device)),
            "torch": str(torch.__version__), "commit": fl.provenance.commit(sources)}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   choices=("cpu", "cuda"))
    p.add_argument("--only", choices=(*WORKLOADS, "growth", *MORE))
    p.add_argument("--repetitions", type=int, default=5)
    p.add_argument("--out", type=pathlib.Path, help="the JSON (default: runs/bench-DEVICE.json)")
    args = p.parse_args()
    here = machine(args.device, __file__)
    print(f"{here['device']}, torch {here['torch']}")
    result = {**here, "repetitions": args.repetitions, "workloads": []}
    out = args.out or pathlib.Path(f"runs/bench-{args.device}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in [args.only] if args.only else (*WORKLOADS, "growth"):
        if part == "growth":
            result["growth"] = growth(args.device, args.repetitions)
        else:
            result["workloads"].append(workload(part, args.device, args.repetitions))
        out.write_text(json.dumps(result, indent=1) + "\n")  # what is done stays if the next fails
    print(f"\nrecord  {out}", flush=True)


if __name__ == "__main__":
    main()
