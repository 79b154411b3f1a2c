"""An example of a new method: each client mixes the server's last layer with its own.

    PYTHONPATH=/path/to/checkout python lastlayer.py --dataset shapes

     1  w = w_0, the global model;  for every client k, v_k = the last layer of w_0
     2  for each round t, with the sampled clients S_t:
     3      for each client k in S_t:
                w_k = w, but its last layer is (1 - lambda) * (that of w) + lambda * v_k
     4          for each minibatch b:  w_k = w_k - eta * gradient of f_k(w_k; b)
     5          v_k = the last layer of w_k
     6      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

f_k(w_k; b) is client k's loss on minibatch b. "personal" tests the new w, mixed with v_k as in
line 3. lambda is --mix: with 0 the method is FedAvg, with 1 its personal models are FedPer's. n_k
counts client k's training images. fedavg.py explains the other symbols.
"""

from types import SimpleNamespace as State

import torch

import common
import fedavg


def mixed(w, v, last, lam):
    """Returns w [..., d] with its last layer mixed as in line 3. v is the client's own last layer,
    `last` the slice of w."""
    return torch.cat([w[..., : last.start], (1 - lam) * w[..., last] + lam * v], -1)


def local_training(net, last, args):
    """Returns client_update(w, v, epochs, eta): lines 3 to 5, for one client."""
    sgd = common.sgd(args, net.decayed)  # w - eta * gradient, with --momentum and --weight-decay

    @common.step
    def sgd_step(w, u, b, eta):  # w, u: [d] weights and momentum; b: a minibatch
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        return sgd(w, u, common.grad(loss)(w), eta)  # l.4

    def client_update(w, v, epochs, eta):
        w = mixed(w, v, last, args.mix)  # l.3
        u = torch.zeros_like(w)
        for minibatches in epochs:  # l.4: --epochs times
            for b in minibatches:
                w, u = sgd_step(w, u, b, eta)
        return w, w[..., last]  # l.5: w_k, v_k

    return client_update


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation)
    last = federation.net.last_layers(1)  # the slice of w that is the last layer
    client_update = local_training(federation.net, last, args)

    w_0 = federation.initial_weights()  # [d]
    state = State(w=w_0, V=federation.per_client(w_0[last]))  # l.1: [d], [K, size of `last`]

    def models(S):
        return mixed(state.w.expand(len(S), -1), state.V[S], last, args.mix)  # [m, d]

    for t in run.rounds(state, clients=models):  # l.2
        S = federation.sample(t)  # l.2
        w, v, eta = state.w.expand(len(S), -1), state.V[S], federation.eta(t)
        w_k, v_k = federation.train(client_update, S, t, own=[w, v], shared=[eta])  # l.3-5
        state.V[S] = v_k
        n_k = federation.n[S]  # [m]
        state.w = n_k @ w_k / n_k.sum()  # l.6: [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(models))
    return run.record()


def arguments(argv):
    parser = common.parser(__doc__)
    parser.add_argument("--mix", type=common.fraction, default=0.5,
                        help="lambda, the weight of the client's own last layer")
    return common.parse(parser, {"shapes": fedavg.BY_DATASET["shapes"]}, argv)


if __name__ == "__main__":
    main()
