"""How the work of a round is spread: several processes, threads on a CPU, CUDA graphs on a GPU. The
plain loop (Federation.one_by_one) is the specification; tests compare every faster way with it, and
on a GPU each run does so before it uses one."""

import collections
import contextlib
import functools
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch._C._functorch import is_gradtrackingtensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from .machine import (
    cores,
    first_line,
    generators,
    join_processes,
    keep_memory,
    now,
    refuse,
    say,
)
from .state import Sampled

# .vmapped: in a step of all clients; .alone: in one item of `each`; .in_grad: in grad's function
STEPS = threading.local()
WAYS = "together", "graphs", "loop"  # of training the clients of a round, the fastest first
SMALL = 3_000_000  # weights; above it "together" gains up to 1.5x for much memory (speed.md)
WIDEST = 32  # clients at once in "together"; each needs memory for its activations
MOST = 32  # graphs, since PyTorch has 32 streams, and each graph needs one of its own
# how far a fast way may be from the loop, as a share of what a minibatch changes (`compare`)
TOLERANCE = {"fp32": 0.01, "tf32": 0.05, "bf16": 0.15}
# how much rounding may change a weight, as a share of what a minibatch changes all on average
ROUNDING = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}


class Slip(Exception):
    """A fault of a method, found while a client trains."""


IN_PLACE = " changes a tensor in place, which others may share; write w = w - ..., not w -= ..."


def ways_to_try(device, args, d):
    """Returns those of WAYS that a run may use, the fastest first. d: weights in the model."""
    if device.type != "cuda" or args.engine == "loop" or torch.version.hip:
        return ("loop",)
    return WAYS if d <= SMALL else WAYS[1:]


class Training:
    """Trains and evaluates on one device: `each` shares items out among processes and threads, and
    `train` chooses the fastest way on a GPU. Nobody else writes its attributes.

    rank, processes: this process's number among all. threads: 0 on a GPU. map: Python's map, with
    these threads. part: images that are evaluated at once. used: the way of the last call of train.
    gave_up: way -> why it is not used any more.
    """

    def __init__(self, device, args):
        self.device, self.args, self.given = device, args, dict(vars(args))
        self.rank, self.processes = join_processes(device)
        self.threads = 0 if device.type == "cuda" else args.parallel or cores()
        self.map = pool(self.threads)
        self.used, self.gave_up, self.calls, self.graphs = "loop", {}, {}, {}
        # of calls: how many clients, and epochs; images used, of all; if `epochs` began anew
        self.sizes, self.epochs, self.fewer, self.twice = set(), set(), (), False
        keep_memory()

    def begin(self, d, largest):
        """Prepares for a model with d weights and clients with at most `largest` images."""
        # minibatches of a GPU are filled up to B images: all have one shape
        self.B = min(self.args.batch_size or largest, largest)
        # fewer for a large model on a CPU, whose cache is small
        self.part = 500 if self.device.type == "cuda" or d <= 500_000 else 100
        self.ways = ways_to_try(self.device, self.args, d)
        self.reset_peak()  # that of an earlier run in this process

    def reset_peak(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    # Several processes: each has the server's whole state. Items are shared out in blocks, which
    # are rows that lie side by side in a result

    @contextlib.contextmanager
    def one_after_the_other(self):
        """Lets the first process of each machine go first. The others wait for it."""
        first = self.processes == 1 or not int(os.environ["LOCAL_RANK"])
        if not first:
            dist.barrier()
        yield
        if first and self.processes > 1:
            dist.barrier()

    def share(self, n, rank=None):
        """Returns which of the items 0 to n-1 a process works on, by default this one."""
        rank = self.rank if rank is None else rank
        return range(n * rank // self.processes, n * (rank + 1) // self.processes)

    def each(self, work, n):
        """Yields (i, work(i)) for this process's share of the items 0 to n-1 (at least for one, so
        that the caller sees a result's shape), on a CPU with several at once. `work` may call it
        again, and then gets all items, one after the other."""
        if getattr(STEPS, "alone", False):
            yield from ((i, work(i)) for i in range(n))
            return

        def alone(i):
            with set_in_thread(alone=True):
                return work(i)

        mine = self.share(n) or [0]
        yield from zip(mine, self.map(alone, mine))

    def exchange(self, tree, ends=None):
        """Returns the tensors with all rows, in all processes. Row i was made by the process that
        has the i-th item. ends: where each item's rows end, if an item has several."""
        if self.processes == 1 or getattr(STEPS, "alone", False):
            return tree
        form_of(tree, self.agree(form_of(tree)))
        for z in tree_leaves(tree):
            stops = [0, *(range(1, len(z) + 1) if ends is None else ends)]
            for rank in range(self.processes):
                items = self.share(len(stops) - 1, rank)
                rows = z[stops[items.start] : stops[items.stop]]
                if len(rows):
                    dist.broadcast(plain(rows), rank)
        return tree

    def stacked(self, logits_of, parts):
        """Returns logits_of(i) for all parts i of the images, stacked in order."""
        ends, logits = np.cumsum([len(index) for index in parts]), None
        places = [slice(end - len(index), end) for end, index in zip(ends, parts)]
        for i, found in self.each(logits_of, len(parts)):
            logits = found.new_empty(ends[-1], found.shape[1]) if logits is None else logits
            logits[places[i]] = found
        return self.exchange(logits, ends)

    def agree(self, value):
        """Returns process 0's value (anything that pickle takes), in all processes."""
        if self.processes == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, 0)
        return values[0]

    def same(self, z):
        """Returns process 0's tensor z, in all processes."""
        if self.processes == 1:
            return z
        z = z.clone(memory_format=torch.contiguous_format)
        dist.broadcast(plain(z), 0)
        return z

    def total(self, n):
        """Returns the sum of all processes' whole numbers n, in all processes."""
        if self.processes == 1:
            return n
        n = torch.tensor(n, device=self.device)
        dist.all_reduce(n)
        return int(n)

    def end_round(self, done):
        """done: rounds that are complete. The peak of memory is that of the later ones, since
        cuDNN's search, in the first, takes the largest candidate's workspace."""
        if done == 1 < self.args.rounds:
            self.reset_peak()

    def end(self):
        self.graphs.clear()

    # Training

    def train(self, fed, client_update, own, clients, shared):
        """Federation.train, with the Epochs of the clients."""
        S = [one.client for one in clients]
        if odd := [one.options["epochs"] for one in clients
                   if not isinstance(E := one.options["epochs"], int | np.integer) or E < 1]:
            refuse(f"federation.train: epochs={odd[0]} trains nothing; it is a whole number, from "
                   "1 on")
        others = [one for one in clients if one.images is not fed.split.train[one.client]]
        check_images([one.images for one in others], [one.client for one in others],
                     "federation.train", fed.dealt)
        if S != self.agree(S):
            refuse("the processes of torchrun train other clients S; draw them by "
                   "federation.sample, or from common.stream", alone=True)
        tensors = [z for z in (*own, *shared) if torch.is_tensor(z)]
        versions, before = [z._version for z in tensors], generators(self.device)
        try:
            before_this = len(fed.passed)
            found = self.train_all(fed, client_update, own, clients, shared)
            mine = self.share(len(clients))
            if not mine:  # another process counts what this one has passed
                del fed.passed[before_this:]
            used = sum(fed.passed[before_this:])
            whole = sum(len(clients[i].images) * clients[i].options["epochs"] for i in mine)
            self.fewer = self.fewer or (used, whole) * (used < whole)
            self.sizes.add(len(clients))
            self.epochs |= {one.options["epochs"] for one in clients}
            self.twice = self.twice or any(one.begun > 1 for one in clients)
            if versions != [z._version for z in tensors]:
                raise Slip("client_update" + IN_PLACE)
        except Slip as problem:  # in one of several threads, or of several processes
            refuse(str(problem), alone=True)
        if before != generators(self.device):
            refuse("client_update draws from torch's, NumPy's or Python's generator, so results "
                   "would depend on the order of clients; use train(..., draw=...) and b.draw",
                   alone=True)
        return found

    def train_all(self, fed, client_update, own, clients, shared):
        if self.ways == ("loop",) and self.device.type != "cuda":
            return self.exchange(fed.one_by_one(client_update, own, clients, shared))
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


def check_clients(S, K, t, own=(), images=None):
    """Refuses what is no round t, what are no clients S of K, and other than a row for each."""
    if not isinstance(t, int | np.integer) or not hasattr(S, "__len__"):
        refuse(f"t is a {type(t).__name__}, and S a {type(S).__name__}; give federation.sample(t) "
               "and federation.train(client_update, S, t, ...) the number t that run.rounds "
               "yields, and the clients S, an array")
    if str(getattr(S, "dtype", "")).endswith("bool"):  # True is the number 1
        refuse("federation.train: S is a mask; it needs the clients' numbers, as np.flatnonzero(S)")
    if not len(S) or min(S) < 0 or max(S) >= K:
        refuse(f"federation.train: S is {[*map(int, S)]}; it needs a client, and numbers below {K}")
    for name, z in (*(("a tensor in `own`", z) for z in own), ("`images`", images)):
        if z is not None and len(z) != len(S):
            refuse(f"federation.train: {name} has {len(z)} rows for {len(S)} clients; give it one "
                   "for each client of S, as V[S]")


def stop(message):
    """Refuses what happens in client_update, perhaps in one of several threads."""
    if getattr(STEPS, "alone", False):
        raise Slip(message)
    refuse(message, alone=True)


def check_images(images, clients, of, allowed=None):
    """Refuses what are no images' numbers, or not of those allowed, and a client without any.
    images: an array for each of the clients."""
    if any(str(getattr(z, "dtype", "")).endswith("bool") for z in images):  # True is the number 1
        stop(f"{of}: `images` has masks; it needs numbers, as federation.split.train[k][mask]")
    if empty := [k for k, z in zip(clients, images) if not len(z)]:
        stop(f"{of}: `images` has none for client {empty[0]}; leave it out, or, if these are "
             "validation images, use --client-val")
    if allowed is not None and images and not np.isin(np.concatenate(images), allowed).all():
        stop(f"{of}: `images` has some that are nobody's for training or validation; they are "
             "numbered as in federation.split.train[k]")


def models_of(W, K):
    """Returns the function that gives the models of clients S, for Federation.evaluate_clients."""
    if torch.is_tensor(W) and len(W) != K:
        refuse(f"evaluate_clients: W has {len(W)} models for {K} clients; give it one [d], one for "
               "each client, or a function of clients S")
    pair, one = (W([0, 1]), W([1])) if callable(W) and K > 1 else ((), ())
    if len(pair) == 2 and not torch.allclose(pair[1:], one, 1e-4, 1e-6, True):
        refuse("evaluate_clients: its function of clients S gives client 1 another model alone "
               "than beside client 0; return the models of the clients in S, as V[S]")
    return W if callable(W) else W.__getitem__


def form_of(found, first=None):
    """Returns the types and shapes of client_update's tensors. Refuses what is no tensor, and what
    differs from `first`, another client's."""
    leaves = tree_leaves(found)
    if odd := [type(z).__name__ for z in leaves if not torch.is_tensor(z)]:
        refuse(f"client_update returns a {odd[0]}, not tensors; is `return` forgotten?")
    form = [f"{list(z.shape)} of {z.dtype}" for z in leaves]
    if form != (first or form):
        refuse(f"client_update returns {', '.join(form)} for one client, but {', '.join(first)} "
               "for another; give all results one shape and type", alone=True)
    return form


def plain(z):
    """Returns z's memory in a type that gloo sends, which has no bool."""
    return z.view(torch.uint8) if z.dtype == torch.bool else z


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


class Filled(NamedTuple):  # a minibatch that a Graph makes: fed.batch(*inputs)
    fed: object
    way: str
    inputs: tuple


# --------------------------------------------------------------------------------------------------
# Steps


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
        if place is not None:
            return by_graph(function, place, *args)
        tensors = [z for z in args if torch.is_tensor(z)]
        before = [z._version for z in tensors]
        in_place = Slip(f"{function.__name__} or client_update{IN_PLACE}")
        try:
            found = function(*args)
        except RuntimeError as problem:
            raise in_place if "inplace" in str(problem) else problem from None
        if before != [z._version for z in tensors]:
            raise in_place
        if found is None:
            raise Slip(f"{function.__name__} returns nothing; is `return` forgotten?")
        return found

    return run


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


def grad(function, argnums=0, has_aux=False, each=False):
    """Returns the gradient of a function of tensors, as torch.func.grad does, but without what only
    second derivatives need: a sixth of a small CNN's step, and half the memory under vmap. each:
    the function and its gradients are of one row, and all arguments have rows. Refuses to be
    differentiated itself."""

    wanted = [argnums] if isinstance(argnums, int) else argnums

    def gradient(*args):
        def of_wanted(*chosen):
            new = dict(zip(wanted, chosen))
            with set_in_thread(in_grad=True):
                return function(*(new.get(i, z) for i, z in enumerate(args)))

        chosen = [args[i] for i in wanted]
        if getattr(STEPS, "in_grad", False) or any(map(is_gradtrackingtensor, chosen)):
            stop("common.grad inside what is differentiated would lack second derivatives; use "
                 "torch.func.grad there, or call it before")
        if each or getattr(STEPS, "vmapped", False):
            value, pull, *aux = vjp(of_wanted, *chosen, has_aux=has_aux)
            found = pull(torch.ones_like(value), retain_graph=False, create_graph=False)
        else:
            chosen = [z.detach().requires_grad_() for z in chosen]
            with torch.enable_grad():
                result = of_wanted(*chosen)
            value, *aux = result if has_aux else (result,)
            if not getattr(value, "requires_grad", True):
                stop("common.grad: the function's value does not depend on its argument; it uses "
                     "another tensor, or .detach()")
            found = torch.autograd.grad(value, chosen, allow_unused=True, materialize_grads=True)
            aux = tree_map(torch.Tensor.detach, aux)
        found = found[0] if isinstance(argnums, int) else found
        return (found, *aux) if has_aux else found

    def by_rows(*args):
        try:
            return vmap(gradient)(*args)
        except RuntimeError:  # not every network can be vmapped
            if args[0].is_cuda:
                raise
            alone = grad(function, argnums, has_aux)
            return tree_map(lambda *z: torch.stack(z), *[alone(*row) for row in zip(*args)])

    return by_rows if each else gradient


def may_look(x):
    """Returns whether code may depend on the values of x: not on a GPU, and not under vmap."""
    return not x.is_cuda and not getattr(STEPS, "vmapped", False)


# --------------------------------------------------------------------------------------------------
# Threads, and how a GPU computes


@contextlib.contextmanager
def set_in_thread(**flags):
    """Sets STEPS' flags in this thread, inside it."""
    before = {name: getattr(STEPS, name, False) for name in flags}
    vars(STEPS).update(flags)
    try:
        yield
    finally:
        vars(STEPS).update(before)


def pool(threads):
    """Returns a map over items by this many threads; for 0, Python's map. In each, PyTorch
    uses one core: its own threads wait for each other if another program takes a core."""
    if not threads:
        return map
    torch.set_num_threads(1)
    workers = ThreadPoolExecutor(threads, initializer=lambda: torch.set_num_threads(1))

    def ordered(work, items):
        """Has a few items ahead of the one that is waited for, since results may be large."""
        ahead = collections.deque()
        try:
            for item in items:
                ahead.append(workers.submit(work, item))
                if len(ahead) > 2 * threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for left in ahead:
                left.cancel()

    return ordered


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
