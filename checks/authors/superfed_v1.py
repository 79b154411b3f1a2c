"""SuPerFed as the authors' code for the first version of the paper computes it, where this differs
from the paper (docs/superfed.md, D1, D2 and D4). superfed.py follows the paper.

    python checks/authors/superfed_v1.py --dataset cifar10 --mix model
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import common
import superfed


def mixed(net):
    """Returns [d]: 1 for each weight with a local copy in w^l, 0 for biases, which have none."""
    return net.per_weight([float(not name.endswith("bias")) for name in net.names])


class Federation(common.Federation):
    def __init__(self, args, make_net=None):
        super().__init__(args, make_net)
        superfed.mix = self.mix

    def mix(self, w_f, w_l, lam):
        lam = lam * mixed(self.net)  # D2
        return (1 - lam) * w_f + lam * w_l

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
    return superfed_arguments(["--lr-decay", "0.995", *argv])  # D4; a flag given later wins


superfed_arguments = superfed.arguments


def main(argv=None):
    """Runs superfed.py with these functions in the place of its own."""
    before = dict(vars(superfed)), common.Federation
    superfed.loss_3, superfed.arguments = loss_3, arguments
    superfed.first_round_of_phase_two, common.Federation = first_round_of_phase_two, Federation
    try:
        return superfed.main(argv)
    finally:
        vars(superfed).update(before[0])
        common.Federation = before[1]


if __name__ == "__main__":
    main()
