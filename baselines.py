"""The methods that the papers of the other files compare with, one function each.

    python baselines.py --method scaffold --dataset cifar10

Each function below is one method: its reference, its pseudocode in our words, its deviations D1..Dn, its step for one client
and one minibatch, and its rounds. K clients; f_k the mean loss on the n_k training images of client k, f_k(w; b) that on a
minibatch b; S_t a set of m = max(C*K, 1) random clients, C*K rounded down; eta the local learning rate; w_0 the same initial
weights for all methods. "Minibatches" are those of the E local epochs, drawn anew in each epoch. "official" means code by the
method's authors. Effects of deviations are not measured unless stated.

"global" is the server's model on the central test images; "personal" is measured on each client's own test images, with the
model that the function names. For it every client, sampled or not, has the server's current model; what a client keeps for
itself is as it was after the last round in which it was sampled.

Local SGD has momentum and weight decay as in fedavg.py: the momentum's buffers are 0 at the start of every round, the decay is
a part of f_k. The defaults are fedavg.py's, SuPerFed's settings for Tables 1 and 2, momentum .9 among them. SuPerFed and FedSLR
tuned each method; FedSLR names some of the values, SuPerFed none. Published accuracies may be of the last or the best round.
"""

import functools
from math import cos, pi
from types import SimpleNamespace as State

import numpy as np
import torch

import common

# SuPerFed's Tables 1 and 2. The column CIFAR-10, and below what differs in the others.
DEFAULTS = dict(split="shards", clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20, lr=0.01, momentum=0.9)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, clients=20, fraction=0.5, per_client=4, lr=0.02, eval_every=3),
}


# What several methods share


def sgd(net, args):
    """Two functions: gradient(w, batch) of f_k, and descend(w, u, g, eta), SGD's step along g with the momentum u; [d] each."""

    def gradient(w, batch):
        g = common.grad(lambda w: common.cross_entropy(net(w, batch.x), batch))(w)
        return torch.addcmul(g, net.decayed, w, value=args.weight_decay) if args.weight_decay else g

    return gradient, functools.partial(common.sgd, args)


def sgd_step(net, args):
    """FedAvg's step, of the methods that differ in what they send."""
    gradient, descend = sgd(net, args)

    def step(client, batch, eta):
        w, u = client  # [d] weights, [d] momentum
        return descend(w, u, gradient(w, batch), eta)

    return step


def gradient_sum(gradient):
    """A step that adds up the gradients of f_k at one w over the client's images, [d]."""

    def step(total, batch, w):
        return total + batch.mask.sum() * gradient(w, batch)

    return step


def own_layers(net, args):
    """The places in w [d] of the weights that a client keeps, its last N layers, for lg-fedavg its first N; and the others'."""
    shape = {where.start: shape for _, where, shape in net.tensors}
    linear = [len(shape[where.start]) == 2 for _, where in net.layers]
    lower, N = args.method == "lg-fedavg", args.personal
    if N is None:
        N = max(linear.index(True), 1) if lower else 1
    if N > len(linear):
        common.refuse(f"--personal {N}: the model {net.name} has only {len(linear)} layers")
    own = net.layer_of < N if lower else net.layer_of >= len(linear) - N
    return own.nonzero()[:, 0], (~own).nonzero()[:, 0]


def put(w, own, V):
    """Models [m, d] of what is shared, w [d], with their own weights V [m, own]."""
    return w.repeat(len(V), 1).index_copy(1, own, V)


# The methods


def local(federation, run, args):
    """Local: every client for itself.

     1  every client k: w_k = w_0
     2  for each round t, for each client k in S_t:
     3      for each minibatch b:  w_k = w_k - eta * gradient of f_k(w_k; b)

    Personal is w_k. Nothing is sent.
    D1  Only sampled clients train, as in FedSLR: as much local work as FedAvg's. The benchmark suites (PFLlib,
        FL-bench) train all clients in every round: --fraction 1. A client that is never sampled is evaluated with w_0.
    """
    step = sgd_step(federation.net, args)
    state = State(W=federation.per_client(federation.initial_weights()))  # l.1: [K, d]
    for t, S in run.rounds(state):  # l.2 (D1)
        w = state.W[S]  # [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, federation.eta(t))  # l.3: [m, d]
        state.W[S] = w_k
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(state.W))


def centralised(federation, run, args):
    """Centralised: SGD on the training images of all clients in one place, the upper line of the plots.

     1  w = w_0;  P = the training images of all clients
     2  for each round t:
     3      for each minibatch b of P:  w = w - eta * gradient of f(w; b)

    Personal is w. Images would be sent once, models are not: no bytes are counted.
    D1  Line 3: a round is C*E epochs of P, as much work as FedAvg's, rounded to whole epochs and at least one.
        What work the papers' central training had is not known. Momentum starts at 0 in each round, as everywhere here.
    """
    step, epochs = sgd_step(federation.net, args), max(1, round(args.fraction * args.epochs))  # D1
    P = np.concatenate(federation.whole.train)  # l.1
    first = np.arange(int(federation.rank == 0))  # of several processes one trains: [1], or [0]
    state = State(w=federation.initial_weights())  # l.1: [d]
    for t, _ in run.rounds(state):  # l.2
        w = state.w.expand(len(first), -1)  # [1, d]
        w, _ = federation.train(step, (w, torch.zeros_like(w)), first, t, federation.eta(t), epochs=epochs, images=[P] * len(first))  # l.3
        state.w = federation.sum(w)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


def fedprox(federation, run, args):
    """FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
    arXiv 1812.06127. fedprox-ft, and with mu = 0 fedavg-ft, add line 5: SuPerFed's FedProx-LU and FedAvg-LU, after Wang et
    al. 2019.

     1  for each round t:  S_t
     2      for each client k in S_t:  w_k = w_t
     3          for each minibatch b:  w_k = w_k - eta * gradient of (f_k(w_k; b) + mu/2 * ||w_k - w_t||^2)
     4      w_{t+1} = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
     5  after the last round, for every client k:  v_k = w_T;  for each minibatch b:  v_k = v_k - eta * gradient of f_k(v_k; b)

    Personal is w_t; for the -ft methods v_k after the last round. Weights are n_k, all clients being equally likely in line 1;
    in the paper's listing, from memory, a client is drawn with a probability like n_k, and the mean is plain.
    D1  Line 3: squared and halved, as in the paper. SuPerFed's code neither squares nor halves; the mu of its tables is not
        known. The default is that of SuPerFed's later code; FedMA's FedProx has .001.
    D2  Clients that stop early and inexact solutions, which the paper is about, are left out, as in all other comparisons.
    D3  Line 5: the number of epochs is not known (SuPerFed's paper has "small steps"). One is what its code has in a path that
        is never run, with the eta that is the default here; with --lr-decay eta is that of round T. FedProx-LU, too, is
        fine-tuned without the proximal term; no paper says whether it has one.
    """
    gradient, descend = sgd(federation.net, args)

    def step(client, batch, eta, mu, w_t):
        w, u = client  # [d] weights, [d] momentum
        return descend(w, u, gradient(w, batch) + mu * (w - w_t), eta)  # l.3 (D1)

    mu = torch.tensor(0.0 if args.method == "fedavg-ft" else args.mu, device=federation.device)
    state = State(w=federation.initial_weights())  # [d]
    for t, S in run.rounds(state):  # l.1
        w = state.w.expand(len(S), -1)  # l.2: [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, federation.eta(t), mu, state.w)  # l.3 (D2)
        state.w = federation.mean(w_k, federation.n[S])  # l.4: [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            v = state.w
            if args.method.endswith("-ft") and t == args.rounds - 1:
                everyone, eta = np.arange(len(federation.clients)), federation.eta(args.rounds)
                v = state.w.expand(len(everyone), -1)  # l.5: [K, d]
                v, _ = federation.train(step, (v, torch.zeros_like(v)), everyone, args.rounds, eta, 0 * mu, state.w,
                                        epochs=args.finetune_epochs)  # l.5 (D3)
            run.log(federation.evaluate(state.w), federation.evaluate_clients(v))


def scaffold(federation, run, args):
    """Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020.

     1  x = w_0;  c = 0 and, for every client k, c_k = 0
     2  for each round t:  S_t
     3      for each client k in S_t:  y_k = x
     4          for each minibatch b:  y_k = y_k - eta * (gradient of f_k(y_k; b) - c_k + c)
     5          Option I:   c_k^+ = gradient of f_k(x)
     6          Option II:  c_k^+ = c_k - c + (x - y_k) / (steps * eta),   steps = how often line 4 was done
     7      x = x + eta_g * mean over S_t of (y_k - x)
     8      c = c + m/K * mean over S_t of (c_k^+ - c_k),   so that c is always the mean of all c_k
     9      c_k = c_k^+

    Personal is x. Weights are uniform. Twice FedAvg's bytes: c_k^+ - c_k goes up, c down.
    D1  Lines 4, 6 and 7: in SuPerFed's later code the correction has no effect. The defaults are FedSLR's, Option II and
        eta_g = 1.
    D2  Line 6: the paper has no momentum; then (x - y_k) / (steps * eta) is the mean of line 4's brackets. With a momentum
        beta y_k goes further. So `reach` takes the place of steps, the distance if eta and all gradients were 1: the sum over
        steps s of 1 + beta + ... + beta^(s-1). With --momentum 0, as FedSLR has it, reach is the number of steps.
    D3  Line 5: one more pass over the client's images, augmented where --transform does so.
    """
    gradient, descend = sgd(federation.net, args)
    add = gradient_sum(gradient)

    def step(client, batch, eta, c):
        y, u, c_k, reach, v = client  # [d] weights, momentum, control; numbers: D2, and its momentum
        y, u = descend(y, u, gradient(y, batch) - c_k + c, eta)  # l.4 (D1)
        v = args.momentum * v + 1  # D2
        return y, u, c_k, reach + v, v

    x = federation.initial_weights()  # l.1: [d]
    state = State(x=x, c=torch.zeros_like(x), C=federation.per_client(torch.zeros_like(x)))  # l.1: C is [K, d]
    for t, S in run.rounds(state):  # l.2
        eta, c_k = federation.eta(t), state.C[S]  # c_k: [m, d]
        zero, none = torch.zeros_like(c_k), torch.zeros_like(federation.n[S])  # [m, d], [m]
        start = (state.x.expand(len(S), -1), zero, c_k, none, none)  # l.3
        y_k, _, _, reach, _ = federation.train(step, start, S, t, eta, state.c)  # l.3-4
        if args.option == "I":
            new = federation.train(add, zero, S, t, state.x, epochs=1, phase=1) / federation.n[S][:, None]  # l.5 (D3): [m, d]
        else:
            new = c_k - state.c + (state.x - y_k) / (reach * eta)[:, None]  # l.6 (D2)
        state.x = state.x + args.global_lr * federation.mean(y_k - state.x)  # l.7
        state.c = state.c + federation.sum(new - c_k) / federation.K  # l.8
        state.C[S] = new  # l.9
        run.sent(up=2 * y_k.numel(), down=2 * y_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.x), federation.evaluate_clients(state.x))


def feddyn(federation, run, args):
    """FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization",
    2021, arXiv 2111.04263.

     1  w = w_0;  h = 0 and, for every client k, g_k = 0
     2  for each round t:  S_t
     3      for each client k in S_t:  theta_k = w
     4          for each minibatch b:
     5              theta_k = theta_k - eta * gradient of (f_k(theta_k; b) - <g_k, theta_k> + alpha/2 * ||theta_k - w||^2)
     6          g_k = g_k - alpha * (theta_k - w)
     7      h = h - alpha/K * sum over S_t of (theta_k - w)
     8      w = mean over S_t of theta_k - h / alpha

    Personal is w. Weights are uniform. FedAvg's bytes: the server can compute every g_k by itself. h is the mean of all g_k;
    in the paper's line 7, from memory, m is the number of all clients, K here. As alpha goes to 0, lines 4 and 5 become
    FedAvg's, but line 8 does not: for every alpha, -h/alpha is the sum of theta_k - w over all past rounds and their clients,
    divided by K.
    fedslr.py without its low-rank penalty is this with alpha = 1/eta_g.
    D1  Line 5: SGD for the paper's exact minimum, as officially, where alpha is divided by n_k / mean n, the weight decay is
        1e-3, and gradients are clipped to the norm 10. Here alpha is the same for all, as in the paper, and nothing is
        clipped; --weight-decay 1e-3. FL-bench's clients lack the quadratic term unless a weight decay is set.
    D2  The official plots show the mean of all clients' last theta_k too, and "all" is what is usually quoted. Here only w.
    D3  alpha is FedSLR's; the official example for CIFAR-10 has .01. The paper has no momentum (--momentum 0).
    """
    gradient, descend = sgd(federation.net, args)
    K, alpha = federation.K, args.feddyn_alpha  # D3

    def step(client, batch, eta, w):
        theta, u, g_k = client  # [d] each
        theta, u = descend(theta, u, gradient(theta, batch) - g_k + alpha * (theta - w), eta)  # l.5 (D1)
        return theta, u, g_k

    w = federation.initial_weights()  # l.1: [d]
    state = State(w=w, h=torch.zeros_like(w), G=federation.per_client(torch.zeros_like(w)))  # l.1: G is [K, d]
    for t, S in run.rounds(state):  # l.2
        g_k = state.G[S]  # [m, d]
        start = (state.w.expand(len(S), -1), torch.zeros_like(g_k), g_k)  # l.3
        theta, _, _ = federation.train(step, start, S, t, federation.eta(t), state.w)  # l.4: [m, d]
        state.G[S] = g_k - alpha * (theta - state.w)  # l.6
        state.h = state.h - alpha / K * federation.sum(theta - state.w)  # l.7: [d]
        state.w = federation.mean(theta) - state.h / alpha  # l.8: [d]
        run.sent(up=theta.numel(), down=theta.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))  # D2


def apfl(federation, run, args):
    """APFL: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020.

     1  w = w_0;  for every client k: v_k = w_0 and alpha_k
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b:
     5              w_k = w_k - eta * gradient of f_k(w_k; b)
     6              g = gradient of f_k(z; b) at z = alpha_k v_k + (1-alpha_k) w_k
     7              v_k = v_k - eta * alpha_k * g
     8              if adaptive:  alpha_k = alpha_k - eta * <v_k - w_k, g>, cut to [0, 1], with the v_k before line 7
     9      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Global is w, personal the mixture alpha_k v_k + (1-alpha_k) w. Weights are n_k (FedSLR and, from memory, the paper:
    uniform). `apfl_alpha` in the record is the mean of all alpha_k.
    D1  Line 6: weights are mixed, as in the paper and in FedSLR; the official code mixes outputs. PFLlib trains v_k alone and
        mixes it into itself; in FL-bench w_k gets its gradient twice. A weight decay acts on the mixture, in FedSLR on v_k.
    D2  Line 8: officially once in a round, on its first minibatch, with another gradient and a penalty of .02 alpha. Here in
        every step, without momentum. The default is FedSLR's, .5 and fixed; SuPerFed's is not known (.25 in its later code).
    D3  Lines 6 and 8: w_k is that of line 5, as officially. In the paper, from memory, both gradients come before either step.
    """
    gradient, descend = sgd(federation.net, args)

    def mix(alpha, v, w):
        return alpha * v + (1 - alpha) * w

    def step(client, batch, eta):
        w, u_w, v, u_v, alpha = client  # [d] weights and their momentum, twice; alpha_k
        w, u_w = descend(w, u_w, gradient(w, batch), eta)  # l.5
        g = gradient(mix(alpha, v, w), batch)  # l.6 (D1, D3)
        new = (alpha - eta * ((v - w) * g).sum()).clamp(0, 1) if args.adaptive else alpha  # l.8 (D2)
        v, u_v = descend(v, u_v, alpha * g, eta)  # l.7
        return w, u_w, v, u_v, new

    w, alpha = federation.initial_weights(), torch.tensor(args.apfl_alpha, device=federation.device)
    state = State(w=w, V=federation.per_client(w), alpha=federation.per_client(alpha))  # l.1: [d], [K, d], [K]
    for t, S in run.rounds(state):  # l.2
        w, v = state.w.expand(len(S), -1), state.V[S]  # l.3: [m, d] each
        start = (w, torch.zeros_like(w), v, torch.zeros_like(v), state.alpha[S])
        w_k, _, v_k, _, alpha_k = federation.train(step, start, S, t, federation.eta(t))  # l.4
        state.w = federation.mean(w_k, federation.n[S])  # l.9: [d]
        state.V[S], state.alpha[S] = v_k, alpha_k  # l.7-8
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w),
                    federation.evaluate_clients(lambda S: mix(state.alpha[S][:, None], state.V[S], state.w)),
                    apfl_alpha=float(federation.gather(state.alpha.all).mean()))


def fedper(federation, run, args):
    """FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818.

     1  base w and, for every client k, head v_k, its last N layers: those of w_0
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b:  (w_k, v_k) = (w_k, v_k) - eta * gradient of f_k(w_k, v_k; b)
     5      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Personal is (w, v_k); there is no global model. Weights are n_k (FedSLR: uniform). Only w is sent.
    D1  Lines 1 and 2: all heads start alike, and only S_t trains; in the paper, from memory, each starts at random, and all
        clients take part in every round. N is not known for SuPerFed, whose text says "penultimate layer", nor for PersFL.
        Here the last layer by default, as in what FedSLR calls FedRep: its code trains jointly.
    D2  FedSLR evaluates with the base of the round before. Here with the current one.
    """
    step, (own, others) = sgd_step(federation.net, args), own_layers(federation.net, args)  # (D1)
    w = federation.initial_weights()
    state = State(w=w, V=federation.per_client(w[own]))  # l.1: [d], whose own part isn't used; [K, own]
    for t, S in run.rounds(state):  # l.2
        w = put(state.w, own, state.V[S])  # l.3: [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, federation.eta(t))  # l.4
        state.w, state.V[S] = federation.mean(w_k, federation.n[S]), w_k[:, own]  # l.5
        run.sent(up=len(S) * len(others), down=len(S) * len(others))
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(lambda S: put(state.w, own, state.V[S])))  # D2


def fedrep(federation, run, args):
    """FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
    ICML 2021.

     1  body w and, for every client k, head v_k, its last N layers: those of w_0
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b of E epochs:           v_k = v_k - eta * gradient by v_k of f_k(w_k, v_k; b)
     5          for each minibatch b of the body's epochs:  w_k = w_k - eta * gradient by w_k of f_k(w_k, v_k; b)
     6      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Personal is (w, v_k); there is no global model. Weights are n_k, as in the official code (the paper, from memory, and
    FedSLR: uniform). Only w is sent.
    D1  Lines 4 and 5: 10 epochs for the head and --body-epochs 1, as officially for CIFAR-10; for CIFAR-100 10 and 5. In the
        paper, from memory, the body takes one step. The official B is 10, momentum .5, decay 1e-4 of all but biases. What
        FedSLR calls FedRep is FedPer.
    D2  Officially all clients train their heads for ten more epochs after the last round, and the mean of the last ten rounds
        is reported too. Not offered.
    """
    gradient, descend = sgd(federation.net, args)
    own, others = own_layers(federation.net, args)

    def step(client, batch, eta, part):
        w, u = client  # [d] weights, [d] momentum
        return descend(w, u, part * gradient(w, batch), eta)  # part: 1 for what is trained, or 0

    w = federation.initial_weights()
    head = torch.zeros_like(w).index_fill(0, own, 1)  # [d]
    state = State(w=w, V=federation.per_client(w[own]))  # l.1: [d], whose own part isn't used; [K, own]
    for t, S in run.rounds(state):  # l.2
        eta, w = federation.eta(t), put(state.w, own, state.V[S])  # l.3: [m, d]
        w, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta, head, phase=1)  # l.4
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta, 1 - head, epochs=args.body_epochs)  # l.5 (D1)
        state.w, state.V[S] = federation.mean(w_k, federation.n[S]), w_k[:, own]  # l.6
        run.sent(up=len(S) * len(others), down=len(S) * len(others))
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(lambda S: put(state.w, own, state.V[S])))  # D2


def lg_fedavg(federation, run, args):
    """LG-FedAvg: Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated
    Learning with Local and Global Representations", 2020, arXiv 2001.01523.

     1  upper layers w and, for every client k, lower layers v_k, the first N: those of w_0
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b:  (v_k, w_k) = (v_k, w_k) - eta * gradient of f_k(v_k, w_k; b)
     5      w = mean over S_t of w_k

    Personal is (v_k, w); there is no global model. Weights are uniform, as in the official code (in the paper, from memory,
    n_k). Only w is sent, and only to S_t: the others need it no sooner than they are sampled or evaluated. The paper's further
    losses for the local representations, and its tests on new clients (from memory), are left out.
    D1  The lower layers are personal, as in the paper. In the official code for CIFAR-10 the convolutions are global, because
        the layers are listed in another order; FL-bench's are the other way round, too. By default all layers before the first
        fully connected one are personal, as in FedSLR. SuPerFed's N is not known.
    D2  Line 1: officially from a model that FedAvg has trained before. Here from w_0, as all methods.
    D3  Officially each client's best round on test images is reported; FedSLR evaluates with the upper layers of the round
        before. Here all clients have the current ones.
    """
    step, (own, others) = sgd_step(federation.net, args), own_layers(federation.net, args)  # (D1)
    w = federation.initial_weights()  # D2
    state = State(w=w, V=federation.per_client(w[own]))  # l.1: [d], whose own part isn't used; [K, own]
    for t, S in run.rounds(state):  # l.2
        w = put(state.w, own, state.V[S])  # l.3: [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, federation.eta(t))  # l.4
        state.w, state.V[S] = federation.mean(w_k), w_k[:, own]  # l.5
        run.sent(up=len(S) * len(others), down=len(S) * len(others))
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(lambda S: put(state.w, own, state.V[S])))  # D3


def ditto(federation, run, args):
    """Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", 2021.

     1  w = w_0 and, for every client k, v_k = w_0
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b of E epochs:  w_k = w_k - eta * gradient of f_k(w_k; b)
     5          for each minibatch b of s epochs:  v_k = v_k - eta * (gradient of f_k(v_k; b) + lambda * (v_k - w))
     6      w = mean over S_t of w_k

    Personal is v_k. Weights are uniform, as officially, where clients are drawn with probabilities like n_k, however. With
    lambda = 0 and s = E v_k is Local's model.
    D1  Lines 4 and 5: officially steps on v_k and on w_k alternate, on the same minibatch, and E and s count minibatches. Here
        one pass follows the other over the same minibatches, which comes to the same. FedSLR has E=2 and s=1; here s is E
        unless --personal-epochs is given.
    D2  Line 5: FedSLR's code pulls v_k towards w after the gradient's step, not in it. Its lambda is the default. Officially
        lambda is .1, 1 or 2, or each client's choice by validation loss. Not offered.
    """
    step, (gradient, descend) = sgd_step(federation.net, args), sgd(federation.net, args)

    def personal_step(client, batch, eta, w):
        v, u = client  # [d] weights, [d] momentum
        return descend(v, u, gradient(v, batch) + args.ditto_lambda * (v - w), eta)  # l.5 (D2)

    w = federation.initial_weights()
    state = State(w=w, V=federation.per_client(w))  # l.1: [d], [K, d]
    for t, S in run.rounds(state):  # l.2
        eta, w, v = federation.eta(t), state.w.expand(len(S), -1), state.V[S]  # l.3: [m, d] each
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta)  # l.4: [m, d]
        v_k, _ = federation.train(personal_step, (v, torch.zeros_like(v)), S, t, eta, state.w,
                                  epochs=args.personal_epochs)  # l.5 (D1): [m, d]
        state.w, state.V[S] = federation.mean(w_k), v_k  # l.6
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.V))


def pfedme(federation, run, args):
    """pFedMe: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", 2020, arXiv 2006.08848.

     1  w = w_0
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = theta_k = w
     4          for each minibatch b  (line 5 seeks theta_k with the least f_k(theta_k; b) + lambda/2 * ||theta_k - w_k||^2):
     5              `steps` times:  theta_k = theta_k - eta_p * (gradient of f_k(theta_k; b) + lambda * (theta_k - w_k))
     6              w_k = w_k - eta * lambda * (w_k - theta_k)
     7      w = (1-beta) * w + beta * sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Personal is the last theta_k; w_0 for a client that was never sampled. Weights are n_k, as in the official code (in the
    paper, from memory, uniform). `steps` is the paper's K.
    D1  Lines 3 and 7: officially and in the paper all clients train in every round, and S_t says only whose w_k are averaged.
        Here only the clients of S_t train, as in every other method. The same where all take part, as in PersFL.
    D2  Line 4: what the official code calls a local epoch is one minibatch, as many for every user. Here an epoch is a pass
        over all of a client's images.
    D3  Line 5: theta_k goes on from minibatch to minibatch, as officially, where .001*theta_k is added to the gradient:
        --weight-decay .001.
    D4  Line 6: the paper has no momentum (--momentum 0). Here w_k has it, since lambda * (w_k - theta_k) is the gradient of
        the envelope; the steps on theta_k have none.
    D5  The defaults of lambda, `steps`, beta and eta_p are PersFL's for DS-1 of CIFAR-10, with eta .01, B=128, 20 minibatches
        and 800 rounds. SuPerFed's later code has lambda 15. eta_p decays as eta does.
    """
    gradient, descend = sgd(federation.net, args)  # D3
    lam = args.pfedme_lambda  # D5

    def step(client, batch, eta, eta_p):
        theta, w, u = client  # [d] each, u: momentum
        for _ in range(args.theta_steps):
            theta = theta - eta_p * (gradient(theta, batch) + lam * (theta - w))  # l.5
        return theta, *descend(w, u, lam * (w - theta), eta)  # l.6 (D4)

    w = federation.initial_weights()
    state = State(w=w, theta=federation.per_client(w))  # l.1: [d], [K, d]
    for t, S in run.rounds(state):  # l.2
        eta, w = federation.eta(t), state.w.expand(len(S), -1)  # l.3: [m, d]
        eta_p = eta * (args.theta_lr / args.lr)
        theta, w_k, _ = federation.train(step, (w, w, torch.zeros_like(w)), S, t, eta, eta_p)  # l.4 (D1, D2): [m, d] each
        state.w = (1 - args.pfedme_beta) * state.w + args.pfedme_beta * federation.mean(w_k, federation.n[S])  # l.7
        state.theta[S] = theta
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.theta))


def per_fedavg(federation, run, args):
    """Per-FedAvg: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning: A Meta-Learning Approach", 2020, arXiv
    2002.07948. It minimises the mean over k of F_k(w) = f_k(w - alpha * gradient of f_k(w)).

     1  w = w_0
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = w
     4          for each group of fresh minibatches D, D' and, if Hessian-free, D'':
     5              z = w_k - alpha * gradient of f_k(w_k; D)
     6              g = gradient of f_k(z; D')
     7              h = 0, or Hessian-free  (gradient of f_k(w_k + delta*g; D'') - that at w_k - delta*g) / (2*delta)
     8              w_k = w_k - beta * (g - alpha*h)
     9      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
    10  personal model of any client k:  w - alpha * gradient of f_k(w)

    Weights are n_k. beta is eta (--lr). With alpha = 0 it is FedAvg on the minibatches D'. FedSLR has alpha .01, beta .001.
    D1  Line 4: D, D' and D'' are the minibatches of the E epochs in turn, so that an epoch has half as many steps as FedAvg's,
        Hessian-free a third. One or two that are left over at the end of a round are not used. Where a client has one
        minibatch, D and D' are the same images. In pFedMe's authors' code for it, and in PersFL's, all users take 20 groups a
        round.
    D2  Line 8: PersFL's code does not go back from z to w_k: two plain steps, alpha then beta. Not offered. The paper has no
        momentum (--momentum 0).
    D3  Line 9: the paper's mean is unweighted; n_k as in PersFL's code. The same with equal sizes.
    D4  Line 10: the gradient over all training images, as F_k has it, augmented where --transform does so. The code that
        PersFL used takes two plain steps, alpha then beta, on minibatches of the TEST images on which it then evaluates. Not
        offered. alpha does not decay.
    D5  Line 7: with ReLU the two gradients can belong to different linear pieces, and h is then wrong. Its relative error
        against the exact product of Hessian and g, on 20 images of `shapes` with delta .001: at w_0 15 to 18 for mnistnet, cnn
        and cifarnet on one draw, 1.4 to 49 on six others, in float64 too; after 200 steps of SGD 2e-5, 5 and 69 for the three
        (results/LOG.md, 2026-11-20).
    """
    gradient, descend = sgd(federation.net, args)
    add = gradient_sum(gradient)
    last, least = 2 if args.hessian_free else 1, int(federation.gather(federation.n).min())
    if args.epochs * -(-least // (args.batch_size or least)) <= last:
        common.refuse(f"a step of per-fedavg takes {last + 1} minibatches, and a client with {least} images has fewer; use "
                      "more --epochs or a smaller --batch-size")
    if args.hessian_free and args.precision != "fp32":
        common.refuse(f"the differences of --hessian-free are lost in the rounding of {args.precision}; use --precision fp32")

    def step(client, batch, beta, alpha):
        w, u, z, g, turn = client  # [d] each, u: momentum; turn is 0, 1 or 2 for D, D' or D'' (D1)
        now = gradient(torch.where(turn == 2, w + args.delta * g, z), batch)
        g = torch.where(turn == 2, g, now)  # l.6
        h = (now - gradient(w - args.delta * g, batch)) / (2 * args.delta) if args.hessian_free else 0  # l.7 (D5)
        new, pace = descend(w, u, g - alpha * h, beta)  # l.8 (D2)
        z = torch.where(turn == 0, w - alpha * now, new)  # l.5
        w, u = torch.where(turn == last, new, w), torch.where(turn == last, pace, u)
        return w, u, z, g, (turn + 1) % (last + 1)

    state = State(w=federation.initial_weights())  # l.1: [d]
    alpha = torch.tensor(args.per_fedavg_alpha, device=federation.device)
    for t, S in run.rounds(state):  # l.2
        w = state.w.expand(len(S), -1)  # l.3: [m, d]
        zero, turn = torch.zeros_like(w), torch.zeros_like(federation.n[S])
        w_k, *_ = federation.train(step, (w, zero, w, zero, turn), S, t, federation.eta(t), alpha)  # l.4: [m, d]
        state.w = federation.mean(w_k, federation.n[S])  # l.9 (D3): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            rows = np.arange(len(federation.clients))
            g = federation.train(add, torch.zeros_like(state.w).repeat(len(rows), 1), rows, t, state.w, epochs=1, phase=1)
            own = state.w - alpha * g / federation.n[:, None]  # l.10 (D4): [K, d]
            run.log(federation.evaluate(state.w), federation.evaluate_clients(own))


def densities(net, density):
    """ERK: the number of active weights of every tensor, round(density * d) in all.

    One-dimensional tensors (biases, normalisation) are dense. The others' densities are proportional to the sum of their
    dimensions over the product, and at most 1.
    """
    sizes = np.array(net.sizes, float)
    sparse = np.array([len(shape) > 1 for _, _, shape in net.tensors])
    share = np.array([sum(shape) / np.prod(shape) for _, _, shape in net.tensors])
    full, budget = ~sparse, round(density * net.d)
    while True:
        scale = (budget - sizes[full].sum()) / max((share * sizes)[~full].sum(), 1e-9)
        over = ~full & (scale * share > 1)
        if not over.any():
            break
        full = full | over
    if scale < 0:
        common.refuse(f"--density {density:g} leaves nothing to kernels: biases and normalisation are always active, "
                      f"{sizes[~sparse].sum() / net.d:.3g} of the weights; use more")
    return common.whole_numbers(np.where(full, sizes, scale * share * sizes))


def highest(score, sizes, counts):
    """True for the counts[i] highest of every tensor i: score [m, d], tensors' sizes -> [m, d]."""
    parts = []
    for part, count in zip(score.split(sizes, 1), counts.tolist()):
        parts.append(torch.zeros_like(part, dtype=torch.bool).scatter_(1, part.topk(count, 1).indices, True))
    return torch.cat(parts, 1)


def fedspa(federation, run, args):
    """FedSpa: Huang, Liu, Shen, He, Lin, Tao, "Achieving Personalized Federated Learning with Sparse Local Models", 2022, arXiv
    2201.11380. Only its abstract was at hand; D1 to D5 say how the rest was filled in.

     1  w = w_0 and, for every client k, a mask M_k in {0,1}^d, random, with a fixed number of ones in every tensor
     2  for each round t = 0, 1, ..., T-1:  S_t
     3      for each client k in S_t:  w_k = M_k * w
     4          for each minibatch b:  g_k = gradient of f_k(w_k; b), of all d weights;  w_k = w_k - eta * M_k * g_k
     5          U_k = w_k - M_k * w
     6          prune: in every tensor, drop the share a/2 * (1 + cos(pi*t/T)) of the ones, those with the least |w_k|
     7          grow: as many new ones, those with the largest |g_k|
     8      w = w + sum over k in S_t of n_k/n * U_k,   n = sum over k in S_t of n_k

    Global is the dense w, personal M_k * w. Weights are n_k. With density 1 it is FedAvg. Bytes: active weights alone, as in
    FedSLR's table; the d bits of a mask are left out.
    D1  Line 1: the numbers of ones are ERK's, as in DisPFL by some of the same authors, with dense biases and normalisation,
        round(density*d) in all. FedSLR's table gives it half of FedAvg's weights and bytes: density .5. Whether clients start
        with different masks, as here, is not known.
    D2  Line 4: with momentum the masked gradients are summed up.
    D3  Line 6: the cosine and a=.5 are DisPFL's.
    D4  Line 7: g_k is that of the last minibatch, so that growing costs no pass of its own. What was just dropped can come
        back.
    D5  Line 8: the paper's mean, from memory, is unweighted. The same with equal sizes.
    """
    net, device = federation.net, federation.device
    gradient, descend = sgd(net, args)
    counts = densities(net, args.density)  # D1
    active = int(counts.sum())

    def step(client, batch, eta):
        w, u, g, M = client  # [d] each: weights, momentum, the last gradient, mask
        g = gradient(w, batch)  # l.4 (D4)
        return *descend(w, u, M * g, eta), g, M  # l.4 (D2)

    def first_mask(k):
        draw = common.stream(args.seed, "algorithm", 0, int(k)).random((1, net.d), np.float32)
        return highest(torch.from_numpy(draw).to(device), net.sizes, counts)[0]

    state = State(w=federation.initial_weights(),  # l.1: [d], [K, d]
                  M=federation.per_client(first_mask))
    for t, S in run.rounds(state):  # l.2
        M_k = state.M[S]  # [m, d]
        w = M_k * state.w  # l.3: [m, d]
        zero = torch.zeros_like(w)
        w_k, _, g_k, _ = federation.train(step, (w, zero, zero, M_k.float()), S, t, federation.eta(t))  # l.4
        kept = counts - np.floor(args.drop / 2 * (1 + cos(pi * t / args.rounds)) * counts + 1e-9).astype(int)  # l.6 (D3)
        keep = highest(torch.where(M_k, w_k.abs(), -1), net.sizes, kept)  # l.6: [m, d]
        state.M[S] = highest(torch.where(keep, torch.inf, g_k.abs()), net.sizes, counts)  # l.7
        state.w = state.w + federation.mean(w_k - w, federation.n[S])  # l.5, l.8 (D5): [d]
        run.sent(up=len(S) * active, down=len(S) * active)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(lambda S: state.M[S] * state.w))


def sampled(federation, S, x):
    """The rows of the sampled clients of all processes, by number: x [of this process, ...] -> [m, ...]."""
    rows = torch.from_numpy(S).to(x.device)
    taken = federation.gather(torch.zeros_like(federation.n).index_fill(0, rows, 1)) > 0  # [K]
    return federation.gather(x.new_zeros(len(federation.n), *x.shape[1:]).index_copy(0, rows, x))[taken]


def units(x, out):
    """A layer of m clients, x [m, its weights and biases], by its units: [m, out, fan in + 1], and back by `flat`."""
    return torch.cat([x[:, :-out].unflatten(1, (out, -1)), x[:, -out:, None]], 2)


def flat(V):
    return torch.cat([V[:, :, :-1].flatten(1), V[:, :, -1]], 1)


def ordered(V, order):
    """V [m, units, ...] with client j's units in the order order[j]; order [m, units]."""
    return V[torch.arange(len(V), device=V.device)[:, None], order]


def permute_inputs(x, out, order):
    """A layer of m clients, x, whose inputs come from units that were put into the order [m, units before]."""
    weight = x[:, :-out].unflatten(1, (out, order.shape[1], -1)).transpose(1, 2)  # [m, units before, out, a unit's pixels]
    return torch.cat([ordered(weight, order).transpose(1, 2).flatten(1), x[:, -out:]], 1)


def match(V, sweeps=5):
    """Which unit of every client is whose counterpart: V [m, out, f] -> order [m, out], V[j][order[j]] being alike for all j.

    Client after client is matched one-to-one to the sum of the others, at first of those before it, until nothing changes.
    """
    from scipy.optimize import linear_sum_assignment

    order = torch.arange(V.shape[1], device=V.device).repeat(len(V), 1)
    total = V[0]
    for sweep in range(sweeps):
        before = order.clone()
        for j in range(0 if sweep else 1, len(V)):
            others = total - V[j][order[j]] if sweep else total
            _, best = linear_sum_assignment((others @ V[j].T).nan_to_num(0, 0, 0).cpu().numpy(), maximize=True)
            order[j] = torch.from_numpy(best)
            total = others + V[j][order[j]]
        if sweep and torch.equal(order, before):
            break
    return order


def check_chain(net, x):
    """The units of every layer of a chain of convolutions and linear layers. Refuses another model, by its tensors or because
    logits change with the order of the hidden units."""
    shapes = [[shape for name, _, shape in net.tensors if name.rsplit(".", 1)[0] == layer] for layer, _ in net.layers]
    outs = [weight[0] for weight, *_ in shapes]
    same = all(len(pair) == 2 and len(pair[0]) > 1 for pair in shapes)
    same = same and all(weight[1] % out == 0 for out, (weight, _) in zip(outs, shapes[1:]))
    if same:
        w = 2 * net.init(common.stream(0, "algorithm")).double()[None]
        parts = [w[:, part] for _, part in net.layers]
        for l, out in enumerate(outs[:-1]):
            order = torch.arange(out, device=w.device).roll(1)[None]
            parts[l] = flat(ordered(units(parts[l], out), order))
            parts[l + 1] = permute_inputs(parts[l + 1], outs[l + 1], order)
        a, b = net(w[0], x.double()), net(torch.cat(parts, 1)[0], x.double())
        same = bool((a - b).abs().max() <= 1e-5 * a.abs().max())
    if not same:
        common.refuse(f"--method fedma takes chains of convolutions and linear layers with biases, and {net.name} is none; use "
                      "--model vgg9, vgg16, cnn, cifarnet or mnistnet")
    return outs


def fedma(federation, run, args):
    """FedMA: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated Learning with Matched Averaging", ICLR 2020.

     1  w = w_0
     2  for each round t:  S_t
     3      for each client k in S_t:  w_k = w
     4      for each layer l = 1, ..., L, for each client k in S_t:
     5          for each minibatch b:  the layers l, ..., L of w_k = those - eta * gradient by them of f_k(w_k; b)
     6          if l < L:  permutations Pi_k of the units of layer l that bring all clients' close to the global units
     7              layer l of w, and of all w_k, = mean over S_t of Pi_k (layer l of w_k)
     8              the inputs of layer l+1 of w_k are permuted by Pi_k
     9          if l = L:  the unit of each class in w = mean over S_t of those in w_k, by k's number of images of this class

    Personal is w. Weights are uniform but for line 9. The authors' script: --model vgg9 --split dirichlet-classes --alpha .5
    --client-test 0 --clients 16 --fraction 1 --batch-size 64 --epochs 20 --rounds 10. One round is FedMA, more are FedMA "with
    communication". Bytes: w to S_t at first, then layer by layer all of w up and all but the last layer down, and Pi_k to
    client k.
    D1  Line 6: the paper's BBP-MAP lets the global layer grow where a client's unit has no counterpart (officially gamma 7,
        sigma and sigma_0 1, 5 iterations, at most about 700 units). Here it keeps its size: units are matched one-to-one. If
        the prior mean is 0 and no unit stays unmatched, BBP-MAP's costs and squared distances lead to the same matching for
        every gamma, sigma and sigma_0: the one with the largest sum of inner products.
    D2  Line 6: a unit is its incoming weights and its bias. Client after client, by number, is matched to the sum of those
        before it, and in up to 4 further sweeps to the sum of all others.
    D3  Line 7: the plain mean; the posterior's is pulled to the prior mean.
    D4  Line 5: SGD and --epochs for all L trainings. Officially, those behind the first layer are by Adam, with the learning
        rate .001, the weight decay .0001 and amsgrad; images are reflected at the borders, cropped, flipped and standardised
        (--transform fedslr is near it); its README has 50 rounds. vgg9 has no dropout here.
    D5  Line 9: a class of which no client of S_t has images takes the plain mean.
    D6  Line 3: all clients start from the same w_0, as in every method here; where they officially do is not known.
    """
    net, device = federation.net, federation.device
    outs = check_chain(net, federation.transform(federation.images[:2]))  # [L] units
    gradient, descend = sgd(net, args)
    held = np.array([np.bincount(federation.data.labels[own], minlength=outs[-1]) for own in federation.split.train])
    held = torch.tensor(held, dtype=torch.float, device=device)  # [K, classes]

    def step(client, batch, eta, free):
        w, u = client  # [d] weights, [d] momentum
        return descend(w, u, free * gradient(w, batch), eta)  # l.5 (D4); free: 0 for the layers before l

    state = State(w=federation.initial_weights())  # l.1: [d]
    for t, S in run.rounds(state):  # l.2
        here = torch.from_numpy(federation.clients[S]).to(device)
        mine = torch.isin(sampled(federation, S, here), here)  # [m of all processes]
        w, w_k = state.w.clone(), state.w.repeat(len(S), 1)  # l.3 (D6): [d], [m, d]
        for l, (out, (_, layer)) in enumerate(zip(outs, net.layers)):  # l.4
            free = (net.layer_of >= l).float()  # [d]
            w_k, _ = federation.train(step, (w_k, torch.zeros_like(w_k)), S, t, federation.eta(t), free, phase=l)  # l.5
            V = units(sampled(federation, S, w_k[:, layer]), out)  # [m, out, inputs + 1]
            if l + 1 < len(outs):
                order, after = match(V), net.layers[l + 1][1]  # l.6 (D1, D2): [m, out]
                w[layer] = flat(ordered(V, order).mean(0, keepdim=True))[0]  # l.7 (D3)
                w_k[:, layer], w_k[:, after] = w[layer], permute_inputs(w_k[:, after], outs[l + 1], order[mine])  # l.7-8
            else:
                n_kc = sampled(federation, S, held[S])  # [m, classes]
                n_kc = torch.where(n_kc.sum(0) > 0, n_kc, 1)  # D5
                w[layer] = flat((V * (n_kc / n_kc.sum(0))[:, :, None]).sum(0, keepdim=True))[0]  # l.9
        state.w = w
        run.sent(up=w_k.numel(), down=2 * w_k.numel() + len(S) * (sum(outs[:-1]) - len(V[0].flatten())))
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


METHODS = {
    "local": local, "centralised": centralised, "fedavg-ft": fedprox, "fedprox": fedprox, "fedprox-ft": fedprox,
    "scaffold": scaffold, "feddyn": feddyn, "apfl": apfl, "fedper": fedper, "fedrep": fedrep, "lg-fedavg": lg_fedavg,
    "ditto": ditto, "pfedme": pfedme, "per-fedavg": per_fedavg, "fedspa": fedspa, "fedma": fedma,
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("methods")
    own.add_argument("--method", choices=METHODS, required=True, help="whose rounds are run")
    own.add_argument("--mu", type=common.nonnegative, default=0.01, help="fedprox, fedprox-ft: mu, of mu/2 ||w - w_t||^2")
    own.add_argument("--finetune-epochs", type=common.positive_int, default=1, help="fedavg-ft, fedprox-ft: epochs at the end")
    own.add_argument("--option", choices=("I", "II"), default="II", help="scaffold: how c_k is made new")
    own.add_argument("--global-lr", type=common.positive, default=1.0, help="scaffold: eta_g, the server's step")
    own.add_argument("--feddyn-alpha", type=common.positive, default=0.1, help="feddyn: alpha, of alpha/2 ||theta - w||^2")
    own.add_argument("--apfl-alpha", type=common.fraction, default=0.5, help="apfl: alpha_k at the start")
    own.add_argument("--adaptive", action="store_true", help="apfl: alpha_k is learnt")
    own.add_argument("--personal", type=common.nonnegative_int,
                     help="fedper, fedrep: N, the last layers, which a client keeps (unless given: 1); lg-fedavg: the first "
                          "layers (unless given: all before the first fully connected one); a normalisation counts as one")
    own.add_argument("--body-epochs", type=common.positive_int, default=1, help="fedrep: epochs on the body, E on the head")
    own.add_argument("--ditto-lambda", type=common.nonnegative, default=0.1, help="ditto: lambda, the pull of v_k to w")
    own.add_argument("--personal-epochs", type=common.positive_int, help="ditto: s, epochs on v_k (unless given: --epochs)")
    own.add_argument("--pfedme-lambda", type=common.positive, default=15.0, help="pfedme: of lambda/2 ||theta_k - w_k||^2")
    own.add_argument("--pfedme-beta", type=common.positive, default=1.0, help="pfedme: beta, the server's step to the mean")
    own.add_argument("--theta-lr", type=common.positive, default=0.001, help="pfedme: eta_p, theta_k's rate; decays as --lr")
    own.add_argument("--theta-steps", type=common.positive_int, default=5, help="pfedme: K, steps on theta_k per minibatch")
    own.add_argument("--per-fedavg-alpha", type=common.nonnegative, default=0.01, help="per-fedavg: alpha, step to z")
    own.add_argument("--hessian-free", action="store_true", help="per-fedavg: with the Hessian's product, not first-order")
    own.add_argument("--delta", type=common.positive, default=1e-3, help="per-fedavg: delta, of the Hessian's product")
    own.add_argument("--density", type=common.positive_fraction, default=0.5, help="fedspa: share of active weights")
    own.add_argument("--drop", type=common.fraction, default=0.5, help="fedspa: a, a mask's share that the first round renews")
    return common.parse(parser, BY_DATASET, argv)


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    args.out = args.out or f"runs/baselines-{args.method}-{federation.data.name}-{args.seed}"
    run = common.Run(__file__, args, federation)
    run.algorithm = args.method
    METHODS[args.method](federation, run, args)


if __name__ == "__main__":
    main()
