"""Net: any nn.Module as a function of one flat vector, logits = net(w, x); --model
path/to/file.py:Name and torchvision:NAME, --init; and what is refused."""

import copy
import functools
import importlib.util
import inspect
import pathlib
import random
import sys
import textwrap
import threading
import warnings

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from .models import MODELS
from .training import first_line, refuse


class Net:
    """logits = net(w, x): a network as a function of one flat vector w [d].

    tensors: (name, slice of w, shape) of each parameter, in the order of w, which is that of
    named_parameters(). layers: (name, slice of w) of each module with parameters of its own.
    layer_of [d]: the number of each weight's layer. decayed [d]: 1 where weight decay acts.
    constants: the tensors beside w: buffers, and parameters with requires_grad = False. batchnorms:
    how many BatchNorm layers --batchnorm has changed. notes: lines for the user.

    build: makes the nn.Module anew. module: one such, whose weights are never used. Refuses
    a network that can't be built for images of shape [C, H, W].
    """

    def __init__(self, name, shape, classes, device="cpu", batchnorm=None, no_dropout=False,
                 build=None, hint="", precision="fp32"):
        self.name, self.classes, self.device, self.notes = name, classes, device, []
        self.batchnorm, self.copies = batchnorm, threading.local()
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
            if build is None and name not in MODELS:
                self.notes += check(self, shape, precision)
            elif build is None:
                self(torch.zeros(self.d, device=device), torch.zeros(1, *shape, device=device))
        except Exception as problem:  # whatever somebody else's network does
            known = isinstance(problem, (RuntimeError, ValueError, TypeError))
            why = "" if known else f"{type(problem).__name__}: "
            refuse(f"--model {name} can't be built for images of {shape[1]}x{shape[2]} with "
                   f"{shape[0]} channels: {why}{first_line(problem)}{hint}")

    def read_table(self):
        """Sets the table of parameters and all that follows from it."""
        trained = {name: z for name, z in self.module.named_parameters() if z.requires_grad}
        if not trained:
            raise ValueError("it has no parameters to train")
        if odd := [name for name, z in trained.items() if not z.is_floating_point()]:
            raise ValueError(f"{odd[0]} is complex; torch.complex(a, b) makes it of "
                             "two real parameters")
        frozen = {name: z for name, z in self.module.named_parameters() if not z.requires_grad}
        if frozen:
            self.notes.append(f"model   {sum(z.numel() for z in frozen.values()):,} weights with "
                              "requires_grad = False stay as they are, with every --seed")
        self.constants = {name: z.detach().clone().to(self.device)
                          for name, z in (*frozen.items(), *self.module.named_buffers())}
        self.names, self.shapes = list(trained), [z.shape for z in trained.values()]
        self.sizes = [z.numel() for z in trained.values()]
        self.d, ends = sum(self.sizes), np.cumsum(self.sizes).tolist()
        self.tensors = [(name, slice(end - z.numel(), end), tuple(z.shape))
                        for (name, z), end in zip(trained.items(), ends)]
        spans = {}  # "conv1": from its weight to its bias, which lie side by side
        for name, where, _ in self.tensors:
            layer = name.rpartition(".")[0]
            spans[layer] = slice(spans.get(layer, where).start, where.stop)
        self.layers = list(spans.items())
        only = getattr(self.module, "decayed", self.names)
        self.decayed = self.per_weight([float(name in only) for name in self.names])

    @functools.cached_property
    def layer_of(self):
        """Made when it is asked for, since it is twice as large as the model."""
        sizes = torch.tensor([where.stop - where.start for _, where in self.layers])
        return torch.arange(len(sizes)).repeat_interleave(sizes).to(self.device)

    def first_layers(self, N):
        """Returns the slice of w with the first N layers; a normalisation counts as one."""
        return slice(0, self.borders(N)[N])

    def last_layers(self, N):
        """Returns the slice of w with the last N layers."""
        return slice(self.borders(N)[-1 - N], self.d)

    def borders(self, N):
        """Returns where each layer begins in w, and d. Refuses a model with fewer than N layers."""
        if N > len(self.layers):
            refuse(f"{N} layers are wanted of the model {self.name}, which has only "
                   f"{len(self.layers)}")
        return [*(where.start for _, where in self.layers), self.d]

    def per_weight(self, values):
        """Repeats each tensor's value for each of its weights: [d]."""
        return torch.tensor(values).repeat_interleave(torch.tensor(self.sizes)).to(self.device)

    def __call__(self, w, x):
        """w [d], x [B, C, H, W] -> logits [B, classes], computed in the precision of x and returned
        in that of w."""
        return self.apply(w.to(x.dtype).split(self.sizes), x).to(w.dtype)

    def apply(self, tensors, x):
        """Returns the module's output for `tensors`, one for each parameter, flat or not."""
        values = {name: z.view(shape) for name, z, shape in zip(self.names, tensors, self.shapes)}
        values |= {name: z.to(tensors[0].dtype) if z.is_floating_point() else z
                   for name, z in self.constants.items()}
        if not hasattr(self.copies, "module"):
            # functional_call puts tensors into the module, so each thread needs its own
            memo = {id(z): z for z in (*self.module.parameters(), *self.module.buffers())}
            self.copies.module = copy.deepcopy(self.module, memo)
        return functional_call(self.copies.module, values, x)

    @property
    def start(self):
        """The network's function `start`, or None. A layer or tensor of this name is not it."""
        start = getattr(self.module, "start", None)
        return start if callable(start) and not isinstance(start, nn.Module) else None

    def init(self, rng):
        """Draws initial weights [d] from a numpy Generator, the same on every device. A network
        without `start` is built again, and its constructor draws with a seed from rng."""
        if not self.start:
            return self.weights_of(fresh(self.build, int(rng.integers(2**63))))
        kernels = {name: shape for name, _, shape in self.tensors}
        parts = []
        for name, size in zip(self.names, self.sizes):
            layer, _, part = name.rpartition(".")
            shape = kernels.get(f"{layer}.weight", kernels[name])
            of_norm = "constant", float(part == "weight")
            how = self.start(name, shape) if len(shape) > 1 else of_norm
            parts.append(draw(rng, *how, size))
        return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(self.device)

    def weights_of(self, module):
        """Returns the weights [d] of a module like self.module."""
        found = dict(module.named_parameters())
        w = torch.cat([found[name].detach().float().flatten() for name in self.names])
        return w.to(self.device)

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
            running = "running_mean" in str(problem) and self.batchnorm != "frozen"
            refuse(f"--init {path} can't be read as a state dict of {self.name}, as "
                   f"torch.save(model.state_dict(), FILE) writes it: "
                   f"{textwrap.shorten(str(problem), 200)}" + " Use --batchnorm frozen." * running)
        self.module, self.copies = module, threading.local()  # set_extra_state may have changed it
        found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.constants = {name: found[name].detach().to(z) for name, z in self.constants.items()}
        return w

    def state_dict(self, w):
        """Returns w [d] as the module's own state dict, on the CPU. With w [K, d] each tensor in it
        is [K, ...], buffers too."""
        found = {name: w[..., where].reshape(w.shape[:-1] + shape).cpu().clone()
                 for name, where, shape in self.tensors}
        found |= {name: z.cpu().clone().expand(w.shape[:-1] + z.shape)
                  for name, z in self.constants.items()}
        first = {id(z): name for name, z in (*self.module.named_parameters(),
                                             *self.module.named_buffers())}  # tied ones once
        own = self.module.state_dict(keep_vars=True)

        def now(name, z):
            if name.rpartition(".")[2] == "_extra_state":
                return z
            name = first.get(id(z), name)
            if name not in found:
                raise ValueError(f"its state_dict() has {name}, neither parameter nor buffer")
            return found[name]

        return {name: now(name, z) for name, z in own.items()}


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


def with_part(w, part, V):
    """Returns the model w [d] with each client's weights V [m, ...] in the slice `part`: [m, d]."""
    W = w.repeat(len(V), 1)
    W[:, part] = V
    return W


# --------------------------------------------------------------------------------------------------
# Other networks

def load_file(path):
    """Returns the module of a .py file, which may lie anywhere and import what lies beside it.
    Refuses what can't be loaded."""
    path = pathlib.Path(path)
    if path.suffix != ".py" or not path.is_file():
        refuse(f"there is no file {path}" + " that ends in .py" * (path.suffix != ".py"))
    return executed(path, path.stat().st_mtime_ns)


@functools.cache
def executed(path, version):
    """Returns the module that the file is in this version."""
    spec = importlib.util.spec_from_file_location(str(path), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module  # where dataclasses look
    sys.path.append(str(path.resolve().parent))
    try:
        fresh(lambda: spec.loader.exec_module(module))
    except Exception as problem:  # whatever the file does
        refuse(f"{path} can't be loaded: {type(problem).__name__}: {first_line(problem)}")
    return module


def find(flag, name, known):
    """Returns what --model NAME or --split NAME means: one of `known`, or an object of a file,
    path/to/file.py:NAME."""
    path, colon, inside = name.rpartition(":")
    if name in known:
        return known[name]
    if name.endswith(".py"):
        refuse(f"--{flag} {name} names nothing in the file; use {name}:NAME")
    if not colon:
        more = ", torchvision:NAME" if flag == "model" else ""
        refuse(f"--{flag} {name} is unknown; use one of {', '.join(known)}{more}, or "
               "path/to/file.py:NAME")
    if not hasattr(load_file(path), inside):
        refuse(f"--{flag} {name}: {path} has no {inside}")
    return getattr(load_file(path), inside)


def fresh(build, seed=0):
    """Returns build(), whose constructor draws from torch, numpy or random with this seed."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            return build()
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def builder(name, shape, classes, batchnorm=None, no_dropout=False):
    """Returns a function that builds the network of --model, as the flags change it."""
    known = {"channels": shape[0], "in_channels": shape[0], "classes": classes,
             "num_classes": classes, "size": tuple(shape[1:])}
    make = construct(name, known)

    def build():
        module = make()
        if not isinstance(module, nn.Module):
            raise TypeError(f"it gives a {type(module).__name__}, not an nn.Module")
        if batchnorm == "group":
            module = group_norms(module)
        batchnorms = [z for z in module.modules() if isinstance(z, BATCHNORM) and z.training]
        if no_dropout:
            module.eval()  # all layers, since F.dropout(z, training=self.training) is possible
        for layer in batchnorms:
            layer.train(batchnorm != "frozen")
        return module

    return build


def construct(name, known):
    """Returns a function that makes --model NAME from those values of `known` that it takes."""
    if name.startswith("torchvision:"):
        import torchvision  # not above: it takes as long as all other imports

        there, wanted = torchvision.models.list_models(module=torchvision.models), name[12:]
        if wanted not in there:
            refuse(f"--model {name}: torchvision has no such network for classification; it has "
                   f"{', '.join(there)}")
        return lambda: torchvision.models.get_model(wanted, weights=None,
                                                    num_classes=known["classes"])
    make = find("model", name, MODELS)
    if isinstance(make, nn.Module):
        return lambda: copy.deepcopy(make)
    try:
        asked = inspect.signature(make)
        given = {key: known[key] for key in known if key in asked.parameters}
        asked.bind(**given)
    except TypeError as problem:
        refuse(f"--model {name}: {problem}; it must be a function or class that gives an nn.Module "
               f"and asks for nothing else than {', '.join(known)} (docs/extend.md)")
    return lambda: make(**given)


class GroupNormInstead(nn.GroupNorm):
    """Replaces a BatchNorm: 2 groups of channels, or 1 if their number is odd."""

    def __init__(self, norm):
        if type(norm) not in BATCHNORM:
            raise ValueError(f"a {type(norm).__name__} does more than BatchNorm; --batchnorm group "
                             "can't replace it")
        groups = 1 if norm.num_features % 2 else 2
        super().__init__(groups, norm.num_features, norm.eps, norm.affine)


BATCHNORM = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
BATCHNORM_BECAME = {"group": (GroupNormInstead, "became GroupNorm"),
                    "frozen": (BATCHNORM, "keep the statistics of --init or of w_0")}


def group_norms(module):
    """Returns the module with GroupNorm in the place of each BatchNorm."""
    if isinstance(module, BATCHNORM):
        return GroupNormInstead(module)
    for name, child in module.named_children():
        setattr(module, name, group_norms(child))
    return module


def check(net, shape, precision):
    """Raises ValueError unless the logits of somebody else's network are a function of its weights
    and of each image alone, in this precision. Returns notes, a line each."""
    for name, layer in net.module.named_modules():
        for key in (key for key, z in vars(layer).items() if torch.is_tensor(z)):
            raise ValueError(f"{name}{'.' * bool(name)}{key} is a tensor that is neither parameter "
                             "nor buffer; use nn.Parameter or register_buffer")
    rng = np.random.default_rng(0)
    w_0 = net.init(rng)
    net.state_dict(w_0)  # must not fail when the run ends
    scale = net.per_weight([float(z.square().mean().sqrt()) or 0.1 for z in w_0.split(net.sizes)])
    noise = torch.from_numpy(rng.standard_normal(net.d).astype(np.float32)).to(net.device)
    w = w_0 + 0.1 * scale * noise  # since layers that begin with 0 would hide what is behind them
    x = rng.normal(0, np.arange(1, 9)[:, None, None, None], (8, *shape)).astype(np.float32)
    x, before = torch.from_numpy(x).to(net.device), [z.clone() for z in net.constants.values()]
    with torch.enable_grad():
        first, again = (net.apply(w.split(net.sizes), x) for _ in range(2))
        two = net.apply(w.clone().requires_grad_().split(net.sizes), x[:2])
    found = tuple(first.shape) if torch.is_tensor(first) else f"a {type(first).__name__}"
    if found != (8, net.classes):
        raise ValueError(f"for 8 images it gives {found}, not logits of the shape "
                         f"{(8, net.classes)}; if it does so only in train(), use --no-dropout")
    if first.requires_grad:
        raise ValueError("it trains tensors that are not its parameters: register them, as modules "
                         "in an nn.ModuleList, not in a list")
    if not two.requires_grad:
        raise ValueError("its logits carry no gradient of its weights (.detach(), torch.no_grad, "
                         "numpy?)")
    if not first.isfinite().all():
        raise ValueError("its logits are not finite, with weights and pixels drawn at random")

    def differ(a, b):
        return not (a - b).norm() <= 1e-4 * a.norm()

    if differ(first, again):
        also = any(isinstance(z, BATCHNORM) and z.training for z in net.module.modules())
        raise ValueError("two calls on one batch differ: it draws at random, or changes x in "
                         "place; for dropout use --no-dropout, which makes it inactive"
                         + ", and for BatchNorm --batchnorm group" * also)
    if differ(first[:2], two):
        raise ValueError("an image's logits depend on the others of its minibatch; for BatchNorm "
                         "use --batchnorm group (GroupNorm instead), or --batchnorm frozen "
                         "(constant running statistics, for a pretrained --init)")
    net.apply(w.split(net.sizes), x[:1])  # must not fail, since a minibatch may have one image
    if any(not torch.equal(a, b) for a, b in zip(before, net.constants.values())):
        raise ValueError("it changes its buffers in training, which all clients share")
    notes = []
    if precision == "bf16":
        try:
            half = net(w, x.bfloat16())
        except RuntimeError as problem:
            raise ValueError(f"with --precision bf16 it fails ({first_line(problem)}); tensors "
                             "that its forward makes need dtype=x.dtype") from problem
        if not (half - first).norm() <= first.norm() / 4:
            notes.append("note    in bf16 logits differ by more than a quarter (its buffers are "
                         "bf16, too)")
    if (first >= 0).all() and (first.sum(1) - 1).abs().max() < 1e-4:
        notes.append("note    the model ends in softmax; cross-entropy wants the logits before it")
    if torch.equal(w_0, net.init(rng)):
        notes.append("note    the model's initial weights are the same for every --seed")
    return notes
