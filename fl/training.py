"""How the work of a round is spread over processes and a CPU's threads (gpu.py: on a GPU), and what
does it: step and grad."""

import collections
import contextlib
import functools
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

from .machine import cores, generators, join_processes, keep_memory, refuse

# .vmapped: in a step of all clients; .alone: in one item of `each`; .in_grad: in grad's function
STEPS = threading.local()


class Slip(Exception):
    """A fault of a method, found while a client trains."""


IN_PLACE = " changes a tensor in place, which others may share; write w = w - ..., not w -= ..."


def training_on(device, args):
    """Returns the Training of a device."""
    if device.type != "cuda":
        return Training(device, args)
    from . import gpu  # which a CPU does without

    return gpu.OnGPU(device, args)


class Training:
    """Trains and evaluates on one device: `each` shares items out among processes and threads.
    Nobody else writes its attributes.

    rank, processes: this process's number among all. threads: 0 on a GPU. map: Python's map, with
    these threads. part: images that are evaluated at once.
    """

    def __init__(self, device, args):
        self.device, self.args, self.given = device, args, dict(vars(args))
        self.rank, self.processes = join_processes(device)
        self.threads = 0 if device.type == "cuda" else args.parallel or cores()
        self.map = pool(self.threads)
        self.gave_up = {}  # a GPU's way -> why it is not used any more
        # of calls: how many clients, and epochs; images used, of all; if `epochs` began anew; a
        # client that was twice in one
        self.sizes, self.epochs, self.fewer, self.twice, self.double = set(), set(), (), False, []
        keep_memory()

    def begin(self, d, largest):
        """Prepares for a model with d weights and clients with at most `largest` images."""
        self.part = 500 if d <= 500_000 else 100  # fewer for a large model: a CPU's cache is small

    def end_round(self, done):
        """Ends a round. done: how many are complete."""

    def end(self):
        """Ends the run."""

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
            if len({*S}) < len(S):
                self.double = self.double or [k for k in S if S.count(k) > 1]
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
        """Trains this process's share of the clients. Returns the results of all."""
        return self.exchange(fed.one_by_one(client_update, own, clients, shared))


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


class Filled(NamedTuple):  # a minibatch that a GPU's Graph makes: fed.batch(*inputs)
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
            from .gpu import by_graph

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
# Threads


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
