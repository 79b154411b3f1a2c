"""How a round is trained on a GPU. The plain loop (Federation.one_by_one) is the specification:
tests compare every faster way with it, and each run does so before it uses one."""

import contextlib
import math

import numpy as np
import torch
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from .machine import first_line, now, refuse, say
from .state import Sampled
from .training import Filled, Training, set_in_thread

WAYS = "together", "graphs", "loop"  # of training the clients of a round, the fastest first
SMALL = 3_000_000  # weights; above it "together" gains up to 1.5x for much memory (speed.md)
WIDEST = 32  # clients at once in "together"; each needs memory for its activations
MOST = 32  # graphs, since PyTorch has 32 streams, and each graph needs one of its own
# how far a fast way may be from the loop, as a share of what a minibatch changes (`compare`)
TOLERANCE = {"fp32": 0.01, "tf32": 0.05, "bf16": 0.15}
# how much rounding may change a weight, as a share of what a minibatch changes all on average
ROUNDING = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}


def ways_to_try(device, args, d):
    """Returns those of WAYS that a run may use, the fastest first. d: weights in the model."""
    if device.type != "cuda" or args.engine == "loop" or torch.version.hip:
        return ("loop",)
    return WAYS if d <= SMALL else WAYS[1:]


class OnGPU(Training):
    """A Training that chooses the fastest way.

    used: the way of the last call of train. graphs: the CUDA graphs, by what they were captured
    for.
    """

    def __init__(self, device, args):
        super().__init__(device, args)
        self.used, self.calls, self.graphs = "loop", {}, {}

    def begin(self, d, largest):
        # minibatches are filled up to B images: all have one shape
        self.B, self.part = min(self.args.batch_size or largest, largest), 500
        self.ways = ways_to_try(self.device, self.args, d)
        self.reset_peak()  # that of an earlier run in this process

    def reset_peak(self):
        if self.device.type == "cuda":  # not of one that tests pretend
            torch.cuda.reset_peak_memory_stats(self.device)

    def end_round(self, done):
        """The peak of memory is that of the rounds from the second on, since cuDNN's search, in the
        first, takes the largest candidate's workspace."""
        if done == 1 < self.args.rounds:
            self.reset_peak()

    def end(self):
        self.graphs.clear()

    def train_all(self, fed, client_update, own, clients, shared):
        if self.processes == 1:
            return self.train_fast(fed, client_update, own, clients, shared)
        m, mine = len(clients), self.share(len(clients)) or range(1)
        with set_in_thread(alone=True):
            found = self.train_fast(fed, client_update, [Sampled(z, mine) for z in own],
                                    clients[mine.start : mine.stop], shared)
        whole = tree_map(lambda z: z.new_empty((m, *z.shape[1:])), found)
        for z, part in zip(tree_leaves(whole), tree_leaves(found)):
            z[mine.start : mine.stop] = part
        return self.exchange(whole)

    def train_fast(self, fed, client_update, own, clients, shared):
        """Trains clients on a GPU: all at once where the model is small and they have equally many
        minibatches, else one after the other by CUDA graphs. A way that fails, or does not give
        what the plain loop gives, is given up for good, with one line."""
        B = self.args.batch_size or math.inf
        alike = len({-(-len(one.images) // B) for one in clients}) == 1
        for way in self.ways[:-1]:
            if way in self.gave_up or way == "together" and not alike:
                continue
            self.used, counted = way, len(fed.passed)
            try:
                self.prove(way, fed, client_update, own, clients, shared)
                del fed.passed[counted:]
                return self.by(way, fed, client_update, own, clients, shared, len(clients))
            except Exception as problem:
                now(self.device)  # raises if the GPU can't be used any more
                del fed.passed[counted:]
                self.gave_up[way] = why = first_line(problem)
            later = self.ways[self.ways.index(way) + 1 :]
            instead = next(z for z in later if z not in self.gave_up)
            say(f"engine  {instead!r} in place of {way!r} from here on, slower: {why}")
            self.graphs.clear()
            with contextlib.suppress(RuntimeError):  # after a capture that broke
                torch.cuda.empty_cache()
        self.used = "loop"
        try:
            with fast_kernels(self.args.precision):
                return fed.one_by_one(client_update, own, clients, shared)
        except torch.OutOfMemoryError as problem:
            refuse(f"out of GPU memory with one client at a time ({first_line(problem)}); use a "
                   "smaller --batch-size or --model", alone=True)

    def by(self, way, fed, client_update, own, clients, shared, m):
        """Trains the clients in a way that is not the loop. m: how many train in this round."""
        with fast_kernels(self.args.precision, search=True):
            if way == "graphs":
                filled = [FilledEpochs(fed, [one], way) for one in clients]
                return fed.one_by_one(client_update, own, filled, shared)
            # all chunks have one width, hence one graph; they are filled up with client 0
            width, parts = -(-m // -(-m // WIDEST)), []
            for start in range(0, len(clients), width):
                places = [*range(start, min(start + width, len(clients)))]
                n, places = len(places), np.array(places + [0] * (width - len(places)))
                epochs = FilledEpochs(fed, [clients[i] for i in places], way)
                found = client_update(*(z[places] for z in own), epochs, *shared)
                parts.append(tree_map(lambda z, n=n: z[:n], found))
            return tree_map(lambda *z: torch.cat(z), *parts) if len(parts) > 1 else parts[0]

    def prove(self, way, fed, client_update, own, clients, shared):
        """Raises ValueError unless this way gives what the plain loop gives: after one minibatch of
        the first client, of the last, and of the first with as few images as any client's last
        minibatch has; together, in every place. A second minibatch would let rounding grow, for
        ResNet-18 a thousandfold. Not only in the first round: there, what clients keep may still be
        0, and a round number that a graph freezes is the right one."""
        B = self.args.batch_size or math.inf
        chosen = [0, len(clients) - 1, 0]
        start = [[z[i] for i in chosen] for z in own]
        key = client_update, way, *(z[0].shape for z in start)
        self.calls[key] = n = self.calls.get(key, 0) + 1
        if n & (n - 1):  # not the 1st, 2nd, 4th, 8th, ... call
            return
        sizes = [min(len(clients[i].images), B) for i in chosen]
        sizes[2] = min((len(one.images) - 1) % B + 1 for one in clients)
        ones = [clients[i].again(images=clients[i].images[: int(n)], epochs=1)
                for i, n in zip(chosen, sizes)]
        with fast_kernels(self.args.precision):
            wanted = [client_update(*(z[j] for z in start), one, *shared)
                      for j, one in enumerate(ones)]
        places = np.arange(max(len(clients), 3)) % 3
        found = self.by(way, fed, client_update, [torch.stack(z)[places] for z in start],
                        [ones[j] for j in places], shared, len(clients))
        for i, j in enumerate(places):
            compare(fed.net, [z[j] for z in start], wanted[j], tree_map(lambda z, i=i: z[i], found),
                    self.args.precision)


def compare(net, start, wanted, found, precision):
    """Raises ValueError if `found`, a client's tensors after a minibatch, differs from `wanted` by
    more than TOLERANCE of the change since `start`, or by more than three times that in one of the
    model's tensors. Where exact arithmetic would change nothing, as in a bias before BatchNorm,
    rounding does."""
    tolerated = TOLERANCE[precision]
    for want, got in zip(tree_leaves(wanted), tree_leaves(found)):
        want, got = want.double(), got.double()
        if not want.isfinite().all():
            raise ValueError("the plain loop diverges in its first minibatch")
        near = [z.double() for z in start if z.shape == want.shape[want.dim() - z.dim() :]]
        change = min((want - z for z in [*near, torch.zeros_like(want)]), key=torch.norm)
        small = ROUNDING[precision] * change.square().mean().sqrt()
        sizes = net.sizes if want.dim() and want.shape[-1] == net.d else want.shape[-1:]
        parts = zip(*(z.split(sizes, -1) if z.dim() else [z] for z in (want, got, change)))
        for n, (w, g, c) in enumerate([(want, got, change), *parts]):
            tolerance, least = (3 * tolerated, small) if n else (tolerated, 0)
            rounding = 1e-6 * w.norm() + least * w.numel() ** 0.5
            if not (g - w).norm() <= tolerance * c.norm() + rounding:
                raise ValueError("a minibatch does not give what the plain loop gives")


class FilledEpochs:
    """Epochs for CUDA graphs, of one client or, with "together", of several, a row for each.
    Minibatches are filled up to B images, so that all have one shape."""

    def __init__(self, fed, clients, way):
        self.fed, self.clients, self.way = fed, clients, way

    def again(self, **options):
        return FilledEpochs(self.fed, [one.again(**options) for one in self.clients], self.way)

    def __iter__(self):
        fed, wide = self.fed, []
        plans = [one.plan() for one in self.clients]
        sizes = [min(fed.args.batch_size or math.inf, index.shape[1]) for index, *_ in plans]
        for (index, uniform, draw), size in zip(plans, sizes):
            (epochs, n), steps = index.shape, draw.shape[1]
            place = np.full((steps, max(fed.training.B, *sizes)), n)  # in 0..n-1; n: padding
            place[:, :size].flat[:n] = np.arange(n)
            index, uniform = (np.append(z, np.zeros_like(z[:, :1]), 1)[:, place]
                              for z in (index, uniform))
            wide.append((index, uniform, draw, np.tile(np.float32(place < n), (epochs, 1, 1))))
        masks = {one.client: mask[0] for one, (*_, mask) in zip(self.clients, wide)}
        images = sum(mask.sum(1) for mask in masks.values())  # a chunk is filled up with client 0
        arrays = (np.stack(z, 2) if self.way == "together" else z[0] for z in zip(*wide))
        for epoch in zip(*(torch.as_tensor(z, device=fed.device) for z in arrays)):
            yield (self.filled(int(n), inputs) for n, *inputs in zip(images, *epoch))

    def filled(self, n, inputs):
        self.fed.passed.append(n)
        return Filled(self.fed, self.way, inputs)


def by_graph(function, place, *args):
    """Runs a step by its graph. place: the minibatch's among args."""
    b, graphs = args[place], args[place].fed.training.graphs
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
        fed, end, step = b.fed, place + len(b.inputs), function
        if together := b.way == "together":  # the step of all clients
            shared = (None,) * (len(given) - end)
            step = vmap(function, (0,) * (place + 1) + shared)
        memory = [z.to(fed.device, copy=True, memory_format=torch.contiguous_format)
                  if torch.is_tensor(z) else z for z in given]

        def once():
            with set_in_thread(vmapped=together):
                return step(*memory[:place], fed.batch(*memory[place:end]), *memory[end:])

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


@contextlib.contextmanager
def fast_kernels(precision, search=False):
    """With precision "tf32", convolutions and matrix products in fp32 use TF32 inside it. search:
    cuDNN times its kernels for each convolution, which pays where shapes repeat."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.benchmark = search
    cudnn.allow_tf32 = matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = False
