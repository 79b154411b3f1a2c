"""Seconds per round of FedAvg: a plain PyTorch loop against this project's, and how the cost grows.

    python tests/bench.py                   (make bench: three workloads, then the cost over K and over the population)
    python tests/bench.py --only fedavg     (one workload)

Every entrant trains the same clients, images and model for one round; repetitions are interleaved, so that a machine that
slows down slows all of them; the medians are printed and written as JSON. "share of peak" is the floating-point work of the
model (counted by torch's FlopCounterMode: forward and backward) per second, over that of a large matrix product in the
same precision on the same device at the same time. "MiB" is the most that one of the first two rounds took over what lay there
before it, on a GPU or in the process. The plain loop has PyTorch's and glibc's own settings; they are set anew for each round.
Run it on a quiet machine.
"""

import argparse
import contextlib
import copy
import ctypes
import json
import pathlib
import statistics
import sys

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import baselines  # noqa: E402
import common  # noqa: E402
import engine  # noqa: E402
import fedavg  # noqa: E402
import records  # noqa: E402


def leafcnn(m, x, classes):
    """Two 5x5 convolutions and two linear layers: 878,538 weights, 43.2 MFLOP per trained image of 32x32x3."""
    x = F.relu(F.max_pool2d(m.conv("conv1", x, 32, 5), 2))
    x = F.relu(F.max_pool2d(m.conv("conv2", x, 64, 5), 2))
    return m.linear("fc2", F.relu(m.linear("fc1", x.flatten(1), 512)), classes)


common.MODELS["leafcnn"] = leafcnn


class Block(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(2, width), nn.GroupNorm(2, width)
        self.short = None
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inside, width, 1, stride, bias=False), nn.GroupNorm(2, width))

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.short is None else self.short(x)))


def plain_model(name, pool_first=False):
    """The model as most people write it; or with the pooling before the ReLU, as ours."""
    after = [nn.MaxPool2d(2), nn.ReLU()] if pool_first else [nn.ReLU(), nn.MaxPool2d(2)]
    if name == "leafcnn":
        return nn.Sequential(nn.Conv2d(3, 32, 5), *after, nn.Conv2d(32, 64, 5), *after, nn.Flatten(), nn.Linear(1600, 512),
                             nn.ReLU(), nn.Linear(512, 10))
    if name == "cnn":
        return nn.Sequential(nn.Conv2d(3, 32, 5), *after, nn.Conv2d(32, 64, 5), *after, nn.Conv2d(64, 32, 3), *after,
                             nn.Flatten(), nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 10))
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64), nn.ReLU(), *(Block(*w) for w in widths),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10, bias=False))


def arguments(model, device, **more):
    words = {"dataset": "shapes", "model": model, "device": device, "split": "iid", "fraction": 1, "epochs": 1, **more}
    argv = [word for name, value in words.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return common.parse(common.parser("bench", **baselines.DEFAULTS), {}, argv)


def plain(args, tidy=False):
    """One round: deepcopy, nn.Module, torch.optim.SGD, one client after the other. tidy: with what makes our loop fast on a
    CPU, but on one thread: images and weights channels-last, pooling before ReLU."""
    federation = common.Federation(args)
    device, model = federation.device, plain_model(args.model, tidy).to(federation.device)
    images = federation.images.permute(0, 3, 1, 2)
    if tidy:
        model = model.to(memory_format=torch.channels_last)
    else:
        images = images.contiguous()  # as torchvision's ToTensor gives them

    def one_round(t):
        if tidy:
            engine.keep_memory()
        else:
            forget_memory()
        torch.set_num_threads(1 if tidy else engine.cores())
        torch.backends.cudnn.allow_tf32 = True  # PyTorch's default, which find_device takes back
        models, sizes = [], []
        for k in federation.sample(t):
            local = copy.deepcopy(model)
            optimiser = torch.optim.SGD(local.parameters(), args.lr, args.momentum)
            own = torch.as_tensor(federation.split.train[k], device=device)
            for _ in range(args.epochs):
                for index in own[torch.randperm(len(own), device=device)].split(args.batch_size):
                    optimiser.zero_grad()
                    F.cross_entropy(local(images[index].float() / 255), federation.labels[index]).backward()
                    optimiser.step()
            models.append(local.state_dict())
            sizes.append(len(own))
        model.load_state_dict({name: sum(n * z[name] for n, z in zip(sizes, models)) / sum(sizes) for name in models[0]})
        torch.backends.cudnn.allow_tf32 = False

    return one_round


def ours(args, **settings):
    """One round of fedavg.py; settings: attributes of the Federation."""
    federation = common.Federation(args)
    vars(federation).update(settings)
    step = fedavg.client_step(federation.net, args)
    eta, w = torch.tensor(args.lr, device=federation.device), federation.initial_weights()

    def one_round(t):
        nonlocal w
        engine.keep_memory()
        S = federation.sample(t)
        start = w.expand(len(S), -1)
        with engine.fast_kernels(tf32=args.precision == "tf32"):  # for the loop, too
            w_k, _ = federation.train(step, (start, torch.zeros_like(start)), S, t, eta)
        w = federation.n[S] @ w_k / federation.n[S].sum()

    one_round.federation = federation
    return one_round


def forget_memory():
    """Undoes engine.keep_memory, for the plain loop: what glibc comes to by itself where large tensors come and go."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        for name, value in ((-4, 65536), (-3, 32 << 20), (-1, 64 << 20)):  # M_MMAP_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
            libc.mallopt(name, value)


def memory_of(work, device):
    """The most MiB that work() took over what lay there before: of the GPU, or of the process (Linux; else 0)."""
    if device == "cuda":
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
    kib = lambda name: int(status.read_text().partition(f"{name}:")[2].split()[0])  # noqa: E731
    before = kib("VmRSS")
    work()
    return (kib("VmHWM") - before) / 1024


def interleaved(entrants, device, repetitions):
    """Seconds of each entrant's rounds, and the MiB that its first two took at most."""
    seconds, memory = {name: [] for name in entrants}, dict.fromkeys(entrants, 0)
    for t in range(-4, repetitions):  # the first four warm up: graphs are captured in the second, ways are tried up to the fourth
        for name, one_round in entrants.items():
            if t < -2:
                memory[name] = max(memory[name], memory_of(lambda: one_round(t + 4), device))
                continue
            start = engine.now(torch.device(device))
            one_round(t + 4)
            if t >= 0:
                seconds[name].append(engine.now(torch.device(device)) - start)
    return seconds, memory


def peak(device, precision):
    """Floating-point operations per second of a large matrix product."""
    n, dtype = (8192 if device == "cuda" else 2048), torch.bfloat16 if precision == "bf16" else torch.float32
    torch.set_num_threads(engine.cores())
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(7):
        start = engine.now(torch.device(device))
        with engine.fast_kernels(tf32=precision == "tf32"):
            a @ b
        times.append(engine.now(torch.device(device)) - start)
    return 2 * n**3 / min(times)


def flops(model, batch):
    """Of one training step of the plain model, per image."""
    module, x = plain_model(model), torch.zeros(batch, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    return counter.get_total_flops() / batch


WORKLOADS = {  # name: model, B, clients and images per client on a GPU, and on a CPU
    "fedavg": ("leafcnn", 50, (10, 500), (10, 500)),
    "superfed-cnn": ("cnn", 20, (10, 500), (10, 500)),
    "resnet18": ("resnet18", 20, (10, 500), (4, 60)),
}


def workload(name, device, repetitions):
    model, B, *numbers = WORKLOADS[name]
    clients, images = numbers[device == "cpu"]
    base = dict(clients=clients, limit=clients * images, client_test=0, batch_size=B)
    entrants, kinds = {}, ("fp32", "bf16") if device == "cpu" else ("fp32", "tf32", "bf16")
    base_line = f"plain loop, {'fp32' if device == 'cpu' else 'tf32'}"  # PyTorch's default: its convolutions use TF32
    for precision in kinds:
        args = arguments(model, device, precision=precision, **base)
        if precision == "fp32":
            entrants[base_line] = plain(args)
        if device == "cpu":
            entrants[f"ours, {precision}"] = ours(args)
            if precision == "fp32":
                entrants["ours, one thread, fp32"] = ours(arguments(model, device, parallel=1, **base))
                entrants["tidy nn.Module loop, one thread, fp32"] = plain(args, tidy=True)
                entrants["ours, vmap, fp32"] = ours(arguments(model, device, **base), vmap=True, parallel=None)
        else:
            for how, route, settings in (("loop", "conv", {"vmap": False}),
                                         ("vmap", "conv", {"graphs": False, "tunes": False}),
                                         ("vmap + graph", "conv", {"tunes": False}),
                                         ("vmap + graph + patches", "patches", {"tunes": False}),
                                         ("one by one + graph", "conv", {"tunes": False, "parallel": 1}),
                                         ("as it comes", "conv", {})):
                entrants[f"ours, {how}, {precision}"] = ours(args, **settings)
                entrants[f"ours, {how}, {precision}"].federation.net.route = route
    every, memory = interleaved(entrants, device, repetitions)
    seconds = {name: statistics.median(s) for name, s in every.items()}
    work, peaks = clients * images * flops(model, B), {precision: peak(device, precision) for precision in kinds}
    rows = []
    for entrant, s in seconds.items():
        share = work / s / peaks[entrant.split(", ")[-1]]
        rows.append({"entrant": entrant, "seconds": s, "all": every[entrant], "share_of_peak": share,
                     "times_plain": seconds[base_line] / s, "images_per_second": clients * images / s,
                     "memory_mb": memory[entrant]})
    print(f"\n{name}: {clients} clients x {images} images, B={B}, {flops(model, B) / 1e6:.1f} MFLOP per trained image; peak "
          + ", ".join(f"{p} {v / 1e9:.0f} GFLOP/s" for p, v in peaks.items()))
    print(f"{'':<42}{'s/round':>9}{'x plain':>9}{'images/s':>10}{'of peak':>9}{'MiB':>8}")
    for row in rows:
        print(f"{row['entrant']:<42}{row['seconds']:>9.3f}{row['times_plain']:>9.2f}{row['images_per_second']:>10.0f}"
              f"{row['share_of_peak']:>9.1%}{row['memory_mb']:>8.0f}")
    return {"name": name, "clients": clients, "images": images, "batch_size": B, "peak": peaks, "rows": rows}


def growth(device, repetitions):
    """Seconds and seconds per client as more clients are sampled, and as the population grows with 10 sampled."""
    rows = []
    for K, m in [(100, m) for m in (1, 2, 5, 10, 20, 50, 100)] + [(1000, 10), (10_000, 10)]:
        args = arguments("cnn", device, clients=K, fraction=m / K, client_test=0, batch_size=20)
        one_round = ours(args)
        federation = one_round.federation
        own = [np.arange(100 * k, 100 * k + 100) % federation.data.n_train for k in range(K)]  # clients may share images
        federation.whole_split = common.Split(own, own, own)
        federation.K, federation.clients, federation.split = K, np.arange(K), federation.whole_split
        federation.n = torch.full((K,), 100.0, device=federation.device)
        (every,), (memory,) = (list(part.values()) for part in interleaved({"": one_round}, device, repetitions))
        s = statistics.median(every)
        rows.append({"population": K, "sampled": m, "seconds": s, "ms_per_client": 1000 * s / m, "memory_mb": memory})
    print(f"\ncnn, 100 images per client, B=20\n{'population':>12}{'sampled':>9}{'s/round':>9}{'ms/client':>11}{'MiB':>8}")
    for row in rows:
        print(f"{row['population']:>12}{row['sampled']:>9}{row['seconds']:>9.3f}{row['ms_per_client']:>11.1f}{row['memory_mb']:>8.0f}")
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    p.add_argument("--only", choices=(*WORKLOADS, "growth"))
    p.add_argument("--repetitions", type=int, default=5)
    p.add_argument("--out", type=pathlib.Path, help="the JSON (default: runs/bench-DEVICE.json)")
    args = p.parse_args()
    name = engine.device_name(torch.device(args.device))
    print(f"{name}, torch {torch.__version__}")
    result = {"device": name, "torch": torch.__version__, "repetitions": args.repetitions,
              "commit": records.commit([__file__, *(pathlib.Path(common.__file__).parent / name for name in records.SHARED)])}
    out = args.out or pathlib.Path(f"runs/bench-{args.device}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    result["workloads"] = []
    for part in (*WORKLOADS, "growth"):
        if args.only not in (None, part):
            continue
        if part == "growth":
            result["growth"] = growth(args.device, args.repetitions)
        else:
            result["workloads"].append(workload(part, args.device, args.repetitions))
        out.write_text(json.dumps(result, indent=1) + "\n")  # what is done stays if the next is killed
    print(f"\nrecord  {out}", flush=True)


if __name__ == "__main__":
    main()
