"""A GPU that isn't there. Its tensors lie on the device cpu:0, which PyTorch takes for another
device than cpu, and are labelled. What a GPU refuses raises Wrong: operations on tensors of both
devices, numpy arrays of the GPU's tensors and, while a CUDA graph is captured, all that waits for
the GPU or copies to it. Its speed and its rounding can't be seen here.

    with pretend.gpu() as operations:
        torch.zeros(3, device=pretend.GPU) + torch.ones(3)      # raises Wrong
"""

import contextlib

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import common
import fl.gpu

GPU, CPU = torch.device("cpu", 0), torch.device("cpu")
aten = torch.ops.aten
READS = {"numpy", "__array__", "item", "tolist", "__float__", "__int__", "__bool__", "__index__"}
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.equal,
         aten.unique_consecutive, aten.unique_dim, aten.bincount, aten.repeat_interleave,
         aten._linalg_eigh, aten._linalg_svd, aten.linalg_eig, aten._linalg_check_errors}


class Wrong(Exception):
    pass


def tensors_of(*values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def unwrapped(x):
    """The tensor of which x is a part in vmap, or which it follows in grad."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def where(x):
    """GPU, CPU or None (made inside of PyTorch) of a tensor."""
    return vars(unwrapped(x)).get("where")


def label(result, device):
    for x in tensors_of(result):
        unwrapped(x).where = device
    return result


class Calls(TorchFunctionMode):
    """What Python asks for: new tensors are labelled, and x.device tells the label."""

    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_function__(self, f, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(f, "__name__", "")
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        device = None if x is None else where(x)
        if f == torch.Tensor.device.__get__:
            return device or CPU
        if f == torch.Tensor.is_cuda.__get__:
            return device == GPU
        to = (*args[1:2], kwargs.get("device")) if name == "to" else ("cpu",) * (name == "cpu")
        to_cpu = x is not None and any(str(z) == "cpu" for z in to)
        if self.operations.capturing:
            index = args[1] if name in ("__getitem__", "__setitem__") else ()
            index = index if isinstance(index, tuple) else (index,)
            from_host = (name in ("tensor", "as_tensor", "new_tensor")
                         or any(isinstance(i, (list, np.ndarray)) for i in index))
            on_gpu = GPU in (device, kwargs.get("device"))
            if device == GPU and (name in READS or to_cpu) or from_host and on_gpu:
                raise Wrong(f"{name} in a captured step")
        if device == GPU and name in ("numpy", "__array__"):
            raise Wrong(f"{name} of a GPU's tensor")
        if to_cpu:
            return label(x.detach().clone(), CPU)
        result = f(*args, **kwargs)
        if not tensors_of(args, kwargs):
            label(result, GPU if kwargs.get("device") == GPU else CPU)
        return result


class Operations(TorchDispatchMode):
    """What is done, by autograd and vmap too."""

    capturing, log = False, None

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        kwargs, kind = kwargs or {}, f.overloadpacket
        tensors = tensors_of(args, kwargs)
        places = [vars(x).get("where") for x in tensors]
        self.refuse(f, kind, args, kwargs, tensors, places)
        result = f(*args, **kwargs)
        if self.log is not None:
            self.note(f, args, kwargs, tensors, result)
        if f._schema.is_mutable and places and places[0]:
            return result
        return label(result, GPU if GPU in (*places, kwargs.get("device"))
                     else CPU if CPU in places else None)

    def refuse(self, f, kind, args, kwargs, tensors, places):
        """Raises Wrong where a GPU would refuse."""
        what = f"{f} of tensors on {[str(p) for p in places]}"
        moves = kwargs.get("device") == GPU or kind is aten.copy_
        # one number on the CPU may be read beside the GPU's tensors; a graph would freeze it
        written = f._schema.is_mutable and places[:1] == [CPU]
        numbers = not (written or self.capturing or kind in (aten.cat, aten.stack))
        looks_up = (kind is aten.index or kind in (aten.index_put, aten.index_put_)
                    and vars(args[2]).get("where") != CPU)
        mixed = GPU in places and any(p == CPU and (x.dim() or not numbers)
                                      for x, p in zip(tensors, places))
        if mixed and not moves and not (looks_up and places[0] == GPU):
            raise Wrong(what)
        if self.capturing:
            by_host = looks_up and any(p == CPU or x.dtype == torch.bool
                                       for x, p in zip(tensors[1:], places[1:]))
            if kind in WAITS or CPU in places and moves or by_host:
                raise Wrong(f"{what} in a captured step")

    def note(self, f, args, kwargs, tensors, result):
        """Adds to the log what a graph would repeat of this operation: its numbers, and the memory
        that was there before."""
        memory = [x.untyped_storage().data_ptr() for x in tensors]
        numbers = [str(a) for a in (*args, *kwargs.values()) if not tensors_of(a)]
        self.log.append((str(f), numbers, [m for m in memory if m not in self.made]))
        for x in tensors_of(result):
            if x.untyped_storage().data_ptr() not in memory:
                self.made[x.untyped_storage().data_ptr()] = x  # kept: its memory stays its own

    def logged(self, work):
        """What work() returns, and what a graph of it would repeat."""
        self.log, self.made = [], {}
        try:
            return work(), self.log
        finally:
            self.log = self.made = None

    def capture(self, function, device):
        """In place of gpu.capture. A graph does again what was captured; here Python does,
        which must be the same."""
        self.capturing = True
        try:
            _, first = self.logged(function)
        finally:
            self.capturing = False

        def replay():
            results, again = self.logged(function)
            if again != first:
                raise Wrong(next((a, b) for a, b in zip(first, again) if a != b))
            return results

        return replay


def eager(function, device):
    """In place of gpu.capture: Python does what a CUDA graph would replay. The results
    lie in the same memory each time."""
    results = tree_map(torch.clone, function())

    def replay():
        for memory, z in zip(tree_leaves(results), tree_leaves(function())):
            memory.copy_(z)
        return results

    return replay


class Training(fl.gpu.OnGPU):
    """Trains on a CPU as on a GPU."""

    def __init__(self, device, args, ways=None):
        """ways: those that may be used, by default those of a GPU."""
        super().__init__(device, args)
        self.threads, self.map, self.wanted = 0, map, ways

    def begin(self, d, largest):
        super().begin(d, largest)
        cuda = torch.device("cuda", 0)
        self.ways = self.wanted or fl.gpu.ways_to_try(cuda, self.args, d)


def ways_from(way):
    """Returns the ways of training that are left where `way` is the fastest."""
    return fl.gpu.WAYS[fl.gpu.WAYS.index(way) :]


@contextlib.contextmanager
def gpu(capture=None, room=float("inf"), way=None):
    """Within, every --device is the pretended GPU, with so much room for what clients keep.
    capture: replaces Operations.capture. way: the fastest way of training that is tried."""
    from_numpy, load = torch.from_numpy, torch.load
    operations, ways = Operations(), way and ways_from(way)

    def loaded(file, map_location="cpu", **more):
        return label(load(file, map_location="cpu", **more), GPU if map_location == GPU else CPU)

    with pytest.MonkeyPatch.context() as patch, operations, Calls(operations):
        patch.setattr(fl.gpu, "capture", capture or operations.capture)
        patch.setattr(common, "find_device", lambda name: GPU)
        patch.setattr(common, "training_on", lambda *given: Training(*given, ways))
        patch.setattr("fl.state.free_memory", lambda device: room)
        patch.setattr(torch, "from_numpy", lambda array: label(from_numpy(array), CPU))
        patch.setattr(torch, "load", loaded)
        yield operations
