"""FedSLR beside other methods, with the small CNN, over 60 and 1,000 rounds.

    python -m papers.fedslr_curves       draws results/fedslr-curves.svg from results/fedslr
"""

import common
from fl import records

from . import reading
from .runs import RESULTS

DATA = {  # FedSLR's record, and what the others' names begin with
    "CIFAR-10": ("cifar10-cnn-lambda-1e-4", "cifar10-cnn"),
    "CIFAR-100": ("cifar100-cnn-lambda-1e-4", "cifar100-cnn"),
    "CIFAR-10, 1,000 rounds": ("cifar10-cnn-1000-rounds", "cifar10-cnn-1000-rounds"),
}
ONE_MODEL = {"FedAvg": "fedavg", "FedDyn": "feddyn", "SCAFFOLD": "scaffold"}
OWN_MODELS = {"FedPer": "fedper", "Ditto": "ditto", "training alone": "local"}


def draw(axis, name, part, **style):
    """Draws the accuracies of a record, if it is there: means over the clients, each on its own
    test images."""
    path = records.at(RESULTS / "fedslr" / name)
    if path.exists():
        axis.plot(*reading.curve(records.read(path), part, "mean"), **style)


def main():
    title = (r"small CNN, 100 clients, $\alpha$ = .1, $\lambda$ = 1e-4, seed 0: accuracy, "
             "mean over the clients")
    with common.drawing(RESULTS / "fedslr-curves.png", 3, 2, (11, 12), title) as axes:
        for (one, own), (data, (ours, prefix)) in zip(axes, DATA.items()):
            draw(one, ours, "gkr", color="black", label="FedSLR: GKR, mixed")
            draw(own, ours, "personal", color="black")
            for axis, methods, first in ((one, ONE_MODEL, 0), (own, OWN_MODELS, 3)):
                for i, (method, name) in enumerate(methods.items(), first):
                    draw(axis, f"{prefix}-{name}", "personal", color=f"C{i}", label=method)
            one.set(title=f"{data}: one model for all", ylabel="accuracy")
            own.set(title=f"{data}: a model for each client")
        for axis in axes.flat:
            axis.set(xlabel="round", ylim=(0, 1))


if __name__ == "__main__":
    main()
