"""Net: any nn.Module as a function of one flat vector, logits = net(w, x); its initial weights, or
those of --init."""

import copy
import functools
import inspect
import textwrap
import threading
import warnings

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from .building import BATCHNORM_BECAME, builder
from .files import fresh
from .machine import first_line, refuse
from .models import MODELS

ROOT = "the root module"


class Net:
    """logits = net(w, x): a network as a function of one flat vector w [d].

    tensors: (name, slice of w, shape) of each parameter, in the order of w, which is that of
    named_parameters(). layers: (name, slice of w) of each module with parameters of its own, in
    the same order. layer_of [d]: the number of each weight's layer. decayed [d]: 1 where weight
    decay acts. constants: the tensors beside w, which are buffers and parameters with
    requires_grad = False; they come from the module that gave the first initial weights.
    batchnorms: how many BatchNorm layers --batchnorm has changed. notes: lines for the user.

    build: makes the nn.Module anew. module: one such, whose weights are never used. Refuses
    a network that can't be built for images of shape [C, H, W].
    """

    def __init__(self, name, shape, classes, device="cpu", batchnorm=None, no_dropout=False,
                 build=None, hint="", precision="fp32"):
        self.name, self.shape, self.classes, self.device = name, shape, classes, device
        self.batchnorm, self.copies, self.notes = batchnorm, threading.local(), []
        self.checked, self.settled = build is None and name not in MODELS, False
        try:
            self.build = build or builder(name, shape, classes, batchnorm, no_dropout)
            with warnings.catch_warnings():  # about a layer without weights, which is refused below
                warnings.simplefilter("ignore")
                self.module = fresh(self.build)
            kinds, became = BATCHNORM_BECAME.get(batchnorm, ((), ""))
            self.batchnorms = sum(isinstance(layer, kinds) for layer in self.module.modules())
            if batchnorm:
                self.notes.append(f"model   BatchNorm layers that {became}: {self.batchnorms}")
            self.read_table()
            if self.checked:
                from . import own_network  # which no network of ours needs

                self.notes += own_network.check(self, precision)
            elif build is None:
                self(torch.zeros(self.d, device=device), torch.zeros(1, *shape, device=device))
        except Exception as problem:  # whatever somebody else's network does
            known = isinstance(problem, (RuntimeError, ValueError, TypeError))
            why = "" if known else f"{type(problem).__name__}: "
            if hasattr(self, "module") and any(z._forward_hooks for z in self.module.modules()):
                hint += ("; its forward hooks must use their argument `module`, not a module that "
                         "a closure holds, since each thread has a copy")
            refuse(f"--model {name} can't be built for images of {shape[1]}x{shape[2]} with "
                   f"{shape[0]} channels: {why}{first_line(problem)}{hint}")

    def read_table(self):
        """Sets the table of parameters and all that follows from it."""
        if lazy := [name for name, z in self.module.named_parameters() if is_lazy(z)]:
            raise ValueError(f"{lazy[0]} has no shape yet; give the layer its number of inputs, or "
                             "call the module on images in its constructor")
        trained = {name: z for name, z in self.module.named_parameters() if z.requires_grad}
        if not trained:
            raise ValueError("it has no parameters to train")
        if odd := [name for name, z in trained.items() if not z.is_floating_point()]:
            raise ValueError(f"{odd[0]} is complex; torch.complex(a, b) makes it of "
                             "two real parameters")
        frozen = {name: z for name, z in self.module.named_parameters() if not z.requires_grad}
        if frozen:
            self.notes.append(f"model   {sum(z.numel() for z in frozen.values()):,} weights with "
                              "requires_grad = False stay as they are")
        self.constants = dict.fromkeys([*frozen, *dict(self.module.named_buffers())])
        self.constants = self.constants_of(self.module)
        self.names, self.shapes = list(trained), [z.shape for z in trained.values()]
        self.sizes = [z.numel() for z in trained.values()]
        self.d, ends = sum(self.sizes), np.cumsum(self.sizes).tolist()
        self.tensors = [(name, slice(end - z.numel(), end), tuple(z.shape))
                        for (name, z), end in zip(trained.items(), ends)]
        spans = {}  # "conv1": from its weight to its bias, which lie side by side
        for name, where, _ in self.tensors:
            layer = self.owner(name)
            layer = layer if spans.get(layer, where).stop in (where.start, where.stop) else name
            spans[layer] = slice(spans.get(layer, where).start, where.stop)
        self.layers = list(spans.items())
        only = getattr(self.module, "decayed", None)
        only = only if isinstance(only, tuple) else self.names
        self.decayed = self.per_weight([float(name in only) for name in self.names])

    @functools.cached_property
    def layer_of(self):
        """Made when it is asked for, since it is twice as large as the model."""
        sizes = torch.tensor([where.stop - where.start for _, where in self.layers])
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.device)

    def first_layers(self, N):
        """Returns the slice of w with the first N layers; a normalisation counts as one. Refuses a
        network in which an image does not pass these before all others."""
        return slice(0, self.border(N, N, kept=0))

    def last_layers(self, N):
        """Returns the slice of w with the last N layers, which an image must pass last."""
        return slice(self.border(N, len(self.layers) - N, kept=1), self.d)

    def border(self, N, n, kept):
        """Returns where layer n of w begins. kept: 0 if the N layers that are asked for lie below
        it, 1 if above. A frozen layer belongs to the others."""
        if N > len(self.layers):
            refuse(f"{N} layers are wanted of the model {self.name}, which has only "
                   f"{len(self.layers)}")
        end = [*(where.start for _, where in self.layers), self.d][n]
        side = {self.owner(name): int(where.start >= end) for name, where, _ in self.tensors}
        several = self.several()
        why, times, first = [], ([(-1, "")], [(float("inf"), "")]), {}
        for name, found in self.uses(*self.graph(self.drawn(np.random.default_rng(0))[0])).items():
            layer = self.owner(name)
            times[side.get(layer, 1 - kept)].extend((time, layer) for time in found)
        (late, below), (early, above) = max(times[0]), min(times[1])
        if late >= early:
            why.append(f"an image passes {above or ROOT} before {below or ROOT}, which is "
                       "registered before it or has requires_grad = False")
        for name, z in self.module.named_parameters(remove_duplicate=False):
            one, other = first.setdefault(id(z), self.owner(name)), self.owner(name)
            if side.get(one) != side.get(other, side.get(one)):
                why.append(f"{one} and {other} share a tensor")
        for name in (name for name, own in side.items() if own == kept):
            if all(layer != name for _, layer in times[kept]):
                why.append(f"an image does not pass {name or ROOT}")
            if name in several:
                why.append(f"{name or ROOT} holds the weights of several layers")
        if why:
            refuse(f"the layers of --model {self.name} can't be divided here: {why[0]}; make each "
                   "layer a module, and register them in the order in which an image passes them")
        return end

    def graph(self, w):
        """Returns the logits of eight images with their graph, and its leaves: {name: parameter},
        frozen ones included."""
        leaves = {name: w[where].view(shape) for name, where, shape in self.tensors}
        leaves |= {name: z for name, z in self.constants.items()
                   if name in dict(self.module.named_parameters()) and z.is_floating_point()}
        leaves = {name: z.clone().requires_grad_() for name, z in leaves.items()}
        with torch.enable_grad():
            return self.call(self.constants | leaves, self.sample()), leaves

    @staticmethod
    def uses(logits, leaves):
        """Returns {name: the operations that use it, by their numbers} of leaves of the logits'
        graph. A forward pass numbers its operations in their order."""
        found, seen, left = {id(z): [] for z in leaves.values()}, set(), [logits.grad_fn]
        while left:
            node = left.pop()
            for below, _ in node.next_functions:
                if hasattr(below, "variable"):
                    found.setdefault(id(below.variable), []).append(node._sequence_nr())
                elif below and below not in seen:
                    seen.add(below)
                    left.append(below)
        return {name: found[id(z)] for name, z in leaves.items()}

    def sample(self):
        """Returns eight random images [8, C, H, W], brighter and brighter; like a transform's they
        are channels-last in memory."""
        scale = np.arange(1, 9)[:, None, None, None]
        x = np.random.default_rng(0).normal(0, scale, (8, *self.shape)).astype(np.float32)
        like = torch.channels_last if x.ndim == 4 else torch.contiguous_format
        return torch.from_numpy(x).to(self.device, memory_format=like)

    def per_weight(self, values):
        """Repeats each tensor's value for each of its weights: [d]."""
        return torch.tensor(values).repeat_interleave(torch.tensor(self.sizes)).to(self.device)

    def __call__(self, w, x):
        """w [d], x [B, C, H, W] -> logits [B, classes], computed in the precision of x and returned
        in that of w."""
        if not torch.is_tensor(w) or w.shape != (self.d,):
            given = f"shape {list(w.shape)}" if torch.is_tensor(w) else f"type {type(w).__name__}"
            raise ValueError(f"a model of {self.name} is a tensor w [{self.d}], not of {given}")
        return self.apply(w.to(x.dtype).split(self.sizes), x).to(w.dtype)

    def features(self, w, x):
        """Returns the logits, and what enters the last layer, [B, ...]: the images' features."""
        found, tensors = [], w.to(x.dtype).split(self.sizes)
        logits = self.call(self.values(tensors), x, lambda _, given: found.append(given[0]))
        return logits.to(w.dtype), found[0].to(w.dtype)

    def apply(self, tensors, x):
        """Returns the module's output for `tensors`, one for each parameter, flat or not."""
        return self.call(self.values(tensors), x)

    def values(self, tensors):
        """Returns {name: tensor} of all that the module gets, parameters and constants."""
        values = {name: z.view(shape) for name, z, shape in zip(self.names, tensors, self.shapes)}
        return values | {name: z.to(tensors[0].dtype) if z.is_floating_point() else z
                         for name, z in self.constants.items()}

    def call(self, values, x, see=None):
        """Returns the module's output for x with these values. see: is called with the last layer
        and its inputs, before it computes."""
        if not hasattr(self.copies, "module"):
            # functional_call puts tensors into the module, so each thread needs its own
            self.copies.module = self.copy()
        if see is None:
            return functional_call(self.copies.module, values, x)
        with self.copies.module.get_submodule(self.last_layer).register_forward_pre_hook(see):
            return functional_call(self.copies.module, values, x)

    def copy(self):
        """Returns a copy of the module that shares its tensors."""
        memo = {id(z): z for z in (*self.module.parameters(), *self.module.buffers())}
        return copy.deepcopy(self.module, memo)

    def is_kernel(self, name, shape):
        """Returns whether a parameter is a kernel or a matrix, not a vector: bias, [1, 1, n], or
        what a normalisation scales and shifts by. A linear layer's [1, n] is a matrix."""
        owner = self.module.get_submodule(self.owner(name))
        norm = isinstance(owner, (nn.LayerNorm, nn.RMSNorm))
        return not norm and (len(shape) == 2 or sum(n > 1 for n in shape) > 1)

    def several(self):
        """Returns the layers that hold the weights of several: the root module, or a list."""
        owners = [self.owner(name) for name, _, shape in self.tensors if len(shape) > 1]
        named = {owner: self.module.get_submodule(owner) for owner in owners}
        return [owner for owner, module in named.items() if owners.count(owner) > 1
                and (not owner or isinstance(module, (nn.ParameterDict, nn.ParameterList)))]

    @staticmethod
    def owner(name):
        """Returns the module of a parameter: "fc" of fc.bias and fc.parametrizations.weight.0."""
        module, parametrized, _ = f".{name}".partition(".parametrizations.")
        return (module if parametrized else module.rpartition(".")[0])[1:]

    @functools.cached_property
    def last_layer(self):
        """The name of the layer that an image passes last."""
        self.last_layers(1)  # refuses a network in which another one is registered last
        return self.owner(self.names[-1])

    @property
    def start(self):
        """The network's function start(name, shape), or None. Nothing else of this name is it."""
        start = getattr(self.module, "start", None)
        if callable(start) and [*inspect.signature(start).parameters] == ["name", "shape"]:
            return start

    def init(self, rng):
        """Draws initial weights [d] from a numpy Generator, the same on every device. A network
        without `start` is built again, and its constructor draws with a seed from rng."""
        w, constants = self.drawn(rng)
        if not self.settled:
            self.constants, self.settled = constants, True
        return w

    def drawn(self, rng):
        """Returns the weights of `init`, and the constants that belong to them."""
        if not self.start:
            module = fresh(self.build, int(rng.integers(2**63)))
            return self.weights_of(module), self.constants_of(module)
        kernels = {name: shape for name, _, shape in self.tensors}
        parts = []
        for name, size in zip(self.names, self.sizes):
            layer, _, part = name.rpartition(".")
            shape = kernels.get(f"{layer}.weight", kernels[name])
            of_norm = "constant", float(part == "weight")
            how = self.start(name, shape) if len(shape) > 1 else of_norm
            parts.append(draw(rng, *how, size))
        w = torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(self.device)
        return w, self.constants

    def weights_of(self, module):
        """Returns the weights [d] of a module like self.module."""
        found = dict(module.named_parameters())
        w = torch.cat([found[name].detach().float().flatten() for name in self.names])
        return w.to(self.device)

    def constants_of(self, module):
        """Returns {name: tensor} of what such a module has beside the weights."""
        found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {name: found[name].detach().clone().to(self.device) for name in self.constants}

    def load(self, path):
        """Returns the weights w [d] in a file's state dict, for --init, and keeps its buffers as
        constants. Refuses a file that does not fit."""
        module = copy.deepcopy(self.module)
        saved = {}
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            module.load_state_dict(saved)
            own = module.state_dict()
            if odd := [name for name, z in saved.items() if torch.is_tensor(z)
                       and z.is_floating_point() != own[name].is_floating_point()]:
                raise ValueError(f"{odd[0]} is {saved[odd[0]].dtype}")
            w = self.weights_of(module)
            if not w.isfinite().all():
                raise ValueError("some weights are not finite")
        except Exception as problem:  # torch.load raises nearly anything
            why = textwrap.shorten(str(problem), 200)
            if "running_mean" in str(problem) and self.batchnorm != "frozen":
                why += " Use --batchnorm frozen."
            if '"module.' in str(problem):
                why = "its names begin with module., as nn.DataParallel's; save model.module's"
            saved = saved if isinstance(saved, dict) else {}
            if within := [name for name, z in saved.items() if isinstance(z, dict)]:
                why = f"its entry {within[0]!r} is a dict; if that is it, save it alone"
            if "Unsupported global" in str(problem):
                why = "it holds a whole module or other objects"
            refuse(f"--init {path} can't be read as a state dict of {self.name}, as "
                   f"torch.save(model.state_dict(), FILE) writes it: {why}")
        self.module, self.copies = module, threading.local()  # set_extra_state may have changed it
        self.constants, self.settled = self.constants_of(module), True
        try:
            if self.checked:
                from . import own_network

                own_network.pure(self, w)
        except ValueError as problem:
            refuse(f"--init {path}: {problem}")
        return w

    def state_dict(self, w):
        """Returns w [d] as the module's own state dict, on the CPU. With w [K, d] each tensor in it
        is [K, ...], buffers too."""
        module = copy.deepcopy(self.module)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, where, shape in self.tensors:
            own[name].data = w[..., where].reshape(w.shape[:-1] + shape).cpu().clone()
        for name, z in self.constants.items():
            own[name].data = z.cpu().clone().expand(w.shape[:-1] + z.shape)
        return dict(module.state_dict())


def draw(rng, kind, scale, size):
    """Returns `size` initial values from the distribution that `start` names."""
    if kind == "constant":
        return np.full(size, scale)
    if kind == "uniform":
        return rng.uniform(-scale, scale, size)
    if kind not in ("normal", "truncated"):
        raise ValueError(f"its `start` gives {kind!r}, which is none of uniform, normal, truncated "
                         "and constant")
    values = rng.normal(0, scale, size)
    while kind == "truncated" and (far := np.abs(values) > 2 * scale).any():
        values[far] = rng.normal(0, scale, far.sum())
    return values


def default(args, data):
    """Returns make_net of Federation: the network of --model."""
    size = data.images.shape[1:3]

    def make_net(shape, classes, device):
        hint = ""
        if shape[1:] != size:
            hint = (f"; --transform {args.transform} cuts the {'x'.join(map(str, size))} images of "
                    f"{data.name}: --transform normalize leaves them whole")
        return Net(args.model, shape, classes, device, args.batchnorm, args.no_dropout, hint=hint,
                   precision=args.precision)

    return make_net
