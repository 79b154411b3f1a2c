"""PersFL: personalised federated learning by distillation. Divi, Farrukh, Celik, "Unifying
Distillation with Personalization in Federated Learning", 2021, arXiv 2105.15191.

    python persfl.py                              DS-1: 4 classes per user, unequal amounts (D9)
    python persfl.py --split dirichlet-classes    DS-2: classes in Dirichlet(.9) shares
    python persfl.py --split lognormal            DS-3: 2 classes per user, log-normal shares
    CIFAR-10, personal, five seeds (DS-1: three): FedAvg (paper); fine-tuned; PersFL (paper)
    DS-1  .4977 (.450)  .7544  .7751 (.819)  results/persfl-unequal/cifar10
    DS-2  .5024 (.487)  .5068  .5817 (.596)  results/persfl-2/persfl-cifar10-split-dirichlet-classes
    DS-3  .3791 (.466)  .8859  .8918 (.823)  results/persfl-2/persfl-cifar10-split-lognormal

"global" tests FedAvg's model G on central test images, "personal" each user's A_k (in Stage 1:
G) on its own test images. docs/persfl.md explains our choices, also D8, D10 (five seeds):

    D1  Lines 5 to 8 choose among the models that the server sends: G_1 (untrained) to G_{E_G}.
    D2  Line 10: user k has n_k of n training images; the paper's (4) weights users equally.
    D3  We chose B = 20, rate .05 (lines 9, 22), E_L = 1, E = 10 (paper: E_L), no momentum.
    D4  Line 15 is repeated in every epoch. Pixels are in [0, 1]. Line 20 averages over b's images.
    D5  Line 20 is KL(teacher || student), as PersFL-GD in gradient; (3) swaps the arguments.
    D6  Line 13: best validation accuracy wins, first if tied. By (3) lambda = 1 would always win.
    D7  Line 13: T is 1, 5, 25; lambda 0, .25, .5, .75, 1. T has no effect at lambda 0, 1: 11 pairs.
    D9  Only training images are dealt, 6,000 in MNIST's DS-1. How unequal the amounts are is ours.
    D11  CIFAR-10's network also pools after its second convolution, as in the authors' baseline.

fedavg.py explains [d] and net. Line numbers are the paper's; we add "choose G_1", line 13's loop
and lines 9 to 11. The code runs line 14 outside line 13, whose students share each minibatch b.

     1  Stage 1, users and server together: find the teachers
     2  choose G_1;  l'_k = infinity for every user k
     3  for each round e = 1, ..., E_G:
     4      for each user k, who is sent G_e:
     5          l_k = mean cross-entropy of G_e on user k's validation images
     6          if l_k < l'_k:
     7              l'_k = l_k
     8              O_k = G_e
     9          w_k = G_e after E_L epochs of SGD on user k's training images
    10      G_{e+1} = sum over k of n_k/n * w_k
    11  with --teacher final (Table 4):  O_k = G_{E_G+1} for every user k
    12  Stage 2, every user alone: distil from the teachers
    13  for each (T, lambda) in the grid: train a student A_k, initialised to O_k; keep the best: D6
    14      for each user k:
    15          cut user k's training images into minibatches of size B
    16          for each of E local epochs:
    17              for each minibatch b, with labels y_b:
    18                  loss = (1-lambda) * hard + lambda * T^2 * soft         (3); PersFL-GD: (7)
    19                  hard = CE(y_b, softmax(A_k(b)))            A_k(b), O_k(b): logits
    20                  soft = KL(s_b || softmax(A_k(b)/T)); PersFL-GD: CE(s_b, softmax(A_k(b)/T))
    21                  s_b = softmax(O_k(b) / T)
    22                  w = w - eta' * gradient of loss, for the weights w of A_k
"""

from types import SimpleNamespace as State

import numpy as np
import torch

import common

# T has no effect at lambda 0 and 1, so 11 students are left (D7)
GRID = [(T, lam) for T in (1, 5, 25) for lam in (0, 0.25, 0.5, 0.75, 1) if T == 1 or 0 < lam < 1]


def local_training(net, args):
    """Returns client_update(w, epochs, eta): line 9, for one user. `epochs` yields E_L passes over
    the user's images, each cut into minibatches b (common.Epochs)."""

    @common.step  # on a GPU it runs for all users at once, or as a CUDA graph
    def sgd_step(w, b, eta):  # w: [d]
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        return common.descend(w, eta, common.grad(loss)(w))  # l.9: a step of SGD

    def client_update(w, epochs, eta):
        for minibatches in epochs:  # l.9: E_L is --epochs
            for b in minibatches:
                w = sgd_step(w, b, eta)
        return w

    return client_update


def distillation(net, args, grid=GRID):
    """Returns distil(O, epochs, eta_prime), which trains a user's students [11, d] from O [d]."""
    all_T, all_lam = torch.tensor(grid, dtype=torch.float, device=net.device).unbind(1)  # [11] each

    @common.step
    def students_step(students, O, b, eta_prime):  # students: [11, d]; O: [d]
        O_b = net(O, b.x)  # O_k(b): [B, classes]

        def loss(w, T, lam):  # of one student: its weights w [d], and two numbers
            A_b = net(w, b.x)  # A_k(b): [B, classes]
            log_s_b = (O_b / T).log_softmax(1)  # l.21
            log_a = (A_b / T).log_softmax(1)  # l.20: log softmax(A_k(b) / T)
            per_class = log_s_b - log_a if args.soft == "kl" else -log_a
            soft = (log_s_b.exp() * per_class).sum(1)  # l.20: KL, or CE (D5): [B]
            soft = (soft * b.mask).sum() / b.mask.sum().clamp(min=1)  # over b's images (D4)
            hard = common.cross_entropy(A_b, b)  # l.19; takes logits
            return (1 - lam) * hard + lam * T**2 * soft  # l.18

        # l.13: for each student of the grid, that is, for each row of these three
        gradients = common.grad(loss, each=True)(students, all_T, all_lam)  # [11, d]
        return common.descend(students, eta_prime, gradients)  # l.22: w - eta' * gradient

    def distil(O, epochs, eta_prime):
        students = O[..., None, :].repeat_interleave(len(grid), -2)  # l.13: each starts at O_k
        for minibatches in epochs:  # l.15-16 (D4)
            for b in minibatches:  # l.17: students_step does lines 18 to 22
                students = students_step(students, O, b, eta_prime)
        return students

    return distil


def accuracies(federation, students, images):
    """Returns the accuracies of every user's students [K, 11, d] on the images images[k]:
    [K, 11], nan for a student that diverged."""
    per_student = [federation.evaluate_clients(W, images)["per_client"]  # [11, K]
                   for W in students.unbind(1)]
    return np.where(students.isfinite().all(2).cpu().numpy(), np.array(per_student).T,
                    np.nan)


def best_students(students, accuracy):
    """Returns each user's best student (the first, if tied): its index in GRID [K], and its
    weights [K, d]. students: [K, 11, d]; accuracy: [K, 11], nan for one that diverged."""
    best_index = np.nan_to_num(accuracy, nan=-1).argmax(1)  # l.13: the first of the best (D6)
    return best_index, students[torch.arange(len(students)), torch.from_numpy(best_index)]


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation, fixed_rounds="Stage 2 follows the last round")
    client_update = local_training(federation.net, args)
    distil = distillation(federation.net, args)
    everyone, K, validation = federation.everyone, federation.K, federation.split.val

    G = federation.initial_weights()  # l.2: G_1, [d]
    state = State(G=G, O=G.repeat(K, 1), A=None,  # O [K, d] is G_1 until line 8
                  l_prime=G.new_full((K,), torch.inf, dtype=torch.double),  # l.2: l' [K]
                  round_of_O=G.new_zeros(K, dtype=torch.long))
    for t in run.rounds(state, model="G", clients="A", more_follows=True):  # l.1, l.3: Stage 1
        e = t + 1
        l_k = federation.losses(state.G, validation)  # l.4-5: [K] (D1)
        better = l_k < state.l_prime  # l.6: [K]
        state.l_prime = torch.where(better, l_k, state.l_prime)  # l.7
        state.O = torch.where(better[:, None], state.G, state.O)  # l.8: [K, d]
        state.round_of_O = torch.where(better, e, state.round_of_O)  # for the record
        # for each user, train calls client_update(its row of `own`, its epochs, eta)
        w_k = federation.train(client_update, everyone, t, own=[state.G.expand(K, -1)],
                               shared=[federation.eta(t)])  # l.9: [K, d]
        state.G = federation.n @ w_k / federation.n.sum()  # l.10: G_{e+1}, [d] (D2)
        run.sent(up=w_k.numel(), down=w_k.numel())
        if run.evaluates() and e < args.rounds:
            run.log(federation.evaluate(state.G), federation.evaluate_clients(state.G))
    if state.A is None:  # l.12: Stage 2, unless a resumed run has finished it
        common.say(f"stage 2  {K} users, {len(GRID)} students each")
        O = state.O
        if args.teacher == "final":
            O = state.G.expand(K, -1)  # l.11: [K, d]
            run.sent(up=0, down=O.numel())
        eta_prime = torch.tensor(args.distill_lr, device=federation.device)
        # t = E_G, one above the last t, gives a new shuffling
        students = federation.train(distil, everyone, args.rounds, own=[O], shared=[eta_prime],
                                    epochs=args.distill_epochs)  # l.13-14: [K, 11, d]
        accuracy = accuracies(federation, students, validation)
        best_index, state.A = best_students(students, accuracy)  # l.13: keep the best one
        if np.isnan(accuracy).all(1).any():
            run.diverge("each student of a user")
        run.log(federation.evaluate(state.G),
                **measures(federation, state, students, accuracy, best_index, args))
    run.finish()
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# DEFAULTS are for DS-1 of CIFAR-10; BY_DATASET has what differs elsewhere. Users, classes, alpha
# and networks are from section 5, rounds from Table 7, MNIST's 6,000 images from the authors' logs.
# epochs, batch_size and lr are ours (D3).
DEFAULTS = dict(split="unequal-classes", per_client=4, alpha=0.9, clients=10, client_val=0.2,
                client_test=0.2, fraction=1.0, rounds=50, epochs=1, batch_size=20, lr=0.05,  # D3
                model="cifarnet")  # D11
BY_DATASET = {
    "mnist": dict(model="mnistnet"),
    ("cifar10", "dirichlet-classes"): dict(rounds=25),
    ("cifar10", "lognormal"): dict(per_client=2),
    ("mnist", "classes"): dict(rounds=100, limit=6000),  # D9
    ("mnist", "unequal-classes"): dict(rounds=100, limit=6000),
    ("mnist", "dirichlet-classes"): dict(rounds=25),
    ("mnist", "lognormal"): dict(rounds=100, per_client=2),
    # ours, for a quick look
    "shapes": dict(transform="normalize", rounds=15, epochs=2, distill_epochs=5),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    group = parser.add_argument_group("PersFL (--rounds is E_G; --epochs is E_L and --lr is eta, "
                                      "of Stage 1)")
    group.add_argument("--soft", choices=("kl", "ce"), default="kl",
                       help="the soft loss: kl is PersFL, ce PersFL-GD")
    group.add_argument("--teacher", choices=("optimal", "final"), default="optimal",
                       help="O_k: each user's best G, or the last one for all (Table 4)")
    group.add_argument("--distill-epochs", type=common.positive_int, default=10,  # D3
                       help="E of line 16, epochs of Stage 2")
    group.add_argument("--distill-lr", type=common.positive, default=0.05,  # D3
                       help="eta', the rate of Stage 2")
    args = common.parse(parser, BY_DATASET, argv)
    if args.fraction < 1:
        common.refuse("all users take part in every round; use --fraction 1")
    if args.momentum or args.weight_decay:
        common.refuse("PersFL's users have neither momentum nor weight decay; use --momentum 0 "
                      "--weight-decay 0")
    if not args.client_val:
        common.refuse("users choose their teachers on validation images; use --client-val above 0")
    return args


def measures(federation, state, students, accuracy, best_index, args):
    """Returns the personal measures, and others for the record. `accuracy` [K, 11] is that of the
    students [K, 11, d] on validation images. best_index [K]: the places in GRID of those kept."""
    of_G, of_A = (federation.evaluate_clients(W) for W in (state.G, state.A))
    on_test = accuracies(federation, students, federation.split.test)
    teacher_rounds = state.round_of_O.tolist()
    if args.teacher == "final":
        teacher_rounds = [args.rounds + 1] * federation.K  # the last G is G_{E_G+1}
    users = {"FedAvg": of_G["per_client"], "fine-tuned": on_test[:, 0].tolist(),
             "PersFL": of_A["per_client"], "T": [GRID[i][0] for i in best_index],
             "lambda": [GRID[i][1] for i in best_index],
             "teacher's round": teacher_rounds}
    return {"personal": of_A, "personal@fedavg": common.without_clients(of_G), "users": users,
            "grid": GRID, "students": {"val": accuracy.tolist(), "test": on_test.tolist()}}


if __name__ == "__main__":
    main()
