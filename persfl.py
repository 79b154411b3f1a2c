"""PersFL: personalised federated learning by distillation. Divi, Farrukh, Celik, "Unifying Distillation with Personalization
in Federated Learning", 2021, arXiv 2105.15191.

    python persfl.py --runs 5                              (Table 2, DS-1; published: FedAvg .450, PersFL .819)
    python persfl.py --runs 5 --split dirichlet-classes    (Table 2, DS-2; published: FedAvg .487, PersFL .596)
    python persfl.py --runs 5 --split lognormal            (Table 2, DS-3; published: FedAvg, 100 rounds, .466, PersFL .823)

DS-1: a user has 4 classes, all users have equally many images. DS-2: each class is dealt out in random Dirichlet(.9) shares.
DS-3: each class is divided between 2 users in log-normal shares. The table has users' mean accuracies on CIFAR-10, 5 runs:

    split   rounds   FedAvg   fine-tuned   PersFL   minutes a run   records
    DS-1    50       .5068    .6846        .7186    8 to 14         results/persfl-2/persfl-cifar10-split-classes
    DS-2    25       .5024    .5068        .5817    8 to 14         results/persfl-2/persfl-cifar10-split-dirichlet-classes
    DS-3    50       .3791    .8859        .8918    9 to 25         results/persfl-2/persfl-cifar10-split-lognormal

G is FedAvg's global model. User k's teacher O_k is the G that suits user k best. User k's own model A_k is a student of O_k.
lambda weighs the teacher's answers, softened by the temperature T, against the labels. "fine-tuned": a student with lambda = 0.
"global" is G on the central test images. "personal" is on each user's own test images: A_k in the last round, G before.

The paper's Algorithm 1, in our words. Three things are ours: "choose G_1" in line 2, the loop in line 13, and lines 9 to 11,
where the paper has `end`s. K users have n_k training images, n in all. A_k(b), O_k(b): logits. CE: cross-entropy. How to read
[d], net and grad: fedavg.py.

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
    13  for each pair (T, lambda) of the grid, lines 14 to 22:  a student A_k, at first O_k. At the end A_k is the best of them
    14  for each user k:
    15      cut user k's training images into minibatches of size B
    16      for each of E local epochs:
    17          for each minibatch b, with labels y_b:
    18              loss = (1-lambda) * hard + lambda * T^2 * soft                      (3); PersFL-GD: (7)
    19              hard = CE(y_b, softmax(A_k(b)))
    20              soft = KL(s_b || softmax(A_k(b) / T));                              PersFL-GD: CE(s_b, softmax(A_k(b) / T))
    21              s_b = softmax(O_k(b) / T)
    22              w = w - eta' * gradient of loss, for the weights w of A_k

Choices that change a number. docs/persfl.md has each in full.

    D1  Lines 5 to 8: the candidates are what users are sent, G_1 (untrained) to G_{E_G}. G_{E_G+1} is no candidate.
    D2  Line 10: the weights n_k/n are McMahan et al.'s. The paper's objective (4) weighs users alike; its FedAvg: unknown.
    D3  Ours: B = 20, eta (line 9) = eta' (line 22) = .05, E_L = 1, E = 10 (line 16; the paper: E_L), no momentum.
    D4  Line 15: cut in every epoch; the paper cuts once. Pixels in [0, 1]. Line 20: sum over classes, mean over images.
    D5  Line 20: KL(teacher || student); (3) has it in the other order. PersFL and PersFL-GD then have the same gradients.
    D6  Line 13: best on validation images; on a tie the first. The paper's (3), least training loss, gives lambda = 1 (loss 0).
    D7  Line 13: T 1, 5, 25; lambda 0, .25, .5, .75, 1 (Table 5). At lambda 0 or 1, T does nothing: 11 students (above: 15 ran).
    D8  Line 11: with --teacher final all students start at, and learn from, G_{E_G+1}.
    D9  Only training images are dealt out (MNIST's DS-1: 6,000); the paper counts all. Its DS-2, DS-3 differ, its DS-1 may.
    D10  --runs 5: five seeds and splits, averaged user by user. Standard deviations are over users, with divisor K-1.
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
GRID = [(1, 0), (1, 0.25), (1, 0.5), (1, 0.75), (1, 1), (5, 0.25), (5, 0.5), (5, 0.75), (25, 0.25), (25, 0.5), (25, 0.75)]


def client_step(net, args):
    """Stage 1's step of SGD, for one user and one minibatch b. (Stage 1's loop is in `main`, below.)"""

    def step(user, b, eta):
        w, u = user  # [d] weights, [d] momentum

        def loss(w):
            return common.cross_entropy(net(w, b.x), b)

        g = common.grad(loss)(w)  # [d]
        return common.sgd(args, w, u, g, eta, net.decayed)  # l.9: w - eta * u', u' = momentum * u + g + decay * w

    return step


def student_step(net, args, grid=GRID):
    """Stage 2's body, for one user and one minibatch b: a step of all of the user's students, one for each pair of the grid."""
    all_T, all_lam = torch.tensor(grid, dtype=torch.float, device=net.device).unbind(1)  # [11], [11]

    def step(user, b, eta_prime):
        students, u, O = user  # [11, d] the students' weights, [11, d] momentum, [d] the teacher's
        O_b = net(O, b.x)  # O_k(b): [B, classes]

        def loss(w, T, lam):  # of one student: its weights w [d], and two numbers
            A_b = net(w, b.x)  # A_k(b): [B, classes]
            log_s = (O_b / T).log_softmax(1)  # l.21: log s_b
            log_a = (A_b / T).log_softmax(1)  # l.20: log softmax(A_k(b) / T)
            difference = log_s - log_a if args.soft == "kl" else -log_a
            soft = (log_s.exp() * difference).sum(1)  # l.20: KL, or CE (D5): [B]
            soft = (soft * b.mask).sum() / b.mask.sum().clamp(min=1)  # the mean over b's images (D4); b.mask is 0 for padding
            hard = common.cross_entropy(A_b, b)  # l.19; takes logits
            return (1 - lam) * hard + lam * T**2 * soft  # l.18

        g = vmap(common.grad(loss))(students, all_T, all_lam)  # l.22: of each student with its own T and lambda, [11, d]
        students, u = common.sgd(args, students, u, g, eta_prime, net.decayed)  # l.22: w - eta' * u'
        return students, u, O

    return step


def best_students(federation, students, images):
    """The accuracies of the students [K, 11, d] on these images of each user: [K, 11], nan for a student that diverged. And
    each user's best one, of equals the first: its number in GRID [K], and its weights [K, d]."""
    accuracy = accuracies(federation, students, images)
    best = np.nan_to_num(accuracy, nan=-1).argmax(1)  # l.13: of equals the first (D6)
    return accuracy, best, students[torch.arange(len(students)), torch.from_numpy(best[federation.clients])]


def stage_2(federation, O, args):
    """Every user alone, with its teacher O_k: O [K, d] -> its students [K, 11, d]."""
    users, eta_prime = np.arange(len(O)), torch.tensor(args.distill_lr, device=federation.device)
    step = student_step(federation.net, args)
    students = O[:, None].repeat(1, len(GRID), 1)  # l.13: each starts at O_k; `step` takes the students of all pairs at once
    # federation.train does for each user k (user: students, u, O), at once or one after the other:  l.14
    #   for epoch in range(E):                        l.16
    #     for b in minibatches(shuffled(images), B):  l.15, l.17 (D4)
    #       user = step(user, b, eta_prime)           l.18-22
    t = args.rounds  # a t that no round has, for an order of images that no round has
    start = students, torch.zeros_like(students), O
    return federation.train(step, start, users, t, eta_prime, epochs=args.distill_epochs)[0]


def main(argv=None):
    args = arguments(argv)
    if args.runs > 1:
        return repeat(args, argv)
    federation = common.Federation(args)
    run = common.Run(__file__, federation, fixed_rounds="Stage 2 follows the last round")  # so --resume refuses other --rounds
    step = client_step(federation.net, args)

    G = federation.initial_weights()  # l.2: G_1, [d]
    K = len(federation.clients)  # all users (if there are several processes: this one's)
    state = State(G=G, O=G.repeat(K, 1), l_prime=G.new_full((K,), torch.inf, dtype=torch.double),
                  round_of_O=G.new_zeros(K, dtype=torch.long), A=None)  # l.2: l' [K]; O [K, d] is G_1 until l.8
    for t, S in run.rounds(state):  # l.1, l.3-4: Stage 1; S are all users, [K]
        e = t + 1
        l_k = validation_losses(federation, state.G)  # l.5: [K] (D1)
        better = l_k < state.l_prime  # l.6: [K]
        state.l_prime = torch.where(better, l_k, state.l_prime)  # l.7
        state.O = torch.where(better[:, None], state.G, state.O)  # l.8: [K, d]
        state.round_of_O = torch.where(better, e, state.round_of_O)  # l.8, for the record
        w = state.G.expand(len(S), -1)  # [K, d]
        w_k, _ = federation.train(step, (w, torch.zeros_like(w)), S, t, federation.eta(t))  # l.9: E_L is --epochs: [K, d]
        state.G = federation.mean(w_k, federation.n[S])  # l.10: G_{e+1}, [d] (D2)
        run.sent(up=w_k.numel(), down=w_k.numel())
        if e == args.rounds:  # e = E_G; in the record Stage 2 is a part of this round
            run.bar.write(f"stage 2  {federation.K} users, {len(GRID)} students each, {args.distill_epochs} epochs")
            O = teachers(run, state, args)  # state.O, or l.11: [K, d] (D8)
            students = stage_2(federation, O, args)  # l.12-22: Stage 2, [K, 11, d]
            accuracy, best, state.A = best_students(federation, students, federation.split.val)  # l.13 (D6): A [K, d]
        if run.evaluates():
            final = measure(federation, state, students, accuracy, best, args) if e == args.rounds else None
            run.log(federation.evaluate(state.G), **(final or {"personal": federation.evaluate_clients(state.G)}))
    last = run.record()["rounds"][-1]
    show([last], run.out, args)
    return last


# ---------------------------------------------------------------------------------------------------------------------
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
        rows.append(main([*argv, *(f"--{name}={value}" for name, value in new.items())]))
    print(f"\naverages of {args.runs} runs")
    averages = show(rows, out, args)
    if common.is_main_process():
        (out / "average.json").write_text(json.dumps({"user": common.without_nan(averages)}, indent=1) + "\n")


def validation_losses(federation, w):
    """Mean cross-entropy of the model w [d] on each user's validation images: [K]."""
    images = federation.split.val  # of each user
    index = torch.from_numpy(np.concatenate(images)).to(federation.device)
    user = torch.from_numpy(np.repeat(np.arange(len(images)), list(map(len, images)))).to(federation.device)
    return common.score(federation.logits(w, index), federation.labels[index], user, len(images))["loss"]  # l.5


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
    print(f"\n{'user':<10}" + "".join(f"{title:>17}" for title in titles))
    of_users = dict(enumerate(zip(*averages["users"].values())))
    for user, line in {**of_users, "mean": averages["mean"].values(), "std": averages["std"].values()}.items():
        values = [100 * value if i < 3 else value for i, value in enumerate(line)]  # the first three are accuracies
        print(f"{user:<10}" + "".join(f"{value:>17.2f}" for value in values))
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
