"""How the work is spread: threads on a CPU, CUDA graphs on a GPU, several processes. The plain loop
is the specification; tests compare every faster way with it. fed is common.py's Federation."""

import atexit
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

import torch
import torch.distributed as dist
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

# --------------------------------------------------------------------------------------------------
# 1. Errors, processes, devices


def is_main_process():
    """Returns whether this is the only process, or the one of torchrun's that prints and writes."""
    # no WORLD_SIZE: not torchrun's
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def refuse(message, alone=False):
    """Ends the program with one line on stderr and exit code 2. Only the first process prints the
    line; if `alone`, this one does, since others don't come here."""
    if not (is_main_process() or alone):
        raise SystemExit  # without an error: at the first error torchrun ends all processes
    print(f"{pathlib.Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def first_line(problem):
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def say(text):
    """Prints a line, above a progress bar, by the first process alone. If nobody reads any more
    (`| head`), the run goes on."""
    if is_main_process():
        try:
            encoding = sys.stdout.encoding or "utf-8"
            tqdm.write(text.encode(encoding, "replace").decode(encoding))  # ascii has no ±
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def find_device(name):
    """Returns the torch.device of this name, with its number. Refuses one that isn't there."""
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
               alone=name == "cuda" and torch.cuda.is_available())  # fewer GPUs than processes
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return device


def before_ampere(name="cuda"):
    """Returns whether this GPU lacks TF32 and is slow with bf16."""
    with contextlib.suppress(RuntimeError, AssertionError):  # find_device refuses what isn't there
        return torch.cuda.get_device_capability(name) < (8, 0)
    return False


def join_processes(device):
    """Joins torchrun's other processes, if any. Returns the rank and the number of processes."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    atexit.unregister(dist.destroy_process_group)  # Run.finish registers it
    if processes > 1 and not dist.is_initialized():
        gpu = device.type == "cuda"
        patience = datetime.timedelta(hours=2)  # the others wait while one downloads
        dist.init_process_group("nccl" if gpu else "gloo", timeout=patience,
                                device_id=device if gpu else None)
    return int(os.environ.get("RANK", 0)) if processes > 1 else 0, processes


def cores():
    """Returns how many CPU cores this process may use: its share, if torchrun started several."""
    whole = len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0))
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


def now(device):
    """Waits until the device has finished its work. Returns the clock, in seconds."""
    getattr(torch, device.type).synchronize(device)  # torch.cpu's does nothing
    return time.perf_counter()


@contextlib.contextmanager
def fast_kernels(precision):
    """Inside it cuDNN times its kernels for each convolution. With precision "tf32",
    convolutions and matrix products in fp32 use TF32."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.benchmark = True
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = False


def pool(threads):
    """Returns a map over items by this many threads; for 0, Python's map. In each, PyTorch
    uses one core: its own threads wait for each other if another program takes a core."""
    if not threads:
        return map

    def begin(worker=True):
        torch.set_num_threads(1)
        STEPS.worker = worker  # a worker's map is Python's own: a pool must not wait for itself

    begin(worker=False)
    workers = ThreadPoolExecutor(threads, initializer=begin)
    return lambda *work: (map if getattr(STEPS, "worker", False) else workers.map)(*work)


# --------------------------------------------------------------------------------------------------
# 2. Steps, and training on a GPU

STEPS = threading.local()  # .vmapped: in a step of all clients; .worker: a thread of pool()
WAYS = "together", "graphs", "loop"  # of training the clients of a round, the fastest first
SMALL = 3_000_000  # weights; above it "together" gains up to 1.5x for much memory (speed.md)
MOST = 32  # graphs, since PyTorch has 32 streams, and each graph needs one of its own


class Filled(NamedTuple):  # a minibatch that a Graph makes: fed.batch(*inputs)
    fed: object
    way: str
    inputs: tuple


def train(fed, client_update, own, clients, shared):
    """Federation.train on a GPU: all clients at once where the model is small and they have equally
    many minibatches, else one after the other by CUDA graphs. A way that fails, or does not give
    what the plain loop gives, is given up for good, with one line."""

    def trained(way, few=False):
        if way != "together":
            epochs = [one.by(way, few) for one in clients]
            return fed.one_by_one(client_update, own, epochs, shared)
        epochs = clients[0].by(way, few, [one.clients[0] for one in clients])
        return client_update(*(z[:] for z in own), epochs, *shared)

    B = fed.args.batch_size or float("inf")
    alike = len({-(-len(images) // B) for one in clients for _, images in one.clients}) == 1
    with fast_kernels(fed.args.precision):
        while fed.way != "loop":
            fed.used = way = fed.way if alike else "graphs"
            try:
                if (client_update, way) not in fed.proved:
                    start = [z[0] for z in own]
                    wanted = client_update(*start, clients[0].by("loop", True), *shared)
                    prove(start, wanted, tree_map(lambda z: z[0], trained(way, few=True)))
                    fed.proved.add((client_update, way))
                return trained(way)
            except Exception as problem:
                now(fed.device)  # raises if the GPU can't be used any more
                fed.way, why = WAYS[WAYS.index(way) + 1], first_line(problem)
            fed.failed.append(f"{way}: {why}")
            say(f"engine  {fed.way!r} in place of {way!r} from here on, slower: {why}")
            fed.graphs.clear()
            with contextlib.suppress(RuntimeError):  # after a capture that broke
                torch.cuda.empty_cache()
        fed.used = "loop"
        try:
            return trained("loop")
        except torch.OutOfMemoryError as problem:
            refuse(f"out of GPU memory with one client at a time ({first_line(problem)}); use a "
                   "smaller --batch-size or --model", alone=True)


def prove(start, wanted, found):
    """Raises ValueError if `found`, a client's tensors after two minibatches, differs from the
    plain loop's by over a quarter of the change since `start`. Rounding is far smaller."""
    for want, got in zip(tree_leaves(wanted), tree_leaves(found)):
        want, got = want.double(), got.double()
        near = [z.double() for z in start if z.shape == want.shape[want.dim() - z.dim() :]]
        change = min((want - z).norm() for z in [*near, torch.zeros_like(want)])
        if change.isfinite() and not (got - want).norm() <= change / 4 + 1e-5 * want.norm():
            raise ValueError("two minibatches do not give what the plain loop gives")


def step(function):
    """Decorates the work of one client on one minibatch:  new = function(*own, b, *shared).

    own: this client's tensors, passed before b; shared: passed after b, equal for all clients.
    A step returns the new values of its first arguments, changes nothing in place, and draws no
    random numbers. In the plain loop it is just called. On a GPU it becomes a CUDA graph, of one
    client or, by vmap, of all. It then replays what was captured: only arguments may change.
    """

    @functools.wraps(function)
    def run(*args):
        place = next((i for i, z in enumerate(args) if isinstance(z, Filled)), None)
        return function(*args) if place is None else by_graph(function, place, *args)

    return run


def by_graph(function, place, *args):
    """Runs a step by its graph. place: the minibatch's among args."""
    b, graphs = args[place], args[place].fed.graphs
    given = *args[:place], *b.inputs, *args[place + 1 :]
    form = ((z.shape, z.dtype) if torch.is_tensor(z) else z for z in given)
    key = function, b.way, *form
    if key not in graphs and len(graphs) == MOST:
        raise RuntimeError(f"more than {MOST} kinds of steps: pass numbers as tensors")
    graph = graphs[key] = graphs.get(key) or Graph(function, place, b, given)
    return graph(given)


class Graph:
    """A step for tensors of given shapes, as a CUDA graph. It reads and writes the same memory in
    every replay: what it is given is copied there, and what it returns is a copy."""

    def __init__(self, function, place, b, given):
        fed, end = b.fed, place + len(b.inputs)
        memory = [z.to(fed.device, copy=True, memory_format=torch.contiguous_format)
                  if torch.is_tensor(z) else z for z in given]

        def once():
            args = (*memory[:place], fed.batch(*memory[place:end]), *memory[end:])
            if b.way != "together":
                return function(*args)
            STEPS.vmapped = True
            try:
                rows = tuple(0 if i <= place else None for i in range(len(args)))
                return vmap(function, rows)(*args)
            finally:
                STEPS.vmapped = False

        self.memory, self.replay = memory, capture(once, fed.device)

    def __call__(self, given):
        for memory, z in zip(self.memory, given):
            if torch.is_tensor(z):
                memory.copy_(z)
        return tree_map(torch.clone, self.replay())


def capture(function, device):
    """Returns a function that replays `function` as a CUDA graph. It has its own stream, since
    freeing a graph frees its stream's cuBLAS workspace (PyTorch's issue 193402)."""
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    side.wait_stream(main)
    try:
        with torch.cuda.stream(side):  # libraries set up their kernels before the capture
            for _ in range(3):
                function()
        # thread_local: NCCL's thread may do what a capture may not
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            results = function()
    finally:
        torch.cuda.set_stream(main)  # PyTorch stays on the other one after a failed capture

    def replay():
        graph.replay()
        return results

    return replay


def grad(function, argnums=0, has_aux=False):
    """Returns torch.func.grad of a function of tensors. Outside vmap it uses torch.autograd.grad,
    which gives no second derivatives and saves a sixth of a small CNN's step."""

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
