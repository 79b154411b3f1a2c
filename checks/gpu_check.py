"""Some minutes on a CUDA GPU: does each algorithm's fast way give what `--engine loop` gives? And
would another way be faster?

    python checks/gpu_check.py                        (make gpu-check; writes results/gpu/CARD.json)
    python checks/gpu_check.py --only superfed ditto
    python checks/gpu_check.py --variants streams compile --only "10 x resnet18"
    python checks/gpu_check.py --device cpu --quick   (tries the script, without a GPU)

The first rows train each algorithm for two rounds on the bundled images, by `--engine loop` and in
the fast way ("way"). "why" says why a faster way was given up. "differs" is the distance of the two
final states relative to what the loop's training changed, for the worst tensor. It comes from runs
with 80 images, in fp32: an H100's rounding stayed below 3e-5 (bf16: .03). With all images rounding
grows: moving w_0 by a millionth gives .14. Runs with all images are timed, in their second round.
"first" is how much longer round one took, with its captures.

The rows "10 x ..." train ten clients with 500 images each by FedAvg, beside a plain PyTorch loop
(bench.py). In TF32 "differs" reaches .1. Below each stand VARIANTS of the product's way, timed in
turn with it; "times" is their speed relative to it. "evaluation" measures 100 clients' models. The
last lines say which variants should become the product's way.

A row that fails says why. After --minutes no new row begins. --only adds to a record of this
commit.
"""

import argparse
import contextlib
import functools
import importlib
import io
import json
import math
import pathlib
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import torch
import torch._dynamo.config as config
import torch.nn.functional as F
from torch import nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves

HERE = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / "tests")]
import bench

import baselines
import common
import fl.gpu
import fl.machine
import fl.provenance
import fl.training
from fl import records

ALGORITHMS = {  # name: module and flags
    **{name: [name] for name in ("fedavg", "fedavgm", "superfed", "psinet", "fedslr")},
    "persfl": ["persfl", "--distill-epochs", "1", "--split", "classes"],
    "superfed, layers": ["superfed", "--mix", "layer", "--start", "0"],
    "superfed, unequal": ["superfed", "--split", "dirichlet-classes", "--alpha", ".1"],
    "fedavg, tfcnn": ["fedavg", "--model", "tfcnn", "--transform", "tensorflow"],
    "fedavg, bf16": ["fedavg", "--precision", "bf16"],
    "psinet, BatchNorm": ["psinet", "--norm", "bn", "--no-prune"],
    **{f"{name}, momentum" if name == "fedavg" else name: ["baselines", "--method", name]
       for name in baselines.METHODS},
    "scaffold, Option I": ["baselines", "--method", "scaffold", "--option", "I"],
    "apfl, adaptive": ["baselines", "--method", "apfl", "--adaptive"],
}
FEW = ["--precision", "fp32", "--limit", "80", "--limit-test", "100", "--clients", "4",
       "--batch-size", "10"]
COLUMNS = {"differs": ".1e", "loop": ".3f", "fast": ".3f", "plain": ".3f", "times": ".2f",
           "first": ".1f", "MiB": ".0f"}


# --------------------------------------------------------------------------------------------------
# The algorithms


def run(name, argv):
    """Returns an algorithm's record, its final state, its Federation, and w_0 [d]."""
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
            why = errors.getvalue().strip() or f"exit code {stop.code}"  # 3: it diverged
            raise RuntimeError(why) from None
        state = torch.load(f"{out}/state.pt", map_location="cpu", weights_only=True)["state"]
    return record, state, *made[-1]


def difference(wanted, found, w_0):
    """Returns the largest difference of float tensors, over the smaller distance of `wanted` from
    w_0 and 0. For other dtypes it is the share of entries that differ."""
    largest = 0.0
    for name, want in wanted.items():
        if torch.is_tensor(want) and want.is_floating_point():
            starts = [torch.zeros_like(want)]
            if want.shape[-1:] == w_0.shape:
                starts.append(w_0.cpu())
            changes = [float((want - start).nan_to_num(posinf=0).norm()) for start in starts]
            gap = float((found[name] - want).nan_to_num(posinf=0).norm())
            largest = max(largest, gap / (min(changes) or 1.0))
        elif torch.is_tensor(want):
            largest = max(largest, float((found[name] != want).double().mean()))
    return largest


def reasons(*federations):
    """Returns why these have given up a way, in words."""
    return "; ".join(dict.fromkeys(f"{way}: {why}" for federation in federations
                                   for way, why in federation.training.gave_up.items()))


def algorithm(name, device, more):
    module, *own = ALGORITHMS[name]
    flags = [*own, "--dataset", "shapes", "--rounds", "2", "--eval-every", "2", "--device", device]
    _, wanted, _, w_0 = run(module, [*FEW, *flags, "--engine", "loop"])
    _, found, federation, _ = run(module, [*FEW, *flags])
    loop, *_ = run(module, [*flags, *more, "--engine", "loop"])
    fast, _, whole, _ = run(module, [*flags, *more])
    first, second = (row["seconds"] for row in fast["rounds"])
    slow = loop["rounds"][1]["seconds"]
    return {"way": whole.training.used, "why": reasons(federation, whole),
            "differs": difference(wanted, found, w_0), "loop": slow, "fast": second,
            "times": slow / second, "first": first - second, "MiB": fast["peak_memory_mb"]}


# --------------------------------------------------------------------------------------------------
# Variants of the product's way: each returns what is changed while a Federation is made and trains,
# as (object, name, new value)


def streams(threads=4):
    """Has `graphs` train four clients at once: a thread and a stream each, a lock around capture.
    """
    lock, capture = threading.Lock(), fl.gpu.capture
    here, workers = threading.local(), ThreadPoolExecutor(threads)
    cuda = torch.cuda.is_available()

    class Streams(fl.gpu.OnGPU):
        # a graph's memory belongs to one thread
        graphs = property(lambda self: vars(here).setdefault(id(self), {}), lambda self, new: None)

        def by(self, way, *more):
            self.map = self.in_threads if way == "graphs" else map
            try:
                return super().by(way, *more)
            finally:
                self.map = map

        def in_threads(self, work, items):
            main = torch.cuda.current_stream() if cuda else None

            def alone(i):
                torch.set_num_threads(1)
                if not cuda:
                    return work(i)
                if not hasattr(here, "stream"):
                    here.stream = torch.cuda.Stream()
                with torch.cuda.stream(here.stream):
                    here.stream.wait_stream(main)
                    found = work(i)
                    for z in tree_leaves(found):
                        z.record_stream(main)
                    here.stream.synchronize()
                return found

            return workers.map(alone, items)

    def locked(function, device):
        with lock:
            return capture(function, device)

    return [(fl.gpu, "OnGPU", Streams), (fl.gpu, "capture", locked)]


def compiled(backend="inductor"):
    """Compiles the step that a graph captures, of one client or of all."""
    compiling = functools.partial(torch.compile, dynamic=False, backend=backend)

    class Compiled(fl.gpu.Graph):
        def __init__(self, function, place, b, given):
            function = function if b.way == "together" else compiling(function)
            super().__init__(function, place, b, given)

    return [(fl.gpu, "Graph", Compiled),
            (fl.gpu, "vmap", lambda function, dims: compiling(vmap(function, dims))),
            # torch.compile can't trace what only notices common.grad in common.grad
            (fl.training, "is_gradtrackingtensor", lambda z: False),
            (fl.training, "set_in_thread", lambda **flags: contextlib.nullcontext()),
            # needed for one graph of a whole step; torch 2.11 may lack it
            *[(config, name, True) for name in ["trace_autograd_ops"] if hasattr(config, name)]]


def layout(memory_format):
    """Gives minibatches this memory format. The product's are channels-last as views."""
    batch = common.Federation.batch

    def contiguous(self, *given):
        b = batch(self, *given)
        return b._replace(x=b.x.flatten(0, -4).contiguous(memory_format=memory_format)
                          .unflatten(0, b.x.shape[:-3]))

    return [(common.Federation, "batch", contiguous)]


def product():
    """Computes convolutions without groups as matrix products."""
    usual = nn.Conv2d._conv_forward

    def by_product(self, x, weight, bias):
        if self.groups > 1 or isinstance(self.padding, str) or self.padding_mode != "zeros":
            return usual(self, x, weight, bias)
        size = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in zip(
            x.shape[-2:], self.padding, self.dilation, self.kernel_size, self.stride)]
        columns = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        y = (weight.flatten(1) @ columns).unflatten(-1, size)
        return y if bias is None else y + bias[:, None, None]

    return [(nn.Conv2d, "_conv_forward", by_product)]


@contextlib.contextmanager
def patched(changes):
    with contextlib.ExitStack() as stack:
        for place, name, new in changes:
            stack.enter_context(mock.patch.object(place, name, new))
        yield


VARIANTS = {
    "streams": streams, "compile": compiled,
    "contiguous": lambda: layout(torch.contiguous_format),
    "channels-last": lambda: layout(torch.channels_last), "product": product,
}


def ours_changed(args, changes):
    """Returns bench.ours, made and run with these changes."""
    with patched(changes):
        one_round = bench.ours(args)

    def changed_round(t):
        with patched(changes):
            return one_round(t)

    changed_round.federation = one_round.federation
    return changed_round


def workload(name, device, variants, quick=False):
    """Yields (variant, row), "" for the product's way: FedAvg by a plain loop, by `loop`, in the
    product's way and in each variant, in turn round by round. The first round captures."""
    model, B, (clients, images), _ = bench.WORKLOADS[name.removesuffix(", unequal")]
    if quick:
        clients, images, B = 2, 10, 5
    split = {"split": "dirichlet-classes", "alpha": 0.3} if name.endswith("unequal") else {}
    args = bench.arguments(model, device, clients=clients, limit=clients * images, client_test=0,
                           batch_size=B, **split)
    ways = {"plain": bench.plain(args), "loop": bench.ours(args, "loop"), "": bench.ours(args)}
    ways |= {variant: ours_changed(args, VARIANTS[variant]()) for variant in variants}
    seconds, w, wrong, now = {way: [] for way in ways}, {}, {}, fl.machine.now
    gpu = ways[""].federation.device
    for t in range(3):
        for way in [way for way in ways if way not in wrong]:
            start = now(gpu)
            try:
                w[way] = ways[way](t)
            except Exception as problem:
                wrong[way] = f"{type(problem).__name__}: {fl.machine.first_line(problem)}"
            seconds[way].append(now(gpu) - start)
    best = {way: min(z[1:]) for way, z in seconds.items() if way not in wrong}
    w_0 = ways[""].federation.initial_weights()
    for way in ["", *variants]:
        if way in wrong:
            yield way, {"error": wrong[way]}
            continue
        fed = ways[way].federation
        row = {"way": fed.training.used, "why": reasons(fed), "fast": best[way],
               "times": best["" if way else "loop"] / best[way],
               "differs": difference({"w": w["loop"].cpu()}, {"w": w[way].cpu()}, w_0),
               "first": seconds[way][0] - best[way],
               "MiB": bench.memory_of(lambda way=way: ways[way](3), device)}
        yield way, row if way else row | {name: best[name] for name in ("loop", "plain")}


def evaluation(device, quick=False):
    """Yields the row of evaluating 100 clients' models: "loop" one after the other, as the product
    does, and "fast" 32 at once by vmap."""
    K = 4 if quick else 100
    args = bench.arguments("cnn", device, clients=K, limit=20 * K, client_test=0)
    fed = common.Federation(args)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((K, fed.net.d), np.float32))
    W = fed.initial_weights() + 0.01 * noise.to(fed.device)
    own, logits = fed.split.test, {}

    def at_once(_):
        parts = []
        for S in np.array_split(fed.everyone, math.ceil(K / fl.gpu.WIDEST)):
            most = max(len(own[k]) for k in S)
            index = np.stack([np.resize(own[k], most) for k in S])
            index = torch.from_numpy(index).to(fed.device)
            x = fed.transform(fed.images[index.flatten()]).unflatten(0, index.shape)
            with torch.no_grad(), fl.training.set_in_thread(vmapped=True):
                found = vmap(fed.net)(W[torch.from_numpy(S).to(fed.device)], x)
            parts += [z[: len(own[k])] for z, k in zip(found, S)]
        logits["fast"] = torch.cat(parts)

    def in_turn(_):
        logits["loop"] = fed.training.stacked(lambda k: fed.logits(W[k], own[k]), own)

    seconds, memory = bench.interleaved({"loop": in_turn, "fast": at_once}, device, 2)
    slow, fast = (min(z) for z in seconds.values())
    gap = (logits["fast"] - logits["loop"]).norm() / logits["loop"].norm()
    yield "", {"way": "vmap", "why": "", "differs": float(gap), "loop": slow, "fast": fast,
               "times": slow / fast, "MiB": memory["fast"]}


# --------------------------------------------------------------------------------------------------
# The table


def line(name, row):
    if "error" in row:
        return f"{name:<30}{'failed':<10}{row['error']}"
    cells = [format(row[key], form) if key in row else "" for key, form in COLUMNS.items()]
    return f"{name:<30}{row['way']:<10}{''.join(f'{cell:>9}' for cell in cells)}  {row['why']}"


def verdicts(rows):
    """Returns a line for each variant that was measured: whether it should become the product's
    way. It should if it is a tenth faster somewhere, and nowhere a twentieth slower or wrong."""
    said = []
    for variant in [*VARIANTS, "evaluation"]:
        found = {name: row for name, row in rows.items() if name.split("; ")[-1] == variant}
        if not found:
            continue
        where = ", ".join(f"{name.split('; ')[0]} {row['times']:.2f}" if "times" in row else
                          f"{name.split('; ')[0]} failed" for name, row in found.items())
        right = all("times" in row and not row["why"] and row["differs"] < 0.2
                    for row in found.values())
        times = [row.get("times", 0) for row in found.values()]
        wins = right and max(times) > 1.1 and min(times) > 0.95
        said.append(f"{variant:<14}{'should become the product’s way' if wins else 'no gain':<33}"
                    f"({where})")
    return said


def main(argv=None, more=()):
    """more: further flags of the algorithms' commands."""
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", default="cuda")
    p.add_argument("--only", nargs="*", metavar="ROW", help="the names of rows")
    p.add_argument("--variants", nargs="*", choices=[*VARIANTS], default=[*VARIANTS],
                   help="of the product's way (default: all)")
    p.add_argument("--minutes", type=float, default=5, help="after which no new row begins")
    p.add_argument("--quick", action="store_true", help="few rows, few images")
    p.add_argument("--out", type=pathlib.Path, default="results/gpu")
    args = p.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA GPU is here: nothing was checked")
        return
    with contextlib.ExitStack() as stack:
        if args.device == "cpu":  # Python's calls in place of CUDA graphs
            import pretend

            stack.enter_context(patched([(fl.gpu, "OnGPU", pretend.Training),
                                         (fl.gpu, "capture", pretend.eager),
                                         (common, "training_on", lambda *z: fl.gpu.OnGPU(*z))]))
        if args.quick:
            stack.enter_context(mock.patch.dict(
                VARIANTS, compile=functools.partial(compiled, "eager")))
        check(args, more)


def check(args, more):
    more = [*more, *FEW[2:]] if args.quick else more
    rows = {name: lambda name=name: [("", algorithm(name, args.device, more))]
            for name in list(ALGORITHMS)[: 2 if args.quick else None]}
    each = {f"10 x {name}": lambda name=name: workload(name, args.device, args.variants, args.quick)
            for name in ["superfed-cnn", "superfed-cnn, unequal", "fedavg", "resnet18"]}
    # what --minutes cuts off is the last algorithms; ResNet-18 takes longest to compile
    rows = {"evaluation": lambda: evaluation(args.device, args.quick)} | each | rows
    result = {**bench.machine(args.device, __file__), "cuda": torch.version.cuda,
              "date": time.strftime("%Y-%m-%d"), "rows": {}}
    card, start = result["device"], time.time()
    out = args.out / f"{re.sub('[^A-Za-z0-9]+', '-', card).strip('-')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.only and out.exists():
        earlier = json.loads(out.read_text())
        result["rows"] = earlier["rows"] if earlier["commit"] == result["commit"] else {}
    print(f"{card}, torch {torch.__version__}\n{'':<40}{''.join(f'{z:>9}' for z in COLUMNS)}  why")
    for name in args.only or rows:
        if time.time() - start > 60 * args.minutes:
            print(f"{name:<30}not begun: --minutes {args.minutes:g} are over")
            continue
        try:
            found = rows[name]()
            for variant, row in found:
                result["rows"][f"{name}; {variant}" if variant else name] = row
                print(line(f"   {variant}" if variant else name, row), flush=True)
        except Exception as problem:
            row = {"error": f"{type(problem).__name__}: {fl.machine.first_line(problem)}"}
            result["rows"][name] = row
            print(line(name, row), flush=True)
        result["seconds"] = round(time.time() - start)
        result["verdicts"] = verdicts(result["rows"])
        out.write_text(records.in_lines(result) + "\n")
    print("\n".join([*result["verdicts"], f"record  {out}"]))
    if args.device == "cpu":
        print("This only tried the script: without a GPU the times mean nothing.")


if __name__ == "__main__":
    main()
