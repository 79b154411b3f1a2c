"""FedAvg: Federated Averaging (AISTATS 2017, arXiv 1602.05629). McMahan, Moore, Ramage, Hampson,
Aguera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized Data".

    python fedavg.py --dataset mnist      Table 2, row E=5, B=10: CNN, i.i.d. clients
    python fedavg.py --dataset cifar10    Table 3, row FedAvg: 2,000 rounds (we ran 300)

Rounds to 99 % (CNN, eta .1) or 97 % (2NN, eta .147) on MNIST, i.i.d. clients, C=.1, seed 0:
         E, B    paper  here    record (in results/fedavg-1)
    CNN  5, 10   20     20.0    fedavg-mnist-cnn-split-iid-C-0.1-E-5-B-10-lr-0.1-rounds-40/0
    2NN  1, 10   87     85.2    fedavg-mnist-2nn-split-iid-C-0.1-E-1-B-10-lr-0.147-rounds-174/0
    2NN  1, all  1474   2188.8  fedavg-mnist-2nn-split-iid-C-0.1-E-1-B-0-lr-0.147-rounds-2948/0

"global" is the accuracy of the one model w on the central test images, as in the paper, "personal"
its mean accuracy on the clients' test images. docs/fedavg.md explains our choices:

    D1  Line 7 averages over the sampled clients S_t, as the authors' correction (arXiv v4) does.
    D2  Lines 8 to 10: a client shuffles and cuts P_k anew in every epoch; the paper cuts it once.
    D3  Line 3: C*K is rounded down.
    D4  Not in the paper: w_0, eta, padding, augmentation ranges, pixels (ours match the 87 rounds).

[d]: a model's d weights; [m, d]: m clients' models; net(w, b.x): minibatch b's logits. The listing
is Algorithm 1 in our words, with our line numbers. Client k of K holds the n_k training images P_k.
C is the fraction of clients that a round samples, eta the learning rate, --lr * --lr-decay^t.

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
    11          w = w - eta * gradient of loss(w; b)
    12  return w to the server
"""

from types import SimpleNamespace as State

import common


def local_training(net, args):
    """Returns client_update(w, epochs, eta), which carries out lines 8 to 12 for one client.
    `epochs` yields E passes over P_k, each cut into minibatches b (common.Epochs)."""

    @common.step  # on a GPU it runs for all clients at once, or as a CUDA graph
    def sgd_step(w, b, eta):  # w: [d]
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        gradient = common.grad(loss)(w)  # [d]
        return common.descend(w, eta, gradient)  # l.11: w - eta * gradient

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

    state = State(w=federation.initial_weights())  # l.1: w_0, [d]
    for t in run.rounds(state):  # l.2; after a round `state` is written to disk, for --resume
        m = max(int(args.fraction * federation.K + 1e-9), 1)  # l.3 (D3): .29 * 100 counts as 29
        S = federation.sample(t, m)  # l.4: [m]
        w_t = state.w.expand(m, -1)  # [m, d]: the same for every client
        eta = federation.eta(t)
        # for each client of S, train calls client_update(its row of w_t, its epochs, eta); an epoch
        # shuffles P_k and cuts it (l.8: common.Epochs)
        w_k = federation.train(client_update, S, t, own=[w_t], shared=[eta])  # l.5-6: [m, d]
        n_k = federation.n[S]  # [m]
        state.w = n_k @ w_k / n_k.sum()  # l.7 (D1): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())  # for the record: how many weights are sent
        run.stop_at_target(state.w)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# These are the settings of Table 2 (row E=5, B=10) and Table 3 (row FedAvg). The first eta, --lr,
# is ours (D4).
DEFAULTS = dict(split="iid", per_client=2, clients=100, client_test=0, fraction=0.1, rounds=200,
                epochs=5, batch_size=10, lr=0.1, target=[])
BY_DATASET = {
    "mnist": dict(rounds=1000, model="mnistcnn", transform="centre", target=[0.99]),
    "cifar10": dict(rounds=2000, batch_size=50, lr_decay=0.99, model="tfcnn",
                    transform="tensorflow", target=[0.8, 0.82, 0.85]),
    # ours, for a quick look
    "shapes": dict(split="shards", per_client=4, client_test=0.2, rounds=30, epochs=1,
                   batch_size=10, clients=20, fraction=0.5, lr=0.1, lr_decay=0.95,
                   transform="normalize", eval_every=3),
}


def arguments(argv):
    args = common.parse(common.parser(__doc__, **DEFAULTS), BY_DATASET, argv)
    if args.momentum or args.weight_decay:
        common.refuse("the paper's clients have neither --momentum nor --weight-decay; python "
                      "baselines.py --method fedavg has both")
    return args


if __name__ == "__main__":
    main()
