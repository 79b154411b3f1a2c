"""Where should groups begin? The total variance of each layer of a network without groups (D9).

    python psinet.py --dataset cifar10 --groups 0 --norm bn --clients 1 --split iid --rounds 50
    python -m papers.psinet_depth runs/psinet-cifar10-0

Reads result.json and model.pt in the folder of a finished run. Prints the total variance TV of each
layer and the depth that it suggests: the first layer whose TV is in the upper half of the range.
Draws tv.png in the folder. docs/psinet.md explains the choices.
"""

import pathlib

import torch
from torch import nn

import common
import psinet

from . import reading


def preferences(module, transform, images, labels, classes, number=20):
    """The class preferences P = [p_1, ..., p_C] of the neurons of each layer but the last:
    name -> [neurons, classes].

    p_c = sum over images x of class c of A(x) * dZ_c/dA(x). A(x) is the neuron's activation as the
    next layer sees it, behind norm, ReLU and pooling, and Z_c the logit of class c. Each class has
    its first `number` images.
    """
    layers = {name: layer for name, layer in module.named_children()
              if isinstance(layer, (nn.Conv2d, nn.Linear))}
    seen, P = {}, {name: [] for name in [*layers][:-1]}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0]}))
    for c in range(classes):
        index = (labels == c).nonzero()[:number, 0]
        Z, _ = module(transform(images[index]))
        activations = [seen[following] for following in [*layers][1:]]
        for (name, p), A, dZ in zip(P.items(), activations,
                                    torch.autograd.grad(Z[:, c].sum(), activations)):
            neurons = (len(index), layers[name].weight.shape[0], -1)
            p.append((A * dZ).detach().reshape(neurons).sum((0, 2)))  # over images and pixels
    return {name: torch.stack(p, 1) for name, p in P.items()}


def total_variance(P):
    """TV of a layer with the preferences P [neurons, classes]: the mean over its neurons q of
    ||P_q - mean over q of P_q||_2, where P_q is row q of P, divided by its sum. The sum is of
    absolute values, since entries have both signs."""
    P_q = P / P.abs().sum(1, keepdim=True).clamp(min=1e-30)
    return (P_q - P_q.mean(0)).norm(dim=1).mean()


def main(folder):
    out = pathlib.Path(folder)
    torch.set_num_threads(1)
    record, federation, module = reading.trained(out, "psinet", "cpu", psinet.GroupedNet)
    if record["args"]["groups"]:
        common.refuse(f"{out} has a network with groups; use psinet.py --groups 0")
    data, n = federation.data, federation.data.n_train
    P = preferences(module, federation.transform, federation.images[:n], federation.labels[:n],
                    data.classes)
    tv = {layer: float(total_variance(p)) for layer, p in P.items()}
    middle = (min(tv.values()) + max(tv.values())) / 2
    depth = next(layer for layer, value in tv.items() if value >= middle)
    for layer, value in tv.items():
        common.say(f"TV      {layer:<20}{value:8.4f}")
    common.say(f"TV      suggests --depth {depth}, the first layer that reaches {middle:.4f}")
    with common.drawing(out / "tv.png", size=(1.5 + 0.45 * len(tv), 3.5)) as axis:
        axis.bar(list(tv), list(tv.values()))
        axis.axhline(middle, color="black", linestyle="--", linewidth=1)
        axis.tick_params(axis="x", rotation=90)
        axis.set(ylabel="TV", title=f"{federation.net.name}, {data.name}: suggests {depth}")
    return tv, depth


if __name__ == "__main__":
    main(reading.folders(__doc__)[0])
