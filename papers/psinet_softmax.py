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


def local_training(net, args):
    """Returns client_update(w, own, epochs, eta): FedAvg's for one node with the classes `own`."""
    sgd = common.sgd(args, net.decayed)

    @common.step
    def step(w, u, own, b, eta):  # w, u: [d] weights and momentum; own: [classes], 1 if it has one
        def loss(w):
            # [B, classes]; a MISSING logit has probability 0
            logits = torch.where(own > 0, net(w, b.x), psinet.MISSING)
            return common.cross_entropy(logits, b)

        return sgd(w, u, common.grad(loss)(w), eta)

    def client_update(w, own, epochs, eta):
        u = torch.zeros_like(w)
        for minibatches in epochs:
            for b in minibatches:
                w, u = step(w, u, own, b, eta)
        return w

    return client_update


def arguments(argv):
    return common.parse(common.parser(__doc__, **psinet.DEFAULTS), psinet.BY_DATASET, argv)


def main(argv=None):
    args = arguments(argv)
    of_psinet = psinet.arguments(["--model", args.model, "--groups", "0", "--norm", "gn"])
    federation = common.Federation(args, lambda *images: psinet.GroupedNet(of_psinet, *images))
    run = common.Run(__file__, federation)
    client_update = local_training(federation.net, args)
    classes = torch.arange(federation.data.classes, device=federation.device)
    own = torch.stack([torch.isin(classes, federation.labels[images]).float()
                       for images in federation.split.train])  # [K, classes]

    state = State(w=federation.initial_weights())  # [d]
    for t in run.rounds(state):
        S = federation.sample(t)
        w = state.w.expand(len(S), -1)  # [m, d]
        w_k = federation.train(client_update, S, t, own=[w, own[S]], shared=[federation.eta(t)])
        state.w = federation.mean(w_k, federation.n[S])
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))
    return run.record()


if __name__ == "__main__":
    main()
