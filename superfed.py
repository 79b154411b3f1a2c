"""SuPerFed: personalised federated learning in the subspace between two models, from Hahn, Jeong, Lee, "Subspace Learning for
Personalized Federated Optimization", 2021, arXiv 2109.07628v1.

    python superfed.py --dataset cifar10 --mix model --out runs/model     (Table 1; published: global top-1 .4535, top-5 .8987)
    python superfed.py --dataset cifar10 --mix layer --out runs/layer     (Table 1; published: global top-1 .4706, top-5 .9007)

Measured, all 200 rounds, seed 0, 2 CPU cores, 31 and 32 min of training:
    results/superfed-1/superfed-cifar10-mix-model/0:
        global 0.4713, personal 0.8529, by the paper's choice of lambda 0.8651
    results/superfed-1/superfed-cifar10-mix-layer/0:
        global 0.4978, personal 0.8706, by the paper's choice of lambda 0.8706

The personal columns of Tables 1 to 3 are lost in our copy; the authors' slides have .848 (Model Mixing) and .881 (Layer
Mixing), very likely after the 100 rounds of Figure 2.

Models of one shape: w^f, the federated one, which travels; w^l_k, the local one of client k, which never leaves it; and
their mixtures W_k(lambda) = (1-lambda) w^f + lambda w^l_k, weight by weight. "global" is the server's w^f on the central
test images. "personal" is W_k(lambda) on client k's own test images, with one lambda for all clients and layers, chosen on
their training images, or validation images with --client-val; personal@test is the paper's choice, personal@lambda=0 the global
model on the clients' images (D12).

The paper's Algorithm 1, in our words (K clients, n_k training images of client k; Phase II begins with round L*R):

    Server
     1  choose w^f_0 and, with other random seeds, w^l_k for every client k
     2  for each round t = 0, 1, ..., R-1:
     3      S_t = max(C*K, 1) random clients
     4      for each client k in S_t, in parallel:
     5          w^f_k = ClientUpdate(k, w^f_t)
     6      w^f_{t+1} = sum over k in S_t of n_k/n * w^f_k,   n = sum over k in S_t of n_k
    ClientUpdate(k, w^f)
     7  w^g = w^f, frozen
     8  for each of E local epochs:
     9      cut the client's training images into minibatches of size B
    10      for each minibatch b:
    11          lambda = 0, nu = 0 in Phase I;  lambda ~ U(0,1) in Phase II: one (Model Mixing) or one per layer (Layer Mixing)
    12          W = (1-lambda) w^f + lambda w^l_k
    13          loss = l(W; b) + nu * cos^2(w^f, w^l_k) + mu * ||w^f - w^g||^2,   cos(u, v) = <u, v> / (||u|| ||v||)      (3)
    14          (w^f, w^l_k) = (w^f, w^l_k) - eta * gradient of loss
    15  keep w^l_k, return w^f to the server

Rounds count from 0 here (line 2's range is lost in our copy of the paper), and from 1 in what the program prints.

Deviations. Our copy of the paper has lost most formulas; (3) and the body of ClientUpdate are restored from its text and the
authors' slides. "Official" is the authors' code for v1 (github vaseline555/SuPerFed, commit ae1803b). It has Model Mixing
only, so that --as official --mix layer is our combination. --as official switches D1 to D4 and nothing else. On `shapes`
(means over seeds 0 to 2, results/LOG.md, 2026-11-20) personal is .863 without and .860 with it (Model Mixing), .782 and .765
(Layer Mixing); standard deviations over the seeds are .02 to .06. Other effects are not measured unless stated.
    D1  Line 13: the official proximal term is mu * (1-lambda) * the sum over tensors of ||w^f - w^g||, not squared. Here it is
        squared, as in (3); the official one with --as official.
    D2  Lines 11 to 14: officially a bias has one copy, which is federated, never mixed, and no part of the cosine. Here w^l
        has biases too, since the paper makes no exception; the official way with --as official.
    D3  Line 1: officially w^l_k starts alike for all clients, which the paper's "broadcast a copy to all clients" can mean.
        Its text gives each client "a set of paired model parameters [...], each of which is initialized with a different
        random seed", which may mean only that w^f and w^l_k differ; the authors' later code (KDD 2022) seeds w^l_k with k. So
        here every client has its own, and with --as official all start alike. Two more differences are not offered: the
        official code seeds anew before each layer, which correlates the layers, and its threads share random generators, so
        that no run can be repeated. The Xavier initialisation is from the official code.
    D4  Lines 2, 11 and 14: officially rounds count from 1, eta is multiplied by .995^r in round r, and Phase II begins with
        round int(L*R). That is one round earlier than here, two if L*R isn't whole, and even with L = 1 the last round is in
        Phase II. The paper mentions no decay. --as official does all three. In the authors' later code Phase II begins one
        round later than in the code for v1, which is as here where L*R is whole.
    D5  Line 11: L of Layer Mixing is not stated. It is .8 here, as Table 1's CIFAR-10 row equals Table 3's row for .8; that
        it is so for the other data sets is a guess, and so are Model Mixing's mu and nu for Layer Mixing. In Phase II a
        client takes part about (1-L)*R*C times: 12 times for Model Mixing on CIFAR-10, 4 times for Layer Mixing. Whoever
        never does is evaluated with a w^l that is still random.
    D6  Lines 11 and 13: a layer's bias shares the lambda of its weights; the code for v1 mixes no biases (D2); the later
        code's convolutions and linear layers have none, and BatchNorm's are mixed. The cosine is one for the whole model in
        both schemes, as in the later code.
    D7  Line 14: momentum 0.9 is in the paper's text, not in its algorithm. Its buffers are 0 at the start of every round, as
        in the official code. Neither paper nor official code has a weight decay; --weight-decay is ours.
    D8  The split. Officially CIFAR-10's shards aren't random: 20 clients have classes 0 and 1, 20 have 2 and 3, and so on, so
        that the published numbers were measured on five pairs of classes. CIFAR-100 has K=200 with 5 classes and 250 images
        each, and the other splits depend on the seed of the initial weights. Not offered: the paper's text says otherwise.
        Here shards are random, two for each of K=100. For EMNIST and Tiny ImageNet K is what the random sizes give (paper:
        1,543 and 390, official code for Tiny ImageNet: 388); EMNIST has 116,323 central test images (paper: 82,587).
    D9  Lines 9 and 10: the official code drops the last, smaller minibatch, in testing too, where it still divides by all
        images. Not offered: it lowers EMNIST's and Tiny ImageNet's accuracies by an artefact. Here all images count.
    D10  Official ECE is a mean over minibatches of 20 test images, which is too high. Not offered: here over all of a client's.
    D11  Officially the personal models are evaluated every 100 rounds, before that round's training, and a client outside S_t
        with the w^f that it last received or trained, however old. Not offered: it measures who was sampled. Here all clients
        have the current w^f, every --eval-every rounds and after the last.
    D12  The paper reports the best of lambda = 0, .1, ..., 1 (one for all clients, and in Layer Mixing, we assume, one for all
        layers) on the very test images that it is chosen on: personal@test. Here "personal" is at the lambda with the best
        mean accuracy over clients on training images (of each client as many as it has test images; the smaller lambda if
        equal), although w^l was fitted to these, or with --client-val on validation images, of which the paper's experiments
        have none. personal@lambda=0.5 needs no choice. In Phase I lambda is 0. Measured, in the two runs of 200 rounds above:
        the paper's choice is .012 (Model Mixing) and .000 (Layer Mixing) higher. Whether the published numbers are of the last
        or of the best round is not known; the record has both, and `best` is a choice on test images.
    D13  Line 3: C*K is rounded down.
    D14  The paper's abstract claims gains for unseen clients; it describes no experiment. With --unseen N, N random clients
        take no part in line 3; after the last round each does lines 7 to 14 once, in Phase II, and is evaluated with its w^l
        and the server's w^f. Their traffic isn't counted.
    D15  Line 6: the official n_k counts a client's test images too: the same shares up to rounding. Its average of the w^l_k
        and its local fine-tuning are never used. Not offered: they change nothing.
    D16  Line 14: in our copy of the paper the loop over an epoch's minibatches ends with a line of which only "(3)" is left,
        and two lines, of which nothing is left, follow the loop. The update may stand in any of them, once per minibatch or
        once per epoch. It is done for every minibatch, as in the official code and for (3) to be of a minibatch; the text has
        the mixing "at every batch update".
"""

from math import ceil
from types import SimpleNamespace as State

import numpy as np
import torch

import common

# Table 1, CIFAR-10, and the other columns of Tables 1 and 2. K and R are the paper's; C, E, B, eta, mu, nu and Model Mixing's L
# (see `arguments`) are from the official scripts, since our copy of the paper has lost them.
DEFAULTS = dict(split="shards", clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20, lr=0.01, momentum=0.9,  # D8
                eval_every=10)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, clients=20, fraction=0.5, per_client=4, lr=0.02, start=0.5, eval_every=5),
}
LAMBDAS = [i / 10 for i in range(11)]


def mix(w_f, w_l, lam):
    """W(lambda) for one lambda or for one per weight [d]; w_f [d], w_l [d] or [m, d]."""
    return (1 - lam) * w_f + lam * w_l  # l.12


def pairs(net, args):
    """[d]: 1 for every weight of w^f that has a partner in w^l."""
    return net.per_weight([float(args.as_ == "paper" or not name.endswith(".bias")) for name, _, _ in net.tensors])  # D2


def client_step(net, args):
    """ClientUpdate's body, for one client and one minibatch."""
    paired = pairs(net, args)  # [d]
    own = net.layer_of if args.mix == "layer" else torch.zeros_like(net.layer_of)  # [d] which lambda is a weight's (D6)

    def objective(w_f, w_l, batch, phase_two, w_g):
        lam = phase_two * batch.draw[own]  # l.11: [d]; phase_two is a tensor, 0 or 1, so that one captured step serves both
        loss = common.cross_entropy(net(mix(w_f, w_l, lam * paired), batch.x), batch)  # l.12 (D2)
        u, v = paired * w_f, paired * w_l
        cos = (u * v).sum() / (u.norm() * v.norm())
        if args.as_ == "official":
            near = sum(z.norm() for z in ((1 - lam) * (w_f - w_g)).split(net.sizes))  # D1
        else:
            near = (w_f - w_g).square().sum()
        return loss + phase_two * args.nu * cos**2 + args.mu * near  # l.13, l.11

    def step(client, batch, eta, phase_two, w_g):
        w_f, w_l, u_f, u_l = client  # [d] each: weights, and their momentum
        g_f, g_l = common.grad(objective, argnums=(0, 1))(w_f, w_l, batch, phase_two, w_g)  # l.14, of l.13
        w_f, u_f = common.sgd(args, w_f, u_f, g_f, eta, net.decayed)  # l.14: w - eta * u (D7, D16)
        w_l, u_l = common.sgd(args, w_l, u_l, g_l, eta, net.decayed)  # l.14
        return w_f, w_l, u_f, u_l

    return step


def measure_mixtures(federation, clients, w_f, w_l, paired):
    """Personal measures of the clients with these numbers at each of LAMBDAS, and for the choices of D12. w_f [d]; w_l(S) [m, d]."""
    split, part = federation.split, "val" if federation.args.client_val else "train"
    images = split.val if part == "val" else [a[: len(b)] for a, b in zip(split.train, split.test)]  # D12
    at = []  # one per lambda
    for lam in LAMBDAS:
        def W(S):
            return mix(w_f, w_l(S), lam * paired)  # [m, d]

        held = federation.evaluate_clients(W, images, clients)
        at.append({"lambda": lam, f"{part}_mean": held["mean"], f"{part}_loss": held["loss"],
                   **federation.evaluate_clients(W, among=clients)})  # D10
    by_loss = min(at, key=lambda measures: measures[f"{part}_loss"])
    by_accuracy, by_test = (max(at, key=lambda measures: measures[key]) for key in (f"{part}_mean", "mean"))
    short = common.without_clients
    return {"personal": by_loss, f"personal@{part}-accuracy": short(by_accuracy), "personal@test": short(by_test),
            "personal@lambda=0.5": short(at[5]), "personal@lambda=0": short(at[0]), "lambdas": [*map(short, at)]}


def show(run, first):
    """Prints the last round's choices of lambda; with --plot draws lambdas.png (Fig. 2's form) and phases.png (Fig. 3's)."""
    history = run.record()["rounds"]
    row = history[-1]
    groups = [(name, part) for name, part in (("trained", row), ("unseen", row.get("unseen", {}))) if "lambdas" in part]
    for name, part in groups:
        print(f"\n{name + ' clients, lambda':<28}{'lambda':>8}{'mean':>10}{'std':>10}{'loss':>10}{'ece':>10}{'mce':>10}")
        images = "validation" if run.args.client_val else "training"
        accuracy = f"personal@{'val' if run.args.client_val else 'train'}-accuracy"
        for choice, how in (("personal", f"smallest {images} loss"), (accuracy, f"best {images} accuracy"),
                            ("personal@test", "best on test images"), ("personal@lambda=0.5", "fixed"),
                            ("personal@lambda=0", "0: the global model")):
            values = "".join(f"{part[choice][key]:>10.4f}" for key in ("mean", "std", "loss", "ece", "mce"))
            print(f"{how:<28}{part[choice]['lambda']:>8}{values}")
    if not run.args.plot:
        return
    if groups:
        with common.drawing(run.out / "lambdas.png", size=(5, 3.5)) as axis:
            for name, part in groups:
                mean, std = ([at[key] for at in part["lambdas"]] for key in ("mean", "std"))
                label = f"{name} clients, best on test {max(mean):.4f}"
                axis.errorbar(LAMBDAS, mean, std, capsize=3, marker="o", markersize=3, label=label)
            axis.set(xlabel="lambda (0: w^f, 1: w^l)", ylabel="accuracy, mean and std over clients", ylim=(0, 1.05),
                     title=f"{run.args.mix} mixing, global top-1 {row['global']['top1']:.4f}")
            axis.legend()

    rows = [row for row in history if "global" in row]
    with common.drawing(run.out / "phases.png", 1, 2, (10, 3.5)) as axes:
        for axis, key, name in zip(axes, ("top1", "loss"), ("top-1 accuracy", "loss")):
            axis.plot([row["round"] for row in rows], [row["global"][key] for row in rows], marker=".")
            if first < run.args.rounds:
                axis.axvline(max(first, 0) + 0.5, color="black", linewidth=1, label="Phase II begins")
                axis.legend()
            axis.set(xlabel="round", ylabel=f"global {name}", title=f"{run.args.mix} mixing")


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("SuPerFed")
    own.add_argument("--mix", choices=("model", "layer"), default="model", help="one lambda, or one per layer")
    own.add_argument("--mu", type=common.nonnegative, default=0.01, help="mu, weight of the proximal term")
    own.add_argument("--nu", type=common.nonnegative, default=2.0, help="nu, weight of the squared cosine in Phase II")
    own.add_argument("--start", type=common.fraction,
                     help="L, share of the rounds before Phase II; 1: no Phase II, but see D4 (unless given: .8 with --mix "
                          "layer; with --mix model .5 for CIFAR-100, .4 for others; .5 for shapes)")
    own.add_argument("--as", dest="as_", choices=("paper", "official"), default="paper", help="whom to follow in D1 to D4")
    own.add_argument("--own-start", action="store_true", help="every client's w^l starts from a seed of its own (D3)")
    own.add_argument("--unseen", type=common.nonnegative_int, default=0, help="clients that join only after the last round")
    args = common.parse(parser, BY_DATASET, argv)
    if args.as_ == "official":
        parser.set_defaults(lr_decay=0.995)  # D4
        args = common.parse(parser, BY_DATASET, argv)
    if args.start is None:
        args.start = 0.8 if args.mix == "layer" else 0.5 if args.dataset == "cifar100" else 0.4  # D5
    return args


def main(argv=None):
    args = arguments(argv)
    official = args.as_ == "official"
    federation = common.Federation(args)
    net, K, device = federation.net, federation.K, federation.device
    if args.unseen >= K:
        common.refuse(f"--unseen {args.unseen} leaves none of the {K} clients to train; use a smaller number")
    order = common.stream(args.split_seed, "split", 2).permutation(K)
    unseen, seen = np.sort(order[: args.unseen]), np.sort(order[args.unseen :])  # D14
    run = common.Run(__file__, args, federation)
    first = int(args.start * args.rounds) - 1 if official else ceil(args.start * args.rounds - 1e-9)  # D4
    print(f"phases  Phase II begins with round {max(first, 0) + 1}" if first < args.rounds else "phases  no Phase II")
    paired = pairs(net, args)
    step = client_step(net, args)

    def draw(rng, steps):
        return rng.random((steps, len(net.layers)))  # l.11: lambda, of which Model Mixing takes the first

    def client_update(S, t):
        """Lines 7 to 14 for the clients S: their w^f_k and w^l_k, [m, d] each."""
        eta = federation.eta(t + 1 if official else t)  # D4
        phase_two = torch.tensor(float(t >= first), device=device)
        w_f, w_l = state.w_f.expand(len(S), -1), state.W_l[S]  # [m, d] each
        start = (w_f, w_l, torch.zeros_like(w_l), torch.zeros_like(w_l))
        return federation.train(step, start, S, t, eta, phase_two, state.w_f, draw=draw)[:2]  # l.7-10 (D9)

    state = State(w_f=federation.initial_weights(),  # l.1: [d]
                  W_l=federation.per_client(lambda k: net.init(
                      common.stream(args.seed, "initialisation", 0, k + 1 if args.own_start else 1))))  # D3: [K, d]
    for t, S in run.rounds(state, among=seen):  # l.2-3: S_t, [m] (D13); C*K counts those that take part
        w_f, w_l = client_update(S, t)  # l.4-5
        n_k = federation.n[S]  # [m]
        state.w_f = federation.mean(w_f, n_k)  # l.6 (D15): [d]
        if t >= first:  # in Phase I w^l doesn't move; a weight decay would move it
            state.W_l[S] = w_l  # l.15: [K, d]
        run.sent(up=w_f.numel(), down=w_f.numel())
        if run.evaluates():
            if t >= first:
                measures = measure_mixtures(federation, seen, state.w_f, lambda S: state.W_l[S], paired)  # D11
            else:
                measures = {"personal": federation.evaluate_clients(state.w_f, among=seen)}  # D12
            if args.unseen and t == args.rounds - 1:  # D14
                rows = federation.rows(unseen)
                w_l = client_update(rows, args.rounds)[1]
                measures["unseen"] = measure_mixtures(
                    federation, unseen, state.w_f, lambda S: w_l[np.searchsorted(rows, S)], paired)
            run.log(federation.evaluate(state.w_f), **measures)
    show(run, first)


if __name__ == "__main__":
    main()
