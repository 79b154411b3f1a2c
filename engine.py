"""How the work is spread: threads on a CPU, one vmapped step for many clients on a GPU, several processes.

Nothing here changes what is computed, up to rounding: `Federation.train_alone` in common.py is the specification of `train`
below, and tests compare the two for every algorithm.

    1. Processes and devices            refuse, is_main_process, find_device, cores
    2. Many clients in one step         prepare, train, check, train_together, tune, logits_together
    3. CUDA graphs                      Replay
    4. Convolutions as products         conv_by_patches
    5. Gradients                        vmapped, outside_of_steps, grad
    6. What clients keep                Rows

fed is common.py's Federation.
"""

import contextlib
import ctypes
import datetime
import functools
import os
import pathlib
import platform
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map

# ---------------------------------------------------------------------------------------------------------------------
# 1. Processes and devices


def refuse(message, alone=False):
    """Ends the program because of its input: one line on stderr, exit code 2. alone: other processes don't say the same."""
    if is_main_process() or alone:
        print(f"{pathlib.Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    else:
        time.sleep(10)  # torchrun ends all processes when one has ended: the one that says why must be the first
    raise SystemExit(2)


def is_main_process():
    """Whether this is the only process, or the one among torchrun's that prints and writes the record."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"  # RANK alone is another program's


def find_device(name):
    """(torch.device, rank, number of processes) of a device's name; joins the others where torchrun started this process. From
    here on the first process alone prints. Refuses a device that isn't there."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0)) if processes > 1 else 0
    if processes > 1 and name.startswith("cuda:"):
        refuse(f"--device {name} is one GPU for {processes} processes; use --device cuda, which gives each its own")
    try:
        device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and processes > 1 else name)
        device = torch.zeros(1, device=device).device  # with its number
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
    except (RuntimeError, AssertionError) as problem:
        refuse(f"--device {name} can't be used: {first_line(problem)}; use --device cpu",
               alone=name == "cuda" and torch.cuda.is_available())  # then there is one, but not one for this process
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # but see fast_kernels
    if processes > 1 and not dist.is_initialized():
        gpu = device.type == "cuda"
        patience = datetime.timedelta(hours=2)  # the others wait while one downloads
        dist.init_process_group("nccl" if gpu else "gloo", timeout=patience, device_id=device if gpu else None)
    if rank:
        sys.stdout = open(os.devnull, "w")
    elif sys.stdout is sys.__stdout__:
        sys.stdout = Output(sys.stdout)
    return device, rank, processes


class Output:
    """sys.stdout, as long as somebody reads it: if `| head` has seen enough, the run goes on."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name):
        return getattr(self.stream, name)


def all_reduce(x):
    """The sum of a tensor over all processes."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def cores():
    """CPU cores that this process may use, its share of them where torchrun started several."""
    all_ = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, all_ // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{found.group(1) if found else platform.processor() or 'CPU'} ({cores()} cores)"


def keep_memory():
    """Has glibc keep freed memory for the next tensor. Otherwise large ones go back to the system and are zeroed page by page
    when they are asked for again: a tenth of a step, of a small model and of ResNet-18, on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another system's C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: nothing has pages of its own
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def give_back_memory(size):
    """Undoes keep_memory for what is free now, where large tensors of a gigabyte in all would otherwise lie between the gaps."""
    if size > 2**30:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)


def now(device):
    """Waits until the device has done all that it was asked for. Then the clock, in seconds."""
    getattr(torch, device.type).synchronize(device)  # torch.cpu's does nothing
    return time.perf_counter()


@contextlib.contextmanager
def fast_kernels(tf32):
    """In here cuDNN times its kernels for each convolution, and convolutions and matrix products in fp32 use TF32 if `tf32`;
    outside neither is so."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, tf32, tf32
    try:
        yield
    finally:
        cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = False


# ---------------------------------------------------------------------------------------------------------------------
# 2. Many clients in one step

TIMED = 16  # minibatches over which ways are timed
ROUNDING = {"fp32": 2**-18, "tf32": 2**-11, "bf16": 2**-8}  # of a product of 4,608 terms, a ResNet-18's longest (see check)


def prepare(fed):
    """Sets how the clients of a Federation are trained: in one step, in threads, or one after the other. And makes the tables
    of what this file finds out on the way."""
    gpu = fed.device.type == "cuda"
    fed.vmap = fed.graphs = fed.tunes = gpu and fed.args.engine == "auto"
    # all clients in one step; as CUDA graphs; in the way that is found to be the fastest. Tests set these three on a CPU, too
    fed.parallel = fed.args.parallel or (None if gpu else cores())  # clients at once; None: all
    fed.threads = 0 if gpu else fed.parallel
    fed.map = ThreadPoolExecutor(fed.threads, initializer=torch.set_num_threads, initargs=(1,)).map if fed.threads else map
    fed.training = fed.net  # the network that is being trained: a pruned node's is a part of it
    fed.ways = {}  # step function -> the fastest way known: of convolutions, and clients at once (None: all)
    fed.tuning = {}  # step function -> what was found of its ways
    fed.checked = set()  # step functions, with ways that give what the plain loop gives
    fed.failed = {}  # (what was done, its step function) -> why its way failed, and the next slower one is used
    fed.replays = {}  # step function and shapes -> the CUDA graph for them
    fed.shapes_seen = set()  # step functions and shapes that came before
    fed.all_rows = []  # every Rows
    fed.peak = 0  # bytes, the most that a GPU held before ways were tried
    fed.at_once = 4000  # images in evaluation under vmap
    if gpu:
        torch.cuda.reset_peak_memory_stats(fed.device)  # of an earlier run in this process
    keep_memory()


def train(fed, step, state, plans, shared, net, left):
    """Federation.train where many clients go through a step at once: as many as fit, in the fastest way that is known. If this
    fails, or does not give what the plain loop gives, each client goes alone, by graphs; and if this fails too, the plain loop
    does it. plans: the Plan of each client. left: how often this step will be trained, this time with it."""
    fed.training, plain = net, functools.partial(fed.one_by_one, step, state, plans, shared)
    together = functools.partial(fast, fed, step, state, plans, shared, left)

    def alone():
        return guarded(fed, "training, without graphs", step, functools.partial(together, ("conv", 1)), plain)

    try:
        with fast_kernels(tf32=fed.args.precision == "tf32"):
            if not fed.vmap:
                return plain()
            return guarded(fed, "training", step, together, plain if fed.parallel == 1 else alone)
    except RuntimeError as problem:
        if not out_of_memory(problem):
            raise
        refuse(f"out of GPU memory, with one client at a time ({first_line(problem)}); use a smaller --batch-size or --model",
               alone=True)


def guarded(fed, what, step, fast_way, plain_way):
    """What the fast way gives; where it fails, whatever the reason, what the plain one gives, from then on, and one line."""
    if (what, step) not in fed.failed:
        try:
            return fast_way()
        except Exception as problem:
            fed.failed[what, step] = f"{what}: {first_line(problem)}"
            print(f"engine  one client after the other from here on, slower, in {fed.failed[what, step]}")
            forget_graphs(fed)
    return plain_way()


def fast(fed, step, state, plans, shared, left, way=None):
    """The clients with most minibatches first, so that those who go together end together. A way is a route, how convolutions
    are computed ("conv" or "patches"), and how many clients go at once (None: all); unless given, it is the fastest known."""
    order = sorted(range(len(plans)), key=lambda i: (-plans[i].index.shape[1], -len(plans[i].index)))
    results, places = state, range(len(plans))

    def rows(some):
        """Where these clients of `order` are in `state`. If `order` changes nothing this is a slice: then nothing is copied."""
        return slice(some.start, some.stop) if order == list(places) else [order[i] for i in some]

    def work(some, steps=None):
        """What some clients begin with, and what they come to."""
        few = [plans[i]._make(z[:steps] for z in plans[i]) for i in order[some.start : some.stop]]
        start = tree_map(lambda z: z[rows(some)], state)
        return start, train_together(fed, step, start, few, shared)

    def put(some):
        nonlocal results
        results = tree_map(functools.partial(merged, rows(some)), results, state, *work(some))

    tuning = fed.tuning.setdefault(step, SimpleNamespace(found={}, seconds=0.0, minibatches=0, spent=0.0))
    steps = sum(len(plan.index) for plan in plans)
    prove = functools.partial(check, fed, step, state, plans, shared, work, order)
    if fed.tunes and not way:
        tune(fed, step, tuning, work, places, steps, prove, left)
    way = way or fed.ways.get(step, (fed.training.route, fed.parallel))
    fed.training.route, most = way[0], prove(way)
    start = now(fed.device)
    fed.ways[step] = way[0], in_parts(fed, put, places, most)[1]
    tuning.seconds, tuning.minibatches = tuning.seconds + now(fed.device) - start, tuning.minibatches + steps
    return results


def merged(these, result, state, start, new):
    """result with new in these rows of it. What a step hands on as it got it, in start, is not copied: result stays state."""
    if result is state:
        if same(start, new):
            return state
        if these == slice(0, state.shape[0]):
            return new
        result = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    result[these] = new
    return result


def same(a, b):
    """Whether two tensors are the same memory, looked at in the same way."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


class Different(Exception):
    pass


def check(fed, step, state, plans, shared, work, order, way, quiet=False):
    """Raises Different if the first minibatch of two clients changes them otherwise than in the plain loop, at a way's first use.
    Returns how many clients at once fit into memory (None: all).

    How much is rounding? A product that is rounded is the exact product of factors that are off by about its relative rounding
    error: 2^-8 in bf16, 2^-11 in TF32, and in fp32 2^-24 times the root of the number of terms. So the plain loop also runs from
    state and shared tensors that are off by so much at random. Sixteen times the change of its result is rounding; but never
    more than half of what the minibatch changes. Four roundings of the state itself come to that.
    """
    most = way[1]
    if (step, way[0], most == 1) in fed.checked:
        return most
    rng, u = np.random.default_rng(0), ROUNDING[fed.args.precision]
    m = len(order) if most is None else min(len(order), max(2, most))

    def ends(trained):
        return [copied(tree_map(lambda z: z[place], trained)) for place in (0, -1)]

    for _ in range(1 + fed.graphs):  # with a graph from the second time on
        parts, most = in_parts(fed, lambda these: ends(work(these, 1)[1]), range(m), most, quiet)

    def near(z):
        noise = torch.from_numpy(rng.standard_normal(z.shape).astype(np.float32)).to(fed.device)
        return z + u * z * noise.to(z.dtype) if z.is_floating_point() else z

    for i, trained in ((order[0], parts[0][0]), (order[m - 1], parts[-1][-1])):
        plan, start = plans[i]._make(z[:1] for z in plans[i]), tree_map(lambda z: z[i], state)
        start_near, shared_near = tree_map(near, (start, shared))
        leaves = zip(*map(tree_leaves, (
            start, fed.train_alone(step, start, plan, shared), trained,
            start_near, fed.train_alone(step, start_near, plan, shared_near))))
        for leaf in leaves:
            size, change, wrong, near_change = norms(*leaf)
            bound = torch.minimum(16 * near_change, change / 2) + 2**-22 * (size + change)
            if change.isfinite() and not wrong <= bound:
                raise Different(f"a minibatch's change is off by {float(wrong / change):.2g} of it; "
                                f"rounding explains {float(bound / change):.2g}")
    fed.checked.add((step, way[0], way[1] == 1))
    return most


def norms(*tensors):
    """What check compares, for old, want, got, old_near, want_near of one shape: the norms of old, of its change, of what is wrong,
    and of how the change differs nearby. In fp64 and piece by piece: a whole copy would be twice as large."""
    squares = 0
    for pieces in zip(*(z.flatten().split(FEW_ROWS // 32) for z in tensors)):
        old, want, got, old_near, want_near = (z.double() for z in pieces)
        differences = old, want - old, got - want, want_near - old_near - want + old
        squares = squares + torch.stack([z.square().sum() for z in differences])
    return squares.sqrt()


def first_line(problem):
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def out_of_memory(problem):
    """Whether an error is PyTorch's for too little memory, or what cuBLAS, cuDNN and CUDA graphs say of it."""
    words = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED",
             "CUDNN_STATUS_NOT_INITIALIZED", "unable to find an engine")  # the last: for so little memory
    return isinstance(problem, torch.cuda.OutOfMemoryError) or any(s in str(problem) for s in words)


def in_parts(fed, work, items, most, quiet=False):
    """The results of work(part) for parts of items with `most` at most (None: all), and that number: halved, with a line
    unless quiet, when memory runs out."""
    results, start = [], 0
    while start < len(items):
        at_once, full = min(most or len(items), len(items)), False
        try:
            results.append(work(items[start : start + at_once]))
            start += at_once
        except RuntimeError as problem:
            if at_once == 1 or not out_of_memory(problem):
                raise
            full = True  # what the failed call holds is free only after this block
        if full:
            most = -(-at_once // 2)
            if not quiet:
                print(f"memory  the GPU's is too small: {most} clients at once from here on")
            forget_graphs(fed)
            with contextlib.suppress(RuntimeError):  # after a capture that broke PyTorch can't empty it
                torch.cuda.empty_cache()  # nothing where there is no GPU
    return results, most


def train_together(fed, step, state, plans, shared):
    """All clients in one vmapped step per minibatch; plans: the longest first.

    A client whose minibatches are used up keeps its state. When a quarter of the clients are at their end, only the others go on.
    """
    steps = np.array([len(plan.index) for plan in plans])
    size = plans[0].index.shape[1]

    def stacked(name, *shape):
        """[steps, m, *shape], with zeros behind the last step of a client and behind its last image."""
        parts = [getattr(plan, name) for plan in plans]
        whole = np.zeros((steps[0], len(plans), *shape), parts[0].dtype)
        for i, part in enumerate(parts):
            whole[(slice(len(part)), i, *map(slice, part.shape[1:]))] = part
        return torch.from_numpy(whole).to(fed.device)

    mask = stacked("mask", size)
    inputs = (stacked("index", size), mask.float(), stacked("uniform", size, plans[0].uniform.shape[2]),
              stacked("draw", *plans[0].draw.shape[1:]), mask.any(2))  # [steps, m, ...] each; the last: who trains
    start, done, s, m = state, [], 0, len(plans)
    while s < steps[0]:
        few = m * 3 // 4
        until = steps[few]  # behind it at most so few of the m clients have minibatches left
        if s < until:
            these = tuple(z[s:until, :m] for z in inputs)
            state = runner(fed, step, state, these, shared)(state, these, shared)
        if until < steps[0]:
            done.append(tree_map(lambda z: z[few:], state))
            state = tree_map(lambda z: z[:few], state)
        s, m = until, few
    return tree_map(lambda z, *parts: z if same(z[: len(parts[0])], parts[0]) else torch.cat(parts) if done else parts[0],
                    start, state, *done[::-1])


def vmapped_step(fed, step, state, index, mask, uniform, draw, *shared):
    """One minibatch of m clients: index and mask [m,B], uniform [m,B,DRAWS], draw [m,...]."""
    return vmap(step, in_dims=(0, 0) + (None,) * len(shared))(state, fed.batch(index, mask, uniform, draw), *shared)


def run_steps(function, state, inputs, shared):
    """state after function(state, *inputs[:-1] of a step, *shared) for every step; inputs: [steps, m, ...] each, the last one
    bool: where it is False, a client keeps its state."""
    for *minibatch, live in zip(*inputs):
        new = function(state, *minibatch, *shared)
        state = tree_map(lambda a, b: b if same(a, b) else torch.where(live.view(-1, *[1] * (a.dim() - 1)), a, b), new, state)
    return state


def tune(fed, step, tuning, work, places, steps, prove, left):
    """Tries one more way for a step, if all trying takes at most a tenth of the time that the step takes in the whole run, at its pace
    so far. The fastest is taken: together or one by one (unless --parallel says), convolutions as such or as products with patches."""
    ways = [("conv", fed.parallel), ("patches", fed.parallel)] + [("conv", 1)] * (fed.parallel is None and len(places) > 1)
    way = next((way for way in ways if way not in tuning.found), None)
    each, few = tuning.seconds / max(1, tuning.minibatches), min(steps, TIMED * len(places))
    # three times, and it may be three times slower than the one that is used
    if way is None or not each or tuning.spent + 9 * few * each > 0.1 * (tuning.seconds + left * steps * each):
        return
    begin, seconds = now(fed.device), float("inf")
    if fed.device.type == "cuda":
        fed.peak = max(fed.peak, torch.cuda.max_memory_allocated(fed.device))
    fed.training.route, most = way
    with contextlib.suppress(RuntimeError, Different):  # too little memory, no such convolution on this device, a wrong one
        most = prove(way, quiet=True)
        for _ in range(3):  # without a graph, capturing it, and with it
            start = now(fed.device)
            most = in_parts(fed, lambda these: work(these, TIMED), places, most, quiet=True)[1]
            seconds = now(fed.device) - start
    forget_graphs(fed)
    if fed.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(fed.device)  # of what was only tried
    tuning.found[way], tuning.spent = (seconds, most), tuning.spent + now(fed.device) - begin
    route, most = min(tuning.found, key=lambda way: tuning.found[way][0])
    fed.ways[step] = route, tuning.found[route, most][1]


@torch.no_grad()
def logits_together(fed, W, here, own, alone):
    """logits of the models W(here), a row each, on the images own[i], one below the other: by vmap, as many as fit
    into memory. At first two are compared with alone(i): rounding in fp32 is far below a hundredth."""
    longest = max(map(len, own))
    most = max(1, min(fed.parallel or fed.K, fed.at_once // longest, FEW_ROWS // (4 * fed.net.d)))

    def work(rows):
        if len(rows) == 1:  # 500 images at a time, however many it has
            return fed.logits(W(here[rows])[0], own[rows[0]])
        parts = [torch.from_numpy(own[k]) for k in rows]
        these = pad_sequence(parts, batch_first=True).to(fed.device)  # filled up with image 0
        real = torch.arange(these.shape[1]) < torch.tensor([len(part) for part in parts])[:, None]
        x = fed.transform(fed.images[these.flatten()]).unflatten(0, these.shape)
        return vmap(fed.net)(W(here[rows]), x)[real.to(fed.device)]

    parts, fitting = in_parts(fed, work, np.arange(len(own)), most)
    if fitting < most:
        fed.at_once = fitting * longest
    logits, n = torch.cat(parts), len(own[-1])
    if "evaluation" not in fed.checked:
        for got, want in ((logits[: len(own[0])], alone(0)), (logits[len(logits) - n :], alone(len(own) - 1))):
            if want.isfinite().all() and not (got - want).norm() <= 0.01 * want.norm() + 1e-6:
                raise Different("the logits of all clients at once are not those of one")
        fed.checked.add("evaluation")
    return logits


# ---------------------------------------------------------------------------------------------------------------------
# 3. CUDA graphs


def runner(fed, step, state, inputs, shared):
    """What runs many steps together: a CUDA graph (Replay) if these shapes came before, or if there are enough steps to pay for
    capturing it; else run_steps."""
    one_step = functools.partial(vmapped_step, fed, step)
    eager = functools.partial(run_steps, one_step)
    if not fed.graphs:
        return eager
    key = step, fed.training.route, tuple((z.shape, z.dtype) for z in tree_leaves((state, [z[0] for z in inputs], shared)))
    if key in fed.replays:
        return fed.replays[key]
    if key not in fed.shapes_seen and len(inputs[0]) <= TIMED:
        fed.shapes_seen.add(key)
        return eager
    if len(fed.replays) == 64:
        oldest = next(iter(fed.replays))
        del fed.replays[oldest]
        fed.shapes_seen.discard(oldest)
    pool = next((replay.pool for replay in fed.replays.values()), None)  # one graph runs at a time, so that they share memory
    try:
        fed.replays[key] = Replay(one_step, state, tuple(z[0] for z in inputs), shared, pool)
    except RuntimeError as problem:
        if out_of_memory(problem):
            raise
        print(f"graphs  none from here on, slower: a step can't be captured as a CUDA graph ({first_line(problem)})")
        fed.graphs = False
        forget_graphs(fed)
        return eager
    return fed.replays[key]


def forget_graphs(fed):
    fed.replays.clear()
    fed.shapes_seen.clear()


@functools.cache
def side_stream(device):
    """The stream on which graphs are captured."""
    return torch.cuda.Stream(device)


class Replay:
    """run_steps for one function and one set of shapes as a CUDA graph: captured here, replayed for every step.

    A graph reads and writes the same memory in every replay; so state, inputs and shared are copied there. On a CPU, where the
    tests use it, the function itself is called instead.
    """

    def __init__(self, function, state, inputs, shared, pool=None):
        self.function, (self.state, self.inputs, self.shared) = function, copied((state, inputs, shared))
        self.go, self.pool = None, pool  # not self.once: by this reference to itself a failed capture's memory would stay alive
        if self.inputs[0].device.type != "cuda":
            self.go = self.once
        else:
            main, side, graph = torch.cuda.current_stream(), side_stream(self.inputs[0].device), torch.cuda.CUDAGraph()
            side.wait_stream(main)
            try:
                with torch.cuda.stream(side):  # libraries choose and set up their kernels before the capture
                    for synchronisation in ("default", "default", "error"):  # a step that synchronises can't be captured
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")  # this mode is a prototype
                            torch.cuda.set_sync_debug_mode(synchronisation)
                        self.once()
                torch.cuda.set_sync_debug_mode("default")
                with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):  # NCCL's thread may do more
                    self.once()
            finally:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.set_stream(main)  # torch 2.11 stays on the other one after a failed capture
                with contextlib.suppress(RuntimeError):  # a capture that could not be ended
                    main.wait_stream(side)  # it may still be writing to what is here
            self.go, self.pool, self.function = graph.replay, graph.pool(), None

    def once(self):
        *minibatch, live = self.inputs
        new, memory = self.function(self.state, *minibatch, *self.shared), lambda z: z.untyped_storage().data_ptr()
        old = {memory(z) for z in tree_leaves(self.state)}
        # a step may hand on a part of its state in another place, which must not be overwritten before it is read
        new = tree_map(lambda a, b: a.clone() if a.data_ptr() != b.data_ptr() and memory(a) in old else a, new, self.state)
        self.kept = tree_map(same, new, self.state)
        tree_map(lambda a, b, kept: kept or torch.where(live.view(-1, *[1] * (a.dim() - 1)), a, b, out=b),
                 new, self.state, self.kept)

    def __call__(self, state, inputs, shared):
        tree_map(lambda a, b: a.copy_(b), (self.state, self.shared), (state, shared))
        for of_step in zip(*inputs):
            for a, b in zip(self.inputs, of_step):
                a.copy_(b)
            self.go()
        return tree_map(lambda a, b, kept: b if kept else copied(a), self.state, state, self.kept)


def copied(tree):
    return tree_map(lambda z: z.clone(memory_format=torch.contiguous_format), tree)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Convolutions as products


def conv_by_patches(x, weight, bias, stride, padding):
    """F.conv2d as one matrix product (im2col): where every client has its own weights, it is batched over the clients under
    vmap, and a convolution is not (it becomes one with a group per client)."""
    out, kernel = weight.shape[0], weight.shape[2]
    x = Patches.apply(F.pad(x, (padding,) * 4) if padding else x, kernel, stride)
    y = x.flatten(0, 2) @ weight.permute(0, 2, 3, 1).flatten(1).T  # [B*h*w, out]
    return (y if bias is None else y + bias).view(*x.shape[:3], out).permute(0, 3, 1, 2)


class Patches(torch.autograd.Function):
    """x [B,C,H,W] -> [B, h, w, kernel*kernel*C], the pixels under the kernel at each place, channels last as x is in memory.

    Its own function since the backward of Tensor.unfold runs client by client under vmap.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, kernel, stride):
        return x.unfold(2, kernel, stride).unfold(3, kernel, stride).permute(0, 2, 3, 4, 5, 1).flatten(3)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.kernel, ctx.stride = inputs
        ctx.size = x.shape[2:]

    @staticmethod
    def backward(ctx, g):
        g = g.flatten(1, 2).unflatten(2, (ctx.kernel**2, -1)).permute(0, 3, 2, 1).flatten(1, 2)  # [B, C*kernel*kernel, h*w]
        return F.fold(g, ctx.size, ctx.kernel, stride=ctx.stride), None, None


# ---------------------------------------------------------------------------------------------------------------------
# 5. Gradients


def vmapped():
    """Whether many clients' steps run at once (or this is inside another grad)."""
    return torch._C._functorch.maybe_current_level() is not None


def outside_of_steps():
    """In here no step is vmapped, also where an interruption comes in the midst of one: its tensors can be saved."""
    return torch._C._DisableFuncTorch()


def grad(function, argnums=0, has_aux=False):
    """torch.func.grad of a function of tensors, without what that pays for second derivatives.

    Where nothing is vmapped, torch.autograd.grad saves a sixth of a small CNN's step.
    """

    def gradient(*args):
        if vmapped():
            return grad_under_vmap(function, argnums, has_aux, args)
        chosen = {i: args[i].detach().requires_grad_() for i in ([argnums] if isinstance(argnums, int) else argnums)}
        with torch.enable_grad():
            result = function(*(chosen.get(i, z) for i, z in enumerate(args)))
        value, *aux = result if has_aux else (result,)
        found = torch.autograd.grad(value, list(chosen.values()), allow_unused=True, materialize_grads=True)
        found = found[0] if isinstance(argnums, int) else found
        return (found, *tree_map(torch.Tensor.detach, aux)) if has_aux else found

    return gradient


def grad_under_vmap(function, argnums, has_aux, args):
    """grad for many clients at once: torch.func.vjp saves nearly half of the memory that a ResNet-18's step holds, and
    GroupNorm's backward is one operation instead of twenty. Inside another gradient it is torch.func.grad itself."""
    levels = torch._C._functorch.get_interpreter_stack()
    if any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels):
        return torch.func.grad(function, argnums, has_aux)(*args)
    args, wanted = list(args), (argnums,) if isinstance(argnums, int) else argnums

    def of(*chosen):
        for i, z in zip(wanted, chosen):
            args[i] = z
        return function(*args)

    value, back, *aux = torch.func.vjp(of, *(args[i] for i in wanted), has_aux=has_aux)
    found = back(torch.ones_like(value), retain_graph=False, create_graph=False)
    found = found[0] if isinstance(argnums, int) else found
    return (found, *aux) if has_aux else found


# ---------------------------------------------------------------------------------------------------------------------
# 6. What clients keep


class Rows:
    """What the clients of this process keep between rounds, a row each: rows[S] are copies of those of the clients S (or of one),
    on the device; rows[S] = x puts others in their place.

    all: the whole tensor [rows, ...]. It lies on the device while all Rows together take at most a quarter of the memory that
    is free there, else in the host's memory. Until a round is complete, the rows that it replaced are remembered: `accept`
    forgets them, `undo` puts them back.
    """

    def __init__(self, fed, first):
        """first(i): row number i."""
        like = first(0)
        size, n = like.numel() * like.element_size() * len(fed.clients), len(fed.clients)
        near = sum(rows.all.nbytes for rows in fed.all_rows if not rows.far)
        far = 4 * (near + size) > free_memory(fed.device) + near
        fed.all_rows.append(self)
        self.device, self.far, self.replaced = fed.device, far, []
        try:
            self.all = torch.empty((n, *like.shape), dtype=like.dtype, device="cpu" if far else fed.device)
        except RuntimeError as problem:
            refuse(f"{n} clients keep {size / 1e9:.1f} GB between rounds ({first_line(problem)}); use fewer --clients or a smaller "
                   "--model", alone=True)
        for i in range(n):
            self.all[i] = first(i)

    def __getitem__(self, S):
        S = self.numbers(S)
        if self.device.type == "cpu":
            give_back_memory(self.all.nbytes)
        x = torch.empty((*np.shape(S), *self.all.shape[1:]), dtype=self.all.dtype, device=self.device)
        for row, k in zip(x if np.ndim(S) else x[None], np.atleast_1d(S)):
            row.copy_(self.all[int(k)])
        return x

    def __setitem__(self, S, x):
        if isinstance(x, Sampled):  # no step has changed them
            return
        S = self.numbers(S)
        if self.device.type == "cpu":
            give_back_memory(self.all.nbytes)
        x = x.expand(*np.shape(S), *self.all.shape[1:])  # as a tensor does: one row for all of S, a row each, or an error
        index = torch.from_numpy(np.atleast_1d(S)).to(self.all.device)
        self.replaced.append((index, self.all[index], is_finite(x)))
        for row, k in zip(x if np.ndim(S) else x[None], np.atleast_1d(S)):
            self.all[int(k)].copy_(row)

    def numbers(self, S):
        """Those of the rows S: a number, a list or an array of numbers, a slice, or a mask."""
        return np.arange(len(self.all))[S if np.size(S) else []]

    def of(self, S):
        """self[S] for Federation.train, which fetches a row when its client's turn comes."""
        return Sampled(self, S)

    def sum(self, dim=0):
        """Over this process's clients: [...]. dim: as a tensor's sum, so that federation.sum takes Rows, too."""
        if not self.far:
            return self.all.sum(0)
        return sum(self[i].sum(0) for i in np.array_split(np.arange(len(self.all)), -(-self.all.nbytes // FEW_ROWS)))

    def load(self, x):
        self.all = x if self.far else x.to(self.device)

    def accept(self):
        self.replaced.clear()

    def undo(self):
        while self.replaced:
            S, x, _ = self.replaced.pop()
            self.all[S] = x


class Sampled:
    """Rows of the clients S: of shape [m, ...], but only what is asked for by its place among them is a tensor."""

    def __init__(self, rows, S):
        self.rows, self.S, self.dtype, self.device = rows, S, rows.all.dtype, rows.device
        self.shape = (len(S), *rows.all.shape[1:])

    def __getitem__(self, these):
        S = self.S[these]
        return self.rows[S] if np.ndim(S) else self.rows.all[int(S)].to(self.device)  # which nobody changes


# Bytes. Models are summed, compared and evaluated in pieces of about this size, so that memory does not grow with the clients.
FEW_ROWS = 2**25


def free_memory(device):
    """Bytes of a GPU that nothing holds; what PyTorch has put aside for the next tensor is free, too."""
    if device.type != "cuda":
        return float("inf")
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def is_finite(z):
    """Whether all numbers of a tensor are, or of what this round has put into Rows; x.isfinite() would make tensors as large as x."""
    if isinstance(z, Rows):
        return all(sound for _, _, sound in z.replaced)
    return not torch.is_tensor(z) or not z.numel() or bool(torch.stack(torch.aminmax(z)).isfinite().all())
