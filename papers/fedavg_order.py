"""FedAvg with each client's images one digit after the other, never shuffled: does their order
explain why the paper's 2NN needs 664 rounds? docs/fedavg.md, D2, has the result.

    python -m papers.fedavg_order --dataset mnist --model 2nn --split shards --epochs 1 \
        --target 0.97 --lr 0.0464 --rounds 1200 --eval-every 20
"""

from types import SimpleNamespace as State

import numpy as np

import common
import fedavg
from fedavg import arguments


class Unshuffled(common.Federation):
    def plan(self, k, images, t, epochs, **options):
        images = images[np.argsort(self.data.labels[images], kind="stable")]
        _, *draws = super().plan(k, images, t, epochs, **options)
        return np.tile(images, (epochs, 1)), *draws


def main(argv=None):
    args = arguments(argv)
    federation = Unshuffled(args)
    run, state = common.Run(__file__, federation), State(w=federation.initial_weights())
    client_update = fedavg.local_training(federation.net, args)
    for t in run.rounds(state):
        S = federation.sample(t)
        w_k = federation.train(client_update, S, t, own=[state.w.expand(len(S), -1)],
                               shared=[federation.eta(t)])
        n_k = federation.n[S]
        state.w = n_k @ w_k / n_k.sum()
        run.sent(up=w_k.numel(), down=w_k.numel())
        run.stop_at_target(state.w)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))
    return run.record()


if __name__ == "__main__":
    main()
