"""Is it the groups, or the softmax? FedAvg, with one change: a node's softmax has only the classes of the node's own images.

    python -m tables.psinet_softmax --dataset cifar10 --rounds 25 --precision bf16 --eval-every 1

In Psi-Net a pruned node has no logits for other classes, so its softmax is like this (D6 of psinet.py). Here no layer is cut
into groups, and all weights are averaged over all nodes, as in psinet.py --groups 0 --norm gn.
docs/psinet.md, "Is it the groups, or the softmax?", has the results.
"""

from types import SimpleNamespace as State

import torch

import common
import psinet


def client_step(net, args):
    """FedAvg's step, for one node and one minibatch b."""

    def step(node, b, eta):
        w, u, own = node  # [d] weights, [d] momentum, [classes] 1 for a class that the node has, else 0

        def loss(w):
            logits = torch.where(own > 0, net(w, b.x), psinet.MISSING)  # [B, classes]; a MISSING logit has probability 0
            return common.cross_entropy(logits, b)

        g = common.grad(loss)(w)  # [d]
        w, u = common.sgd(args, w, u, g, eta, net.decayed)
        return w, u, own

    return step


def main(argv=None):
    parser = common.parser(__doc__, **psinet.DEFAULTS)
    args = common.parse(parser, psinet.BY_DATASET, argv)
    of_psinet = psinet.arguments(["--model", args.model, "--groups", "0", "--norm", "gn"])
    federation = common.Federation(args, lambda _, *images: psinet.PsiNet(of_psinet, *images))
    run = common.Run(__file__, federation)
    step, classes = client_step(federation.net, args), torch.arange(federation.data.classes, device=federation.device)
    own = torch.stack([torch.isin(classes, federation.labels[images]).float() for images in federation.split.train])  # [K, classes]

    state = State(w=federation.initial_weights())  # [d]
    for t, S in run.rounds(state):
        w = state.w.expand(len(S), -1)  # [m, d]
        w_k, _, _ = federation.train(step, (w, torch.zeros_like(w), own[S]), S, t, federation.eta(t))  # [m, d]
        state.w = federation.mean(w_k, federation.n[S])
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


if __name__ == "__main__":
    main()
