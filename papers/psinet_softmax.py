"""Is it the groups, or the softmax? FedAvg with one change: a node's softmax has only the classes
of its own images.

    python -m papers.psinet_softmax --dataset cifar10 --rounds 25 --precision bf16 --eval-every 1

In Psi-Net a pruned node has no logits for other classes, so its softmax is like this (D6 of
psinet.py). Here no layer is cut into groups, and all weights are averaged over all nodes, as in
psinet.py --groups 0 --norm gn. docs/psinet.md, "Is it the groups, or the softmax?", has the
results.
"""

from types import SimpleNamespace as State

import torch

import common
import psinet


def arguments(argv):
    return common.parse(common.parser(__doc__, **psinet.DEFAULTS), psinet.BY_DATASET, argv)


def own_classes(federation):
    """Returns which classes each node's training images have: [K, classes]."""
    classes = torch.arange(federation.data.classes, device=federation.device)
    return torch.stack([torch.isin(classes, federation.labels[images])
                        for images in federation.split.train])


def main(argv=None):
    args = arguments(argv)
    of_psinet = psinet.arguments(["--model", args.model, "--groups", "0", "--norm", "gn"])
    federation = common.Federation(args, lambda *images: psinet.GroupedNet(of_psinet, *images))
    run = common.Run(__file__, federation)
    local_update, own = psinet.local_training(federation.net, args), own_classes(federation)

    state = State(w=federation.initial_weights())  # [d]
    for t in run.rounds(state):
        S = federation.sample(t)
        w = state.w.expand(len(S), -1)  # [m, d]: all of Omega, as there is no BatchNorm
        w_k = federation.train(local_update, S, t, own=[w, own[S]],
                               shared=[federation.eta(t)])  # [m, d]
        n_k = federation.n[S]
        state.w = n_k @ w_k / n_k.sum()
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))
    return run.record()


if __name__ == "__main__":
    main()
