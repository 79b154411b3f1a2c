"""How the work is spread: threads on a CPU, CUDA graphs on a GPU, several processes.

Nothing here changes what is computed, up to rounding. The plain loop is the specification: one
client after the other, one minibatch after the other. Tests compare every faster way with it.

    1. What a command line names         refuse, find
    2. Processes and devices             find_device, cores, now
    3. Clients and their minibatches     Epochs, train
    4. Steps                             step, Graph
    5. Gradients                         grad
    6. What clients keep                 Rows

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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

# --------------------------------------------------------------------------------------------------
# 1. What a command line names


def refuse(message, alone=False):
    """Ends the program because of its input: one line on stderr, exit code 2. Of several processes
    the first says it; alone: this one does, since the others don't come here."""
    if not (is_main_process() or alone):
        raise SystemExit  # without an error: at the first error torchrun ends all processes
    print(f"{pathlib.Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def first_line(problem):
    return (str(problem).splitlines() or [type(problem).__name__])[0]


# --------------------------------------------------------------------------------------------------
# 2. Processes and devices


def is_main_process():
    """Whether this is the only process, or the one among torchrun's that prints and writes."""
    # RANK alone is another program's
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def say(text=""):
    """Prints a line, above a progress bar, by the first process alone. If nobody reads any more
    (`| head`), the run goes on."""
    if is_main_process():
        try:
            tqdm.write(text)
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def find_device(name):
    """The torch.device of that name, with its number. Refuses one that isn't there."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several and name.startswith("cuda:"):
        refuse(f"--device {name} is one GPU for {os.environ['WORLD_SIZE']} processes; use --device "
               "cuda, which gives each its own")
    try:
        own = f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and several else name
        device = torch.zeros(1, device=own).device
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
    except (RuntimeError, AssertionError) as problem:
        refuse(f"--device {name} can't be used: {first_line(problem)}; use --device cpu",
               alone=name == "cuda" and torch.cuda.is_available())  # one, but not for this process
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return device


def join_processes(device):
    """(rank, number of processes), after joining the others where torchrun started this one."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if processes > 1 and not dist.is_initialized():
        gpu = device.type == "cuda"
        patience = datetime.timedelta(hours=2)  # the others wait while one downloads
        dist.init_process_group("nccl" if gpu else "gloo", timeout=patience,
                                device_id=device if gpu else None)
    return int(os.environ.get("RANK", 0)) if processes > 1 else 0, processes


def all_reduce(x):
    """The sum of a tensor over all processes."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def cores():
    """CPU cores that this process may use, its share of them where torchrun started several."""
    known = hasattr(os, "sched_getaffinity")
    whole = len(os.sched_getaffinity(0)) if known else os.cpu_count()
    return max(1, whole // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{found.group(1) if found else platform.processor() or 'CPU'} ({cores()} cores)"


def keep_memory():
    """Has glibc keep freed memory for the next tensor. Otherwise large ones go back to the system
    and are zeroed page by page when they are asked for again: a tenth of a step on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another system's C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: nothing has pages of its own
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def give_back_memory(size):
    """Undoes keep_memory for what is free now, where large tensors of a gigabyte in all would
    otherwise lie between the gaps."""
    if size > 2**30:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)


def now(device):
    """Waits until the device has done all that it was asked for. Then the clock, in seconds."""
    getattr(torch, device.type).synchronize(device)  # torch.cpu's does nothing
    return time.perf_counter()


@contextlib.contextmanager
def fast_kernels(precision):
    """In here cuDNN times its kernels for each convolution, and convolutions and matrix products in
    fp32 use TF32 if that is the precision; outside neither is so."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.benchmark, cudnn.allow_tf32 = True, precision == "tf32"
    matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = False


def pool(threads):
    """map over items by so many threads, each with one thread of torch; Python's own map for 0.

    torch's own threads wait for each other wherever another program takes a core. So on a CPU all
    heavy work is cut into parts for this pool, and torch has one thread everywhere else, too. Then
    results do not depend on the number of threads.
    """
    if not threads:
        return map
    torch.set_num_threads(1)
    return ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)).map


# --------------------------------------------------------------------------------------------------
# 3. Clients and their minibatches

WAYS = "together", "graphs", "loop"  # of training the clients of a round, the fastest first
SMALL = 500_000  # weights; above it clients gain nothing from going together (a guess: gpu.md)


class Batch(NamedTuple):
    """One client's minibatch: images x [B,C,H,W], labels y [B], mask [B] (0 where a row only fills
    up), draw [...] (the algorithm's own random numbers; see Federation.train)."""

    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor
    draw: torch.Tensor


def stacked(plans):
    """The Plans of several clients as one, with an axis for the clients behind epochs and steps."""
    size = max(plan.index.shape[2] for plan in plans)

    def filled(z):
        return np.pad(z, [(0, 0), (0, 0), (0, size - z.shape[2]), *[(0, 0)] * (z.ndim - 3)])

    parts = [(*map(filled, plan[:3]), plan.draw) for plan in plans]
    return type(plans[0])(*(np.stack(z, 2) for z in zip(*parts)))


class Filled(NamedTuple):
    """A minibatch that a Graph makes: fed.batch(*inputs), filled up to B images."""

    fed: object
    way: str
    inputs: tuple


def train(fed, client_update, own, clients, shared):
    """Federation.train on a GPU: all clients at once where the model is small and they have equally
    many minibatches, else one after the other by CUDA graphs. What fails, or does not give what the
    plain loop gives, is given up for good, with one line."""
    with fast_kernels(fed.args.precision):
        while fed.way != "loop":
            counts = {-(-len(images) // fed.args.batch_size) for epochs in clients
                      for _, images in epochs.clients} if fed.args.batch_size else {1, 2}
            small = fed.net.d <= SMALL and len(counts) == 1
            way = "graphs" if fed.way == "graphs" or not small else "together"
            work = functools.partial(train_by, fed, client_update, own, clients, shared, way)
            try:
                if (client_update, way) not in fed.proved:
                    prove(fed, client_update, own, clients, shared, work)
                    fed.proved.add((client_update, way))
                return work()
            except Exception as problem:
                if isinstance(problem, torch.AcceleratorError) and not out_of_memory(problem):
                    raise  # the GPU can't be used any more
                fed.way, why = WAYS[WAYS.index(way) + 1], first_line(problem)
            fed.failed.append(f"{way}: {why}")
            say(f"engine  {fed.way!r} in place of {way!r} from here on, slower: {why}")
            fed.graphs.clear()
            with contextlib.suppress(RuntimeError):  # after a capture that broke
                torch.cuda.empty_cache()
        try:
            return fed.one_by_one(client_update, own, clients, shared)
        except RuntimeError as problem:
            if not out_of_memory(problem):
                raise
            refuse(f"out of GPU memory with one client at a time ({first_line(problem)}); use a "
                   "smaller --batch-size or --model", alone=True)


def train_by(fed, client_update, own, clients, shared, way, first_only=False):
    """What client_update gives for each client, in one of the ways "together" and "graphs"."""
    clients = [epochs.by(way, first_only)
               for epochs in clients]
    if way == "graphs":
        return fed.one_by_one(client_update, own, clients, shared)
    every = slice(0, len(clients))
    epochs = clients[0].by(way, first_only, [epochs.clients[0] for epochs in clients])
    return copied(client_update(*(z[every] for z in own), epochs, *shared))


def prove(fed, client_update, own, clients, shared, work):
    """Raises if the first minibatch changes the first client quite otherwise than in the plain
    loop: by more than a quarter of the change. Rounding does not come near that."""
    start = [z[0] for z in own]
    wanted = copied(client_update(*start, clients[0].by("loop", True), *shared))
    found = tree_map(lambda z: z[0], work(first_only=True))
    for want, got in zip(tree_leaves(wanted), tree_leaves(found)):
        near = [z for z in start if z.shape == want.shape] + [torch.zeros_like(want)]
        change = min((want - z).norm() for z in near)
        if change.isfinite() and not (got - want).norm() <= change / 4 + 1e-5 * want.norm():
            raise ValueError("one minibatch does not give what the plain loop gives")


def out_of_memory(problem):
    """Whether an error is PyTorch's for too little memory, or what CUDA's libraries say of it."""
    words = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED",
             "CUDNN_STATUS_NOT_INITIALIZED", "unable to find an engine")
    return isinstance(problem, torch.OutOfMemoryError) or any(s in str(problem) for s in words)


# --------------------------------------------------------------------------------------------------
# 4. Steps


def step(function):
    """Decorates the work of one client on one minibatch:  new = function(*own, b, *shared).

    own: tensors of this client, before the minibatch b; shared: tensors that are the same for all
    clients. A step changes nothing in place and draws no random numbers. It returns the new values
    of its first arguments. In a plain loop it is just called. On a GPU it becomes a CUDA graph, of
    one client, or of all at once by vmap. Its results then live until it is called again: clone
    what you keep longer.
    """

    @functools.wraps(function)
    def run(*args):
        place = next(i for i, z in enumerate(args) if isinstance(z, (Batch, Filled)))
        own, b, shared = args[:place], args[place], args[place + 1 :]
        if isinstance(b, Batch):
            return function(*args)
        form = tuple((z.shape, z.dtype) if torch.is_tensor(z) else z
                     for z in tree_leaves((own, b.inputs, shared)))
        if (function, b.way, form) not in b.fed.graphs:
            b.fed.graphs[function, b.way, form] = Graph(function, own, b, shared)
        return b.fed.graphs[function, b.way, form](own, b.inputs, shared)

    return run


class Graph:
    """A step for one set of shapes, as a CUDA graph.

    A graph reads and writes the same memory in every replay. So what it is given is copied there,
    but for what lies there already: its own last results, and what has not changed since.
    """

    def __init__(self, function, own, b, shared):
        self.memory = own, inputs, shared = copied((own, b.inputs, shared))
        together = b.way == "together"
        if together:
            function = vmap(function, (0,) * len(own) + (0,) + (None,) * len(shared))

        def once():
            STEPS.vmapped = together
            try:
                new = function(*own, b.fed.batch(*inputs), *shared)
            finally:
                STEPS.vmapped = False
            several = isinstance(new, tuple)
            new, places = new if several else (new,), {z.data_ptr() for z in own}
            # what a step hands on, perhaps in another place, must be read before it is overwritten
            new = [z.clone() if z.data_ptr() in places else z for z in new]
            for memory, z in zip(own, new):
                memory.copy_(z)
            return own[: len(new)] if several else own[0]

        self.results = once()
        self.changing = len(tree_leaves(self.results))  # the first of `memory`
        self.last = {}
        self.replay = capture(once, own[0].device)

    def __call__(self, *given):
        for i, (memory, z) in enumerate(zip(*map(tree_leaves, (self.memory, given)))):
            if not torch.is_tensor(z) or z is memory:
                continue
            now = z, z._version
            if i < self.changing or not (i in self.last and self.last[i][0] is z
                                         and self.last[i][1] == now[1]):
                memory.copy_(z)
                self.last[i] = now
        self.replay()
        return self.results


def capture(function, device):
    """A function that replays `function` as a CUDA graph. Each graph has a stream of its own: when
    a graph goes, PyTorch frees the cuBLAS workspace of its stream."""
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(main)
    try:
        # libraries choose and set up their kernels before the capture
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        # thread_local: NCCL's thread may do what a capture may not
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            function()
    finally:
        torch.cuda.set_stream(main)  # torch 2.11 stays on the other one after a failed capture
        with contextlib.suppress(RuntimeError):  # a capture that could not be ended
            main.wait_stream(side)
    return graph.replay


def copied(tree):
    return tree_map(lambda z: z.clone(memory_format=torch.contiguous_format)
                    if torch.is_tensor(z) else z, tree)


# --------------------------------------------------------------------------------------------------
# 5. Gradients

STEPS = threading.local()  # .vmapped: whether this thread is in a step of all clients at once


def grad(function, argnums=0, has_aux=False):
    """torch.func.grad of a function of tensors, without what that pays for second derivatives:
    alone (not under vmap) torch.autograd.grad saves a sixth of a small CNN's step."""

    def gradient(*args):
        if getattr(STEPS, "vmapped", False):
            return torch.func.grad(function, argnums, has_aux)(*args)
        wanted = [argnums] if isinstance(argnums, int) else argnums
        chosen = {i: args[i].detach().requires_grad_() for i in wanted}
        with torch.enable_grad():
            result = function(*(chosen.get(i, z) for i, z in enumerate(args)))
        value, *aux = result if has_aux else (result,)
        found = torch.autograd.grad(value, list(chosen.values()), allow_unused=True,
                                    materialize_grads=True)
        found = found[0] if isinstance(argnums, int) else found
        return (found, *tree_map(torch.Tensor.detach, aux)) if has_aux else found

    return gradient
