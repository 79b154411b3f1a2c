"""builder: a function that makes the nn.Module of --model, one of models.py, of torchvision or of a
file of one's own, as --batchnorm and --no-dropout change it."""

import copy
import inspect

import torch
from torch import nn

from .files import find
from .machine import refuse
from .models import MODELS


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
        own = any(getattr(z.train, "__func__", None) is not nn.Module.train
                  for z in module.modules())
        if own or not module.training:  # a train() of its own may freeze layers
            module.train()
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
