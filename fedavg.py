"""FedAvg: Federated Averaging. McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-Efficient Learning of Deep
Networks from Decentralized Data", AISTATS 2017, arXiv 1602.05629.

    python fedavg.py --dataset mnist                Table 2: CNN, E=5, B=10, IID (published: 99 % after 20 rounds)
    python fedavg.py --dataset cifar10              Table 3: FedAvg (published: 80, 82, 85 % after 280, 630, 2000 rounds; hours)
    python fedavg.py --dataset mnist --model 2nn --epochs 1 --target .97 --lr .147    Table 1: 2NN, IID (published: 97 % in 87)

What to expect (seed 0): rounds until the test accuracy is 99 % (CNN) or 97 % (2NN), interpolated. IID: clients' images are
random. C=.1: a tenth of the clients is in a round. B=all: FedSGD, the third command with `--batch-size 0 --rounds 2948`.

         E  B    eta   paper  here    top-1 min record
    CNN  5  10   .1    20     20.0    .9900 27  results/fedavg-1/fedavg-mnist-cnn-split-iid-C-0.1-E-5-B-10-lr-0.1-rounds-40/0
    2NN  1  10   .147  87     85.2    .9711 1   results/fedavg-1/fedavg-mnist-2nn-split-iid-C-0.1-E-1-B-10-lr-0.147-rounds-174/0
    2NN  1  all  .147  1474   2188.8  .9701 5   results/fedavg-1/fedavg-mnist-2nn-split-iid-C-0.1-E-1-B-0-lr-0.147-rounds-2948/0

There is one model w, measured after line 7. "global": on the central test images, as in the paper. "personal": on each client's
test images, mean over clients. With --client-test above 0 these are its own; else central ones, drawn with its class shares.

How to read the code. "l.7": line 7. net(w, x): the logits with the weights w. grad(loss): the function that gives loss's
gradient. b: a minibatch, images b.x, labels b.y. [d]: d numbers, a model. [m, d], [m]: d, or one, for each of m clients in S_t.

The paper's Algorithm 1, in our words, with our line numbers. K clients. P_k: client k's n_k images. loss: cross-entropy.

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

Choices that change a number. docs/fedavg.md has each in full.

    D1  Line 7 is the authors' own correction (arXiv v4): the sum is over the sampled clients S_t, not over all K.
    D2  Lines 8 to 10: a client's images are shuffled and cut again in every epoch. The paper cuts them once.
    D3  Line 3: C*K is rounded down.
    D4  Not in the paper: w_0, eta, padding, augmentation's ranges, MNIST's pixels (-1/2 to 1/2, chosen by the 2NN's rounds).
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
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.11: w - eta * g; our flags add decay * w + momentum * u to g

    return step


def main(argv=None):
    args = common.parse(common.parser(__doc__, **DEFAULTS), BY_DATASET, argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    step = client_step(federation.net, args)

    w_0 = federation.initial_weights()  # l.1: [d]
    state = State(w=w_0)  # what the server keeps from round to round
    for t, S in run.rounds(state):  # l.2-4: S_t by Federation.sample, m = max(C*K, 1) (D3)
        eta = federation.eta(t)  # --lr, times --lr-decay in every round
        w = state.w.expand(len(S), -1)  # [m, d]
        # federation.train does for each client k of S, at once or one after the other (Federation.plan, train_alone):
        #   for epoch in range(E):                     l.9
        #     for b in minibatches(shuffled(P_k), B):  l.8, l.10 (D2)
        #       client = step(client, b, eta)          l.11
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta)  # l.5-6, l.12: [m, d]; u starts at 0
        n_k = federation.n[S]  # [m]
        state.w = federation.mean(w_k, n_k)  # l.7: weighted by n_k (D1): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())  # for the record: how many numbers travel
        if run.evaluates(state.w):
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


# ---------------------------------------------------------------------------------------------------------------------
# Around it

# Table 2, row E=5, B=10; Table 3, row FedAvg. eta: ours (D4)
DEFAULTS = dict(split="iid", per_client=2, clients=100, client_test=0, fraction=0.1, rounds=200, epochs=5, batch_size=10,
                lr=0.1, momentum=0.0, target=[])
BY_DATASET = {
    "mnist": dict(rounds=1000, model="mnistcnn", transform="centre", target=[0.99]),
    "cifar10": dict(rounds=2000, batch_size=50, lr_decay=0.99, model="tfcnn", transform="tensorflow", target=[0.8, 0.82, 0.85]),
    # ours, for a quick look
    "shapes": dict(split="shards", per_client=4, client_test=0.2, rounds=30, epochs=1, batch_size=10, clients=20, fraction=0.5,
                   lr=0.02, lr_decay=0.95, momentum=0.9, transform="normalize", eval_every=3),
}

if __name__ == "__main__":
    main()
