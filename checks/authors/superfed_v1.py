"""SuPerFed as the authors' code for the first version of the paper computes it, where this differs
from the paper (docs/superfed.md, D1, D2 and D4). superfed.py follows the paper.

    python checks/authors/superfed_v1.py --dataset cifar10 --mix model
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import common
from fl.files import execute

superfed = execute(ROOT / "superfed.py")  # a copy, of which `main` replaces some functions


def mixed(net):
    """Returns [d]: 1 for each weight with a local copy in w^l, 0 for biases, which have none."""
    return net.per_weight([float(not name.endswith("bias")) for name in net.names])


class Federation(common.Federation):
    def eta(self, t):
        return super().eta(t + 1)  # rounds count from 1 (D4)


def loss_3(net, w_f, w_l, w_g, lam, nu, mu, b):
    """Returns the loss that the authors' code has in the place of (3)."""
    own = mixed(net)
    W = superfed.mix(w_f, w_l, lam)
    distance = sum(z.norm() for z in ((1 - lam) * (w_f - w_g)).split(net.sizes))  # D1
    cos = superfed.cosine(own * w_f, own * w_l)  # D2
    return common.cross_entropy(net(W, b.x), b) + nu * cos**2 + mu * distance


def first_round_of_phase_two(args):
    return max(int(args.start * args.rounds) - 1, 0)  # D4


def arguments(argv):
    argv = sys.argv[1:] if argv is None else [*map(str, argv)]
    args = superfed.arguments(["--lr-decay", "0.995", *argv])  # D4; a flag given later wins
    args.argv = argv
    return args


def main(argv=None):
    federation = Federation(arguments(argv))
    own = mixed(federation.net)

    def mix(w_f, w_l, lam):
        return (1 - lam * own) * w_f + lam * own * w_l  # D2

    superfed.mix, superfed.loss_3 = mix, loss_3
    superfed.first_round_of_phase_two = first_round_of_phase_two
    return superfed.main(federation=federation, file=__file__)


if __name__ == "__main__":
    main()
