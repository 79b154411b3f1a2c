"""A GPU that isn't there: every tensor is labelled as the GPU's or the CPU's, and what a GPU refuses is refused.

    with pretend.Operations() as operations, pretend.Calls(operations):
        torch.zeros(3, device=pretend.GPU) + torch.ones(3)      # raises Wrong

The device is cpu:0, which PyTorch takes for another device than cpu, but where its tensors are tensors on the CPU. Refused are
operations on tensors of both and numpy arrays of the GPU's tensors; and while operations.capturing, as in the capture of a CUDA
graph, all that waits for the GPU or copies to it. How fast or how exact a GPU is can't be seen here.
"""

import gc
import weakref

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cpu", 0)
aten = torch.ops.aten
READS = {"numpy", "__array__", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu"}
WAITS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim,
    aten.equal, aten.bincount, aten.repeat_interleave, aten._linalg_eigh, aten.linalg_eig, aten._linalg_check_errors,
}


class Wrong(Exception):
    pass


def unwrapped(x):
    """The tensor of which x is a part in vmap, or which it follows in grad."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def where(x):
    """"gpu", "cpu" or None (made inside of PyTorch) of a tensor."""
    return vars(unwrapped(x)).get("where")


def label(result, name):
    for x in tensors_of((result,)):
        unwrapped(x).where = name
        if name == "gpu":
            MEMORY.hold(unwrapped(x).untyped_storage())
    return result


class Memory:
    """Bytes of the GPU's tensors that are alive, and the most there were, with what graphs keep for themselves between replays."""

    held, peak, places = 0, 0, {}
    before, pool = None, 0  # held when a graph began; the most that one took, since all share their memory

    def hold(self, storage):
        place, size = storage.data_ptr(), storage.nbytes()
        if place and place not in self.places:
            self.places[place] = weakref.finalize(storage, self.drop, place, size)
            self.held += size
            if self.before is not None:
                self.pool = max(self.pool, self.held - self.before)
            self.peak = max(self.peak, self.pool + (self.held if self.before is None else self.before))

    def of(self, work):
        """The most bytes that work() has at a time beyond what is there before it."""
        gc.collect()  # of what was there before, nothing may go meanwhile
        self.pool, self.peak, before = 0, self.held, self.held
        work()
        return self.peak - before

    def graph(self, work):
        """work() by a graph."""
        self.before = self.held
        try:
            work()
        finally:
            self.before = None
        return []

    def drop(self, place, size):
        if self.places.pop(place, None):
            self.held -= size


MEMORY = Memory()


def tensors_of(values):
    """The tensors among values and among those in their lists, tuples and dicts."""
    found = []
    for x in values:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += tensors_of(x)
        elif isinstance(x, dict):
            found += tensors_of(x.values())
    return found


class Calls(TorchFunctionMode):
    """What Python asks for: new tensors are labelled, x.device tells the label, the GPU's tensors can't be numpy arrays."""

    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(f, "__name__", "")
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if f == torch.Tensor.device.__get__:
            return GPU if where(first) == "gpu" else torch.device("cpu")
        on_gpu = first is not None and where(first) == "gpu"
        to_cpu = name in ("cpu", "to") and first is not None and (name == "cpu" or torch.device("cpu") in args or "cpu" in args)
        if self.operations.capturing:
            index = args[1] if name in ("__getitem__", "__setitem__") else ()
            from_host = name in ("tensor", "as_tensor", "new_tensor") or any(
                isinstance(i, (list, np.ndarray)) for i in (index if isinstance(index, tuple) else (index,)))
            if on_gpu and (name in READS or to_cpu) or from_host and (on_gpu or kwargs.get("device") == GPU):
                raise Wrong(f"{name} in a captured step")
        if on_gpu and name in ("numpy", "__array__"):
            raise Wrong(f"{name} of a GPU's tensor")
        if to_cpu:
            return label(first.detach().clone(), "cpu")
        result = f(*args, **kwargs)
        if not tensors_of((*args, *kwargs.values())):
            label(result, "gpu" if kwargs.get("device") == GPU else "cpu")
        return result


class Operations(TorchDispatchMode):
    """What is done, by autograd and vmap too."""

    capturing, log = False, None

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        kwargs, kind = kwargs or {}, f.overloadpacket
        tensors = tensors_of((*args, *kwargs.values()))
        places = [vars(x).get("where") for x in tensors]
        self.refuse(f, kind, args, kwargs, tensors, places)
        result = f(*args, **kwargs)
        if self.log is not None:
            self.note(f, args, kwargs, tensors, result)
        if f._schema.is_mutable and places and places[0]:
            return result
        gpu = "gpu" in places or kwargs.get("device") == GPU
        return label(result, "gpu" if gpu else "cpu" if "cpu" in places else None)

    def refuse(self, f, kind, args, kwargs, tensors, places):
        """Raises Wrong where a GPU would refuse."""
        what, moves = f"{f} of tensors on {places}", kwargs.get("device") == GPU or kind is aten.copy_
        # one number on the CPU may be read beside the GPU's tensors; but a graph would keep the number of its capture
        written = f._schema.is_mutable and places[:1] == ["cpu"]
        numbers = not (written or self.capturing or kind in (aten.cat, aten.stack))
        looks_up = kind is aten.index or kind in (aten.index_put, aten.index_put_) and vars(args[2]).get("where") != "cpu"
        if "gpu" in places and any(p == "cpu" and (x.dim() or not numbers) for x, p in zip(tensors, places)):
            if not moves and not (looks_up and places[0] == "gpu"):
                raise Wrong(what)
        if self.capturing:
            if kind is aten._linalg_eigh:
                raise RuntimeError("called a synchronizing CUDA operation")  # as PyTorch says it
            by_host = looks_up and any(p == "cpu" or x.dtype == torch.bool for x, p in zip(tensors[1:], places[1:]))
            if kind in WAITS or "cpu" in places and moves or by_host:
                raise Wrong(f"{what} in a captured step")

    def note(self, f, args, kwargs, tensors, result):
        """Adds to the log what a graph would repeat of this operation: its numbers, and the memory that was there before."""
        memory = [x.untyped_storage().data_ptr() for x in tensors]
        numbers = [str(a) for a in (*args, *kwargs.values()) if not tensors_of((a,))]
        self.log.append((str(f), numbers, [m for m in memory if m not in self.made]))
        for x in tensors_of((result,)):
            if x.untyped_storage().data_ptr() not in memory:
                self.made[x.untyped_storage().data_ptr()] = x  # kept, or its memory would soon be another's

    def logged(self, work):
        """What work() does, by what a graph of it would repeat."""
        self.log, self.made = [], {}
        try:
            work()
            return self.log
        finally:
            self.log = self.made = None
