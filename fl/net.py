"""Net: any nn.Module as a function of one flat vector, logits = net(w, x); --model
path/to/file.py:Name and torchvision:NAME, --init; and what is refused."""

import contextlib
import copy
import functools
import inspect
import sys
import textwrap
import threading
import warnings

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .files import find, fresh
from .machine import first_line, generators, refuse
from .models import MODELS
from .state import KNOWN, Content, overlapping, sharing

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
                self.notes += check(self, precision)
            elif build is None:
                self(torch.zeros(self.d, device=device), torch.zeros(1, *shape, device=device))
        except Exception as problem:  # whatever somebody else's network does
            known = isinstance(problem, (RuntimeError, ValueError, TypeError))
            why = "" if known else f"{type(problem).__name__}: "
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
            layer = owner(name)
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
        side = {owner(name): int(where.start >= end) for name, where, _ in self.tensors}
        why, times, first = [], ([(-1, "")], [(float("inf"), "")]), {}
        for name, found in uses(*self.graph(self.drawn(np.random.default_rng(0))[0])).items():
            layer = owner(name)
            times[side.get(layer, 1 - kept)].extend((time, layer) for time in found)
        (late, below), (early, above) = max(times[0]), min(times[1])
        if late >= early:
            why.append(f"an image passes {above or ROOT} before {below or ROOT}, which is "
                       "registered before it or has requires_grad = False")
        for name, z in self.module.named_parameters(remove_duplicate=False):
            one, other = first.setdefault(id(z), owner(name)), owner(name)
            if side.get(one) != side.get(other, side.get(one)):
                why.append(f"{one} and {other} share a tensor")
        for name in (name for name, own in side.items() if own == kept):
            module = self.module.get_submodule(name)
            mere = not name or isinstance(module, (nn.ParameterDict, nn.ParameterList))
            if all(layer != name for _, layer in times[kept]):
                why.append(f"an image does not pass {name or ROOT}")
            if mere and sum(z.dim() > 1 for z in module.parameters(recurse=False)) > 1:
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

    @functools.cached_property
    def last_layer(self):
        """The name of the layer that an image passes last."""
        self.last_layers(1)  # refuses a network in which another one is registered last
        return owner(self.names[-1])

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
        try:
            module.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
            w = self.weights_of(module)
            if not w.isfinite().all():
                raise ValueError("some weights are not finite")
        except Exception as problem:  # torch.load raises nearly anything
            why = textwrap.shorten(str(problem), 200)
            if "running_mean" in str(problem) and self.batchnorm != "frozen":
                why += " Use --batchnorm frozen."
            refuse(f"--init {path} can't be read as a state dict of {self.name}, as "
                   f"torch.save(model.state_dict(), FILE) writes it: {why}")
        self.module, self.copies = module, threading.local()  # set_extra_state may have changed it
        self.constants, self.settled = self.constants_of(module), True
        try:
            if self.checked:
                pure(self, w)
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


def uses(logits, leaves):
    """Returns {name: the operations that use it, by their numbers} of leaves of the logits' graph.
    A forward pass numbers its operations in their order."""
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


def owner(name):
    """Returns the module of a parameter: "fc" of fc.bias and fc.parametrizations.weight.0."""
    module, parametrized, _ = f".{name}".partition(".parametrizations.")
    return (module if parametrized else module.rpartition(".")[0])[1:]


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


# --------------------------------------------------------------------------------------------------
# Other networks

def builder(name, shape, classes, batchnorm=None, no_dropout=False):
    """Returns a function that builds the network of --model, as the flags change it."""
    make = construct(name, shape, classes)

    def build():
        module = make()
        if not isinstance(module, nn.Module):
            raise TypeError(f"it gives a {type(module).__name__}, not an nn.Module")
        if odd := [type(z).__name__ for z in module.modules()
                   if isinstance(z, WRAPPED) or hasattr(z, "_orig_mod")]:
            raise TypeError(f"it holds a {odd[0]}; give the plain nn.Module, without "
                            "torch.compile, torch.jit and nn.DataParallel")
        if any(getattr(z.train, "__func__", None) is not nn.Module.train for z in module.modules()):
            module.train(module.training)  # a train() of its own may freeze layers
        if batchnorm == "group":
            module = group_norms(module)
        batchnorms = [z for z in module.modules() if isinstance(z, BATCHNORM) and z.training]
        if no_dropout:
            module.eval()  # all layers, since F.dropout(z, training=self.training) is possible
        for layer in batchnorms:
            layer.train(batchnorm != "frozen")
        return module

    return build


def construct(name, shape, classes):
    """Returns a function that makes --model NAME from what it asks for."""
    if name.startswith("torchvision:"):
        import torchvision  # not above: it takes as long as all other imports

        there, wanted = torchvision.models.list_models(module=torchvision.models), name[12:]
        if wanted not in there:
            refuse(f"--model {name}: torchvision has no such network for classification; it has "
                   f"{', '.join(there)}")
        size = {"image_size": shape[1]} if wanted.startswith("vit_") else {}
        return lambda: torchvision.models.get_model(wanted, weights=None, num_classes=classes,
                                                    **size)
    make = find("model", name, MODELS)
    if isinstance(make, nn.Module):
        return lambda: copy.deepcopy(make)
    known = (("in_channels", "channels"), shape[0]), (("num_classes", "classes"), classes), (
        ("size",), tuple(shape[1:]))
    try:
        asked, given = inspect.signature(make), {}
        for keys, value in known:
            ours = [key for key in keys if key in asked.parameters
                    and may_be(asked.parameters[key].default, value, key)]
            given |= dict.fromkeys(ours[:1], value)
        asked.bind(**given)
    except TypeError as problem:
        refuse(f"--model {name}: {problem}; it must be a function or class that gives an nn.Module "
               "and asks for nothing else than in_channels (or channels), num_classes (or "
               "classes) and size (docs/extend.md)")
    return lambda: make(**given)


def may_be(default, value, key):
    """Returns whether a parameter with this default means what we fill in. channels=64 is a width,
    and size="large" or size=512 is no (height, width)."""
    free = default in (inspect.Parameter.empty, None)
    return free or type(default) is type(value) and ("channels" not in key or default in (1, 3))


class GroupNormInstead(nn.GroupNorm):
    """Replaces a BatchNorm: 2 groups of channels, or 1 if their number is odd."""

    def __init__(self, norm):
        if type(norm) not in BATCHNORM:
            raise ValueError(f"a {type(norm).__name__} does more than BatchNorm; --batchnorm group "
                             "can't replace it")
        groups = 1 if norm.num_features % 2 else 2
        super().__init__(groups, norm.num_features, norm.eps, norm.affine)
        if norm.affine:  # as its constructor has left them: 0, frozen, or shared
            self.weight, self.bias = norm.weight, norm.bias


WRAPPED = torch.jit.ScriptModule, nn.DataParallel
BATCHNORM = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
BATCHNORM_BECAME = {"group": (GroupNormInstead, "became GroupNorm"),
                    "frozen": (BATCHNORM, "keep the statistics of --init or of w_0")}


def group_norms(module):
    """Returns the module with GroupNorm in the place of each BatchNorm."""
    made = {z: GroupNormInstead(z) for z in module.modules() if isinstance(z, BATCHNORM)}
    for parent in [*module.modules()]:
        parent._modules.update((name, made[z]) for name, z in parent._modules.items() if z in made)
    return made.get(module, module)


OF_X = "tensors that its forward makes or converts need dtype=x.dtype"


def check(net, precision):
    """Raises ValueError unless the logits of somebody else's network are a function of its weights
    and of each image alone, in this precision, with a gradient. Returns notes, a line each."""
    for name, layer in net.module.named_modules():
        for key in vars(layer).keys() - {"_parameters", "_buffers", "_modules"}:
            held = [z for z in Content(vars(layer)[key]).tensors
                    if torch.is_tensor(z) and not isinstance(z, nn.Parameter)]
            if not {*map(id, held)} <= {*map(id, net.module.buffers())}:
                raise ValueError(f"{f'{name}.{key}'.lstrip('.')} holds a tensor that is neither "
                                 "parameter nor buffer; use nn.Parameter or register_buffer, and "
                                 "torch.nn.utils.parametrizations in place of old weight_norm or "
                                 "pruning")
        if type(layer).__name__ == "_SpectralNorm":
            raise ValueError("its spectral_norm has buffers that must follow the weights; use "
                             "parametrizations.weight_norm, or divide by torch.linalg."
                             "matrix_norm(weight, 2) in forward")
    own = {**dict(net.module.named_parameters()), **dict(net.module.named_buffers())}
    if {*map(id, net.module.parameters())} != {id(z) for _, z in net.module.named_parameters()}:
        raise ValueError("its parameters() gives others than named_parameters(), which are "
                         "trained; set requires_grad = False on those that are not to be")
    if odd := [name for name, z in own.items() if z.layout != torch.strided]:
        raise ValueError(f"{odd[0]} is sparse; make it dense, and call .to_sparse() in forward")
    if odd := [name for name, z in own.items()
               if z.isnan().any() or name not in net.constants and not z.isfinite().all()]:
        raise ValueError(f"{odd[0]} starts as NaN or infinite; torch.empty, for instance, "
                         "initialises nothing")
    if two := sharing(own.items()) or overlapping(own.items()):
        raise ValueError(f"{two[0]} and {two[1]} share their memory, but would be trained and "
                         "saved apart; assign the nn.Parameter itself, or .clone()")
    if hooked := [name for name, z in net.module.named_parameters()
                  if z._backward_hooks or z._post_accumulate_grad_hooks]:
        raise ValueError(f"{hooked[0]} has a hook on its gradient, which would not be called; use "
                         "requires_grad = False, or multiply the weight by a mask in forward")
    rng = np.random.default_rng(0)
    (w_0, *at_0), (w_1, *_), (again, *at_again) = (
        net.drawn(rng), net.drawn(rng), net.drawn(np.random.default_rng(0)))
    if not all(map(torch.equal, tree_leaves((w_0, at_0)), tree_leaves((again, at_again)))):
        raise ValueError("two calls with one --seed give other weights or buffers: it draws from a "
                         "generator without a seed; use torch's functions, or np.random's")
    net.state_dict(w_0)  # must not fail when the run ends
    scale = net.per_weight([float(z.square().mean().sqrt()) or 0.1 for z in w_0.split(net.sizes)])
    noise = torch.from_numpy(rng.standard_normal(net.d).astype(np.float32)).to(net.device)
    w = w_0 + 0.1 * scale * noise  # since layers that begin with 0 would hide what is behind them
    try:
        logits = pure(net, w)
    except RuntimeError as problem:
        if "type" in (why := first_line(problem)):
            raise ValueError(f"{why}; weights and images are float32: {OF_X}") from problem
        if "view size" not in why:
            raise
        # images are channels-last in memory, as is a convolution's output then; .view minds
        net.module.register_forward_pre_hook(lambda module, given: (given[0].contiguous(),))
        net.copies = threading.local()
        logits = pure(net, w)
    x, notes, other = net.sample(), [], copy.deepcopy(fresh(net.build, 1)).to(net.device)
    values, saved = net.values(w.split(net.sizes)), other.state_dict().keys()
    values = {name: z for name, z in values.items() if name in saved}
    if differ(logits, functional_call(other, values, x.contiguous())):
        raise ValueError("with the weights of its model.pt it gives other logits when it is built "
                         "again: its constructor draws or counts something that is neither a "
                         "parameter nor a buffer that is saved; use register_buffer")
    if precision == "bf16":
        try:
            half = net(w, x.bfloat16())
        except RuntimeError as problem:
            raise ValueError(f"with --precision bf16 it fails ({first_line(problem)}); "
                             f"{OF_X}") from problem
        if not (half - logits).norm() <= logits.norm() / 4:
            notes.append("note    in bf16 logits differ by more than a quarter (its buffers are "
                         "bf16, too)")
    both = logits, net.apply((-w).split(net.sizes), x)  # of which logits change sign
    if all(z.min() >= 0 and z.max() <= 1 for z in both):
        notes.append("note    the model's outputs lie between 0 and 1, as after softmax or sigmoid;"
                     " cross-entropy wants the logits before it")
    if net.module.training:
        other = functional_call(net.copy().eval(), net.values(w.split(net.sizes)), x)
        if not torch.is_tensor(other) or other.shape != logits.shape or differ(logits, other):
            notes.append("note    the model's logits differ in eval(); it stays in train(), in "
                         "evaluation, too")
    if torch.equal(w_0, w_1):
        notes.append("note    the model's initial weights are the same for every --seed")
    gradients, own = [], [z.data for z in net.module.parameters()]
    for _ in range(2):
        logits, leaves = net.graph(w)
        try:
            gradients.append(torch.autograd.grad(logits.square().sum(), [*leaves.values()],
                                                 materialize_grads=True))
        except RuntimeError as problem:
            raise ValueError(f"its gradient can't be computed: {first_line(problem)}") from problem
        for z in net.module.parameters():  # its own weights, which must have no influence
            z.data = z.data + 1  # not in place: their memory may be the file's
    for z, data in zip(net.module.parameters(), own):
        z.data = data
    if odd := [name for name, z in zip(leaves, gradients[0]) if z.layout != torch.strided]:
        raise ValueError(f"the gradient of {odd[0]} is sparse; nn.Embedding(sparse=False) has "
                         "a dense one")
    far, whole = (sum(float(z.nan_to_num().square().sum()) for z in of) for of in (
        (a - b for a, b in zip(*gradients)), gradients[0]))
    if far > 1e-8 * whole:
        raise ValueError("its gradient depends on weights that it is not given; "
                         "torch.utils.checkpoint, for instance, can't be used here")
    used = uses(logits, leaves)
    idle = [name for name, size in zip(net.names, net.sizes) if size and not used[name]]
    if idle:
        n = sum(z for name, z in zip(net.names, net.sizes) if name in idle)
        notes.append(f"note    {n:,} of {net.d:,} weights, such as {idle[0]}, have no influence on "
                     "the logits of eight images; if they never have, set requires_grad = False "
                     "there, or they are sent without being trained")
    return notes


def differ(a, b):
    return not (a - b).norm() <= 1e-4 * a.norm()


def held(module):
    """What a module holds, and the files that define its layers, but tensors; to be compared."""
    names = {type(z).__module__ for z in module.modules()} & {*sys.modules}
    names = {name for name in names if name.split(".")[0] not in (*KNOWN, "fl", "common")
             and "site-packages" not in (getattr(sys.modules[name], "__file__", "") or "")}
    return [Content(module, versions=False)] + [
        Content(z, modules=names, versions=False) for home in sorted(names)
        for name, z in vars(sys.modules[home]).items() if name[:2] != "__"]


def pure(net, w):
    """Returns the logits [8, classes] of eight images. Raises ValueError unless they are a function
    of w and of each image alone."""
    x, state, values = net.sample(), generators(net.device), net.values(w.clone().split(net.sizes))
    before = {name: values[name].clone() for name in net.constants}
    with torch.enable_grad():
        first, kept = net.call(values, x), held(net.copies.module)
        again = net.call(values, x)
    keeps = kept != held(net.copies.module)
    draws = state != generators(net.device)
    layers = dict(net.module.named_modules())

    def expect_shape(logits, n):
        found = tuple(logits.shape) if torch.is_tensor(logits) else f"a {type(logits).__name__}"
        if found != (n, net.classes):
            raise ValueError(f"for {n} image{'s' * (n > 1)} it gives {found}, not logits of the "
                             f"shape {(n, net.classes)}; its signature must name num_classes (or "
                             "classes), and if it does so only in train(), use --no-dropout")

    expect_shape(first, 8)
    if first.requires_grad:
        raise ValueError("it trains tensors that are not its parameters: register them, as modules "
                         "in an nn.ModuleList, not in a list or a function like torch.compile(self."
                         "forward) (for a gradient in forward use torch.func.grad)")
    if not first.isfinite().all():
        raise ValueError("its logits are not finite, with weights and pixels drawn at random")
    if draws:
        why = "it draws random numbers"
        if net.module.training:
            why += "; for dropout use --no-dropout, which makes it inactive"
        if any(isinstance(z, BATCHNORM) and z.training for z in layers.values()):
            why += ", and for BatchNorm --batchnorm group"
        raise ValueError(why)
    changed = [name for name, z in before.items() if not torch.equal(z, values[name])]
    if odd := [name for name, where, _ in net.tensors
               if not torch.equal(values[name].flatten(), w[where])]:
        raise ValueError(f"forward changes its weights {odd[0]}, which the method alone may do; "
                         "compute with a changed copy, as torch.nn.utils.parametrize does")
    if odd := [name for name in changed if not isinstance(layers[owner(name)], BATCHNORM)]:
        raise ValueError(f"it changes its buffer {odd[0]} in training, which all clients share; "
                         "keep it constant (InstanceNorm: track_running_stats=False)")
    used = net.apply((1.01 * w).split(net.sizes), x)
    net.copies = threading.local()
    with torch.no_grad():  # as an evaluation
        anew = net.apply((1.01 * w).split(net.sizes), x)
    if keeps or differ(first, again) or differ(used, anew):
        raise ValueError("two calls on one batch differ: it changes x in place, keeps something "
                         "from call to call, or computes otherwise without gradients")
    with torch.enable_grad():
        two = net.apply(w.clone().requires_grad_().split(net.sizes), x[:2])
    if not two.requires_grad:
        raise ValueError("its logits carry no gradient of its weights (.detach(), torch.no_grad, "
                         "numpy?)")
    x = torch.cat([x, -x, 2 * x, x.flip(-1), x.flip(-2)])
    many, turned = (net.apply(w.split(net.sizes), z) for z in (x, x.flip(0)))
    # copies of one image want the same expert, or are each other's neighbours
    same = net.apply(w.split(net.sizes), x[[0] * 8])
    dark = x[:2] / 100  # somebody may look whether the largest pixel is above 1
    alone, beside = (net.apply(w.split(net.sizes), z)[:2] for z in (
        dark, torch.cat([dark, x[:8].abs() + 1])))
    why = ("an image's logits depend on the others of its minibatch, such as on their number or "
           "largest pixel; for BatchNorm use --batchnorm group (GroupNorm instead)")
    if net.batchnorm != "frozen":
        why += ", or --batchnorm frozen (constant running statistics, for a pretrained --init)"
    if (changed or differ(alone, beside) or differ(first[:2], two) or differ(first, many[:8])
            or differ(first[[0] * 8], same) or differ(many.flip(0), turned)):
        raise ValueError(why)
    one = net.apply(w.split(net.sizes), x[:1])
    expect_shape(one, 1)  # a minibatch may have one image
    if differ(one, first[:1]):
        raise ValueError(why)
    if differ(first, beside_others(net, w.split(net.sizes), x[:8])):
        raise ValueError("forward reads what another thread's forward has written, such as a "
                         "global or what a hook's function keeps, and clients train in threads; "
                         "use local variables")
    return first


def beside_others(net, tensors, x):
    """Returns the logits of x. Before each of some layers another thread computes other images'."""
    net.apply(tensors, x[:1])  # makes this thread's copy
    layers = [z for z in net.copies.module.modules() if not [*z.children()]]
    here = threading.get_ident()

    def others():
        with contextlib.suppress(Exception):
            net.apply(tensors, x.flip(0))

    def interrupt(*_):
        if threading.get_ident() == here:
            thread = threading.Thread(target=others)
            thread.start()
            thread.join()

    with contextlib.ExitStack() as hooks:
        for layer in layers[:: 1 + len(layers) // 8]:
            hooks.enter_context(layer.register_forward_pre_hook(interrupt))
        return net.apply(tensors, x)


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
