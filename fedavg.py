"""FedAvg: Federated Averaging. McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629.

    python fedavg.py --dataset cifar10            row FedAvg of SuPerFed's Table 1 (published: top-1 .4709)

What to expect: global accuracy on CIFAR-10, seed 0, two CPU cores.

    rounds   last    best    minutes   record
    200      .4607   .4641   25        results/superfed-1/fedavg-ft-cifar10/0
    40       .3096   .3096   10        results/scale-0.2/superfed-1/fedavg-cifar10/0

There is one model w. "global" is w on the central test images. "personal" is the same w on each client's own test images.

The paper's Algorithm 1, in our words. K clients; P_k are the images of client k, n_k their number.

    Server
     1  choose w_0
     2  for each round t = 0, 1, ..., T-1:
     3      m = max(C*K, 1)
     4      S_t = m random clients
     5      for each client k in S_t, in parallel:
     6          w_k = ClientUpdate(k, w_t)
     7      w_{t+1} = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
    ClientUpdate(k, w)
     8  cut P_k into minibatches of size B
     9  for each of E local epochs:
    10      for each minibatch b:
    11          w = w - eta * gradient of l(w; b)
    12  return w to the server

Choices that change a number. docs/fedavg.md has each in full.

    D1  Line 7 is the corrected one (arXiv v4): the sum is over the sampled clients S_t, not over all K.
    D2  Lines 8 to 10: a client's images are shuffled again in every epoch. The paper cuts them once.
    D3  Line 11: local SGD has momentum 0.9, which SuPerFed uses. McMahan et al. have none: --momentum 0.
    D4  The default settings are SuPerFed's (Tables 1 and 2), not McMahan et al.'s.
    D5  Line 3: C*K is rounded down.
"""

from types import SimpleNamespace as State

import torch

import common


def client_step(net, args):
    """ClientUpdate's body, for one client and one minibatch b."""

    def step(client, b, eta):
        w, u = client  # [d] weights, [d] momentum

        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        g = common.grad(loss)(w)  # l.11: gradient of l(w; b), [d]
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.11: w - eta * u, with u = momentum * u + g (D3)

    return step


def main(argv=None):
    args = common.parse(common.parser(__doc__, **DEFAULTS), BY_DATASET, argv)
    federation = common.Federation(args)
    run = common.Run(__file__, args, federation)
    step = client_step(federation.net, args)

    state = State(w=federation.initial_weights())  # l.1: [d]
    for t, S in run.rounds(state):  # l.2-4: S_t, [m] (D5)
        eta = federation.eta(t)
        w = state.w.expand(len(S), -1)  # [m, d]
        # federation.train does for each client k of S, at once or one after the other:
        #     for epoch in range(E):                           l.9
        #         for b in minibatches(shuffled(P_k), B):      l.8, l.10 (D2)
        #             client = step(client, b, eta)            l.11
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta)  # l.5-6, l.12: [m, d]
        n_k = federation.n[S]  # [m]
        state.w = federation.mean(w_k, n_k)  # l.7 (D1): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


# ---------------------------------------------------------------------------------------------------------------------
# Around it

# SuPerFed's Tables 1 and 2, row FedAvg: the column CIFAR-10, and what differs in the others (D4)
DEFAULTS = dict(split="shards", clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20, lr=0.01, momentum=0.9)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, batch_size=10, clients=20, fraction=0.5, per_client=4, lr=0.03, lr_decay=0.95,
                   transform="normalize", eval_every=3),
}

if __name__ == "__main__":
    main()
