"""FedAvgM: Federated Averaging with Server Momentum. Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution
for Federated Visual Classification", 2019, arXiv 1909.06335.

    python fedavgm.py --dataset cifar10           Figure 5: C=.05, 10,000 rounds; E=1, alpha=.1: from Flower's lists (D6)

What to expect: global accuracy, C=.05, E=1, B=64, seed 0. FedAvg is --beta 0 --lr .03. alpha = .1: --rounds 500, two cores.
alpha = 0, one class per client: 10,000 rounds, one core, --precision bf16. Published, most skewed: FedAvgM .769, FedAvg .301.

    alpha  method   last   best   min  record (in results)
    .1     FedAvgM  .4021  .4068  11   scale-0.05/fedavgm-figure-5/fedavgm-cifar10-alpha-0.1-C-0.05-E-1-lr-0.0003-beta-0.99/0
    .1     FedAvg   .3530  .4076  11   scale-0.05/fedavgm-figure-5/fedavgm-cifar10-alpha-0.1-C-0.05-E-1-lr-0.03-beta-0/0
    0      FedAvgM  .7993  .8015  312  fedavgm-headline/fedavgm-cifar10-alpha-0-C-0.05-E-1-lr-0.0003-beta-0.99/0
    0      FedAvg   .5413  .6974  310  fedavgm-headline/fedavgm-cifar10-alpha-0-C-0.05-E-1-lr-0.03-beta-0/0

Section 4.2, in FedAvg's algorithm (fedavg.py's lines). K clients; P_k: client k's n_k training images. loss: cross-entropy.
There is one model w. "global", "personal" and how to read the code: see fedavg.py.

    Server
     1  choose w_0;  v = 0
     2  for each round t = 0, 1, ..., T-1:
     3      m = max(C*K, 1)
     4      S_t = m random clients
     5      for each client k in S_t, in parallel:
     6          w_k = ClientUpdate(k, w_t)
     7      dw = sum over k in S_t of n_k/n * (w_t - w_k),   n = sum over k in S_t of n_k
    7a      v = beta*v + dw
    7b      w_{t+1} = w_t - v;   with Nesterov's momentum, as in the experiments: w_{t+1} = w_t - (dw + beta*v)
    ClientUpdate(k, w)
     8  cut P_k into minibatches of size B
     9  for each of E local epochs:
    10      for each minibatch b:
    11          w = w - eta * (gradient of loss(w; b) + decay * w)
    12  return w to the server

Choices that change a number. docs/fedavgm.md has each in full.

    D1  Line 11: the weight decay .004 acts on the kernels of the two hidden fully connected layers. The paper does not say.
    D2  Lines 8 to 10: a client's images are shuffled and cut again in every epoch. The paper does not say.
    D3  Line 3: C*K is rounded down.
    D4  Images are augmented as in the TensorFlow tutorial, which the network is from. The paper does not say whether its were.
    D5  A client's class shares: Dirichlet(alpha/10, ...), the paper's. Some libraries: alpha per class; their .01 is our .1.
    D6  E, B, alpha, eta, beta: lost in our copy. Here Flower's reproduction's; eta, beta: its pair for alpha 0 and 1 (not .1).
    D7  Lines 7 to 7b: formulas lost in our copy. 7b: Nesterov's momentum as in PyTorch; the server's rate is 1 (the paper).
"""

from types import SimpleNamespace as State

import torch

import common


def client_step(net, args):
    """step: line 11 of ClientUpdate, for one client and one minibatch b."""

    def step(client, b, eta):
        w, u = client  # [d] weights, [d] momentum

        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        g = common.grad(loss)(w)  # l.11: its gradient, [d]
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.11: w - eta * (g + decay * w) (D1); our flag adds momentum * u

    return step


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    step = client_step(federation.net, args)

    w_0 = federation.initial_weights()  # l.1: [d]
    state = State(w=w_0, v=torch.zeros_like(w_0))  # what the server keeps from round to round; l.1: v = 0, [d]
    for t, S in run.rounds(state):  # l.2-4: S_t by Federation.sample, m = max(C*K, 1) (D3)
        eta = federation.eta(t)  # --lr, times --lr-decay in every round
        w = state.w.expand(len(S), -1)  # [m, d]
        # federation.train does for each client k of S, at once or one after the other (Federation.plan, train_alone):
        #   for epoch in range(E):                     l.9
        #     for b in minibatches(shuffled(P_k), B):  l.8, l.10 (D2)
        #       client = step(client, b, eta)          l.11
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta)  # l.5-6, l.12: [m, d]; u starts at 0
        n_k = federation.n[S]  # [m]
        dw = state.w - federation.mean(w_k, n_k)  # l.7, since the n_k/n sum to 1: [d]
        state.v = args.beta * state.v + dw  # l.7a: [d]
        server_step = state.v if args.server_momentum == "plain" else dw + args.beta * state.v  # l.7b (D7)
        state.w = state.w - server_step  # l.7b: [d]
        run.sent(up=w_k.numel(), down=w_k.numel())  # for the record: how many numbers travel
        if run.evaluates(state.w):
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


# ---------------------------------------------------------------------------------------------------------------------
# Around it

# Figure 5 at E=1, C=.05, alpha=.1. K: section 3. T, weight decay: section 4. E, B, alpha, eta, beta: Flower's (D6)
DEFAULTS = dict(split="dirichlet", alpha=0.1, clients=100, client_test=0.0, fraction=0.05, rounds=10_000, epochs=1,  # D5
                batch_size=64, lr=0.0003, lr_decay=1.0, momentum=0.0, beta=0.99, weight_decay=0.004, model="tfcnn",  # D1, D6
                transform="tensorflow", eval_every=50, target=[])  # D4
BY_DATASET = {
    # ours, for a quick look
    "shapes": dict(split="shards", per_client=4, client_test=0.2, rounds=30, clients=20, fraction=0.5, batch_size=20, lr=0.05,
                   beta=0.9, weight_decay=0.0, model="cnn", transform="normalize", eval_every=3),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("FedAvgM")
    own.add_argument("--beta", type=common.fraction, help="beta, server momentum; 0 is FedAvg")
    own.add_argument("--server-momentum", choices=("nesterov", "plain"), default="nesterov", help="the form of line 7b")
    return common.parse(parser, BY_DATASET, argv)


if __name__ == "__main__":
    main()
