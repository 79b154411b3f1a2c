"""A GPU that isn't there: every tensor is labelled as the GPU's or the CPU's, and what a GPU refuses is refused.

    with pretend.Operations() as operations, pretend.Calls(operations):
        torch.zeros(3, device=pretend.GPU) + torch.ones(3)      # raises Wrong

The device is cpu:0, which PyTorch takes for another device than cpu, but where its tensors are tensors on the CPU. Refused are
operations on tensors of both and numpy arrays of the GPU's tensors; and while operations.capturing, as in the capture of a CUDA
graph, all that waits for the GPU or copies to it. How fast or how exact a GPU is can't be seen here.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cpu", 0)
aten = torch.ops.aten
FACTORIES = {"tensor", "zeros", "ones", "full", "empty", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm",
             "as_tensor"}  # fmt: skip
READS = {"numpy", "__array__", "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu"}
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.equal}


class Wrong(Exception):
    pass


def where(x):
    """"gpu", "cpu" or None (made inside of PyTorch) of a tensor, in vmap and grad too."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return vars(x).get("where")


def label(result, name):
    for x in tensors_of((result,)):
        while torch._C._functorch.is_functorch_wrapped_tensor(x):
            x = torch._C._functorch.get_unwrapped(x)
        x.where = name
    return result


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
        if name in READS and where(first) == "gpu":
            if self.operations.capturing:
                raise Wrong(f"{name} in a captured step")
            if name in ("numpy", "__array__"):
                raise Wrong(f"{name} of a GPU's tensor")
        if name in ("cpu", "to") and first is not None and (name == "cpu" or torch.device("cpu") in args or "cpu" in args):
            return label(first.detach().clone(), "cpu")
        result = f(*args, **kwargs)
        if name in FACTORIES:
            device = kwargs.get("device")
            label(result, "gpu" if device == GPU else "cpu")
        return result


class Operations(TorchDispatchMode):
    """What is done, by autograd and vmap too."""

    capturing = False

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        kwargs, kind = kwargs or {}, f.overloadpacket
        tensors = tensors_of((*args, *kwargs.values()))
        places = [vars(x).get("where") for x in tensors]
        # one number on the CPU may stand beside the GPU's tensors; but a graph would keep the number of its capture
        numbers = kind not in (aten.cat, aten.stack) and not self.capturing
        gpu, cpu = "gpu" in places, any(p == "cpu" and (x.dim() or not numbers) for x, p in zip(tensors, places))
        moves, looks_up = kwargs.get("device") == GPU or kind is aten.copy_, kind in (aten.index, aten.index_put_, aten.index_put)
        if gpu and cpu and not moves and not (looks_up and places[0] == "gpu"):
            raise Wrong(f"{f} of tensors on {places}")
        if self.capturing and kind is aten._linalg_svd:
            raise RuntimeError("called a synchronizing CUDA operation")  # as PyTorch says it
        if self.capturing and (kind in WAITS or "cpu" in places and moves or
                               looks_up and any(p == "cpu" or x.dtype == torch.bool for x, p in zip(tensors[1:], places[1:]))):
            raise Wrong(f"{f} of tensors on {places} in a captured step")
        result = f(*args, **kwargs)
        if f._schema.is_mutable and places and places[0]:
            return result
        return label(result, "gpu" if gpu or kwargs.get("device") == GPU else "cpu" if "cpu" in places else None)
