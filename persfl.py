"""PersFL: personalised federated learning by distillation. Divi, Farrukh, Celik, "Unifying
Distillation with Personalization in Federated Learning", 2021, arXiv 2105.15191.

    python persfl.py --runs 5                              Table 2, DS-1: FedAvg .450, PersFL .819
    python persfl.py --runs 5 --split dirichlet-classes    Table 2, DS-2: FedAvg .487, PersFL .596
    python persfl.py --runs 5 --split lognormal            Table 2, DS-3: FedAvg .466, PersFL .823

DS-1: each user has 4 classes and as many images as the others. DS-2: each class is dealt in Dirichlet(.9)
shares. DS-3: two users share each class in log-normal shares. Mean accuracy of the users on CIFAR-10 (5
runs of 8 to 25 minutes):

    split  rounds  FedAvg  fine-tuned  PersFL  records
    DS-1   50      .5068   .6846       .7186   results/persfl-2/persfl-cifar10-split-classes
    DS-2   25      .5024   .5068       .5817   results/persfl-2/persfl-cifar10-split-dirichlet-classes
    DS-3   50      .3791   .8859       .8918   results/persfl-2/persfl-cifar10-split-lognormal

G is FedAvg's global model. User k's teacher O_k is the G that suits user k best. User k's own model A_k
is a student of O_k: lambda weighs the teacher's answers, softened by the temperature T, against the
labels. "fine-tuned" is a student with lambda = 0. "global" measures G on the central test images.
"personal" measures A_k (before the last round: G) on each user's own test images. fedavg.py explains
[d], net and grad.

The paper's Algorithm 1 in our words. Ours are "choose G_1" in line 2, the loop in line 13, and lines 9
to 11, where the paper has `end`s. K users have n_k training images, n in all. A_k(b), O_k(b): logits.

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
    13  for each pair (T, lambda) in the grid: train a student A_k, initialised to O_k. Keep the best one
    14      for each user k:
    15          cut user k's training images into minibatches of size B
    16          for each of E local epochs:
    17              for each minibatch b, with labels y_b:
    18                  loss = (1-lambda) * hard + lambda * T^2 * soft              (3); PersFL-GD: (7)
    19                  hard = CE(y_b, softmax(A_k(b)))
    20                  soft = KL(s_b || softmax(A_k(b) / T));    PersFL-GD: CE(s_b, softmax(A_k(b) / T))
    21                  s_b = softmax(O_k(b) / T)
    22                  w = w - eta' * gradient of loss, for the weights w of A_k

Choices that change a number; docs/persfl.md explains each.

    D1  Lines 5 to 8: candidates are what users are sent, G_1 (untrained) to G_{E_G}, not G_{E_G+1}.
    D2  Line 10: weights n_k/n as in FedAvg. The paper's objective (4) weighs users alike.
    D3  Ours: B = 20, eta (line 9) = eta' (line 22) = .05, E_L = 1, E = 10 (paper: E = E_L), no momentum.
    D4  Line 15: cut anew in every epoch. Pixels are in [0, 1]. Line 20 averages over images.
    D5  Line 20: KL(teacher || student); (3) has the reverse. PersFL and PersFL-GD then have equal gradients.
    D6  Line 13: best on validation images; the first if tied. By (3)'s least training loss, lambda is 1.
    D7  Line 13: T 1, 5, 25; lambda 0, .25, .5, .75, 1. T does nothing at lambda 0 or 1: 11 students.
    D8  Line 11: all students start at, and learn from, G_{E_G+1}.
    D9  Only training images are dealt (MNIST's DS-1: 6,000); the paper counts all.
    D10  --runs 5: five seeds and splits, averaged user by user. Deviations are over users (K-1).
    D11  CIFAR-10's network also pools after its second convolution, as the authors' baselines do.
"""

import json
import pathlib
import sys
from math import ceil
from types import SimpleNamespace as State

import numpy as np
import torch
from torch.func import vmap

import common

# l.13: (T, lambda) of 11 students (D7)
GRID = [(1, 0), (1, 0.25), (1, 0.5), (1, 0.75), (1, 1), (5, 0.25), (5, 0.5), (5, 0.75), (25, 0.25),
        (25, 0.5), (25, 0.75)]


def local_training(net, args):
    """client_update(w, epochs, eta): line 9, for one user."""
    sgd = common.sgd(args, net.decayed)  # w - eta * gradient; --momentum adds to it

    @common.step
    def sgd_step(w, u, b, eta):  # w, u: [d] weights and momentum
        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        gradient = common.grad(loss)(w)  # [d]
        return sgd(w, u, gradient, eta)

    def client_update(w, epochs, eta):
        u = torch.zeros_like(w)
        for minibatches in epochs:  # l.9: E_L is --epochs
            for b in minibatches:
                w, u = sgd_step(w, u, b, eta)
        return w

    return client_update


def distillation(net, args, grid=GRID):
    """distil(O, epochs, eta_prime): lines 13 to 22 for one user: O [d] -> its students [11, d]."""
    sgd = common.sgd(args, net.decayed)
    all_T, all_lam = torch.tensor(grid, dtype=torch.float, device=net.device).unbind(1)  # [11] each

    @common.step
    def students_step(students, u, O, b, eta_prime):  # [11, d] weights, [11, d] momentum, [d] teacher
        O_b = net(O, b.x)  # O_k(b): [B, classes]

        def loss(w, T, lam):  # of one student: its weights w [d], and two numbers
            A_b = net(w, b.x)  # A_k(b): [B, classes]
            log_s = (O_b / T).log_softmax(1)  # l.21: log s_b
            log_a = (A_b / T).log_softmax(1)  # l.20: log softmax(A_k(b) / T)
            difference = log_s - log_a if args.soft == "kl" else -log_a
            soft = (log_s.exp() * difference).sum(1)  # l.20: KL, or CE (D5): [B]
            soft = (soft * b.mask).sum() / b.mask.sum().clamp(min=1)  # over b's images (D4)
            hard = common.cross_entropy(A_b, b)  # l.19; takes logits
            return (1 - lam) * hard + lam * T**2 * soft  # l.18

        # l.13: its loop over the pairs of the grid is this vmap, over the students' weights, T, lambda
        gradients = vmap(torch.func.grad(loss))(students, all_T, all_lam)  # [11, d]
        return sgd(students, u, gradients, eta_prime)  # l.22: w - eta' * gradient

    def distil(O, epochs, eta_prime):
        students = O[..., None, :].repeat_interleave(len(grid), -2)  # l.13: each starts at O_k
        u = torch.zeros_like(students)
        for minibatches in epochs:  # l.15-16 (D4)
            for b in minibatches:  # l.17
                students, u = students_step(students, u, O, b, eta_prime)  # l.18-22
        return students

    return distil


def main(argv=None):
    args = arguments(argv)
    if args.runs > 1:
        return repeat(args, argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation, fixed_rounds="Stage 2 follows the last round")
    client_update = local_training(federation.net, args)
    distil = distillation(federation.net, args)

    G = federation.initial_weights()  # l.2: G_1, [d]
    K = len(federation.clients)  # all users (of this process)
    state = State(G=G, O=G.repeat(K, 1), A=None,  # l.2: O [K, d] is G_1 until l.8
                  l_prime=G.new_full((K,), torch.inf, dtype=torch.double),  # l.2: l' [K]
                  round_of_O=G.new_zeros(K, dtype=torch.long))
    for t in run.rounds(state, model="G", clients="A"):  # l.1, l.3: Stage 1
        e, users = t + 1, federation.rows()  # l.4: all of them, [K]
        l_k = validation_losses(federation, state.G)  # l.5: [K] (D1)
        better = l_k < state.l_prime  # l.6: [K]
        state.l_prime = torch.where(better, l_k, state.l_prime)  # l.7
        state.O = torch.where(better[:, None], state.G, state.O)  # l.8: [K, d]
        state.round_of_O = torch.where(better, e, state.round_of_O)  # l.8, for the record
        G_e = state.G.expand(K, -1)  # [K, d]: the same for each user
        eta = federation.eta(t)
        w_k = federation.train(client_update, users, t, own=[G_e], shared=[eta])  # l.9: [K, d]
        state.G = federation.mean(w_k, federation.n)  # l.10: G_{e+1}, [d] (D2)
        run.sent(up=w_k.numel(), down=w_k.numel())
        if e == args.rounds:  # e = E_G; in the record Stage 2 is a part of this round
            common.say(f"stage 2  {federation.K} users, {len(GRID)} students each, "
                       f"{args.distill_epochs} epochs")
            O = teachers(run, state, args)  # state.O, or l.11: [K, d] (D8)
            eta_prime = torch.tensor(args.distill_lr, device=federation.device)
            # l.12, l.14: Stage 2; t = E_G, beyond the last round, has its own shuffling
            students = federation.train(distil, users, args.rounds, own=[O], shared=[eta_prime],
                                        epochs=args.distill_epochs)  # l.13-22: [K, 11, d]
            accuracy, best, state.A = best_students(federation, students, federation.split.val)  # l.13
        if run.evaluates():
            final = measure(federation, state, students, accuracy, best, args) if e == args.rounds else None
            run.log(federation.evaluate(state.G),
                    **(final or {"personal": federation.evaluate_clients(state.G)}))
    show([run.record()["rounds"][-1]], run.out, args)
    return run.record()


def best_students(federation, students, images):
    """Returns the accuracies of the students [K, 11, d] on these images of each user: [K, 11], nan for
    a student that diverged. Also each user's best student (the first one, if tied): its index in GRID
    [K] and its weights [K, d]."""
    accuracy = accuracies(federation, students, images)
    best = np.nan_to_num(accuracy, nan=-1).argmax(1)  # l.13: the first of the best (D6)
    mine = torch.from_numpy(best[federation.clients])
    return accuracy, best, students[torch.arange(len(students)), mine]


# --------------------------------------------------------------------------------------------------
# Around it

# DS-1 of CIFAR-10, and below what differs elsewhere. Users, classes, shares, network: section 5. Rounds: Table 7. MNIST's 6,000
# images: the authors' logs. epochs, batch_size, lr: our choice (D3).
DEFAULTS = dict(split="classes", per_client=4, alpha=0.9, clients=10, client_val=0.2, client_test=0.2, fraction=1.0, rounds=50,
                epochs=1, batch_size=20, lr=0.05, model="cifarnet")  # D3, D11
BY_DATASET = {
    "mnist": dict(model="mnistnet"),
    ("cifar10", "dirichlet-classes"): dict(rounds=25),
    ("cifar10", "lognormal"): dict(per_client=2),
    ("mnist", "classes"): dict(rounds=100, limit=6000),  # D9
    ("mnist", "dirichlet-classes"): dict(rounds=25),
    ("mnist", "lognormal"): dict(rounds=100, per_client=2),
    # ours, for a quick look
    "shapes": dict(transform="normalize", rounds=15, epochs=2, distill_epochs=5),
}


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    group = parser.add_argument_group("PersFL (--rounds is E_G; --epochs E_L and --lr eta of Stage 1; --momentum of both)")
    group.add_argument("--soft", choices=("kl", "ce"), default="kl", help="the soft loss: kl is PersFL, ce PersFL-GD")
    group.add_argument("--teacher", choices=("optimal", "final"), default="optimal",
                       help="O_k: each user's best G, or the last one for all (Table 4)")
    group.add_argument("--distill-epochs", type=common.positive_int, default=10, help="E of line 16, epochs of Stage 2")  # D3
    group.add_argument("--distill-lr", type=common.positive, default=0.05, help="eta', the rate of Stage 2")  # D3
    group.add_argument("--runs", type=common.positive_int, default=1, help="runs to average; run r adds r to both seeds")
    args = common.parse(parser, BY_DATASET, argv)
    if args.fraction < 1:
        common.refuse("all users take part in every round; use --fraction 1")
    if max(args.seed, args.split_seed) + args.runs > 2**32:
        common.refuse(f"--runs {args.runs} makes a seed larger than {2**32 - 1}; use a smaller --seed or --split-seed")
    if not args.client_val:
        common.refuse("users choose their teachers on validation images; use --client-val above 0")
    return args


def repeat(args, argv):
    """--runs: one run after the other, each with its own record, and average.json with the mean of them."""
    argv = sys.argv[1:] if argv is None else argv
    out = pathlib.Path(args.out or f"runs/persfl-{pathlib.Path(args.dataset).stem}-{args.seed}")
    rows = []
    for r in range(args.runs):
        new = {"runs": 1, "seed": args.seed + r, "split-seed": args.split_seed + r, "out": out / f"run-{r}"}  # D10
        rows.append(main([*argv, *(f"--{name}={value}" for name, value in new.items())])["rounds"][-1])
    common.say(f"\naverages of {args.runs} runs")
    averages = show(rows, out, args)
    averages = {"user": common.without_nan(averages)}
    if common.is_main_process():
        (out / "average.json").write_text(json.dumps(averages, indent=1) + "\n")
    return averages


def validation_losses(federation, w):
    """Mean cross-entropy of the model w [d] on each user's validation images: [K]."""
    images = federation.split.val  # of each user
    index = np.concatenate(images)
    user = np.repeat(np.arange(len(images)), list(map(len, images)))
    labels, user = federation.labels[index], torch.from_numpy(user).to(federation.device)
    return common.score(federation.logits(w, index), labels, user, len(images))["loss"]  # l.5


def teachers(run, state, args):
    """O_k of every user: [K, d]. --teacher final: the last G, which all users are sent."""
    if args.teacher == "optimal":
        return state.O
    run.sent(up=0, down=state.O.numel())
    return state.G.expand(len(state.O), -1)  # l.11


def accuracies(federation, students, images):
    """Of every user's students [K, 11, d] on the images numbered images[k]: [K, 11], nan for a student that diverged."""
    found = [federation.evaluate_clients(W, images)["per_client"] for W in students.unbind(1)]  # [11, K]
    sound = federation.gather(students.isfinite().all(2).long()).cpu().numpy() > 0  # [K, 11]
    return np.where(sound, np.array(found).T, np.nan)


def measure(federation, state, students, accuracy, best, args):
    """The last round's personal measures, and those that docs/persfl.md names. students [K, 11, d]; accuracy [K, 11] of them on
    validation images; best [K]: which of them the users keep."""
    on_test, _, A_by_test = best_students(federation, students, federation.split.test)  # [K, 11]; [K, d]
    models = {"fedavg": state.G, "lambda=0": students[:, 0], "val": state.A, "test": A_by_test}
    found = {name: federation.evaluate_clients(W) for name, W in models.items()}
    rounds = federation.gather(state.round_of_O).tolist()
    if args.teacher == "final":
        rounds = [args.rounds + 1] * federation.K  # a further round would begin with this G
    users = {"FedAvg": found["fedavg"]["per_client"], "fine-tuned": on_test[:, 0].tolist(),
             "PersFL": found["val"]["per_client"], "T": [GRID[i][0] for i in best], "lambda": [GRID[i][1] for i in best],
             "teacher's round": rounds}
    short = {f"personal@{name}": common.without_clients(measures) for name, measures in found.items()}
    return {"personal": found["val"], **short, "users": users, "grid": GRID,
            "students": {"val": accuracy.tolist(), "test": on_test.tolist()}}


def average(parts):
    """Of several runs' measures: the table of users, the mean over users, their standard deviation, students' accuracies."""
    table = {name: np.mean([part["users"][name] for part in parts], 0) for name in parts[0]["users"]}  # D10
    students = np.mean([part["students"]["test"] for part in parts], 0)  # [m, 11]
    return {
        "users": {name: column.tolist() for name, column in table.items()},
        "mean": {name: column.mean() for name, column in table.items()},
        "std": {name: column.std(ddof=min(1, len(column) - 1)) for name, column in table.items()},
        "students": students.tolist(),
    }


def show(rows, out, args):
    """Prints the tables of the last rounds of one or several runs; draws them, in the form of Figs. 2 and 3 to 8."""
    averages = average(rows)
    titles = ["PersFL-GD" if title == "PersFL" and args.soft == "ce" else title for title in averages["users"]]
    common.say(f"\n{'user':<10}" + "".join(f"{title:>17}" for title in titles))
    of_users = dict(enumerate(zip(*averages["users"].values())))
    for user, line in {**of_users, "mean": averages["mean"].values(), "std": averages["std"].values()}.items():
        values = [100 * value if i < 3 else value for i, value in enumerate(line)]  # the first three are accuracies
        common.say(f"{user:<10}" + "".join(f"{value:>17.2f}" for value in values))
    if args.plot:
        draw(averages, len(rows), out)
    return averages


def draw(averages, runs, out):
    """students-users.png, the form of Figs. 3 to 8, and teachers-users.png, that of Fig. 2."""
    students = np.array(averages["students"])  # [K, 11]
    columns = min(5, len(students))
    lines = ceil(len(students) / columns)
    with common.drawing(out / "students-users.png", lines, columns, (3 * columns, 3 * lines),
                        "accuracy of the students, by $\\lambda$ and $T$") as axes:
        for user, (axis, accuracy) in enumerate(zip(np.ravel(axes), students)):
            for T in sorted({T for T, _ in GRID}):  # at lambda 0 and 1 one student stands for every T
                points = sorted((lam, a) for (at, lam), a in zip(GRID, accuracy) if at == T or lam in (0, 1))
                axis.plot(*zip(*points), marker="o", label=f"$T$ = {T}")
            axis.set(title=f"user {user}", xlabel=r"$\lambda$", ylabel="" if user % columns else "test accuracy")
    with common.drawing(out / "teachers-users.png") as axis:
        axis.bar(np.arange(len(students)), averages["users"]["teacher's round"])
        axis.set(xlabel="user", ylabel="round of its teacher", title=f"mean over {runs} runs" if runs > 1 else "")


if __name__ == "__main__":
    main()
