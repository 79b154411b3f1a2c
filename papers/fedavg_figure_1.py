"""FedAvg's Figure 1: the loss of the average of two networks, trained independently, from the same
and from different initial weights.

    python -m papers.fedavg_figure_1        writes results/fedavg-figure-1.json and .svg

Two 2NN are trained on the 600 images of two clients, 240 minibatches of 50 each. The loss of
theta*w + (1-theta)*w' is measured on all training images of MNIST. This is one round of FedAvg with
two clients, and theta = .5 is what its server makes. It takes two minutes on one core.
"""

import json
import sys

import numpy as np
import torch
import torch.nn.functional as F

import common
import fedavg
from fl import provenance

from .runs import RESULTS

SETTING = "--dataset mnist --model 2nn --epochs 20 --batch-size 50 --lr 0.1"
THETA = np.sort(np.append(np.linspace(-0.2, 1.2, 50), 0.5))


def losses(federation, W):
    """Returns the loss on all training images of the models theta*W[0] + (1-theta)*W[1], for each
    theta of THETA. W: [2, d]."""
    index = np.arange(federation.data.n_train)
    y = federation.labels[: federation.data.n_train]
    between = (federation.logits(theta * W[0] + (1 - theta) * W[1], index) for theta in THETA)
    return [F.cross_entropy(logits, y).item() for logits in between]


def main(argv=None, out=RESULTS):
    p = common.parser(__doc__, **fedavg.DEFAULTS)
    more = sys.argv[1:] if argv is None else argv
    args = common.parse(p, fedavg.BY_DATASET, [*SETTING.split(), *more])
    federation = common.Federation(args)
    client_update = fedavg.local_training(federation.net, args)
    first, other = (federation.net.init(common.stream(args.seed + i, "initialisation"))
                    for i in (0, 1))
    loss = {}
    for name, second in (("shared", first), ("different", other)):
        W = federation.train(client_update, [0, 1], 0, own=[torch.stack([first, second])],
                             shared=[federation.eta(0)])
        loss[name] = losses(federation, W)
    record = {"args": vars(args), "commit": provenance.commit([__file__]), "theta": THETA.tolist(),
              "loss": loss}
    (out / "fedavg-figure-1.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(loss, out / "fedavg-figure-1.png")
    return record


def draw(losses, path):
    with common.drawing(path, 1, 2, (10, 4)) as axes:
        for axis, (name, loss) in zip(axes, losses.items()):
            better = min(loss[np.abs(THETA - end).argmin()] for end in (0, 1))
            axis.plot(THETA, loss, marker="o", label=r"the network $\theta w + (1-\theta) w'$")
            axis.axhline(better, color="black", linestyle="--",
                         label="the better of the two networks w and w'")
            axis.set(title=f"{name} initial weights", xlabel=r"$\theta$",
                     ylabel="loss on all training images")


if __name__ == "__main__":
    main()
