"""FedAvg: Federated Averaging, from McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629.

    python fedavg.py --dataset cifar10            (row FedAvg of SuPerFed's Table 1: top-1 .4709, top-5 .8937)

Measured, seed 0, 2 CPU cores, the best evaluation in brackets: all 200 rounds in 25 min, on an Intel Xeon, by baselines.py
--method fedavg-ft, whose global model is the same but for rounding (at round 40 .329), and 40 rounds in 10 min on an AMD EPYC:
    results/superfed-1/fedavg-ft-cifar10/0: global 0.4607 (0.4641)
    results/scale-0.2/superfed-1/fedavg-cifar10/0: global 0.3096 (0.3096)

There is one model. "global" is the server's w on the central test images; "personal" is that same w on each client's own
test images.

The paper's Algorithm 1, in our words (K clients, P_k the images of client k, n_k of them):

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

Deviations
    D1  The AISTATS version of line 7 (from memory) sums over all K clients, with n the number of all images (and w_k = w_t
        where k was not sampled). It is read as the average over the sampled ones, as in SuPerFed's and pFedMe's code (FedSLR's
        weighs clients alike).
    D2  Lines 8 to 10: a client's images are shuffled again in every epoch; the paper cuts them once. Effect not measured.
    D3  Line 11: SuPerFed's experiments use momentum 0.9 in local SGD, its buffer being 0 at the start of every round; so do
        the defaults here. McMahan et al. have none: --momentum 0. Nor do they have a weight decay; it is 0 by default.
    D4  The defaults are SuPerFed's settings for Tables 1 and 2. T (its R), and K of CIFAR, are from its paper; C, E, B and eta
        from its code, which has Model Mixing alone. The paper tuned every method; what values FedAvg got is not known. None of
        McMahan et al.'s own tables is reproduced here. SuPerFed's code also multiplies eta by .995^r in round r = 1, 2, ...,
        which its paper does not mention: --lr .00995 --lr-decay .995. It deals CIFAR-10's shards so that clients hold only
        five pairs of classes, and for CIFAR-100 it has 200 clients of 5 classes; here shards are dealt at random to 100
        clients, as its paper says. D8 and D9 of superfed.py (EMNIST, Tiny ImageNet, the last minibatch) hold here, too.
        Whether the published accuracies are the last or the best ones is not known. Effects not measured.
    D5  Line 3: C*K is rounded down.
"""

from types import SimpleNamespace as State

import torch

import common

# D4: SuPerFed's Tables 1 and 2, row FedAvg. The column CIFAR-10, and below what differs in the others.
DEFAULTS = dict(split="shards", clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20, lr=0.01, momentum=0.9)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, clients=20, fraction=0.5, per_client=4, lr=0.02, eval_every=3),
}


def client_step(net, args):
    """ClientUpdate's body, for one client and one minibatch."""

    def step(client, batch, eta):
        w, u = client  # [d] weights, [d] momentum
        g = common.grad(lambda w: common.cross_entropy(net(w, batch.x), batch))(w)  # l.11: gradient of l(w; b), [d]
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.11: w - eta * u, u = momentum * u + g + decay * w (D3)

    return step


def main(argv=None):
    args = common.parse(common.parser(__doc__, **DEFAULTS), BY_DATASET, argv)
    federation = common.Federation(args)
    run = common.Run(__file__, args, federation)
    step = client_step(federation.net, args)

    w_0 = federation.initial_weights()
    state = State(w=w_0)  # l.1: w_0, [d]
    for t, S in run.rounds(state):  # l.2-4: S_t, [m] (D5)
        eta = federation.eta(t)  # D4
        w = state.w.expand(len(S), -1)  # [m, d]
        # The loops of l.9-10 are in common.py: E and B in Federation.plan, the minibatches in Federation.train_alone
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta)  # l.5-6, l.8-10 (D2), l.12: [m, d]
        n_k = federation.n[S]  # [m]
        state.w = federation.mean(w_k, n_k)  # l.7 (D1): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


if __name__ == "__main__":
    main()
