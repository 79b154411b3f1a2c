"""The methods with which the papers of the other files compare theirs.

    python baselines.py --method fedper --dataset cifar10

    --method     function     paper, and idea
    local        local        Each client trains a model of its own. Nothing is sent.
    centralised  centralised  One model trains on the images of all clients in one place.
    fedavg       fedprox      FedAvg, McMahan et al. 2017, with client momentum and weight decay.
    fedavg-ft    fedprox      FedAvg. After the last round each client fine-tunes the global model.
    fedprox      fedprox      Li et al. 2020. Each client's steps are pulled to the global model.
    fedprox-ft   fedprox      FedProx, then fine-tuning as in fedavg-ft.
    scaffold     scaffold     Karimireddy et al. 2020. Each step is corrected for client drift.
    feddyn       feddyn       Acar et al. 2021. Two more loss terms align the clients' minima.
    apfl         apfl         Deng et al. 2020. The global and a client's own model are mixed.
    fedper       fedper       Arivazhagan et al. 2019. The last layers are personal.
    fedrep       fedrep       Collins et al. 2021. As in fedper, but the two parts train in turn.
    lg-fedavg    lg_fedavg    Liang et al. 2020. The first layers are personal.
    ditto        ditto        Li et al. 2021. Each client's personal model is pulled to FedAvg's.
    pfedme       pfedme       Dinh et al. 2020. The global model moves to personal ones near it.
    per-fedavg   per_fedavg   Fallah et al. 2020. The global model is trained for one more step.
    fedspa       fedspa       Huang et al. 2022. A client trains the weights of its changing mask.
    fedma        fedma        Wang et al. 2020. Clients' units are matched before they are averaged.

Each function cites its paper, if any, and contains pseudocode in our words, choices D1 to Dn, one
client's work (client_update) and the server's loop. Its helpers stand next to it.
docs/baselines.md explains each choice, names the code it cites, reports what was measured, and
compares with PFLlib.

Symbols. There are K clients. Client k has n_k training images. f_k(w) is the mean loss on its
images, and f_k(w; b) that on its minibatch b. w_0 are the initial weights. t is 0, 1, ..., T-1. S_t
are the m = max(C*K, 1) clients sampled in round t; C*K is rounded down. eta is the round's local
learning rate, --lr times --lr-decay^t. "For each minibatch b" means two loops: over E local epochs,
and over the newly shuffled minibatches of each epoch. A line with other epochs says so. K, C, T and
E are --clients, --fraction, --rounds and --epochs. alpha, beta, lambda, g and h differ from
function to function; --help lists their options. [d] is a vector of the model's d weights; [m, d]
holds one for each of the m sampled clients. Several listings call FedAvg's ClientUpdate SGD:

    SGD(k, w):  for each minibatch b:  w = w - eta * gradient of f_k(w; b);  return w

`# l.3` marks the code of the listing's line 3: its loop, and the statement that computes it. At a
call of federation.train it marks the lines that the clients carry out.

Models. "global" is the accuracy of the server's model on the central test images. "personal" is the
mean over all clients of the accuracy of each client's own model on its own test images; some
authors' code weights clients by their numbers of test images (`weighted_mean` in the record). Each
function says which models these are. A two-part personal model combines the newest shared part with
the client's own part.

Local SGD uses momentum .9, SuPerFed's setting, unless --momentum says otherwise (on shapes three
methods use none); several methods' authors use none (docs/baselines.md). The momentum buffer u is 0
before each loop over epochs. pfedme's steps on theta_k, apfl's on alpha_k, and lines 5 and 8 of
per-fedavg have no momentum. Weight decay is added to each gradient of f_k. The record counts the
bytes that S_t sends and receives.

federation.train(client_update, S, t, own=[...], shared=[...]) calls client_update(*own, epochs,
*shared) for each client of S, with its row of each tensor in `own`, its local epochs, and what is
`shared` by all. It returns the results, a row for each client. epochs.again(epochs=3, order=1)
returns 3 epochs of the same client, with another order of the images. @common.step decorates the
work on one minibatch b. A GPU may train all clients at once: client_update then sees [m, d] in
place of [d]. V = federation.per_client(x) keeps a row x for every client; V[S] copies the rows of
the clients in S, and V[S] = y replaces them.
"""

from itertools import chain
from math import ceil, cos, pi
from types import SimpleNamespace as State

import numpy as np
import torch

import common

# --------------------------------------------------------------------------------------------------
# What several methods share


def with_decay(g, w, decayed, decay):
    """Returns f_k's gradient g, plus decay * w where `decayed` [d] is 1 (see Net)."""
    return torch.addcmul(g, decayed, w, value=decay) if decay else g


def gradient_of_loss(net, args):
    """Returns gradient(w, b), the gradient [d] of f_k(w; b), plus --weight-decay times w."""

    def gradient(w, b):
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        return with_decay(common.grad(loss)(w), w, net.decayed, args.weight_decay)

    return gradient


def local_sgd(net, args):
    """Returns client_update(w, epochs, eta), which the listings call SGD(k, w)."""
    gradient, sgd = gradient_of_loss(net, args), common.sgd(args)

    @common.step
    def sgd_step(w, u, b, eta):  # [d] weights, [d] momentum
        return sgd(w, u, gradient(w, b), eta)

    def client_update(w, epochs, eta):
        u = torch.zeros_like(w)
        for minibatches in epochs:
            for b in minibatches:
                w, u = sgd_step(w, u, b, eta)
        return w

    return client_update


def gradient_of_all(gradient):
    """Returns mean(w, n_k, epochs): the gradient [d] of f_k at w, by one pass over k's n_k [1]
    images."""

    @common.step
    def add(so_far, w, b):
        return so_far + b.mask.sum() * gradient(w, b)

    def mean(w, n_k, epochs):
        total = torch.zeros_like(w)
        for minibatches in epochs.again(epochs=1, order=1):  # shuffled unlike the training
            for b in minibatches:
                total = add(total, w, b)
        return total / n_k

    return mean


# --------------------------------------------------------------------------------------------------
# The methods


def local(federation, run, args):
    """Local: every client trains alone.

    Global: none. Personal: w_k. Nothing is sent.

    D1  Line 2: only sampled clients train, as much as in FedAvg. A client that is never sampled is
        evaluated with w_0.

     1  for every client k: w_k = w_0
     2  for each round t, for each client k in S_t:
     3      w_k = SGD(k, w_k)
    """
    client_update = local_sgd(federation.net, args)
    state = State(W=federation.per_client(federation.initial_weights()))  # l.1: [K, d]
    for t in run.rounds(state, model=None, clients="W"):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2 (D1)
        w_k = federation.train(client_update, S, t, own=[state.W[S]], shared=[eta])  # l.3: [m, d]
        state.W[S] = w_k  # l.3: k keeps it
        run.sent(up=0, down=0)
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(state.W))


def centralised(federation, run, args):
    """Centralised: SGD on the training images of all clients in one place.

    Global and personal: w. The loss is that on P. No bytes are counted: images would be sent once.

    D1  Line 3: C*E epochs are as much work as a round of FedAvg. C*E is rounded, but at least 1.

     1  w = w_0;  P = the training images of all clients
     2  for each round t:
     3      w = SGD(P, w) of C*E epochs
    """
    client_update = local_sgd(federation.net, args)
    epochs = max(1, round(args.fraction * args.epochs))  # D1
    state = State(w=federation.initial_weights())  # l.1: [d]
    P = np.concatenate(federation.split.train)  # l.1: numbers of images
    for t in run.rounds(state):  # l.2
        eta = federation.eta(t)
        w = federation.train(client_update, [0], t, own=[state.w[None]], shared=[eta],
                             epochs=epochs, images=[P])  # l.3: [1, d], as if client 0 had P
        state.w = w[0]
        run.sent(up=0, down=0)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


def fedprox(federation, run, args):
    """FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in
    Heterogeneous Networks", MLSys 2020, arXiv 1812.06127. In fedavg and fedavg-ft mu is 0. Only
    the -ft methods run lines 5 and 6; SuPerFed calls them FedProx-LU and FedAvg-LU.

    Global: w_{t+1}. Personal: w_{t+1}; in the -ft methods v_k after the last round. Sending w_T to
    all clients is not counted as bytes.

    D1  Line 3: the distance is squared and halved, as in the paper. SuPerFed's later code does
        neither; the default mu is that code's.
    D2  Line 3: every client does all of its work. The paper also lets slow clients stop early.
    D3  Line 6 runs one epoch by default, with the eta of round T and without the proximal term. The
        papers do not specify this.
    D4  Line 4 weights by n_k, as the paper's experiments do. Its listing draws clients by n_k and
        takes plain means.

     1  w = w_0;  for each round t, with the clients S_t:
     2      for each client k in S_t:  w_k = w_t
     3          for each minibatch b:
                    w_k = w_k - eta * gradient of (f_k(w_k; b) + mu/2 * ||w_k - w_t||^2)
     4      w_{t+1} = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
     5  after the last round, for every client k:  v_k = w_T
     6      v_k = SGD(k, v_k) of --finetune-epochs epochs
    """
    mu = args.mu if args.method in ("fedprox", "fedprox-ft") else 0.0
    gradient, sgd = gradient_of_loss(federation.net, args), common.sgd(args)

    @common.step
    def proximal_step(w, u, w_t, b, eta):  # [d] each, u: momentum
        return sgd(w, u, gradient(w, b) + mu * (w - w_t), eta)  # l.3 (D1)

    def client_update(w_t, epochs, eta):
        w, u = w_t, torch.zeros_like(w_t)  # l.2
        for minibatches in epochs:  # l.3 (D2)
            for b in minibatches:  # l.3
                w, u = proximal_step(w, u, w_t, b, eta)
        return w

    state = State(w=federation.initial_weights())  # l.1: [d]
    for t in run.rounds(state):  # l.1
        S, eta = federation.sample(t), federation.eta(t)  # l.1
        w_t = state.w.expand(len(S), -1)  # [m, d]
        w_k = federation.train(client_update, S, t, own=[w_t], shared=[eta])  # l.2-3: [m, d]
        n_k = federation.n[S]  # [m]
        state.w = n_k @ w_k / n_k.sum()  # l.4 (D4): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            v = state.w  # the personal model: [d]; for -ft methods in the end [K, d]
            if args.method.endswith("-ft") and t == args.rounds - 1:
                v, T = state.w.expand(federation.K, -1), args.rounds  # l.5: [K, d]
                v = federation.fine_tuned(v, args.finetune_epochs, federation.eta(T))  # l.6 (D3)
            run.log(federation.evaluate(state.w), federation.evaluate_clients(v))


def scaffold(federation, run, args):
    """Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging
    for Federated Learning", 2020, arXiv 1910.06378.

    Global and personal: x. SCAFFOLD sends twice FedAvg's bytes, since clients also send c_k^+ - c_k
    and receive c.

    D1  The defaults are Option II and eta_g = 1, as in FedSLR and in the paper's experiments.
    D2  Line 6: the paper has no momentum and divides by the number of steps, as we do with
        --momentum 0. With momentum beta, .9 by default, y_k moves further; so `reach` sums
        1 + beta + ... + beta^(s-1) over the steps s.
    D3  Line 5 takes one more pass over the client's images, augmented if --transform augments.
    D4  Line 4 runs E epochs, so clients with more images take more steps, unlike in the paper.

     1  x = w_0;  c = 0 and, for every client k, c_k = 0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  y_k = x
     4          for each minibatch b:  y_k = y_k - eta * (gradient of f_k(y_k; b) - c_k + c)
     5          Option I:   c_k^+ = gradient of f_k(x)
     6          Option II:  c_k^+ = c_k - c + (x - y_k) / (reach * eta),
                            reach = the number of steps in line 4, if momentum is 0 (D2)
     7      x = x + eta_g * mean over S_t of (y_k - x)
     8      c = c + 1/K * sum over S_t of (c_k^+ - c_k),   so that c is the mean of all c_k
     9      c_k = c_k^+
    """
    gradient, sgd = gradient_of_loss(federation.net, args), common.sgd(args)
    full_gradient = gradient_of_all(gradient)

    @common.step
    def corrected_step(y, u, reach, pace, c_k, b, eta, c):  # y, u, c_k: [d], u: momentum
        y, u = sgd(y, u, gradient(y, b) - c_k + c, eta)  # l.4
        pace = args.momentum * pace + 1  # 1+beta+...+beta^(s-1)
        return y, u, reach + pace, pace  # l.6 (D2)

    def client_update(x, c_k, n_k, epochs, eta, c):  # n_k: [1]
        y, u = x, torch.zeros_like(x)  # l.3
        reach, pace = torch.zeros_like(n_k), torch.zeros_like(n_k)
        for minibatches in epochs:  # l.4 (D4)
            for b in minibatches:  # l.4
                y, u, reach, pace = corrected_step(y, u, reach, pace, c_k, b, eta, c)
        if args.option == "I":
            return y, full_gradient(x, n_k, epochs)  # l.5 (D3)
        return y, c_k - c + (x - y) / (reach * eta)  # l.6 (D1)

    x = federation.initial_weights()  # l.1: [d]
    state = State(x=x, c=torch.zeros_like(x), c_k=federation.per_client(torch.zeros_like(x)))  # l.1
    for t in run.rounds(state, model="x"):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2
        x, c_k = state.x.expand(len(S), -1), state.c_k[S]  # [m, d] each
        n_k = federation.n[S, None]  # [m, 1]
        y_k, c_plus = federation.train(client_update, S, t, own=[x, c_k, n_k],
                                       shared=[eta, state.c])  # l.3-6: [m, d] each
        state.x = state.x + args.global_lr * (y_k - x).mean(0)  # l.7 (D1)
        state.c = state.c + (c_plus - c_k).sum(0) / federation.K  # l.8
        state.c_k[S] = c_plus  # l.9
        run.sent(up=2 * y_k.numel(), down=2 * y_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.x), federation.evaluate_clients(state.x))


def feddyn(federation, run, args):
    """FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based
    on Dynamic Regularization", 2021, arXiv 2111.04263.

    Global and personal: w. FedDyn sends FedAvg's bytes, as line 7 needs only theta_k.

    D1  Line 5: SGD replaces the exact minimum. The authors' code also divides alpha by n_k /
        (mean n) and clips gradients to the norm 10.
    D2  Global is w. The authors' code evaluates only means of theta_k.
    D3  The default alpha is FedSLR's; the authors' example has .01.

     1  w = w_0;  h = 0 and, for every client k, g_k = 0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  theta_k = w
     4          for each minibatch b:
     5              theta_k = theta_k - eta * gradient of (f_k(theta_k; b) - <g_k, theta_k>
                                                           + alpha/2 * ||theta_k - w||^2)
     6          g_k = g_k - alpha * (theta_k - w)
     7      h = h - alpha/K * sum over S_t of (theta_k - w),   so that h is the mean of all g_k
     8      w = mean over S_t of theta_k - h / alpha
    """
    gradient, sgd = gradient_of_loss(federation.net, args), common.sgd(args)
    K, alpha = federation.K, args.feddyn_alpha  # D3

    @common.step
    def dynamic_step(theta, u, g_k, w, b, eta):  # [d] each, u: momentum
        return sgd(theta, u, gradient(theta, b) - g_k + alpha * (theta - w), eta)  # l.5 (D1)

    def client_update(w, g_k, epochs, eta):
        theta, u = w, torch.zeros_like(w)  # l.3
        for minibatches in epochs:  # l.4
            for b in minibatches:  # l.4
                theta, u = dynamic_step(theta, u, g_k, w, b, eta)
        return theta, g_k - alpha * (theta - w)  # l.6

    w = federation.initial_weights()  # l.1: [d]
    state = State(w=w, h=torch.zeros_like(w), G=federation.per_client(torch.zeros_like(w)))  # l.1
    for t in run.rounds(state):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2
        w, g_k = state.w.expand(len(S), -1), state.G[S]  # [m, d] each
        theta_k, g_k = federation.train(client_update, S, t, own=[w, g_k], shared=[eta])  # l.3-6
        state.h = state.h - alpha / K * (theta_k - w).sum(0)  # l.7: [d]
        state.w = theta_k.mean(0) - state.h / alpha  # l.8: [d]
        state.G[S] = g_k  # l.6
        run.sent(up=theta_k.numel(), down=theta_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))  # D2


def apfl(federation, run, args):
    """APFL: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv
    2003.13461.

    Global: w. Personal: the mixture alpha_k v_k + (1-alpha_k) w. `apfl_alpha` in the record is the
    mean of all alpha_k.

    D1  Lines 4 and 7: weights are mixed, as in the paper; FedTorch mixes outputs.
    D2  Line 4 moves alpha_k once a round, before the steps on w_k and v_k; FedTorch does so after
        them. By default alpha_k is fixed at FedSLR's .5.
    D3  Line 7 uses line 6's new w_k, as FedTorch does. The paper computes all gradients first.
    D4  The personal model uses the averaged w. FedTorch's uses the client's w_k, before line 9.
    D5  Line 9 weights by n_k. FedTorch, FedSLR's code and the paper take the plain mean.

     1  w = w_0;  for every client k: v_k = w_0, alpha_k = .5 (--apfl-alpha)
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          if adaptive, for the first minibatch b:
                    g = gradient of f_k(z; b) at z = alpha_k v_k + (1-alpha_k) w_k
                    alpha_k = alpha_k - eta * <v_k - w_k, g>, cut to [0, 1]
     5          for each minibatch b:
     6              w_k = w_k - eta * gradient of f_k(w_k; b)
     7              g = gradient of f_k(z; b) at z = alpha_k v_k + (1-alpha_k) w_k
     8              v_k = v_k - eta * alpha_k * g
     9      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
    """
    gradient, sgd = gradient_of_loss(federation.net, args), common.sgd(args)

    def mix(alpha, v, w):
        return alpha * v + (1 - alpha) * w  # D1

    @common.step
    def learn_alpha(alpha, v, w, b, eta):  # v, w: [d]
        g = gradient(mix(alpha, v, w), b)  # l.4
        return (alpha - eta * ((v - w) * g).sum()).clamp(0, 1)  # l.4

    @common.step
    def two_steps(w, u_w, v, u_v, alpha, b, eta):  # w, u_w, v, u_v: [d]
        w, u_w = sgd(w, u_w, gradient(w, b), eta)  # l.6
        g = gradient(mix(alpha, v, w), b)  # l.7 (D3)
        v, u_v = sgd(v, u_v, alpha * g, eta)  # l.8
        return w, u_w, v, u_v

    def client_update(w, v, alpha, epochs, eta):  # l.3: w_k = w
        if args.adaptive:
            b = next(chain.from_iterable(epochs))  # l.4 (D2): the first; l.5 starts anew with it
            alpha = learn_alpha(alpha, v, w, b, eta)
        u_w, u_v = torch.zeros_like(w), torch.zeros_like(v)
        for minibatches in epochs:  # l.5
            for b in minibatches:  # l.5
                w, u_w, v, u_v = two_steps(w, u_w, v, u_v, alpha, b, eta)
        return w, v, alpha

    w_0 = federation.initial_weights()
    alpha = torch.tensor(args.apfl_alpha, device=federation.device)
    state = State(w=w_0, V=federation.per_client(w_0), alpha=federation.per_client(alpha))  # l.1

    def mixtures(S):
        return mix(state.alpha[S][:, None], state.V[S], state.w)  # D4: [m, d]

    for t in run.rounds(state, clients=mixtures):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2
        w, v, alpha = state.w.expand(len(S), -1), state.V[S], state.alpha[S]  # [m, d], [m, d], [m]
        w_k, v_k, alpha_k = federation.train(client_update, S, t, own=[w, v, alpha],
                                             shared=[eta])  # l.3-8
        n_k = federation.n[S]  # [m]
        state.w = n_k @ w_k / n_k.sum()  # l.9 (D5): [d]
        state.alpha[S], state.V[S] = alpha_k, v_k  # l.4, l.8
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(mixtures),
                    apfl_alpha=float(state.alpha.all.mean()))


# The layers of a model lie side by side in w. A client keeps the last ones in fedper and fedrep,
# the first ones in lg-fedavg.


def personal_layers(federation, run, args):
    """Returns the slice of w that a client keeps: its last N layers, for lg-fedavg its first N. The
    run prints which layers these are."""
    net, N = federation.net, args.personal
    if args.method == "lg-fedavg":
        part = net.first_layers(max(first_linear_layer(net), 1) if N is None else N)
    else:
        part = net.last_layers(1 if N is None else N)
    names = [name or "the root" for name, where in net.layers
             if part.start <= where.start < part.stop]
    names = " to ".join(dict.fromkeys([*names[:1], *names[-1:]])) or "no layer"
    run.note(f"note    personal: {names} ({part.stop - part.start:,} of {net.d:,} weights)")
    return part


def with_part(w, part, V):
    """Returns the model w [d] with each client's weights V [m, ...] in the slice `part`: [m, d]."""
    W = w.repeat(len(V), 1)
    W[:, part] = V
    return W


def first_linear_layer(net):
    """Returns the number of the first fully connected layer, from 0. Its weights are a matrix."""
    linear = [i for i, (_, layer) in enumerate(net.layers) if 2 == max(
        len(shape) for _, where, shape in net.tensors if layer.start <= where.start < layer.stop)]
    if not linear:
        common.refuse(f"{net.name} has no fully connected layer, below which the personal part "
                      "would end; say --personal N")
    return linear[0]


def fedper(federation, run, args):
    """FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization
    Layers", arXiv 1912.00818.

    Global: none. Personal: (w, v_k). Only w is sent.

    D1  Lines 1 and 2: N is 1 by default, all heads start alike, and only S_t trains. In the paper
        heads start at random and all clients train in every round.
    D2  The personal model uses the current body w. FedSLR's code uses that of the round before.
    D3  Line 5 weights by n_k, as in the paper. FedSLR's code takes the plain mean.

     1  w = the body of w_0;  for every client k, v_k = the head of w_0, its last N layers
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          (w_k, v_k) = SGD(k, (w_k, v_k))
     5      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
    """
    client_update = local_sgd(federation.net, args)
    head = personal_layers(federation, run, args)  # a slice of w (D1)
    w_0 = federation.initial_weights()
    state = State(w=w_0,  # l.1: [d]; its head is not used
                  V=federation.per_client(w_0[head]))  # l.1: [K, ...]

    def models(S):
        return with_part(state.w, head, state.V[S])  # (w, v_k): [m, d]

    for t in run.rounds(state, model=None, clients=models):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2 (D1)
        trained = federation.train(client_update, S, t, own=[models(S)], shared=[eta])  # l.3-4
        n_k = federation.n[S]  # [m]
        state.w = n_k @ trained / n_k.sum()  # l.5 (D3): [d]; its head is not used
        state.V[S] = trained[:, head]  # l.4
        sent = len(S) * head.start
        run.sent(up=sent, down=sent)
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(models))  # D2


def logits_of_parts(net, lower, upper, x):
    """Returns the logits of the model w = (lower, upper) without joining the parts, so that the
    gradient w.r.t. one part costs nothing for the other."""
    n = sum(where.stop <= len(lower) for _, where, _ in net.tensors)  # tensors in `lower`
    tensors = [*lower.to(x.dtype).split(net.sizes[:n]), *upper.to(x.dtype).split(net.sizes[n:])]
    return net.apply(tensors, x).to(lower.dtype)


def gradient_of_part(net, i):
    """Returns gradient(lower, upper, b, decay), that of f_k(w; b) w.r.t. one part of w = (lower,
    upper), plus decay times this part. i: 0 for the lower part, 1 for the upper."""

    def loss(lower, upper, b):
        return common.cross_entropy(logits_of_parts(net, lower, upper, b.x), b)

    def gradient(lower, upper, b, decay):
        part = (lower, upper)[i]
        if not len(part):  # all layers are personal, or none is
            return part
        decayed = net.decayed.split([len(lower), len(upper)])[i]
        return with_decay(common.grad(loss, argnums=i)(lower, upper, b), part, decayed, decay)

    return gradient


def fedrep(federation, run, args):
    """FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for
    Personalized Federated Learning", ICML 2021, arXiv 2102.07078.

    Global: none. Personal: (w, v_k). Only w is sent.

    D1  Lines 4 and 5: E = 10 and --body-epochs 1, the defaults, are those of the authors' code for
        CIFAR-10 with two classes per client. The paper's listing has one step in line 5.
    D2  After the last round nothing is trained. In the authors' code all clients then train their
        heads for ten epochs.
    D3  Line 6 weights by n_k. The paper, and the authors' code for CIFAR, take the plain mean.
    D4  Line 1: v_k is the client's own. In the authors' code a client that was never sampled has
        the mean of the sampled heads.

     1  w = the body of w_0;  for every client k, v_k = the head of w_0, its last N layers
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b of E epochs:
                    v_k = v_k - eta * gradient of f_k(w_k, v_k; b) w.r.t. v_k
     5          for each minibatch b of the body's epochs:
                    w_k = w_k - eta * gradient of f_k(w_k, v_k; b) w.r.t. w_k
     6      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
    """
    by_body, by_head = gradient_of_part(federation.net, 0), gradient_of_part(federation.net, 1)
    sgd, decay = common.sgd(args), args.weight_decay
    head = personal_layers(federation, run, args)  # a slice of w; the body is before it

    @common.step
    def head_step(v, u, w, b, eta):  # [size of the head] v, u; [size of the body] w
        return sgd(v, u, by_head(w, v, b, decay), eta)  # l.4

    @common.step
    def body_step(w, u, v, b, eta):
        return sgd(w, u, by_body(w, v, b, decay), eta)  # l.5

    def client_update(w, v, epochs, eta):  # l.3: w_k = w
        u = torch.zeros_like(v)
        # order=1: the head's epochs are not shuffled as the body's are
        for minibatches in epochs.again(order=1):  # l.4
            for b in minibatches:  # l.4
                v, u = head_step(v, u, w, b, eta)
        u = torch.zeros_like(w)
        for minibatches in epochs.again(epochs=args.body_epochs):  # l.5 (D1)
            for b in minibatches:  # l.5
                w, u = body_step(w, u, v, b, eta)
        return w, v

    w_0 = federation.initial_weights()
    state = State(w=w_0,  # l.1: [d]; its head is not used
                  V=federation.per_client(w_0[head]))  # l.1 (D4): [K, ...]

    def models(S):
        return with_part(state.w, head, state.V[S])  # (w, v_k): [m, d]

    for t in run.rounds(state, model=None, clients=models):  # l.2 (D2)
        S, eta = federation.sample(t), federation.eta(t)  # l.2
        w = state.w[: head.start].expand(len(S), -1)  # the body, [m, ...]
        w_k, v_k = federation.train(client_update, S, t, own=[w, state.V[S]], shared=[eta])  # l.3-5
        n_k = federation.n[S]  # [m]
        both = torch.cat([w_k, v_k], 1)  # [m, d]
        state.w = n_k @ both / n_k.sum()  # l.6 (D3): [d]; its head is not used
        state.V[S] = v_k  # l.4
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(models))


def lg_fedavg(federation, run, args):
    """LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally,
    Act Globally: Federated Learning with Local and Global Representations", 2020, arXiv 2001.01523.

    Global: none. Personal: (v_k, w). Only w is sent.

    D1  Line 1: N is all layers before the first fully connected one, as in FedSLR, and at least 1.
        The paper's CIFAR-10 experiment is set up the other way round: its convolutions are global.
    D2  Line 1 starts from w_0, the authors' code from a model that FedAvg has trained.
    D3  The personal model has the current w, that of the authors' code a mean over the clients'
        best models on test images.
    D4  Line 5 takes the plain mean, as in the authors' code. The paper weights by n_k.
    D5  Line 4 minimises the joint loss alone, as in the paper's main algorithm.

     1  w = the upper layers of w_0;  for every client k, v_k = the lower (first N) layers of w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          (v_k, w_k) = SGD(k, (v_k, w_k))
     5      w = mean over S_t of w_k
    """
    client_update = local_sgd(federation.net, args)
    lower = personal_layers(federation, run, args)  # a slice of w (D1)
    w_0 = federation.initial_weights()  # D2
    state = State(w=w_0,  # l.1: [d]; its lower layers are not used
                  V=federation.per_client(w_0[lower]))  # l.1: [K, ...]

    def models(S):
        return with_part(state.w, lower, state.V[S])  # (v_k, w): [m, d]

    for t in run.rounds(state, model=None, clients=models):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2
        trained = federation.train(client_update, S, t, own=[models(S)], shared=[eta])  # l.3-4 (D5)
        state.w = trained.mean(0)  # l.5 (D4): [d]; its lower layers are not used
        state.V[S] = trained[:, lower]  # l.4
        sent = len(S) * (len(state.w) - lower.stop)
        run.sent(up=sent, down=sent)
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(models))  # D3


def ditto(federation, run, args):
    """Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through
    Personalization", 2021, arXiv 2012.04221.

    Global: w. Personal: v_k. With lambda = 0 and s = E, v_k is Local's model.

    D1  Lines 4 and 5: s is E by default. The authors' code counts both in minibatches and
        alternates steps on w_k and v_k, which changes nothing if s = E.
    D2  Line 5: the pull is in the gradient. FedSLR's code, whose lambda is our default, pulls v_k
        after the gradient's step.
    D3  Line 6 takes the plain mean, as in the authors' code. But that code draws client k with a
        probability proportional to n_k.

     1  w = w_0 and, for every client k, v_k = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          w_k = SGD(k, w_k)
     5          for each minibatch b of s epochs:
                    v_k = v_k - eta * (gradient of f_k(v_k; b) + lambda * (v_k - w))
     6      w = mean over S_t of w_k
    """
    gradient, sgd = gradient_of_loss(federation.net, args), common.sgd(args)
    global_sgd = local_sgd(federation.net, args)
    s = args.personal_epochs or args.epochs  # D1

    @common.step
    def personal_step(v, u, w_t, b, eta):  # [d] each, u: momentum
        return sgd(v, u, gradient(v, b) + args.ditto_lambda * (v - w_t), eta)  # l.5 (D2)

    def client_update(w_t, v, epochs, eta):
        w_k = global_sgd(w_t, epochs, eta)  # l.3-4
        u = torch.zeros_like(v)
        for minibatches in epochs.again(epochs=s):  # l.5 (D1)
            for b in minibatches:  # l.5
                v, u = personal_step(v, u, w_t, b, eta)
        return w_k, v

    w_0 = federation.initial_weights()
    state = State(w=w_0, V=federation.per_client(w_0))  # l.1: [d], [K, d]
    for t in run.rounds(state, clients="V"):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2
        w_t, v = state.w.expand(len(S), -1), state.V[S]  # [m, d] each
        w_k, v_k = federation.train(client_update, S, t, own=[w_t, v], shared=[eta])  # l.3-5
        state.w = w_k.mean(0)  # l.6 (D3): [d]
        state.V[S] = v_k  # l.5
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.V))


def pfedme(federation, run, args):
    """pFedMe: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", 2020,
    arXiv 2006.08848.

    Line 5 seeks the theta_k with the least f_k(theta_k; b) + lambda/2 * ||theta_k - w_k||^2.
    `steps` is the paper's K. Global: w. Personal: the client's last theta_k; w_0 if it was never
    sampled.

    D1  Lines 3 and 7: only S_t trains. In the paper and the authors' code all clients train, and
        S_t says whose w_k are averaged.
    D2  Line 4: an epoch is a pass over all images of a client. In the paper every client takes R
        minibatches.
    D3  Line 5: theta_k is kept from minibatch to minibatch, as in the authors' code, which also has
        a weight decay (--weight-decay .001).
    D4  Line 6: --momentum acts on w_k, not on theta_k. The authors use none (--momentum 0).
    D5  lambda, `steps`, beta and eta_p are PersFL's for DS-1 of CIFAR-10. eta_p decays as eta does.
    D6  The personal model is theta_k, as in the paper. By mistake the authors' code evaluates w_k,
        and PFLlib the server's w.
    D7  Line 7 weights by n_k, as in the authors' code. The paper takes the plain mean.

     1  w = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = theta_k = w
     4          for each minibatch b:
     5              `steps` times:  theta_k = theta_k - eta_p * (gradient of f_k(theta_k; b)
                                                               + lambda * (theta_k - w_k))
     6              w_k = w_k - eta * lambda * (w_k - theta_k)
     7      w = (1-beta) * w + beta * sum over k in S_t of n_k/n * w_k,
            n = sum over k in S_t of n_k
    """
    gradient, sgd = gradient_of_loss(federation.net, args), common.sgd(args)
    lam = args.pfedme_lambda  # D5

    @common.step
    def envelope_step(theta, w, u, b, eta, eta_p):  # [d] each, u: momentum
        for _ in range(args.theta_steps):  # l.5
            theta = theta - eta_p * (gradient(theta, b) + lam * (theta - w))  # l.5 (D3)
        return theta, *sgd(w, u, lam * (w - theta), eta)  # l.6 (D4)

    def client_update(w, epochs, eta, eta_p):
        theta, u = w, torch.zeros_like(w)  # l.3
        for minibatches in epochs:  # l.4 (D2)
            for b in minibatches:  # l.4
                theta, w, u = envelope_step(theta, w, u, b, eta, eta_p)
        return theta, w

    w_0 = federation.initial_weights()
    state = State(w=w_0, Theta=federation.per_client(w_0))  # l.1: [d]; D6: [K, d]
    for t in run.rounds(state, clients="Theta"):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2 (D1)
        eta_p = torch.tensor(args.theta_lr * args.lr_decay**t, device=federation.device)  # D5
        w = state.w.expand(len(S), -1)  # [m, d]
        theta_k, w_k = federation.train(client_update, S, t, own=[w], shared=[eta, eta_p])  # l.3-6
        n_k = federation.n[S]  # [m]
        mean = n_k @ w_k / n_k.sum()  # l.7 (D7): [d]
        state.w = (1 - args.pfedme_beta) * state.w + args.pfedme_beta * mean  # l.7
        state.Theta[S] = theta_k  # l.5
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.Theta))


def per_fedavg(federation, run, args):
    """Per-FedAvg: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning: A Meta-Learning
    Approach", 2020, arXiv 2002.07948. It minimises the mean over k of F_k(w) = f_k(w - alpha *
    gradient of f_k(w)).

    Global: w, before line 8's step. Personal: line 8's model. beta is eta (--lr). With alpha = 0 it
    is FedAvg on the minibatches b'. FedSLR has alpha .01 and beta .001.

    D1  Line 4 takes b and b' from the minibatches of the E epochs, so it does half as many steps as
        FedAvg. A minibatch that is left over at the end of a round is not used.
    D2  Line 6 takes its step from w_k; PersFL's code takes it from z. The paper has no momentum.
    D3  Line 7 weights by n_k, as in PersFL's code. The paper takes the plain mean.
    D4  Line 8: the gradient is over all training images. pFedMe's code and PersFL's take two steps
        on TEST images instead.
    D5  Line 6 is first-order, as in PersFL's code: it omits a factor of F_k's gradient,
        1 - alpha * (Hessian of f_k at w_k).

     1  w = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          for each pair of the next minibatches b, b':
     5              z = w_k - alpha * gradient of f_k(w_k; b)
     6              w_k = w_k - beta * gradient of f_k(z; b')
     7      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
     8  personal model of any client k:  w - alpha * gradient of f_k(w)
    """
    gradient, sgd = gradient_of_loss(federation.net, args), common.sgd(args)
    full_gradient, alpha = gradient_of_all(gradient), args.per_fedavg_alpha
    refuse_small_clients(federation, args)

    @common.step
    def to_z(w, b):
        return w - alpha * gradient(w, b)  # l.5

    @common.step
    def meta_step(w, u, z, b, beta):  # [d] each, u: momentum
        return sgd(w, u, gradient(z, b), beta)  # l.6 (D2, D5)

    def client_update(w, epochs, beta):  # l.3: w_k = w
        u = torch.zeros_like(w)
        minibatches = chain.from_iterable(epochs)  # of all epochs, one after the other
        for b, b_prime in zip(minibatches, minibatches):  # l.4 (D1): two by two
            z = to_z(w, b)
            w, u = meta_step(w, u, z, b_prime, beta)
        return w

    def personal_model(w, n_k, epochs):
        return w - alpha * full_gradient(w, n_k, epochs)  # l.8 (D4)

    state = State(w=federation.initial_weights())  # l.1: [d]
    for t in run.rounds(state):  # l.2
        S, beta = federation.sample(t), federation.eta(t)  # l.2
        w = state.w.expand(len(S), -1)  # [m, d]
        w_k = federation.train(client_update, S, t, own=[w], shared=[beta])  # l.3-6: [m, d]
        n_k = federation.n[S]  # [m]
        state.w = n_k @ w_k / n_k.sum()  # l.7 (D3): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            own = [state.w.expand(federation.K, -1), federation.n[:, None]]  # [K, d], [K, 1]
            personal = federation.train(personal_model, federation.everyone, t, own=own)  # l.8
            run.log(federation.evaluate(state.w), federation.evaluate_clients(personal))


def refuse_small_clients(federation, args):
    """Refuses --method per-fedavg where a client has too few minibatches for one step."""
    least = int(federation.n.min())
    if args.epochs * ceil(least / (args.batch_size or least)) < 2:
        common.refuse(f"a step of per-fedavg takes 2 minibatches, and a client with {least} images "
                      "has fewer; use more --epochs or a smaller --batch-size")


def fedspa(federation, run, args):
    """FedSpa: Huang, Liu, Shen, He, Lin, Tao, "Achieving Personalized Federated Learning with
    Sparse Local Models", 2022, arXiv 2201.11380. We had only its abstract; D1 to D5 say how we
    filled in the rest.

    Global: the dense w. Personal: M_k * w, with the mask of line 7 and the w of line 8. With
    density 1 it is FedAvg. Only active weights count as bytes.

    D1  Line 1: ERK (erdos_renyi_kernel) sets the numbers of ones, as in DisPFL's code; FedSLR's
        table implies density .5. Each client has its own mask.
    D2  Line 4: the momentum sums M_k * g_k, so weights outside the mask stay 0.
    D3  Line 6: the cosine and a = .5 (--drop) are those of DisPFL's code. We round the number of
        dropped weights down; that code rounds it up.
    D4  Line 7: g_k is that of the last minibatch, before its step; in DisPFL's code that of a new
        one, after training. Weights that line 6 dropped can come back.
    D5  Line 8 weights by n_k.

     1  w = w_0 and, for every client k, a random mask M_k in {0,1}^d, with a fixed number of ones
        in every tensor
     2  for each round t = 0, 1, ..., T-1, with the clients S_t:
     3      for each client k in S_t:  w_k = M_k * w
     4          for each minibatch b:
                    g_k = gradient of f_k(w_k; b), of all d weights
                    w_k = w_k - eta * M_k * g_k
     5          U_k = w_k - M_k * w
     6          prune: in each tensor, drop the share a/2 * (1 + cos(pi*t/T)) of M_k's ones, those
                with the least |w_k|
     7          grow: refill the mask with the other weights that have the largest |g_k|
     8      w = w + sum over k in S_t of n_k/n * U_k,   n = sum over k in S_t of n_k
    """
    net = federation.net
    gradient, sgd = gradient_of_loss(net, args), common.sgd(args)
    counts = erdos_renyi_kernel(net, args.density)  # D1: ones in each tensor
    active = int(counts.sum())

    @common.step
    def sparse_step(w, u, M, b, eta):  # [d] each, u: momentum
        g = gradient(w, b)  # l.4 (D4)
        return *sgd(w, u, M * g, eta), g  # l.4 (D2)

    def client_update(w, M, epochs, eta, left):  # M: 0.0 or 1.0
        start = w_k = M * w  # l.3
        u = torch.zeros_like(w)
        for minibatches in epochs:  # l.4
            for b in minibatches:  # l.4
                w_k, u, g = sparse_step(w_k, u, M, b, eta)
        U = w_k - start  # l.5
        keep = highest(torch.where(M > 0, w_k.abs(), -1), net.sizes, left)  # l.6: the largest |w_k|
        M = highest(torch.where(keep, torch.inf, g.abs()), net.sizes, counts)  # l.7: these and more
        return U, M.float()

    def first_mask(k):
        draw = common.stream(args.seed, "algorithm", 0, k).random((1, net.d), np.float32)
        return highest(torch.from_numpy(draw).to(federation.device), net.sizes, counts)[0]

    state = State(w=federation.initial_weights(), M=federation.per_client(first_mask))  # l.1

    def sparse_models(S):
        return state.M[S] * state.w  # [m, d]

    for t in run.rounds(state, clients=sparse_models):  # l.2
        S, eta = federation.sample(t), federation.eta(t)  # l.2
        share = args.drop / 2 * (1 + cos(pi * t / args.rounds))  # l.6
        left = counts - np.floor(share * counts + 1e-9).astype(int)  # l.6 (D3): kept in each tensor
        own = [state.w.expand(len(S), -1), state.M[S].float()]  # [m, d] each
        U_k, M_k = federation.train(client_update, S, t, own=own, shared=[eta, left])  # l.3-7
        n_k = federation.n[S]  # [m]
        state.w = state.w + n_k @ U_k / n_k.sum()  # l.8 (D5): [d]
        state.M[S] = M_k.bool()  # l.7
        run.sent(up=len(S) * active, down=len(S) * active)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(sparse_models))


def erdos_renyi_kernel(net, density):
    """Returns how many weights of every tensor are active by ERK, round(density * d) in all.

    One-dimensional tensors (biases, normalisation) are dense. The densities of the others are
    proportional to the sum of their dimensions over the product of their dimensions, and at most 1.
    """
    sizes, shapes = np.array(net.sizes, float), [shape for _, _, shape in net.tensors]
    kernel = np.array([net.is_kernel(name, shape) for name, _, shape in net.tensors])
    relative = np.array([sum(shape) / np.prod(shape) for shape in shapes])  # not yet scaled
    dense, budget = ~kernel, round(density * net.d)
    while True:  # a kernel whose density would exceed 1 becomes dense
        scale = (budget - sizes[dense].sum()) / max((relative * sizes)[~dense].sum(), 1e-9)
        over = ~dense & (scale * relative > 1)
        if not over.any():
            break
        dense = dense | over
    if scale < 0:
        common.refuse(f"--density {density:g} leaves nothing to kernels: biases and normalisation "
                      f"are always active, {sizes[~kernel].sum() / net.d:.3g} of the weights; use "
                      "more")
    return common.whole_numbers(np.where(dense, sizes, scale * relative * sizes))


def highest(score, sizes, counts):
    """Returns a mask [..., d], True for the counts[i] largest entries of score [..., d] in every
    tensor i. `sizes` are those of the tensors."""
    parts = []
    for part, count in zip(score.split(sizes, -1), counts.tolist()):
        chosen = part.topk(count, -1).indices
        parts.append(torch.zeros_like(part, dtype=torch.bool).scatter_(-1, chosen, True))
    return torch.cat(parts, -1)


def fedma(federation, run, args):
    """FedMA: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated Learning with Matched
    Averaging", ICLR 2020, arXiv 2002.06440.

    Global and personal: w. One round is FedMA; more are FedMA "with communication". The authors'
    script has --model vgg9 --split fedma --alpha .5 --client-test 0 --clients 16 --fraction 1
    --batch-size 64 --epochs 20 --rounds 11. In a round a client sends each layer once. It receives
    w at the start (except in round 0 without --common-start), then each averaged layer but the
    last, and Pi_k.

    D1  Line 6: units are matched one-to-one, so that layers keep their size. In the paper (BBP-MAP)
        a global layer can grow.
    D2  Line 6: a unit is its weights and bias. The j-th client of S is matched to the sum of
        those before it, then in up to four sweeps to that of all others (authors' code: five, in
        random order).
    D3  Line 7 takes the plain mean. The paper's mean is pulled to that of the prior.
    D4  Line 5: for l = L eta is divided by 10, the weight decay is 1e-4, and there are 3*E epochs,
        as in the authors' code. --last-lr 1 --last-decay 0 --last-epochs 1 treats all layers alike.
    D5  Line 9: the unit of a class of which no client in S_t has images becomes the plain mean.
    D6  Line 3: clients start from random weights of their own, as in the authors' code. With
        --common-start they start from w_0, as in all other methods here.
    D7  Line 2 samples a tenth of the clients by default, the authors' script all (--fraction 1).

     1  w = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w;  in the first round w_k = random weights of its own
     4      for each layer l = 1, ..., L:
     5          for each k in S_t, for each minibatch b (if l = L, of 3*E epochs):
                    a step of SGD on f_k(w_k; b), only on w_k's layers l to L
     6          if l < L:  find permutations Pi_k of the units of layer l that bring all clients'
                           units close to each other
     7              layer l of w, and of all w_k, = mean over S_t of Pi_k (layer l of w_k)
     8              the inputs of layer l+1 of w_k are permuted by Pi_k
     9          if l = L:  each class's unit in w = mean over S_t of that in w_k, weighted by k's
                           images of this class
    """
    net, L = federation.net, len(federation.net.layers)
    units = units_of_a_chain(net, federation.transform(federation.images[:2]))  # [L]: of each layer
    sgd, by_upper = common.sgd(args), gradient_of_part(net, 1)
    labels, classes = federation.data.labels, units[-1]
    held = np.array([np.bincount(labels[images], minlength=classes)
                     for images in federation.split.train], np.float32)
    held = torch.from_numpy(held).to(net.device)  # [K, classes]: images of each class

    @common.step
    def sgd_step(free, u, matched, b, eta, decay):
        return sgd(free, u, by_upper(matched, free, b, decay), eta)  # l.5

    def client_update(free, matched, epochs, eta, decay):  # layers l to L, and those before l
        u = torch.zeros_like(free)
        for minibatches in epochs:  # l.5
            for b in minibatches:  # l.5
                free, u = sgd_step(free, u, matched, b, eta, decay)
        return free

    state = State(w=federation.initial_weights())  # l.1: [d]
    for t in run.rounds(state):  # l.2
        S = federation.sample(t)  # l.2 (D7)
        w, w_k = state.w.clone(), state.w.repeat(len(S), 1)  # l.3: [d], [m, d]
        own_start = t == 0 and not args.common_start
        if own_start:
            for i, k in enumerate(S):
                w_k[i] = net.init(common.stream(args.seed, "initialisation", 0, k + 1))  # l.3 (D6)
        for l, (_, layer) in enumerate(net.layers):  # l.4: from 0; `layer` is its slice of w
            last = l == L - 1
            eta, decay, epochs = federation.eta(t), args.weight_decay, args.epochs
            if last:
                eta, decay = eta * args.last_lr, args.last_decay  # D4
                epochs = epochs * args.last_epochs  # D4
            matched, free = w_k[:, : layer.start], w_k[:, layer.start :]
            free = federation.train(client_update, S, t, own=[free, matched], shared=[eta, decay],
                                    epochs=epochs, order=l)  # l.5
            w_k = torch.cat([matched, free], 1)
            U = by_unit(w_k[:, layer], units[l])  # [m, units, inputs + 1]
            if not last:
                Pi = match(U)  # l.6 (D1, D2): [m, units]
                w[layer] = flat(in_order(U, Pi).mean(0))  # l.7 (D3)
                w_k[:, layer] = w[layer]  # l.7
                following, out = net.layers[l + 1][1], units[l + 1]
                w_k[:, following] = inputs_in_order(w_k[:, following], out, Pi)  # l.8
            else:
                n_kc = held[S]  # [m, classes]
                n_kc = torch.where(n_kc.sum(0) > 0, n_kc, 1)  # D5
                weights = (n_kc / n_kc.sum(0))[:, :, None]
                w[layer] = flat((U * weights).sum(0))  # l.9
        state.w = w
        first = 0 if own_start else w_k.numel()
        all_but_last = len(S) * net.layers[-1][1].start
        permutations = len(S) * sum(units[:-1])
        run.sent(up=w_k.numel(), down=first + all_but_last + permutations)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


def by_unit(x, out):
    """Returns a layer of m clients, x [m, weights then biases], unit by unit:
    [m, out, inputs + 1], where the last is the bias."""
    return torch.cat([x[:, :-out].unflatten(1, (out, -1)), x[:, -out:, None]], 2)


def flat(U):
    """Returns the inverse of by_unit, of one client or of several."""
    return torch.cat([U[..., :-1].flatten(-2), U[..., -1]], -1)


def in_order(U, order):
    """Returns U [m, units, ...] with client j's units in the order order[j]; order [m, units]."""
    return U[torch.arange(len(U), device=U.device)[:, None], order]


def inputs_in_order(x, out, order):
    """Returns the layer x of m clients with its inputs permuted, because the units before it were
    put in `order` [m, units before]."""
    weight = x[:, :-out].unflatten(1, (out, order.shape[1], -1))  # [m, out, units before, pixels]
    weight = in_order(weight.transpose(1, 2), order).transpose(1, 2)  # line 8 of fedma
    return torch.cat([weight.flatten(1), x[:, -out:]], 1)


def best_order(U, target):
    """Returns the order of the units U [units, inputs + 1] that has the largest sum over i of
    <U[order[i]], target[i]>."""
    from scipy.optimize import linear_sum_assignment  # solves the assignment problem exactly

    # a run that diverges has NaN; it ends after this round
    products = (target @ U.T).nan_to_num(nan=0, posinf=0, neginf=0)
    return torch.from_numpy(linear_sum_assignment(products.cpu().numpy(), maximize=True)[1])


def match(U, sweeps=5):
    """Returns an order of each client's units that makes unit i similar in all clients:
    U [m, units, inputs + 1] -> [m, units]."""
    order = torch.arange(U.shape[1], device=U.device).repeat(len(U), 1)
    total = U[0]  # the sum of the clients' units, each in its order
    for j in range(1, len(U)):  # first sweep: match client j to the sum of those before it
        order[j] = best_order(U[j], total)  # line 6 of fedma
        total = total + U[j][order[j]]
    for _ in range(1, sweeps):  # other sweeps: match client j to the sum of all others
        before = order.clone()
        for j in range(len(U)):
            others = total - U[j][order[j]]
            order[j] = best_order(U[j], others)  # line 6 of fedma
            total = others + U[j][order[j]]
        if torch.equal(order, before):
            break
    return order


def units_of_a_chain(net, x):
    """Returns the number of units of every layer. Refuses a model that is no chain of convolutions
    and linear layers with biases.

    It checks the shapes of the tensors, and with order_is_free that the logits do not depend on the
    order of the hidden units.
    """
    shapes = [[shape for name, _, shape in net.tensors if name.rpartition(".")[0] == layer]
              for layer, _ in net.layers]
    units = [kernel[0] for kernel, *_ in shapes]
    chained = all(len(pair) == 2 and len(pair[0]) > 1 for pair in shapes)  # a kernel and its biases
    chained = chained and all(kernel[1] % before == 0  # inputs for each unit
                              for before, (kernel, _) in zip(units, shapes[1:]))
    if not (chained and order_is_free(net, units, x)):
        common.refuse("--method fedma takes chains of convolutions and linear layers with biases, "
                      f"and {net.name} is none; use --model vgg9, vgg16, cnn, cifarnet, mnistnet, "
                      "mnistcnn or 2nn")
    return units


def order_is_free(net, units, x):
    """Returns whether the logits on x stay the same when all hidden units are rolled, layer by
    layer by another number of places, since layers of one width could be in another order."""
    w = 2 * net.init(common.stream(0, "algorithm")).double()[None]  # [1, d]
    moved = w.clone()
    for l, (_, layer) in enumerate(net.layers[:-1]):
        places = 1 + l % max(units[l] - 1, 1)
        order = torch.arange(units[l], device=w.device).roll(places)[None]
        following = net.layers[l + 1][1]
        moved[:, layer] = flat(in_order(by_unit(moved[:, layer], units[l]), order))
        moved[:, following] = inputs_in_order(moved[:, following], units[l + 1], order)
    a, b = net(w[0], x.double()), net(moved[0], x.double())
    return bool((a - b).abs().max() <= 1e-5 * a.abs().max())


# --------------------------------------------------------------------------------------------------
# Around it

METHODS = {
    "local": local, "centralised": centralised, "fedavg": fedprox, "fedavg-ft": fedprox,
    "fedprox": fedprox, "fedprox-ft": fedprox, "scaffold": scaffold, "feddyn": feddyn, "apfl": apfl,
    "fedper": fedper, "fedrep": fedrep, "lg-fedavg": lg_fedavg, "ditto": ditto, "pfedme": pfedme,
    "per-fedavg": per_fedavg, "fedspa": fedspa, "fedma": fedma,
}

FIXED_ROUNDS = {  # why --resume can't have other --rounds
    "fedavg-ft": "clients fine-tune after the last round",
    "fedprox-ft": "clients fine-tune after the last round",
    "fedspa": "the masks' pace depends on the number of rounds",
}

# The settings of CIFAR-10 in SuPerFed's Table 1, and what differs in Tables 1 and 2's other columns
DEFAULTS = dict(split="shards", clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20,
                lr=0.01, momentum=0.9)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, batch_size=10, clients=20, fraction=0.5, per_client=4,
                   lr=0.02, lr_decay=0.95, theta_lr=0.02, transform="normalize", eval_every=3),
}
# no momentum on shapes (docs/shapes.md says why)
WITHOUT_MOMENTUM = "centralised", "scaffold", "per-fedavg"

SGD_RATE = {"pfedme": "theta-lr"}  # the flag of SGD's learning rate, where that is not --lr


def arguments(argv):
    """Returns the arguments. A flag group's title names its methods."""
    p = common.parser(__doc__, **DEFAULTS)
    flag = p.add_argument_group("methods").add_argument
    flag("--method", choices=METHODS, required=True, help="which method runs")
    flag = p.add_argument_group("fedprox, fedprox-ft").add_argument
    flag("--mu", type=common.nonnegative, default=0.01, help="mu in mu/2 ||w - w_t||^2")
    flag = p.add_argument_group("fedavg-ft, fedprox-ft").add_argument
    flag("--finetune-epochs", type=common.positive_int, default=1, help="epochs of fine-tuning")
    flag = p.add_argument_group("scaffold").add_argument
    flag("--option", choices=("I", "II"), default="II", help="how c_k is updated: line 5 or 6")
    flag("--global-lr", type=common.positive, default=1.0, help="eta_g, the server's step")
    flag = p.add_argument_group("feddyn").add_argument
    flag("--feddyn-alpha", type=common.positive, default=0.1,
         help="alpha in alpha/2 ||theta - w||^2")
    flag = p.add_argument_group("apfl").add_argument
    flag("--apfl-alpha", type=common.fraction, default=0.5, help="the initial alpha_k")
    flag("--adaptive", action="store_true", help="learn alpha_k")
    flag = p.add_argument_group("fedper, fedrep, lg-fedavg").add_argument
    flag("--personal", type=common.nonnegative_int,
         help="N, how many layers a client keeps: the last ones (default: 1); lg-fedavg: the first "
              "ones (default: all before the first fully connected one, but at least 1); a "
              "normalisation counts as one")
    flag = p.add_argument_group("fedrep").add_argument
    flag("--body-epochs", type=common.positive_int, default=1,
         help="epochs on the body; --epochs counts those on the head")
    flag = p.add_argument_group("ditto").add_argument
    flag("--ditto-lambda", type=common.nonnegative, default=0.1,
         help="lambda, how strongly v_k is pulled to w")
    flag("--personal-epochs", type=common.positive_int, help="s, epochs on v_k (default: --epochs)")
    flag = p.add_argument_group("pfedme").add_argument
    flag("--pfedme-lambda", type=common.positive, default=15.0,
         help="lambda in lambda/2 ||theta_k - w_k||^2; given without --lr it makes --lr 1/lambda, "
              "with which the first step sets w_k to theta_k")
    flag("--pfedme-beta", type=common.positive, default=1.0,
         help="beta, the server's step to the mean")
    flag("--theta-lr", type=common.positive, default=0.001,
         help="eta_p, the learning rate of theta_k; decays as --lr does")
    flag("--theta-steps", type=common.positive_int, default=5,
         help="`steps` per minibatch on theta_k")
    flag = p.add_argument_group("per-fedavg").add_argument
    flag("--per-fedavg-alpha", type=common.nonnegative, default=0.01, help="alpha, step size to z")
    flag = p.add_argument_group("fedspa").add_argument
    flag("--density", type=common.positive_fraction, default=0.5, help="share of active weights")
    flag("--drop", type=common.fraction, default=0.5, help="a, share of a mask that round 0 drops")
    flag = p.add_argument_group("fedma").add_argument
    flag("--common-start", action="store_true",
         help="all clients start from w_0, not each from random weights of its own")
    flag("--last-lr", type=common.positive, default=0.1,
         help="the last layer's learning rate, as a multiple of --lr")
    flag("--last-epochs", type=common.positive_int, default=3,
         help="the last layer's epochs, as a multiple of --epochs")
    flag("--last-decay", type=common.nonnegative, default=1e-4,
         help="the last layer's weight decay")
    args = common.parse(p, BY_DATASET, argv)
    if args.method in WITHOUT_MOMENTUM and args.dataset == "shapes":
        p.set_defaults(momentum=0.0, lr=0.05)  # flags on the command line win
        args = common.parse(p, {}, argv)
    given = {word.partition("=")[0] for word in args.argv}
    refuse_foreign(p, args.method, given)
    if "--pfedme-lambda" in given and "--lr" not in given:
        args.lr = float(f"{1 / args.pfedme_lambda:.3g}")
    if args.method == "pfedme" and args.fine_tune and args.fine_tune_lr is None:
        args.fine_tune_lr = args.theta_lr  # its SGD's rate
    return args


def refuse_foreign(p, method, given):
    """Refuses a flag of other methods, which would change nothing."""
    for group in p._action_groups:
        methods = group.title.split(", ")
        if methods[0] in METHODS and method not in methods:
            for names in (flag.option_strings for flag in group._group_actions):
                if given & set(names):
                    p.error(f"{method} has no {names[0][2:]}; it is for {group.title}")


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation, args.method, FIXED_ROUNDS.get(args.method, ""))
    if args.momentum and args.method in ("scaffold", "per-fedavg", "pfedme"):
        run.note("note    its paper has no momentum: use --momentum 0, and choose --lr anew")
    METHODS[args.method](federation, run, args)
    return run.record()


if __name__ == "__main__":
    main()
