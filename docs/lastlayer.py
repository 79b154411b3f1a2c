"""A method of one's own: the last layer lies between the server's and the client's.

    PYTHONPATH=/path/to/checkout python lastlayer.py --dataset shapes

     1  w: the global model; for every client k, v_k: the last layer of its own.  All from w_0.
     2  for each round t, with the sampled clients S_t:
     3      for each client k in S_t:  w_k = w, but its last layer is (1 - lambda) * (that of w) + lambda * v_k
     4          for each minibatch b:  w_k = w_k - eta * gradient of f_k(w_k; b)
     5          v_k = the last layer of w_k
     6      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

f_k: client k's loss. Global is w. Personal: the new w and v_k, joined as in line 3. lambda = 0 is FedAvg. With lambda = 1 the
personal models are FedPer's.
"""

from types import SimpleNamespace as State

import torch

import common
import fedavg


def client_step(net, args):
    """Line 4, for one client and one minibatch b."""

    def step(client, b, eta):
        w, u = client  # [d] weights, [d] momentum

        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        g = common.grad(loss)(w)  # l.4: [d]
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.4

    return step


def main(argv=None):
    parser = common.parser(__doc__)
    parser.add_argument("--mix", type=common.fraction, default=0.5, help="lambda, the client's share of its last layer")
    args = common.parse(parser, {"shapes": fedavg.BY_DATASET["shapes"]}, argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    step, lam = client_step(federation.net, args), args.mix
    last = federation.net.last_layers(1)  # a slice: where the last layer is in w

    w_0 = federation.initial_weights()  # [d]
    state = State(w=w_0, V=federation.per_client(w_0[last]))  # l.1: [d], [K, size of the last layer]

    def models(S):
        return common.with_part(state.w, last, (1 - lam) * state.w[last] + lam * state.V[S])  # l.3: [m, d]

    for t, S in run.rounds(state):  # l.2
        start = models(S)  # l.3: [m, d]
        w_k, _ = federation.train(step, (start, torch.zeros_like(start)), S, t, federation.eta(t))  # l.4: [m, d]
        state.V[S] = w_k[:, last]  # l.5
        state.w = federation.mean(w_k, federation.n[S])  # l.6: [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(models))


if __name__ == "__main__":
    main()
