"""SuPerFed for unseen clients, for which the paper's abstract claims gains: --unseen clients never
take part in the training of superfed.py. The paper's text does not say how they are evaluated.
Ours: after the last round each unseen client is tested with w^f as it is, with
w^f after one ClientUpdate of Phase I (fine-tuned), and with its mixtures W(lambda) after one
ClientUpdate of Phase II. The results are printed and written to unseen.json, beside the record.

    python -m papers.superfed_unseen --unseen 20 --dataset cifar10 --mix model
"""

import argparse
import json
import sys

import numpy as np
import torch

import common
import superfed


class Federation(common.Federation):
    """Samples only clients that are seen."""

    def __init__(self, args):
        super().__init__(args)
        if args.unseen >= self.K:
            common.refuse(f"--unseen {args.unseen} leaves none of the {self.K} clients")
        order = common.stream(args.split_seed, "split", 2).permutation(self.K)
        self.unseen, self.seen = np.sort(order[: args.unseen]), np.sort(order[args.unseen :])

    def sample(self, t, m=None):
        rng = common.stream(self.args.seed, "sampling", t)
        return np.sort(rng.choice(self.seen, min(m, len(self.seen)), replace=False))


def arguments(argv):
    """Returns superfed.py's arguments and `unseen`, which a resumed run must not change either."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--unseen", type=common.positive_int, default=20)
    argv = sys.argv[1:] if argv is None else argv
    own, rest = parser.parse_known_args(argv)
    args = superfed.arguments(rest)
    args.unseen, args.argv = own.unseen, [*map(str, argv)]
    return args


def main(argv=None):
    args = arguments(argv)
    federation = Federation(args)
    superfed.main(federation=federation, file=__file__)
    out = args.out or f"runs/superfed_unseen-{federation.data.name}-{args.seed}"
    state = torch.load(f"{out}/state.pt", weights_only=True, map_location=federation.device)
    found = accuracies(federation, state["state"]["w_f"], state["state"]["w_l"])
    for name, accuracy in found.items():
        common.say(f"{name:<24}{accuracy:.4f}")
    with open(f"{out}/unseen.json", "w") as file:
        json.dump({"unseen": federation.unseen.tolist(), **found}, file, indent=1)
    return found


def accuracies(federation, w_f, w_l):
    """Returns the unseen clients' mean accuracies, each on its own test images."""
    S, T = federation.unseen, federation.args.rounds
    client_update = superfed.local_training(federation.net, federation.args)
    own = [w_f.expand(len(S), -1), w_l.to(federation.device)[S]]  # [m, d] each

    def draw(rng, steps):
        return rng.random((steps, len(federation.net.layers)))

    def trained(phase_two):
        shared = [federation.eta(T), torch.tensor(phase_two, device=federation.device)]
        return federation.train(client_update, S, T, own=own, shared=shared, draw=draw)

    def accuracy(models):  # of the clients S: [m, d]
        def of(k):
            return models[np.searchsorted(S, k)] if k[0] in S else w_f[None]

        return float(np.mean(np.array(federation.evaluate_clients(of)["per_client"])[S]))

    w_f_k, w_l_k = trained(1.0)
    mixtures = {f"W({lam})": accuracy(superfed.mix(w_f_k, w_l_k, lam)) for lam in superfed.LAMBDAS}
    return {"w^f": accuracy(own[0]), "w^f, fine-tuned": accuracy(trained(0.0)[0]), **mixtures}


if __name__ == "__main__":
    main()
