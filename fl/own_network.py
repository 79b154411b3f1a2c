"""check: what is refused of a network of one's own, because its logits depend on more than its
weights and one image. Nothing here changes a result."""

import contextlib
import copy
import sys
import threading

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .building import BATCHNORM
from .files import fresh
from .machine import first_line, generators
from .own_method import KNOWN, Content, overlapping, sharing

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
    if all(z.min() >= 0 for z in both):
        notes.append("note    the model's outputs are never negative, as after softmax, sigmoid or "
                     "ReLU; cross-entropy wants the logits before it")
    if net.module.training:
        other = functional_call(net.copy().eval(), net.values(w.split(net.sizes)), x)
        if not torch.is_tensor(other) or other.shape != logits.shape or differ(logits, other):
            notes.append("note    the model's logits differ in eval(); it stays in train(), in "
                         "evaluation, too")
    if odd := [name for name, z in net.constants.items() if z.dtype == torch.float64]:
        notes.append(f"note    {odd[0]} is float64, and is used as float32, as all tensors are")
    if torch.equal(w_0, w_1):
        notes.append("note    the model's initial weights are the same for every --seed")
    other = [*net.module.parameters(), *(z for z in net.module.buffers() if z.is_floating_point())]
    gradients, own = [], [z.data for z in other]
    for _ in range(2):
        logits, leaves = net.graph(w)
        try:
            gradients.append(torch.autograd.grad(logits.square().sum(), [*leaves.values()],
                                                 materialize_grads=True))
        except RuntimeError as problem:
            raise ValueError(f"its gradient can't be computed: {first_line(problem)}") from problem
        for z in other:  # its own tensors, which must have no influence
            z.data = z.data + 1  # not in place: their memory may be the file's
    for z, data in zip(other, own):
        z.data = data
    if odd := [name for name, z in zip(leaves, gradients[0]) if z.layout != torch.strided]:
        raise ValueError(f"the gradient of {odd[0]} is sparse; nn.Embedding(sparse=False) has "
                         "a dense one")
    far, whole = (sum(float(z.nan_to_num().square().sum()) for z in of) for of in (
        (a - b for a, b in zip(*gradients)), gradients[0]))
    if far > 1e-8 * whole:
        raise ValueError("its gradient depends on weights or buffers that it is not given, but "
                         "holds elsewhere; write functions as methods, and no "
                         "torch.utils.checkpoint")
    used = net.uses(logits, leaves)
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
        remedy = ("its signature must name num_classes (or classes), and if it does so only in "
                  "train(), use --no-dropout")
        if not torch.is_tensor(logits):
            remedy = "return the logits alone; if it does so only in eval(), use --no-dropout"
        elif n == 1 and found == (net.classes,):
            remedy = ".squeeze() removes the axis of a single image, too; use .flatten(1)"
        if found != (n, net.classes):
            raise ValueError(f"for {n} image{'s' * (n > 1)} it gives {found}, not logits of the "
                             f"shape {(n, net.classes)}; {remedy}")

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
        if not net.module.training:
            why += "; F.dropout needs training=self.training"
        raise ValueError(why)
    changed = [name for name, z in before.items() if not torch.equal(z, values[name])]
    large = net.values((10 * w).split(net.sizes))  # a limit may not be reached by the first weights
    net.call(large, x)
    if odd := [name for name, where, _ in net.tensors
               if not torch.equal(values[name].flatten(), w[where])
               or not torch.equal(large[name].flatten(), 10 * w[where])]:
        raise ValueError(f"forward changes its weights {odd[0]}, which the method alone may do; "
                         "compute with a changed copy, as torch.nn.utils.parametrize does")
    if odd := [name for name in changed if not isinstance(layers[net.owner(name)], BATCHNORM)]:
        raise ValueError(f"it changes its buffer {odd[0]} in training, which all clients share; "
                         "keep it constant (InstanceNorm: track_running_stats=False)")
    used = net.apply((1.01 * w).split(net.sizes), x)
    net.copies = threading.local()
    with torch.no_grad():  # as an evaluation
        anew = net.apply((1.01 * w).split(net.sizes), x)
    net.copies = threading.local()
    net.apply(w.flip(0).split(net.sizes), 3 * x.flip(0))  # a first call, from which it may keep
    later = net.apply(w.split(net.sizes), x)
    if keeps or differ(first, again) or differ(used, anew) or differ(first, later):
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
    if any(getattr(z, "batch_first", True) is False for z in layers.values()):
        why = why.replace("; for", "; this layer takes the first axis for time: use "
                          "batch_first=True; for")
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
    """Returns the logits of x. Before some functions of torch another thread computes others'."""
    class Interrupted(TorchFunctionMode):
        calls, every = 0, 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            Interrupted.calls += 1
            if self.every and self.calls % self.every == 0:
                thread = threading.Thread(target=others)
                thread.start()
                thread.join()
            return function(*args, **(kwargs or {}))

    def others():
        with contextlib.suppress(Exception):
            net.apply(tensors, x.flip(0))

    net.apply(tensors, x[:1])  # makes this thread's copy
    with Interrupted():
        net.apply(tensors, x)  # counts them
    Interrupted.every, Interrupted.calls = 1 + Interrupted.calls // 16, 0
    with Interrupted():
        return net.apply(tensors, x)
