"""FedAvg with each client's images one digit after the other, never shuffled: does their order
explain why the paper's 2NN needs 664 rounds? docs/fedavg.md, D2, has the result.

    python -m papers.fedavg_order --dataset mnist --model 2nn --split shards --epochs 1 \
        --target 0.97 --lr 0.0464 --rounds 1200 --eval-every 20
"""

import numpy as np

import common
import fedavg
from fedavg import arguments


class Unshuffled(common.Federation):
    def plan(self, k, images, t, epochs, **options):
        images = images[np.argsort(self.data.labels[images], kind="stable")]
        _, *draws = super().plan(k, images, t, epochs, **options)
        return np.tile(images, (epochs, 1)), *draws


def main(argv=None):
    return fedavg.main(federation=Unshuffled(arguments(argv)))


if __name__ == "__main__":
    main()
