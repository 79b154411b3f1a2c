"""Some minutes on a CUDA GPU: does each algorithm's fast way give what `--engine loop` gives?

    python checks/gpu_check.py                        (make gpu-check; writes results/gpu/CARD.json)
    python checks/gpu_check.py --only superfed ditto

Algorithms train two rounds on the embedded images, by `--engine loop` and in the fast way ("way").
"why" says why a faster way failed. "differs": the distance of the two
final states relative to what the loop's training changed, for the worst tensor. It comes from
runs with 80 images, in fp32: an H100's rounding stayed below 3e-5 (bf16: .03). With
all images rounding grows: w_0 moved by a millionth gives .14. Runs with all images are
timed, in their second round. "first" is how much longer round one took, with its captures. The
last rows are FedAvg, 10 clients with 500 images each, beside a plain PyTorch loop (bench.py). In
TF32 "differs" reaches .1. A row that fails says why. --only adds to a record of this commit.
"""

import argparse
import contextlib
import functools
import importlib
import io
import json
import pathlib
import re
import sys
import tempfile
import time
from unittest import mock

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import bench

import baselines
import common
import fl.run
import fl.training

ALGORITHMS = {  # name: module and flags
    **{name: [name] for name in ("fedavg", "fedavgm", "superfed", "psinet", "fedslr")},
    "persfl": ["persfl", "--distill-epochs", "1"],
    "superfed, layers": ["superfed", "--mix", "layer", "--start", "0"],
    "superfed, official": ["superfed", "--as", "official", "--start", "0"],
    "superfed, unequal": ["superfed", "--split", "dirichlet-classes", "--alpha", ".1"],
    "fedavg, tfcnn": ["fedavg", "--model", "tfcnn", "--transform", "tensorflow"],
    "fedavg, bf16": ["fedavg", "--precision", "bf16"],
    "psinet, BatchNorm": ["psinet", "--norm", "bn", "--no-prune"],
    **{name: ["baselines", "--method", name] for name in baselines.METHODS},
    "scaffold, Option I": ["baselines", "--method", "scaffold", "--option", "I"],
    "apfl, adaptive": ["baselines", "--method", "apfl", "--adaptive"],
}
FEW = ["--precision", "fp32", "--limit", "80", "--clients", "4", "--batch-size", "10"]
COLUMNS = {"differs": ".1e", "loop": ".3f", "fast": ".3f", "plain": ".3f", "times": ".1f",
           "first": ".1f", "MiB": ".0f"}


def run(name, argv):
    """An algorithm's run: its record, its final state, its Federation, and w_0 [d]."""
    made, initial_weights = [], common.Federation.initial_weights

    def noted(federation):
        made.append((federation, initial_weights(federation)))
        return made[-1][1]

    with contextlib.ExitStack() as stack:
        out = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(mock.patch.object(common.Federation, "initial_weights", noted))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        errors = stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            record = importlib.import_module(name).main([*argv, "--out", out])
        except SystemExit as stop:
            if stop.code in (130, 143):
                raise  # Ctrl-C or SIGTERM
            why = errors.getvalue().strip() or f"exit code {stop.code}"  # 3: it diverged
            raise RuntimeError(why) from None
        state = torch.load(f"{out}/state.pt", map_location="cpu", weights_only=True)["state"]
    return record, state, *made[-1]


def difference(wanted, found, w_0):
    """The largest difference of float tensors, over the smaller distance
    of `wanted` from w_0 and 0. For other dtypes it is the share of entries that differ."""
    largest = 0.0
    for name, want in wanted.items():
        if torch.is_tensor(want) and want.is_floating_point():
            starts = [torch.zeros_like(want), *[w_0.cpu()] * (want.shape[-1:] == w_0.shape)]
            changes = [float((want - start).nan_to_num(posinf=0).norm()) for start in starts]
            gap = float((found[name] - want).nan_to_num(posinf=0).norm())
            largest = max(largest, gap / (min(changes) or 1.0))
        elif torch.is_tensor(want):
            largest = max(largest, float((found[name] != want).double().mean()))
    return largest


def algorithm(name, device, more):
    module, *own = ALGORITHMS[name]
    flags = [*own, "--dataset", "shapes", "--rounds", "2", "--eval-every", "2", "--device", device]
    _, wanted, _, w_0 = run(module, [*FEW, *flags, "--engine", "loop"])
    _, found, federation, _ = run(module, [*FEW, *flags])
    loop, *_ = run(module, [*flags, *more, "--engine", "loop"])
    fast, _, whole, _ = run(module, [*flags, *more])
    first, second = (row["seconds"] for row in fast["rounds"])
    failed = dict.fromkeys([*federation.failed, *whole.failed])
    return {"way": whole.used, "why": "; ".join(failed),
            "differs": difference(wanted, found, w_0), "loop": loop["rounds"][1]["seconds"],
            "fast": second, "first": first - second, "MiB": fast["peak_memory_mb"]}


def workload(name, device):
    model, B, (clients, images), _ = bench.WORKLOADS[name]
    args = bench.arguments(model, device, clients=clients, limit=clients * images, client_test=0,
                           batch_size=B)
    loop, fast = bench.ours(args, "loop"), bench.ours(args)
    seconds, w, w_0 = {}, {}, fast.federation.initial_weights()
    for entrant, one_round in {"plain": bench.plain(args), "loop": loop, "fast": fast}.items():
        times = [fl.training.now(fast.federation.device)]
        for t in range(3):
            w[entrant] = one_round(t)
            times.append(fl.training.now(fast.federation.device))
        seconds[entrant] = [b - a for a, b in zip(times, times[1:])]
    best = {entrant: min(times[1:]) for entrant, times in seconds.items()}
    return {"way": fast.federation.used, "why": "; ".join(fast.federation.failed), **best,
            "differs": difference({"w": w["loop"].cpu()}, {"w": w["fast"].cpu()}, w_0),
            "first": seconds["fast"][0] - best["fast"],
            "MiB": bench.memory_of(lambda: fast(3), device)}


def line(name, row):
    if "error" in row:
        return f"{name:<20}{'failed':<10}{row['error']}"
    cells = [format(row[key], form) if key in row else "" for key, form in COLUMNS.items()]
    return f"{name:<20}{row['way']:<10}{''.join(f'{cell:>9}' for cell in cells)}  {row['why']}"


def main(argv=None, more=()):
    """more: further flags of the algorithms' commands."""
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", default="cuda")
    p.add_argument("--only", nargs="*", metavar="ROW", help="the names of rows")
    p.add_argument("--out", type=pathlib.Path, default="results/gpu")
    args = p.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA GPU is here: nothing was checked")
        return
    rows = {name: functools.partial(algorithm, name, args.device, more) for name in ALGORITHMS}
    rows |= {f"10 x {name}": functools.partial(workload, name, args.device)
             for name in bench.WORKLOADS}
    card, start = fl.training.device_name(torch.device(args.device)), time.time()
    sources = [pathlib.Path(common.__file__).parent / name for name in fl.run.SHARED]
    result = {"device": card, "torch": str(torch.__version__), "cuda": torch.version.cuda,
              "date": time.strftime("%Y-%m-%d"), "commit": fl.run.commit([__file__, *sources]),
              "rows": {}}
    out = args.out / f"{re.sub('[^A-Za-z0-9]+', '-', card).strip('-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.only and out.exists():
        earlier = json.loads(out.read_text())
        result["rows"] = earlier["rows"] if earlier["commit"] == result["commit"] else {}
    print(f"{card}, torch {torch.__version__}\n{'':<30}{''.join(f'{z:>9}' for z in COLUMNS)}  why")
    for name in args.only or rows:
        try:
            row = rows[name]()
            row["times"] = row["loop"] / row["fast"]
        except Exception as problem:
            row = {"error": f"{type(problem).__name__}: {fl.training.first_line(problem)}"}
        result["rows"][name], result["seconds"] = row, round(time.time() - start)
        print(line(name, row), flush=True)
        out.write_text(json.dumps(common.without_nan(result), indent=1) + "\n")
    print(f"record  {out}")


if __name__ == "__main__":
    main()
