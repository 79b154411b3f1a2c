"""FedAvgM: Federated Averaging with Server Momentum. Hsu, Qi, Brown, "Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification", 2019, arXiv 1909.06335.

    python fedavgm.py --dataset cifar10    Figure 5: C=.05, E=1, alpha=.1 (D6), 10,000 rounds

Global accuracy after 10,000 rounds with --alpha 0 (one class per client), bf16, seed 0:
             paper  last   best   record (in results/fedavgm-headline)
    FedAvgM  .769   .7993  .8015  fedavgm-cifar10-alpha-0-C-0.05-E-1-lr-0.0003-beta-0.99/0
    FedAvg   .301   .5413  .6974  fedavgm-cifar10-alpha-0-C-0.05-E-1-lr-0.03-beta-0/0
    FedAvg runs with --beta 0 --lr .03; its .5413 is unexplained. docs/fedavgm.md explains these:

    D1  Line 11: of tfcnn only the hidden linear layers' kernels decay; the paper does not say.
    D2  Lines 8 to 10: a client shuffles and cuts P_k anew in every epoch; FedAvg cuts it once.
    D3  Line 3: C*K is rounded down.
    D4  We augment images as FedAvg's paper does, with its tutorial's ranges; this one doesn't say.
    D5  Class proportions follow Dir(alpha/10), as in the paper; some libraries use alpha.
    D6  C is the paper's 5 of 100; E, B, alphas, eta and beta, which our copy lost, are Flower's.
    D7  The text names Nesterov and server rate 1; formulas 7-7b are lost. The form is PyTorch's.

[d]: a model's d weights; [m, d]: m clients' models; net(w, b.x): minibatch b's logits. Client k of
K holds the n_k training images P_k; C: share of clients in a round; eta: --lr. The listing is
FedAvg's, with the server's momentum v, whose factor is beta (lines 1, 7, 7a, 7b), and decay.

    Server
     1  choose w_0;  v = 0
     2  for each round t = 0, 1, ..., T-1:
     3      m = max(C*K, 1)
     4      S_t = m random clients
     5      for each client k in S_t, in parallel:
     6          w_k = ClientUpdate(k, w_t)
     7      dw = sum over k in S_t of n_k/n * (w_t - w_k),   n = sum over k in S_t of n_k
    7a      v = beta*v + dw
    7b      w_{t+1} = w_t - (dw + beta*v)      Nesterov, as in the experiments; plain: w_t - v
    ClientUpdate(k, w)
     8  cut P_k into minibatches of size B
     9  for each of E local epochs:
    10      for each minibatch b:
    11          w = w - eta * (gradient of loss(w; b) + decay * w)
    12  return w to the server
"""

from types import SimpleNamespace as State

import torch

import common


def local_training(net, args):
    """Returns client_update(w, epochs, eta), which carries out lines 8 to 12 for one client.
    `epochs` yields E passes over P_k, each cut into minibatches b (common.Epochs)."""
    decay = args.weight_decay * net.decayed  # [d]: 0 for weights that do not decay (D1)

    @common.step  # on a GPU it runs for all clients at once, or as a CUDA graph
    def sgd_step(w, b, eta):  # w: [d]
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        gradient = common.grad(loss)(w)  # [d]
        direction = torch.addcmul(gradient, decay, w)  # l.11: gradient + decay * w
        return common.descend(w, eta, direction)  # l.11: w - eta * (gradient + decay * w)

    def client_update(w, epochs, eta):
        for minibatches in epochs:  # l.8-9: E epochs, each cut into minibatches of size B (D2)
            for b in minibatches:  # l.10
                w = sgd_step(w, b, eta)
        return w  # l.12

    return client_update


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    client_update = local_training(federation.net, args)

    w_0 = federation.initial_weights()
    state = State(w=w_0, v=torch.zeros_like(w_0))  # l.1: w_0 and v = 0, [d]
    for t in run.rounds(state):  # l.2; after a round `state` is written to disk, for --resume
        m = max(int(args.fraction * federation.K + 1e-9), 1)  # l.3 (D3): .29 * 100 counts as 29
        S = federation.sample(t, m)  # l.4: [m]
        w_t = state.w.expand(m, -1)  # [m, d]: the same for every client
        eta = federation.eta(t)
        # for each client of S, train calls client_update(its row of w_t, its epochs, eta); an epoch
        # shuffles P_k and cuts it (l.8: common.Epochs)
        w_k = federation.train(client_update, S, t, own=[w_t], shared=[eta])  # l.5-6: [m, d]
        n_k = federation.n[S]  # [m]
        dw = state.w - n_k @ w_k / n_k.sum()  # l.7, since the n_k/n sum to 1: [d]
        state.v = args.beta * state.v + dw  # l.7a: [d]
        if args.server_momentum == "nesterov":
            state.w = state.w - (dw + args.beta * state.v)  # l.7b (D7): [d]
        else:
            state.w = state.w - state.v  # l.7b, plain: [d]
        run.sent(up=w_k.numel(), down=w_k.numel())  # for the record: how many weights are sent
        run.stop_at_target(state.w)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# The settings of Figure 5 at E=1, C=.05, alpha=.1. K is from section 3; C, T and the weight decay
# are from section 4. E, B, alpha, eta and beta are Flower's (D6)
DEFAULTS = dict(split="dirichlet-hsu", alpha=0.1, clients=100, client_test=0.0, fraction=0.05,  # D5
                rounds=10_000, epochs=1, batch_size=64, lr=0.0003, lr_decay=1.0, beta=0.99,
                weight_decay=0.004, model="tfcnn", transform="tensorflow",  # D1, D4, D6
                eval_every=50, target=[])
BY_DATASET = {
    # ours, for a quick look
    "shapes": dict(split="shards", per_client=4, client_test=0.2, rounds=30, clients=20,
                   fraction=0.5, batch_size=20, lr=0.05, beta=0.9, weight_decay=0.0, model="cnn",
                   transform="normalize", eval_every=3),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    group = parser.add_argument_group("FedAvgM")
    group.add_argument("--beta", type=common.fraction,
                       help="beta, the server's momentum; 0 is FedAvg")
    group.add_argument("--server-momentum", choices=("nesterov", "plain"), default="nesterov",
                       help="the form of line 7b")
    args = common.parse(parser, BY_DATASET, argv)
    if args.momentum:
        common.refuse("FedAvgM's clients have no momentum; use --momentum 0, and --beta for the "
                      "server's")
    return args


if __name__ == "__main__":
    main()
