"""The methods that the papers of the other files compare with. fedavg-ft, fedprox, fedprox-ft share a function.

    python baselines.py --method fedper --dataset cifar10

    --method     idea
    local        Every client trains for itself (`local_training`). Nothing is sent.
    centralised  One model is trained on the images of all clients, in one place: what federated methods are measured against.
    fedavg-ft    FedAvg. After the last round every client trains the global model further, alone (fine-tuning; see `fedprox`).
    fedprox      FedAvg, and each client's steps are pulled back to the global model.
    fedprox-ft   FedProx, then fine-tuning as in fedavg-ft.
    scaffold     FedAvg, with corrected steps: minus the client's gradient in its last round, plus all clients' mean of these.
    feddyn       Two more terms in each client's loss move the client's own minimum towards the minimum of the mean loss.
    apfl         The personal model is a mixture of the global model and of a model of the client's own.
    fedper       The last layers are personal. The other layers are averaged.
    fedrep       As fedper, but a round trains the personal layers first and then the others.
    lg-fedavg    The first layers are personal. The other layers are averaged.
    ditto        FedAvg, and beside it each client trains a second model, its own, which is pulled to the global model.
    pfedme       Each client trains a personal model near the global one, and the global model moves to the personal models.
    per-fedavg   The global model is trained to be good after one gradient step on a client's images.
    fedspa       Each client trains only some weights of the global model: those of its mask, which changes every round.
    fedma        Layer by layer: the clients' units are matched with each other before they are averaged.

Each function has the paper, the pseudocode in our words, the choices D1 to Dn, the step for one client and one minibatch, and
the rounds. docs/baselines.md has each choice in full, what was measured, and a comparison with PFLlib.

Symbols. K clients. Client k has n_k training images. f_k(w) is the mean loss on them, f_k(w; b) that on a minibatch b of them.
w_0 are the initial weights. t is 0, 1, ..., T-1. S_t are the m = max(C*K, 1) sampled clients of round t; C*K is rounded down.
eta is the round's local learning rate, --lr times --lr-decay^t. "For each minibatch b" is two loops: over E local epochs, and
over the epoch's minibatches, newly shuffled. Lines that have other epochs say so.
K, C, T, E are --clients, --fraction, --rounds, --epochs. alpha, beta, lambda, g, h differ from function to function; --help has
their options.
`# l.3` marks the code of line 3. [m, d]: m rows, one for each sampled client, with d numbers each, one for each weight.

Models. "global": the server's model, on the central test images. "personal": each client's model on its own test images, then
the mean over all clients. (Most authors' code weighs clients by their test images: `weighted_mean` in the record.) A function
says which models these are. In a personal model the server's part is the newest; the client's own part is from the last round
in which the client was sampled.

Local SGD has momentum .9, SuPerFed's setting; most methods' own papers have none (docs/baselines.md). Its buffer u starts at 0
in each call of federation.train: zeros in `start`. Steps without momentum: pfedme's on theta_k, apfl's on alpha_k, per-fedavg's
in lines 5 and 8. Weight decay is added to each gradient of f_k. Bytes: what S_t sends and gets.

federation.train(step, start, S, t, *shared) does for each client of S: client = its row of the tensors in `start`; for each
minibatch b: client = step(client, b, *shared). It returns what the clients come to, as such tensors. epochs=: instead of
E. order=1, 2, ...: other orders of the images. images=: instead of the client's own training images.

V = federation.per_client(x) keeps a row x for every client. V[S] are the rows of the clients in S. V[S] = y replaces them.
V.all has all rows.

federation.mean(x) is the plain mean of the rows of x, one for each client of S_t; mean(x, n_k) weighs them by n_k; sum(x) adds
them up. run.rounds(state) yields t and S = S_t. run.evaluates(): is round t measured? run.log records it.

Whose code the choices cite: docs/baselines.md. "Official" is code by the method's authors.
"""

import sys
from math import ceil, cos, pi
from types import SimpleNamespace as State

import numpy as np
import torch

import common

# ---------------------------------------------------------------------------------------------------------------------
# What several methods share: gradients and steps


def with_decay(g, w, decayed, decay):
    """g + decay * w where `decayed` is 1: the weight decay as a part of the gradient g of f_k."""
    return torch.addcmul(g, decayed, w, value=decay) if decay else g


def local_sgd(net, args):
    """gradient(w, b): of f_k(w; b). descend(w, u, g, eta) -> (w, u): SGD's step against g. u: momentum's buffer. [d] each."""

    def gradient(w, b):
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        return with_decay(common.grad(loss)(w), w, net.decayed, args.weight_decay)

    def descend(w, u, g, eta):
        return common.sgd(args, w, u, g, eta)

    return gradient, descend


def sgd_step(net, args):
    """FedAvg's step, for the methods that differ from FedAvg only in what they send and keep."""
    gradient, descend = local_sgd(net, args)

    def step(client, b, eta):
        w, u = client  # [d] weights, [d] momentum
        return descend(w, u, gradient(w, b), eta)

    return step


def sums_of_gradients(federation, gradient):
    """sums(w, S, t): n_k times the gradient of f_k at the one w [d], for each client k of S: [m, d]."""

    def add(total, b, w):
        return total + b.mask.sum() * gradient(w, b)

    def sums(w, S, t):
        return federation.train(add, w.new_zeros(len(S), len(w)), S, t, w, epochs=1, order=1)

    return sums


# What several methods share: parts of w. Layers lie side by side in w. A cut at the start of a layer makes two parts of w,
# the lower layers w[:cut] and the upper layers w[cut:].


def personal_layers(net, args):
    """The slice of w that a client keeps: its last N layers; for lg-fedavg its first N."""
    if args.method == "lg-fedavg":
        return net.first_layers(max(first_linear_layer(net), 1) if args.personal is None else args.personal)
    return net.last_layers(1 if args.personal is None else args.personal)


def first_linear_layer(net):
    """The number of the first fully connected layer, from 0: of the first whose weights are a matrix."""
    shapes = {where.start: shape for _, where, shape in net.tensors}
    linear = [i for i, (_, where) in enumerate(net.layers) if len(shapes[where.start]) == 2]
    if not linear:
        common.refuse(f"{net.name} has no fully connected layer, below which the personal part would end; say --personal N")
    return linear[0]


def logits_of_parts(net, lower, upper, x):
    """The logits of the model w = (lower, upper). The gradient by one part then costs nothing for the other."""
    n = sum(where.stop <= len(lower) for _, where, _ in net.tensors)  # tensors in `lower`
    tensors = [*lower.to(x.dtype).split(net.sizes[:n]), *upper.to(x.dtype).split(net.sizes[n:])]
    return net.model(common.Weights(zip(net.names, tensors), net.route), x, net.classes).to(lower.dtype)


def steps_on_parts(net, args, decay):
    """Two steps for federation.train. on_lower trains (lower, u, upper), on_upper trains (upper, u, lower). u is the momentum
    of the first part. The last part is a constant."""

    def loss(lower, upper, b):
        return common.cross_entropy(logits_of_parts(net, lower, upper, b.x), b)

    by_lower, by_upper = common.grad(loss, argnums=0), common.grad(loss, argnums=1)

    def on_lower(client, b, eta):
        lower, u, upper = client
        if not len(lower):  # all layers are personal
            return client
        g = with_decay(by_lower(lower, upper, b), lower, net.decayed[: len(lower)], decay)
        return *common.sgd(args, lower, u, g, eta), upper

    def on_upper(client, b, eta):
        upper, u, lower = client
        if not len(upper):  # no layer is personal
            return client
        g = with_decay(by_upper(lower, upper, b), upper, net.decayed[len(lower) :], decay)
        return *common.sgd(args, upper, u, g, eta), lower

    return on_lower, on_upper


# ---------------------------------------------------------------------------------------------------------------------
# The methods


def local_training(federation, run, args):
    """Local: every client for itself.

     1  every client k: w_k = w_0
     2  for each round t, for each client k in S_t:
     3      for each minibatch b:  w_k = w_k - eta * gradient of f_k(w_k; b)

    Global: none. Personal: w_k. Nothing is sent.
    D1  Line 2: only sampled clients train, as much as in FedAvg. A client that is never sampled is evaluated with w_0.
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
    """Centralised: SGD on the training images of all clients in one place.

     1  w = w_0;  P = the training images of all clients
     2  for each round t:
     3      for each minibatch b of C*E epochs of P:  w = w - eta * gradient of f(w; b)

    Global and personal: w. Images would be sent once and models are not sent: no bytes are counted.
    D1  Line 3: C*E epochs are as much work as FedAvg's. Rounded, and at least one: more work where C*E is below 1.
    """
    step = sgd_step(federation.net, args)
    epochs = max(1, round(args.fraction * args.epochs))  # D1
    state = State(w=federation.initial_weights())  # l.1: [d]
    P = np.concatenate(federation.whole_split.train)  # l.1: numbers of images
    centre = federation.rows([0])  # client 0 trains on P. With several processes only its own trains
    for t, _ in run.rounds(state):  # l.2
        w = state.w.expand(len(centre), -1)  # [1, d]; [0, d] where nobody trains
        w, _ = federation.train(step, (w, torch.zeros_like(w)), centre, t, federation.eta(t), epochs=epochs,
                                images=[P for _ in centre])  # l.3
        state.w = federation.sum(w)  # the one row, now in all processes
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


def fedprox(federation, run, args):
    """FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
    arXiv 1812.06127. Lines 5 and 6 are for fedprox-ft and fedavg-ft alone: SuPerFed's FedProx-LU and FedAvg-LU ("local
    update"), after Wang et al. 2019. fedavg-ft has mu = 0.

     1  w = w_0;  for each round t, with the clients S_t:
     2      for each client k in S_t:  w_k = w_t
     3          for each minibatch b:  w_k = w_k - eta * gradient of (f_k(w_k; b) + mu/2 * ||w_k - w_t||^2)
     4      w_{t+1} = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
     5  after the last round, for every client k:  v_k = w_T
     6      for each minibatch b of --finetune-epochs epochs:  v_k = v_k - eta * gradient of f_k(v_k; b)

    Global: w_{t+1}. Personal: w_{t+1}; for the -ft methods v_k after the last round. That all clients then need w_T is not
    counted as bytes.
    D1  Line 3: squared and halved, as in the paper. SuPerFed's later code does neither. The default mu is that code's.
    D2  Line 3: every client does all of its work. The paper also lets slow clients stop early.
    D3  Line 6: one epoch by default (the papers do not say), without the proximal term. eta has decayed once more.
    D4  Line 4: weighted by n_k, as in the authors' and SuPerFed's code. The paper's listing, from memory, draws clients by n_k
        and takes the plain mean.
    """
    mu = 0.0 if args.method == "fedavg-ft" else args.mu
    gradient, descend = local_sgd(federation.net, args)
    fine_tune = sgd_step(federation.net, args)  # l.6

    def step(client, b, eta, w_t):
        w, u = client  # [d] weights, [d] momentum
        return descend(w, u, gradient(w, b) + mu * (w - w_t), eta)  # l.3 (D1)

    state = State(w=federation.initial_weights())  # l.1: [d]
    for t, S in run.rounds(state):  # l.1
        w = state.w.expand(len(S), -1)  # l.2: [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, federation.eta(t), state.w)  # l.3 (D2)
        n_k = federation.n[S]  # [m]
        state.w = federation.mean(w_k, n_k)  # l.4 (D4): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            v = state.w  # the personal model: [d]; of the -ft methods after the last round [K, d]
            if args.method.endswith("-ft") and t == args.rounds - 1:
                everyone, T = federation.rows(), args.rounds
                v = state.w.expand(len(everyone), -1)  # l.5: [K, d]
                v, _ = federation.train(fine_tune, (v, torch.zeros_like(v)), everyone, T, federation.eta(T),
                                        epochs=args.finetune_epochs)  # l.6 (D3)
            run.log(federation.evaluate(state.w), federation.evaluate_clients(v))


def scaffold(federation, run, args):
    """Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", 2020,
    arXiv 1910.06378.

     1  x = w_0;  c = 0 and, for every client k, c_k = 0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  y_k = x
     4          for each minibatch b:  y_k = y_k - eta * (gradient of f_k(y_k; b) - c_k + c)
     5          Option I:   c_k^+ = gradient of f_k(x)
     6          Option II:  c_k^+ = c_k - c + (x - y_k) / (steps * eta),   steps = how often line 4 was done
     7      x = x + eta_g * mean over S_t of (y_k - x)
     8      c = c + 1/K * sum over S_t of (c_k^+ - c_k),   so that c is always the mean of all c_k
     9      c_k = c_k^+

    Global and personal: x. Twice FedAvg's bytes: c_k^+ - c_k goes up, too, and c goes down.
    D1  Lines 6 and 7: the defaults are Option II and eta_g = 1, as in FedSLR and, from memory, in the paper's experiments.
    D2  Line 6: `reach` replaces steps: the sum over s = 1 to steps of (1 + beta + ... + beta^(s-1)), beta being the momentum.
        Without momentum it is the number of steps. The paper, from memory, has none (--momentum 0).
    D3  Line 5: one more pass over the client's images, augmented where --transform does so.
    D4  Line 4: E epochs, so that clients with more images take more steps. The paper has one number of steps for all.
    """
    gradient, descend = local_sgd(federation.net, args)
    sums = sums_of_gradients(federation, gradient)

    def step(client, b, eta, c):
        y, u, c_k, reach, pace = client  # [d] weights, momentum, control; numbers: D2's reach, and its last term
        y, u = descend(y, u, gradient(y, b) - c_k + c, eta)  # l.4
        pace = args.momentum * pace + 1  # l.6: reach counts the steps; with momentum more (D2)
        return y, u, c_k, reach + pace, pace

    x = federation.initial_weights()  # l.1: [d]
    state = State(x=x, c=torch.zeros_like(x), c_k=federation.per_client(torch.zeros_like(x)))  # l.1: c_k is [K, d]
    for t, S in run.rounds(state):  # l.2
        eta, n_k = federation.eta(t), federation.n[S]  # n_k: [m]
        c_k = state.c_k[S]  # [m, d]
        zero = torch.zeros_like(n_k)  # [m]
        start = (state.x.expand(len(S), -1), torch.zeros_like(c_k), c_k, zero, zero)  # l.3
        y_k, _, _, reach, _ = federation.train(step, start, S, t, eta, state.c)  # l.4 (D4)
        if args.option == "I":
            c_plus = sums(state.x, S, t) / n_k[:, None]  # l.5 (D3): [m, d]
        else:
            c_plus = c_k - state.c + (state.x - y_k) / (reach * eta)[:, None]  # l.6 (D1, D2)
        state.x = state.x + args.global_lr * federation.mean(y_k - state.x)  # l.7
        state.c = state.c + federation.sum(c_plus - c_k) / federation.K  # l.8
        state.c_k[S] = c_plus  # l.9
        run.sent(up=2 * y_k.numel(), down=2 * y_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.x), federation.evaluate_clients(state.x))


def feddyn(federation, run, args):
    """FedDyn: Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization",
    2021, arXiv 2111.04263.

     1  w = w_0;  h = 0 and, for every client k, g_k = 0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  theta_k = w
     4          for each minibatch b:
     5              theta_k = theta_k - eta * gradient of (f_k(theta_k; b) - <g_k, theta_k> + alpha/2 * ||theta_k - w||^2)
     6          g_k = g_k - alpha * (theta_k - w)
     7      h = h - alpha/K * sum over S_t of (theta_k - w),   so that h is always the mean of all g_k
     8      w = mean over S_t of theta_k - h / alpha

    Global and personal: w. FedAvg's bytes: line 7 needs only the theta_k. fedslr.py without its low-rank penalty is FedDyn with
    alpha = 1/eta_g.
    D1  Line 5: SGD in place of the paper's exact minimum. The official code divides alpha by n_k / (mean n), clips gradients to
        the norm 10 and has a weight decay of 1e-3. Here is none of the three; --weight-decay 1e-3 gives the last.
    D2  Global is w. The official code evaluates only means of theta_k. That of all clients' last theta_k is recorded as "all".
    D3  The default alpha is FedSLR's; the official example has .01. The paper, from memory, has no momentum (--momentum 0).
    """
    gradient, descend = local_sgd(federation.net, args)
    K, alpha = federation.K, args.feddyn_alpha  # D3

    def step(client, b, eta, w):
        theta, u, g_k = client  # [d] weights, momentum, g_k
        theta, u = descend(theta, u, gradient(theta, b) - g_k + alpha * (theta - w), eta)  # l.5 (D1)
        return theta, u, g_k

    w = federation.initial_weights()  # l.1: [d]
    state = State(w=w, h=torch.zeros_like(w), G=federation.per_client(torch.zeros_like(w)),  # l.1: G is [K, d]
                  Theta=federation.per_client(w))  # [K, d] the last theta_k, for D2 alone
    for t, S in run.rounds(state):  # l.2
        g_k = state.G[S]  # [m, d]
        start = (state.w.expand(len(S), -1), torch.zeros_like(g_k), g_k)  # l.3
        theta_k, _, _ = federation.train(step, start, S, t, federation.eta(t), state.w)  # l.4-5: [m, d]
        state.G[S] = g_k - alpha * (theta_k - state.w)  # l.6
        state.h = state.h - alpha / K * federation.sum(theta_k - state.w)  # l.7: [d]
        state.w = federation.mean(theta_k) - state.h / alpha  # l.8: [d]
        state.Theta[S] = theta_k
        run.sent(up=theta_k.numel(), down=theta_k.numel())
        if run.evaluates():
            of_all = federation.sum(state.Theta) / K  # D2
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w), all=federation.evaluate(of_all))


def apfl(federation, run, args):
    """APFL: Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, arXiv 2003.13461.

     1  w = w_0;  for every client k: v_k = w_0, alpha_k = .5 (--apfl-alpha)
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          if adaptive, for the first minibatch b:  g = gradient of f_k(z; b) at z = alpha_k v_k + (1-alpha_k) w_k;
                                                         alpha_k = alpha_k - eta * <v_k - w_k, g>, cut to [0, 1]
     5          for each minibatch b:
     6              w_k = w_k - eta * gradient of f_k(w_k; b)
     7              g = gradient of f_k(z; b) at z = alpha_k v_k + (1-alpha_k) w_k
     8              v_k = v_k - eta * alpha_k * g
     9      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Global: w. Personal: the mixture alpha_k v_k + (1-alpha_k) w. `apfl_alpha` in the record is the mean of all alpha_k.
    D1  Lines 4 and 7: weights are mixed, as in the paper; FedTorch mixes outputs. A weight decay acts on the mixture.
    D2  Line 4: once in a round, as in FedTorch, but before both steps; we had no copy of the paper. b has the images of line
        5's first minibatch, augmented in another way. By default alpha_k is fixed, at FedSLR's .5.
    D3  Line 7: w_k is that of line 6, as in FedTorch. In the paper, from memory, the gradient comes before w_k's step.
    D4  Personal is with the averaged w. FedTorch evaluates with the client's own w_k, before line 9.
    D5  Line 9: weighted by n_k. In FedTorch, in FedSLR's code and, from memory, in the paper the mean is plain.
    """
    gradient, descend = local_sgd(federation.net, args)

    def mix(alpha, v, w):
        return alpha * v + (1 - alpha) * w  # D1

    def learn_alpha(client, b, eta):
        alpha, v, w = client  # alpha_k; [d] each
        g = gradient(mix(alpha, v, w), b)  # l.4
        return (alpha - eta * ((v - w) * g).sum()).clamp(0, 1), v, w  # l.4

    def step(client, b, eta):
        w, u_w, v, u_v, alpha = client  # [d] weights and their momentum, twice; alpha_k
        w, u_w = descend(w, u_w, gradient(w, b), eta)  # l.6
        g = gradient(mix(alpha, v, w), b)  # l.7 (D3)
        v, u_v = descend(v, u_v, alpha * g, eta)  # l.8
        return w, u_w, v, u_v, alpha

    def first_minibatch(row, t):
        """The images of the first minibatch of line 5 in round t, for the client in this row: `train` makes the same plan."""
        plan = federation.plan(row, federation.split.train[row], t, epochs=1)
        return plan.index[0][plan.mask[0]]

    w_0, alpha = federation.initial_weights(), torch.tensor(args.apfl_alpha, device=federation.device)
    state = State(w=w_0, V=federation.per_client(w_0), alpha=federation.per_client(alpha))  # l.1: [d], [K, d], [K]

    def mixtures(S):
        return mix(state.alpha[S][:, None], state.V[S], state.w)  # D4: [m, d]

    for t, S in run.rounds(state):  # l.2
        eta, w = federation.eta(t), state.w.expand(len(S), -1)  # l.3: [m, d]
        v, alpha = state.V[S], state.alpha[S]  # [m, d], [m]
        if args.adaptive:
            first = [first_minibatch(row, t) for row in S]  # numbers of images
            alpha, _, _ = federation.train(learn_alpha, (alpha, v, w), S, t, eta, epochs=1, images=first)  # l.4 (D2)
        start = (w, torch.zeros_like(w), v, torch.zeros_like(v), alpha)
        w_k, _, v_k, _, alpha_k = federation.train(step, start, S, t, eta)  # l.5-8
        n_k = federation.n[S]  # [m]
        state.w = federation.mean(w_k, n_k)  # l.9 (D5): [d]
        state.alpha[S] = alpha_k  # l.4
        state.V[S] = v_k  # l.8
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(mixtures),
                    apfl_alpha=float(federation.gather(state.alpha.all).mean()))


def fedper(federation, run, args):
    """FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818.

     1  body w and, for every client k, head v_k, its last N layers: those of w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b:  (w_k, v_k) = (w_k, v_k) - eta * gradient of f_k(w_k, v_k; b)
     5      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Global: none. Personal: (w, v_k). Only w is sent.
    D1  Lines 1 and 2: N is 1 by default, all heads start alike, and only S_t trains. In the paper, from memory, heads start at
        random and all clients train in every round.
    D2  Personal is with the current body w. FedSLR's code takes the body of the round before.
    D3  Line 5: weighted by n_k, as in the paper. FedSLR's code has the plain mean.
    """
    step, head = sgd_step(federation.net, args), personal_layers(federation.net, args)  # head: a slice of w (D1)
    w_0 = federation.initial_weights()
    state = State(w=w_0, V=federation.per_client(w_0[head]))  # l.1: [d], whose own head is not used; [K, ...]

    def models(S):
        return common.with_part(state.w, head, state.V[S])  # (w, v_k): [m, d]

    for t, S in run.rounds(state):  # l.2 (D1)
        start = models(S)  # l.3: (w, v_k), [m, d]
        trained, _ = federation.train(step, (start, torch.zeros_like(start)), S, t, federation.eta(t))  # l.4: (w_k, v_k)
        n_k = federation.n[S]  # [m]
        state.w = federation.mean(trained, n_k)  # l.5 (D3): [d]; the mean of the heads is not used
        state.V[S] = trained[:, head]  # l.4
        sent = len(S) * head.start
        run.sent(up=sent, down=sent)
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(models))  # D2


def fedrep(federation, run, args):
    """FedRep: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
    ICML 2021, arXiv 2102.07078.

     1  body w and, for every client k, head v_k, its last N layers: those of w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b of E epochs:           v_k = v_k - eta * gradient by v_k of f_k(w_k, v_k; b)
     5          for each minibatch b of the body's epochs:  w_k = w_k - eta * gradient by w_k of f_k(w_k, v_k; b)
     6      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Global: none. Personal: (w, v_k). Only w is sent.
    D1  Lines 4 and 5: E = 10 and --body-epochs 1 by default, the official numbers for CIFAR-10 with two classes a client; for
        other data 10 and 5. The paper's listing, from memory, has one step in line 5.
    D2  After the last round nothing is trained. Officially all clients then train their heads for ten epochs.
    D3  Line 6: weighted by n_k. In the paper, from memory, and officially for CIFAR and MNIST the mean is plain.
    D4  Line 1: v_k is the client's own. Officially a client that was never sampled has the mean of the sampled heads.
    """
    on_body, on_head = steps_on_parts(federation.net, args, args.weight_decay)
    head = personal_layers(federation.net, args)  # a slice of w; the body is before it
    w_0 = federation.initial_weights()
    state = State(w=w_0, V=federation.per_client(w_0[head]))  # l.1 (D4): [d], whose own head is not used; [K, ...]

    def models(S):
        return common.with_part(state.w, head, state.V[S])  # (w, v_k): [m, d]

    for t, S in run.rounds(state):  # l.2 (D2)
        eta, w = federation.eta(t), state.w[: head.start].expand(len(S), -1)  # l.3: the body, [m, ...]
        v = state.V[S]  # the heads, [m, ...]
        v_k, _, _ = federation.train(on_head, (v, torch.zeros_like(v), w), S, t, eta, order=1)  # l.4
        w_k, _, _ = federation.train(on_body, (w, torch.zeros_like(w), v_k), S, t, eta, epochs=args.body_epochs)  # l.5 (D1)
        n_k = federation.n[S]  # [m]
        state.w = federation.mean(torch.cat([w_k, v_k], 1), n_k)  # l.6 (D3): [d]; the mean of the heads is not used
        state.V[S] = v_k  # l.4
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(models))


def lg_fedavg(federation, run, args):
    """LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated
    Learning with Local and Global Representations", 2020, arXiv 2001.01523.

     1  upper layers w and, for every client k, lower layers v_k, the first N: those of w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b:  (v_k, w_k) = (v_k, w_k) - eta * gradient of f_k(v_k, w_k; b)
     5      w = mean over S_t of w_k

    Global: none. Personal: (v_k, w). Only w is sent.
    D1  Line 1: N is all layers before the first fully connected one, as in FedSLR, and at least 1. The official code for
        CIFAR-10 has the convolutions global, against the paper.
    D2  Line 1: from w_0, as all methods here. Officially from a model that FedAvg has trained.
    D3  Personal is of the last round, with the current w. Officially: of each client the w of its best round so far, by its
        test images; the mean of these w, in every round; the best of these means counts.
    D4  Line 5: the plain mean, as in the official code. In the paper, from memory, it is weighted by n_k.
    D5  Line 4: the paper, from memory, has further losses for v_k. They are left out.
    """
    step, lower = sgd_step(federation.net, args), personal_layers(federation.net, args)  # lower: a slice of w (D1)
    w_0 = federation.initial_weights()  # D2
    state = State(w=w_0, V=federation.per_client(w_0[lower]))  # l.1: [d], whose own lower layers are not used; [K, ...]

    def models(S):
        return common.with_part(state.w, lower, state.V[S])  # (v_k, w): [m, d]

    for t, S in run.rounds(state):  # l.2
        start = models(S)  # l.3: (v_k, w), [m, d]
        trained, _ = federation.train(step, (start, torch.zeros_like(start)), S, t, federation.eta(t))  # l.4 (D5): (v_k, w_k)
        state.w = federation.mean(trained)  # l.5 (D4): [d]; the mean of the lower layers is not used
        state.V[S] = trained[:, lower]  # l.4
        sent = len(S) * (len(state.w) - lower.stop)
        run.sent(up=sent, down=sent)
        if run.evaluates():
            run.log(personal=federation.evaluate_clients(models))  # D3


def ditto(federation, run, args):
    """Ditto: Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", 2021, arXiv
    2012.04221.

     1  w = w_0 and, for every client k, v_k = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          for each minibatch b of E epochs:  w_k = w_k - eta * gradient of f_k(w_k; b)
     5          for each minibatch b of s epochs:  v_k = v_k - eta * (gradient of f_k(v_k; b) + lambda * (v_k - w))
     6      w = mean over S_t of w_k

    Global: w. Personal: v_k. With lambda = 0 and s = E, v_k is Local's model.
    D1  Lines 4 and 5: s is E by default; FedSLR has E = 2 and s = 1. Officially E and s count minibatches, and the steps on w_k
        and v_k alternate, which for s = E comes to the same.
    D2  Line 5: the pull is in the gradient. FedSLR's code pulls v_k after the gradient's step. The default lambda is FedSLR's.
    D3  Line 6: the plain mean, as officially. But officially client k is drawn with a probability proportional to n_k.
    """
    gradient, descend = local_sgd(federation.net, args)
    step = sgd_step(federation.net, args)

    def personal_step(client, b, eta, w):
        v, u = client  # [d] weights, [d] momentum
        return descend(v, u, gradient(v, b) + args.ditto_lambda * (v - w), eta)  # l.5 (D2)

    w_0 = federation.initial_weights()
    state = State(w=w_0, V=federation.per_client(w_0))  # l.1: [d], [K, d]
    for t, S in run.rounds(state):  # l.2
        eta, w = federation.eta(t), state.w.expand(len(S), -1)  # l.3: [m, d]
        v = state.V[S]  # [m, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, eta)  # l.4: [m, d]
        v_k, _ = federation.train(personal_step, (v, torch.zeros_like(v)), S, t, eta, state.w,
                                  epochs=args.personal_epochs)  # l.5 (D1): [m, d]
        state.V[S] = v_k  # l.5
        state.w = federation.mean(w_k)  # l.6 (D3): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.V))


def pfedme(federation, run, args):
    """pFedMe: Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", 2020, arXiv 2006.08848.

     1  w = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = theta_k = w
     4          for each minibatch b:
     5              `steps` times:  theta_k = theta_k - eta_p * (gradient of f_k(theta_k; b) + lambda * (theta_k - w_k))
     6              w_k = w_k - eta * lambda * (w_k - theta_k)
     7      w = (1-beta) * w + beta * sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k

    Line 5 seeks the theta_k with the least f_k(theta_k; b) + lambda/2 * ||theta_k - w_k||^2. `steps` is the paper's K.
    Global: w. Personal: the client's last theta_k; w_0 if it was never sampled.
    D1  Lines 3 and 7: only S_t trains. In paper and official code all clients train, and S_t says whose w_k are averaged.
    D2  Line 4: an epoch is a pass over all images of a client. The paper has R minibatches for every client; what the official
        code calls a local epoch is one minibatch.
    D3  Line 5: theta_k goes on from minibatch to minibatch, as officially. The official weight decay is --weight-decay .001.
    D4  Line 6: --momentum acts on w_k, not on theta_k. The paper, from memory, has none (--momentum 0).
    D5  lambda, `steps`, beta and eta_p are by default PersFL's for DS-1 of CIFAR-10. eta_p decays as eta does.
    D6  Personal is theta_k, as in the paper. By mistake the official code evaluates w_k (in the record: `personal@w_k`), and
        PFLlib the server's w.
    D7  Line 7: weighted by n_k, as officially. In the paper, from memory, the mean is plain.
    """
    gradient, descend = local_sgd(federation.net, args)
    lam = args.pfedme_lambda  # D5

    def step(client, b, eta, eta_p):
        theta, w, u = client  # [d] each, u: momentum
        for _ in range(args.theta_steps):
            theta = theta - eta_p * (gradient(theta, b) + lam * (theta - w))  # l.5 (D3)
        return theta, *descend(w, u, lam * (w - theta), eta)  # l.6 (D4)

    w_0 = federation.initial_weights()
    state = State(w=w_0, Theta=federation.per_client(w_0),  # l.1: [d], [K, d]
                  W=federation.per_client(w_0))  # [K, d] the last w_k, for D6 alone
    for t, S in run.rounds(state):  # l.2
        eta, w = federation.eta(t), state.w.expand(len(S), -1)  # l.3: [m, d]
        eta_p = eta * (args.theta_lr / args.lr)  # D5
        start = w, w, torch.zeros_like(w)  # l.3: theta_k = w_k = w
        theta_k, w_k, _ = federation.train(step, start, S, t, eta, eta_p)  # l.4-6 (D1, D2): [m, d] each
        n_k = federation.n[S]  # [m]
        state.w = (1 - args.pfedme_beta) * state.w + args.pfedme_beta * federation.mean(w_k, n_k)  # l.7 (D7)
        state.Theta[S], state.W[S] = theta_k, w_k
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            at_w_k = common.without_clients(federation.evaluate_clients(state.W))  # D6
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.Theta), **{"personal@w_k": at_w_k})


def per_fedavg(federation, run, args):
    """Per-FedAvg: Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning: A Meta-Learning Approach", 2020, arXiv
    2002.07948. It minimises the mean over k of F_k(w) = f_k(w - alpha * gradient of f_k(w)).

     1  w = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w
     4          for each pair of the next minibatches b, b':
     5              z = w_k - alpha * gradient of f_k(w_k; b)
     6              w_k = w_k - beta * gradient of f_k(z; b')
     7      w = sum over k in S_t of n_k/n * w_k,   n = sum over k in S_t of n_k
     8  personal model of any client k:  w - alpha * gradient of f_k(w)

    Global: w, before line 8's step. Personal: line 8's model. beta is eta (--lr). With alpha = 0 it is FedAvg on the
    minibatches b'. FedSLR has alpha .01 and beta .001.
    D1  Line 4: b and b' are the next minibatches of the E epochs: half as many steps as FedAvg's. A minibatch that is left over
        at the end of a round is not used.
    D2  Line 6: the step is from w_k. PersFL's code takes it from z. By default with momentum; the paper, from memory, has none.
    D3  Line 7: weighted by n_k, as in PersFL's code. The paper's mean is plain.
    D4  Line 8: the gradient is over all training images. pFedMe's code and PersFL's take two steps on TEST images instead.
    D5  Line 6: first-order. The gradient of F_k has a second factor, 1 - alpha * (Hessian of f_k at w_k). It is left out, as in
        PersFL's code. The paper's Hessian-free version, which estimates it, is not built (why: on the page).
    """
    gradient, descend = local_sgd(federation.net, args)
    sums = sums_of_gradients(federation, gradient)
    alpha = args.per_fedavg_alpha
    refuse_small_clients(federation, args)

    def step(client, b, beta):
        """Minibatches come one at a time, so a pair takes two turns: turn 0 does line 5 with b, turn 1 does line 6 with b'."""
        w, u, z, turn = client  # [d] each, u: momentum; turn: 0 or 1
        # Clients that go together can't branch (`if turn == 0`). So both turns compute all, and torch.where keeps one's part.
        g = gradient(torch.where(turn == 0, w, z), b)  # l.5: at w_k; l.6: at z
        new_w, new_u = descend(w, u, g, beta)  # l.6 (D2, D5)
        z = torch.where(turn == 0, w - alpha * g, z)  # l.5
        w, u = torch.where(turn == 1, new_w, w), torch.where(turn == 1, new_u, u)  # l.6
        return w, u, z, 1 - turn

    state = State(w=federation.initial_weights())  # l.1: [d]
    everyone = federation.rows()
    for t, S in run.rounds(state):  # l.2
        n_k, w = federation.n[S], state.w.expand(len(S), -1)  # l.3: [m], [m, d]
        zero, turn = torch.zeros_like(w), torch.zeros_like(n_k)
        w_k, _, _, _ = federation.train(step, (w, zero, zero, turn), S, t, federation.eta(t))  # l.4-6 (D1): [m, d]
        state.w = federation.mean(w_k, n_k)  # l.7 (D3): [d]
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates():
            personal = state.w - alpha * sums(state.w, everyone, t) / federation.n[:, None]  # l.8 (D4): [K, d]
            run.log(federation.evaluate(state.w), federation.evaluate_clients(personal))


def refuse_small_clients(federation, args):
    """Refuses --method per-fedavg where a client has too few minibatches for one step."""
    least = int(federation.gather(federation.n).min())
    if args.epochs * ceil(least / (args.batch_size or least)) < 2:
        common.refuse(f"a step of per-fedavg takes 2 minibatches, and a client with {least} images has fewer; use more "
                      "--epochs or a smaller --batch-size")


def fedspa(federation, run, args):
    """FedSpa: Huang, Liu, Shen, He, Lin, Tao, "Achieving Personalized Federated Learning with Sparse Local Models", 2022, arXiv
    2201.11380. Only its abstract was at hand; D1 to D5 say how the rest was filled in.

     1  w = w_0 and, for every client k, a mask M_k in {0,1}^d, random, with a fixed number of ones in every tensor
     2  for each round t = 0, 1, ..., T-1, with the clients S_t:
     3      for each client k in S_t:  w_k = M_k * w
     4          for each minibatch b:  g_k = gradient of f_k(w_k; b), of all d weights;  w_k = w_k - eta * M_k * g_k
     5          U_k = w_k - M_k * w
     6          prune: in every tensor, drop the share a/2 * (1 + cos(pi*t/T)) of the ones, those with the least |w_k|
     7          grow: fill up with the other weights that have the largest |g_k|
     8      w = w + sum over k in S_t of n_k/n * U_k,   n = sum over k in S_t of n_k

    Global: the dense w. Personal: M_k * w, with the mask of line 7 and the w of line 8. With density 1 it is FedAvg. Bytes are
    those of the active weights alone.
    D1  Line 1: ERK's numbers of ones, as in DisPFL's code, and density .5, as FedSLR's table implies. A random mask per client;
        DisPFL's code gives all clients one, unless told otherwise.
    D2  Line 4: the momentum sums M_k * g_k. So weights outside the mask stay 0.
    D3  Line 6: the cosine and a = .5 (--drop) are those of DisPFL's code. The number dropped is rounded down, there up.
    D4  Line 7: g_k is that of the last minibatch, before its step; DisPFL's code takes one more, after training. Weights that
        line 6 dropped are among the others, so they can come back.
    D5  Line 8: weighted by n_k. The paper's mean, from memory, is plain.
    """
    net = federation.net
    gradient, descend = local_sgd(net, args)
    counts = erdos_renyi_kernel(net, args.density)  # D1: ones in each tensor
    active = int(counts.sum())

    def step(client, b, eta):
        w, u, _, M = client  # [d] each: weights, momentum, the last gradient (line 7 needs it), mask
        g = gradient(w, b)  # l.4 (D4)
        return *descend(w, u, M * g, eta), g, M  # l.4 (D2)

    def first_mask(k):
        draw = common.stream(args.seed, "algorithm", 0, k).random((1, net.d), np.float32)
        return highest(torch.from_numpy(draw).to(federation.device), net.sizes, counts)[0]

    state = State(w=federation.initial_weights(), M=federation.per_client(first_mask))  # l.1: [d], [K, d]

    def sparse_models(S):
        return state.M[S] * state.w  # [m, d]

    for t, S in run.rounds(state):  # l.2
        M_k = state.M[S]  # [m, d]
        start = M_k * state.w  # l.3: [m, d]
        zero = torch.zeros_like(start)
        w_k, _, g_k, _ = federation.train(step, (start, zero, zero, M_k.float()), S, t, federation.eta(t))  # l.4
        U_k = w_k - start  # l.5
        share = args.drop / 2 * (1 + cos(pi * t / args.rounds))  # l.6 (D3)
        left = counts - np.floor(share * counts + 1e-9).astype(int)  # l.6
        keep = highest(torch.where(M_k, w_k.abs(), -1), net.sizes, left)  # l.6: of M_k's ones the largest |w_k|, [m, d]
        state.M[S] = highest(torch.where(keep, torch.inf, g_k.abs()), net.sizes, counts)  # l.7: these, then the largest |g_k|
        n_k = federation.n[S]  # [m]
        state.w = state.w + federation.mean(U_k, n_k)  # l.8 (D5): [d]
        run.sent(up=len(S) * active, down=len(S) * active)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(sparse_models))


def erdos_renyi_kernel(net, density):
    """ERK: the number of active weights of every tensor, round(density * d) in all.

    One-dimensional tensors (biases, normalisation) are dense. The densities of the others are proportional to the sum of their
    dimensions over the product of their dimensions, and at most 1.
    """
    sizes = np.array(net.sizes, float)
    kernel = np.array([len(shape) > 1 for _, _, shape in net.tensors])
    relative = np.array([sum(shape) / np.prod(shape) for _, _, shape in net.tensors])  # densities, before they are scaled
    dense, budget = ~kernel, round(density * net.d)
    while True:  # kernels that would have more than all of their weights become dense, and leave less to the others
        scale = (budget - sizes[dense].sum()) / max((relative * sizes)[~dense].sum(), 1e-9)
        over = ~dense & (scale * relative > 1)
        if not over.any():
            break
        dense = dense | over
    if scale < 0:
        common.refuse(f"--density {density:g} leaves nothing to kernels: biases and normalisation are always active, "
                      f"{sizes[~kernel].sum() / net.d:.3g} of the weights; use more")
    return common.whole_numbers(np.where(dense, sizes, scale * relative * sizes))


def highest(score, sizes, counts):
    """True for the counts[i] highest of every tensor i: score [m, d], tensors' sizes -> [m, d]."""
    parts = []
    for part, count in zip(score.split(sizes, 1), counts.tolist()):
        parts.append(torch.zeros_like(part, dtype=torch.bool).scatter_(1, part.topk(count, 1).indices, True))
    return torch.cat(parts, 1)


def fedma(federation, run, args):
    """FedMA: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated Learning with Matched Averaging", ICLR 2020, arXiv
    2002.06440.

     1  w = w_0
     2  for each round t, with the clients S_t:
     3      for each client k in S_t:  w_k = w;  in the first round w_k = random weights of its own
     4      for each layer l = 1, ..., L:
     5          each k in S_t, for each minibatch b (l = L: of 3*E epochs):  SGD on f_k(w_k; b), only on w_k's layers l to L
     6          if l < L:  permutations Pi_k of the units of layer l that bring all clients' units close to each other
     7              layer l of w, and of all w_k, = mean over S_t of Pi_k (layer l of w_k)
     8              the inputs of layer l+1 of w_k are permuted by Pi_k
     9          if l = L:  each class's unit in w = mean over S_t of w_k's, weighted by k's images of this class

    Global and personal: w. One round is FedMA, more are FedMA "with communication". The authors' script: --model vgg9 --split
    fedma --alpha .5 --client-test 0 --clients 16 --fraction 1 --batch-size 64 --epochs 20 --rounds 11. Bytes up: each layer
    once. Down: w at the start of a round (not of the first, unless --common-start); then each averaged layer but the last, and
    Pi_k.
    D1  Line 6: units are matched one-to-one, so that layers keep their size. In the paper (BBP-MAP) a global layer can grow.
    D2  Line 6: a unit is its incoming weights and its bias. First sweep: client k is matched to the sum of clients 0 to k-1. Up
        to four more: to the sum of all others. Officially always five more, each in a random order.
    D3  Line 7: the plain mean. The paper's mean is pulled to the prior's.
    D4  Line 5: SGD, as officially. For l = L the rate is eta/10, the weight decay 1e-4, and there are 3*E epochs. To train it
        like the other layers: --last-lr 1 --last-decay 0 --last-epochs 1.
    D5  Line 9: a class of which no client of S_t has images takes the plain mean.
    D6  Line 3: own random weights, as officially. From w_0 with --common-start, as all other methods here.
    D7  Line 2: by default a tenth of the clients. In the authors' script all take part (--fraction 1).
    """
    net, device, L = federation.net, federation.device, len(federation.net.layers)
    units = units_of_a_chain(net, federation.transform(federation.images[:2]))  # [L] how many in each layer
    _, train_upper = steps_on_parts(net, args, args.weight_decay)
    _, train_last = steps_on_parts(net, args, args.last_decay)  # D4
    held = [np.bincount(federation.data.labels[images], minlength=units[-1]) for images in federation.split.train]
    held = torch.tensor(np.array(held), dtype=torch.float, device=device)  # [K, classes] images of each class

    state = State(w=federation.initial_weights())  # l.1: [d]
    for t, S in run.rounds(state):  # l.2 (D7)
        numbers = sampled_numbers(federation, S)  # of all processes. With one process this is S, and gather(x) below is x
        mine = np.flatnonzero(np.isin(numbers, federation.clients))  # which of them are this process's; with one process all
        w, w_k = state.w.clone(), state.w.repeat(len(S), 1)  # l.3: [d], [m, d]
        own_start = t == 0 and not args.common_start
        if own_start:
            for i, k in enumerate(federation.clients[S]):
                w_k[i] = net.init(common.stream(args.seed, "initialisation", 0, k + 1))  # l.3 (D6)
        for l, (_, layer) in enumerate(net.layers):  # l.4; l counts from 0, and the slice `layer` is its place in w
            last = l == L - 1
            eta, epochs = federation.eta(t), args.epochs
            if last:
                eta, epochs = eta * args.last_lr, epochs * args.last_epochs  # D4
            matched, free = w_k[:, : layer.start], w_k[:, layer.start :]  # constant; trained: the layers l, ..., L
            step = train_last if last else train_upper
            start = free, torch.zeros_like(free), matched
            free, _, _ = federation.train(step, start, S, t, eta, epochs=epochs, order=l)  # l.5 (D4)
            w_k = torch.cat([matched, free], 1)
            U = by_unit(federation.gather(w_k[:, layer], numbers), units[l])  # [m of all processes, units, inputs + 1]
            if not last:
                Pi = match(U)  # l.6 (D1, D2): [m, units]
                w[layer] = flat(in_order(U, Pi).mean(0, keepdim=True))[0]  # l.7 (D3)
                w_k[:, layer] = w[layer]  # l.7
                following = net.layers[l + 1][1]
                w_k[:, following] = inputs_in_order(w_k[:, following], units[l + 1], Pi[mine])  # l.8
            else:
                n_kc = federation.gather(held[S], numbers)  # [m, classes]
                n_kc = torch.where(n_kc.sum(0) > 0, n_kc, 1)  # D5
                w[layer] = flat((U * (n_kc / n_kc.sum(0))[:, :, None]).sum(0, keepdim=True))[0]  # l.9
        state.w = w
        first = 0 if own_start else w_k.numel()
        all_but_last = len(S) * net.layers[-1][1].start
        permutations = len(S) * sum(units[:-1])
        run.sent(up=w_k.numel(), down=first + all_but_last + permutations)
        if run.evaluates():
            run.log(federation.evaluate(state.w), federation.evaluate_clients(state.w))


def sampled_numbers(federation, S):
    """The numbers of the sampled clients of all processes; S: the rows of this process's."""
    taken = torch.zeros_like(federation.n)
    taken[S] = 1
    return np.flatnonzero(federation.gather(taken).cpu().numpy())


def by_unit(x, out):
    """A layer of m clients, x [m, its weights, then its biases], unit by unit: [m, out, inputs + 1]; the last is the bias."""
    return torch.cat([x[:, :-out].unflatten(1, (out, -1)), x[:, -out:, None]], 2)


def flat(U):
    """by_unit's way back."""
    return torch.cat([U[:, :, :-1].flatten(1), U[:, :, -1]], 1)


def in_order(U, order):
    """U [m, units, ...] with client j's units in the order order[j]; order [m, units]."""
    return U[torch.arange(len(U), device=U.device)[:, None], order]


def inputs_in_order(x, out, order):
    """A layer of m clients, x, when the units before it are put in order [m, units before]."""
    weight = x[:, :-out].unflatten(1, (out, order.shape[1], -1)).transpose(1, 2)  # [m, units before, out, a unit's pixels]
    return torch.cat([in_order(weight, order).transpose(1, 2).flatten(1), x[:, -out:]], 1)


def best_order(U, target):
    """How to order the units U [units, inputs + 1]: the sum over i of <U[order[i]], target[i]> is the largest there is."""
    from scipy.optimize import linear_sum_assignment  # solves the assignment problem exactly

    products = (target @ U.T).nan_to_num(nan=0, posinf=0, neginf=0)  # of a run that diverges, which Run.log then ends
    return torch.from_numpy(linear_sum_assignment(products.cpu().numpy(), maximize=True)[1])


def match(U, sweeps=5):
    """An order of each client's units that makes unit i much the same in all: U [m, units, inputs + 1] -> [m, units]."""
    order = torch.arange(U.shape[1], device=U.device).repeat(len(U), 1)
    total = U[0]  # the sum of the clients' units, each in its order
    for j in range(1, len(U)):  # the first sweep: each client to the sum of those before it
        order[j] = best_order(U[j], total)
        total = total + U[j][order[j]]
    for _ in range(1, sweeps):  # the others: each client to the sum of all others
        before = order.clone()
        for j in range(len(U)):
            others = total - U[j][order[j]]
            order[j] = best_order(U[j], others)
            total = others + U[j][order[j]]
        if torch.equal(order, before):
            break
    return order


def units_of_a_chain(net, x):
    """The number of units of every layer. Refuses a model that is no chain of convolutions and linear layers with biases.

    First by the shapes of its tensors; then by trying: logits on x must stay when the hidden units stand in another order.
    """
    shapes = [[shape for name, _, shape in net.tensors if name.rsplit(".", 1)[0] == layer] for layer, _ in net.layers]
    units = [kernel[0] for kernel, *_ in shapes]
    chain = all(len(pair) == 2 and len(pair[0]) > 1 for pair in shapes)  # a kernel and its biases
    chain = chain and all(kernel[1] % before == 0 for before, (kernel, _) in zip(units, shapes[1:]))  # inputs for each unit
    if not (chain and order_is_free(net, units, x)):
        common.refuse(f"--method fedma takes chains of convolutions and linear layers with biases, and {net.name} is none; use "
                      "--model vgg9, vgg16, cnn, cifarnet, mnistnet, mnistcnn or 2nn")
    return units


def order_is_free(net, units, x):
    """Whether the logits on x stay when the units of all hidden layers move on by one place."""
    w = 2 * net.init(common.stream(0, "algorithm")).double()[None]  # [1, d]
    moved = w.clone()
    for l, (_, layer) in enumerate(net.layers[:-1]):
        order, following = torch.arange(units[l], device=w.device).roll(1)[None], net.layers[l + 1][1]
        moved[:, layer] = flat(in_order(by_unit(moved[:, layer], units[l]), order))
        moved[:, following] = inputs_in_order(moved[:, following], units[l + 1], order)
    a, b = net(w[0], x.double()), net(moved[0], x.double())
    return bool((a - b).abs().max() <= 1e-5 * a.abs().max())


# ---------------------------------------------------------------------------------------------------------------------
# Around it

METHODS = {
    "local": local_training, "centralised": centralised, "fedavg-ft": fedprox, "fedprox": fedprox, "fedprox-ft": fedprox,
    "scaffold": scaffold, "feddyn": feddyn, "apfl": apfl, "fedper": fedper, "fedrep": fedrep, "lg-fedavg": lg_fedavg,
    "ditto": ditto, "pfedme": pfedme, "per-fedavg": per_fedavg, "fedspa": fedspa, "fedma": fedma,
}

FIXED_ROUNDS = {  # why --resume can't have other --rounds
    "fedavg-ft": "clients fine-tune after the last round", "fedprox-ft": "clients fine-tune after the last round",
    "fedspa": "the masks' pace depends on the number of rounds",
}

# SuPerFed's Tables 1 and 2, the column CIFAR-10, and what differs in the others
DEFAULTS = dict(split="shards", clients=100, fraction=0.1, rounds=200, epochs=10, batch_size=20, lr=0.01, momentum=0.9)
BY_DATASET = {
    "cifar100": dict(rounds=300),
    "emnist": dict(rounds=100, split="semantic", fraction=0.01),
    "tinyimagenet": dict(rounds=500, split="semantic", fraction=0.03),
    # ours, for a quick look
    "shapes": dict(rounds=30, epochs=1, batch_size=10, clients=20, fraction=0.5, per_client=4, lr=0.02, lr_decay=0.95,
                   theta_lr=0.02, transform="normalize", eval_every=3),
}
WITHOUT_MOMENTUM = "centralised", "scaffold", "per-fedavg"  # no momentum on shapes (docs/shapes.md says why)


def parser():
    """The flags of all methods. A group of flags has the names of the methods that they are for."""
    p = common.parser(__doc__, **DEFAULTS)
    flag = p.add_argument_group("methods").add_argument
    flag("--method", choices=METHODS, required=True, help="whose rounds are run")
    flag = p.add_argument_group("fedprox, fedprox-ft").add_argument
    flag("--mu", type=common.nonnegative, default=0.01, help="mu, of mu/2 ||w - w_t||^2")
    flag = p.add_argument_group("fedavg-ft, fedprox-ft").add_argument
    flag("--finetune-epochs", type=common.positive_int, default=1, help="E at the end")
    flag = p.add_argument_group("scaffold").add_argument
    flag("--option", choices=("I", "II"), default="II", help="how c_k is made new")
    flag("--global-lr", type=common.positive, default=1.0, help="eta_g, the server's step")
    flag = p.add_argument_group("feddyn").add_argument
    flag("--feddyn-alpha", type=common.positive, default=0.1, help="alpha, of alpha/2 ||theta - w||^2")
    flag = p.add_argument_group("apfl").add_argument
    flag("--apfl-alpha", type=common.fraction, default=0.5, help="alpha_k at the start")
    flag("--adaptive", action="store_true", help="alpha_k is learnt")
    flag = p.add_argument_group("fedper, fedrep, lg-fedavg").add_argument
    flag("--personal", type=common.nonnegative_int,
         help="N, how many layers a client keeps, the last ones (unless given: 1); lg-fedavg: the first ones (unless given: "
              "all before the first fully connected one, but at least 1); a normalisation counts as one")
    flag = p.add_argument_group("fedrep").add_argument
    flag("--body-epochs", type=common.positive_int, default=1, help="epochs on the body, E on the head")
    flag = p.add_argument_group("ditto").add_argument
    flag("--ditto-lambda", type=common.nonnegative, default=0.1, help="lambda, the pull of v_k to w")
    flag("--personal-epochs", type=common.positive_int, help="s, epochs on v_k (unless given: --epochs)")
    flag = p.add_argument_group("pfedme").add_argument
    flag("--pfedme-lambda", type=common.positive, default=15.0, help="of lambda/2 ||theta_k - w_k||^2")
    flag("--pfedme-beta", type=common.positive, default=1.0, help="beta, the server's step to the mean")
    flag("--theta-lr", type=common.positive, default=0.001, help="eta_p, theta_k's rate; decays as --lr")
    flag("--theta-steps", type=common.positive_int, default=5, help="`steps`, on theta_k per minibatch")
    flag = p.add_argument_group("per-fedavg").add_argument
    flag("--per-fedavg-alpha", type=common.nonnegative, default=0.01, help="alpha, step to z")
    flag = p.add_argument_group("fedspa").add_argument
    flag("--density", type=common.positive_fraction, default=0.5, help="share of active weights")
    flag("--drop", type=common.fraction, default=0.5, help="a, share of a mask that round 0 drops")
    flag = p.add_argument_group("fedma").add_argument
    flag("--common-start", action="store_true", help="all clients start from w_0, not each from its own")
    flag("--last-lr", type=common.positive, default=0.1, help="times --lr, the rate for the last layer")
    flag("--last-epochs", type=common.positive_int, default=3, help="times --epochs, for the last layer")
    flag("--last-decay", type=common.nonnegative, default=1e-4, help="weight decay for the last layer")
    return p


def arguments(argv):
    p = parser()
    args = common.parse(p, BY_DATASET, argv)
    if args.method in WITHOUT_MOMENTUM and args.dataset == "shapes":
        p.set_defaults(momentum=0.0, lr=0.05)  # flags on the command line stand
        args = common.parse(p, {}, argv)
    refuse_foreign(p, args.method, sys.argv[1:] if argv is None else argv)
    return args


def refuse_foreign(p, method, argv):
    """Refuses a flag of other methods, which would change nothing."""
    given = {word.partition("=")[0] for word in argv}
    for group in p._action_groups:
        methods = group.title.split(", ")
        if methods[0] in METHODS and method not in methods:
            for flag in group._group_actions:
                if given & set(flag.option_strings):
                    p.error(f"{method} has no {flag.option_strings[0][2:]}; it is for {group.title}")


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    args.out = args.out or f"runs/baselines-{args.method}-{federation.data.name}-{args.seed}"
    run = common.Run(__file__, federation, FIXED_ROUNDS.get(args.method, ""))
    run.algorithm = args.method
    METHODS[args.method](federation, run, args)


if __name__ == "__main__":
    main()
