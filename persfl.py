"""PersFL: personalised federated learning by distillation. Divi, Farrukh, Celik, "Unifying
Distillation with Personalization in Federated Learning", 2021, arXiv 2105.15191.

    python persfl.py --runs 5                              DS-1: 4 classes a user, equal amounts
    python persfl.py --runs 5 --split dirichlet-classes    DS-2: classes in Dirichlet(.9) shares
    python persfl.py --runs 5 --split lognormal            DS-3: 2 classes a user, log-normal shares
    CIFAR-10, means of 5 runs: FedAvg published, ours; fine-tuned ours; PersFL published, ours
    DS-1  .450  .5068  .6846  .819  .7186  results/persfl-2/persfl-cifar10-split-classes
    DS-2  .487  .5024  .5068  .596  .5817  results/persfl-2/persfl-cifar10-split-dirichlet-classes
    DS-3  .466  .3791  .8859  .823  .8918  results/persfl-2/persfl-cifar10-split-lognormal

G is FedAvg's model, O_k user k's teacher, A_k the student ("fine-tuned" if lambda = 0), T the
temperature, lambda the soft loss's weight. "global" tests G on central test images, "personal" A_k
(or, before the last round, G) on user k's. This is Algorithm 1 reworded, line numbers kept. We add
"choose G_1", 9-11 (paper: "end"), 13's loop. See fedavg.py for notation, docs/persfl.md for D1-D11.

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
    13  for each (T, lambda) in the grid: train a student A_k, initialised to O_k. Keep the best one
    14      for each user k:
    15          cut user k's training images into minibatches of size B
    16          for each of E local epochs:
    17              for each minibatch b, with labels y_b:
    18                  loss = (1-lambda) * hard + lambda * T^2 * soft         (3); PersFL-GD: (7)
    19                  hard = CE(y_b, softmax(A_k(b)))            A_k(b), O_k(b): logits
    20                  soft = KL(s_b || softmax(A_k(b)/T)); PersFL-GD: CE(s_b, softmax(A_k(b)/T))
    21                  s_b = softmax(O_k(b) / T)
    22                  w = w - eta' * gradient of loss, for the weights w of A_k

    D1  Lines 5 to 8 choose among the models users are sent: G_1 (untrained) to G_{E_G}.
    D2  Line 10: user k has n_k of n training images; the paper's (4) weights users equally.
    D3  We chose B = 20, rate .05 (lines 9, 22), E_L = 1, E = 10 (paper: E_L), no momentum.
    D4  Line 15 is repeated in every epoch. Pixels are in [0, 1]. Line 20 averages over b's images.
    D5  Line 20: KL(teacher || student), whose gradients are PersFL-GD's; (3) has the reverse.
    D6  Line 13: best validation accuracy wins, first if tied. By (3) lambda = 1 would always win.
    D7  Line 13: T is 1, 5, 25; lambda 0, .25, .5, .75, 1. T has no effect at lambda 0, 1: 11 pairs.
    D8  Line 11: teacher and start are G_{E_G+1}. FedAvg's .466 took 100 rounds, ours 50.
    D9  Users are dealt only training images, 6,000 in MNIST's DS-1, as in the authors' logs.
    D10  --runs 5 averages each user over 5 seeds and splits. Deviations over users divide by K-1.
    D11  CIFAR-10's network also pools after its second convolution, as in the authors' baseline."""

import json
import pathlib
import sys
from types import SimpleNamespace as State

import numpy as np
import torch

import common

# T has no effect at lambda 0 and 1, so 11 students are left (D7)
GRID = [(T, lam) for T in (1, 5, 25) for lam in (0, 0.25, 0.5, 0.75, 1) if T == 1 or 0 < lam < 1]


def local_training(net, args):
    """Returns client_update(w, epochs, eta): line 9, for one user."""
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
    """Returns distil(O, epochs, eta_prime), which trains a user's students [11, d] from O [d]."""
    sgd = common.sgd(args, net.decayed)
    all_T, all_lam = torch.tensor(grid, dtype=torch.float, device=net.device).unbind(1)  # [11] each

    @common.step
    def students_step(students, u, O, b, eta_prime):  # u: [11, d]; O: [d]
        O_b = net(O, b.x)  # O_k(b): [B, classes]

        def loss(w, T, lam):  # of one student: its weights w [d], and two numbers
            A_b = net(w, b.x)  # A_k(b): [B, classes]
            log_s = (O_b / T).log_softmax(1)  # l.21: log s_b
            log_a = (A_b / T).log_softmax(1)  # l.20: log softmax(A_k(b) / T)
            per_class = log_s - log_a if args.soft == "kl" else -log_a
            soft = (log_s.exp() * per_class).sum(1)  # l.20: KL, or CE (D5): [B]
            soft = (soft * b.mask).sum() / b.mask.sum().clamp(min=1)  # over b's images (D4)
            hard = common.cross_entropy(A_b, b)  # l.19; takes logits
            return (1 - lam) * hard + lam * T**2 * soft  # l.18

        # l.13: vmap loops over the grid, that is, over the students' weights, T and lambda
        gradients = torch.func.vmap(torch.func.grad(loss))(students, all_T, all_lam)  # [11, d]
        return sgd(students, u, gradients, eta_prime)  # l.22: w - eta' * gradient

    def distil(O, epochs, eta_prime):
        students = O[..., None, :].repeat_interleave(len(grid), -2)  # l.13: each starts at O_k
        u = torch.zeros_like(students)
        for minibatches in epochs:  # l.15-16 (D4)
            for b in minibatches:  # l.17: students_step does lines 18 to 22
                students, u = students_step(students, u, O, b, eta_prime)
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
    state = State(G=G, O=G.repeat(K, 1), A=None,  # O [K, d] is G_1 until line 8
                  l_prime=G.new_full((K,), torch.inf, dtype=torch.double),  # l.2: l' [K]
                  round_of_O=G.new_zeros(K, dtype=torch.long))
    for t in run.rounds(state, model="G", clients="A"):  # l.1, l.3: Stage 1
        e, S = t + 1, federation.rows()  # l.4: all users, [K]
        l_k = validation_losses(federation, state.G)  # l.5: [K] (D1)
        better = l_k < state.l_prime  # l.6: [K]
        state.l_prime = torch.where(better, l_k, state.l_prime)  # l.7
        state.O = torch.where(better[:, None], state.G, state.O)  # l.8: [K, d]
        state.round_of_O = torch.where(better, e, state.round_of_O)  # for the record
        G_e = state.G.expand(K, -1)  # [K, d]: the same for each user
        w_k = federation.train(client_update, S, t, own=[G_e], shared=[federation.eta(t)])  # l.9
        state.G = federation.mean(w_k, federation.n)  # l.10: G_{e+1}, [d] (D2)
        run.sent(up=w_k.numel(), down=w_k.numel())
        if e == args.rounds:  # e = E_G; in the record Stage 2 is a part of this round
            common.say(f"stage 2  {federation.K} users, {len(GRID)} students each")
            O = teachers(run, state, args)  # state.O, or l.11: [K, d] (D8)
            eta_prime = torch.tensor(args.distill_lr, device=federation.device)
            # l.12, l.14: Stage 2; t = E_G, one above the last t, gives a new shuffling
            students = federation.train(distil, S, args.rounds, own=[O], shared=[eta_prime],
                                        epochs=args.distill_epochs)  # [K, 11, d]
            *chosen, state.A = best_students(federation, students, federation.split.val)  # l.13
        if run.evaluates():
            personal = (measure(federation, state, students, *chosen, args) if e == args.rounds
                        else {"personal": federation.evaluate_clients(state.G)})
            run.log(federation.evaluate(state.G), **personal)
    show([run.record()["rounds"][-1]], run.out, args)
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# DEFAULTS are for DS-1 of CIFAR-10; BY_DATASET has what differs elsewhere. Users, classes, alpha
# and networks are from section 5, rounds from Table 7, MNIST's 6,000 images from the authors' logs.
# epochs, batch_size and lr are ours (D3).
DEFAULTS = dict(split="classes", per_client=4, alpha=0.9, clients=10, client_val=0.2,
                client_test=0.2, fraction=1.0, rounds=50, epochs=1, batch_size=20, lr=0.05,  # D3
                model="cifarnet")  # D11
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
    group = parser.add_argument_group("PersFL (--rounds is E_G; --epochs is E_L and --lr is eta, "
                                      "of Stage 1; --momentum acts in both stages)")
    group.add_argument("--soft", choices=("kl", "ce"), default="kl",
                       help="the soft loss: kl is PersFL, ce PersFL-GD")
    group.add_argument("--teacher", choices=("optimal", "final"), default="optimal",
                       help="O_k: each user's best G, or the last one for all (Table 4)")
    group.add_argument("--distill-epochs", type=common.positive_int, default=10,  # D3
                       help="E of line 16, epochs of Stage 2")
    group.add_argument("--distill-lr", type=common.positive, default=0.05,  # D3
                       help="eta', the rate of Stage 2")
    group.add_argument("--runs", type=common.positive_int, default=1,
                       help="runs to average; run r adds r to both seeds")
    args = common.parse(parser, BY_DATASET, argv)
    if args.fraction < 1:
        common.refuse("all users take part in every round; use --fraction 1")
    if max(args.seed, args.split_seed) + args.runs > 2**32:
        common.refuse(f"--runs {args.runs} makes a seed larger than {2**32 - 1}; use a smaller "
                      "--seed or --split-seed")
    if not args.client_val:
        common.refuse("users choose their teachers on validation images; use --client-val above 0")
    return args


def repeat(args, argv):
    """Makes --runs runs one after the other, each with its own record. Writes their averages to
    average.json and returns them."""
    argv = sys.argv[1:] if argv is None else argv
    out = pathlib.Path(args.out or f"runs/persfl-{pathlib.Path(args.dataset).stem}-{args.seed}")
    rows = []
    for r in range(args.runs):
        new = {"runs": 1, "seed": args.seed + r, "split-seed": args.split_seed + r,  # D10
               "out": out / f"run-{r}"}
        record = main([*argv, *(f"--{name}={value}" for name, value in new.items())])
        rows.append(record["rounds"][-1])
    common.say(f"\naverages of {args.runs} runs")
    averages = {"user": common.without_nan(show(rows, out, args))}
    if common.is_main_process():
        (out / "average.json").write_text(json.dumps(averages, indent=1) + "\n")
    return averages


def validation_losses(federation, w):
    """Returns the mean cross-entropy of the model w [d] on each user's validation images: [K]."""
    images = federation.split.val  # of each user
    index = np.concatenate(images)
    user = np.repeat(np.arange(len(images)), list(map(len, images)))
    labels, user = federation.labels[index], torch.from_numpy(user).to(federation.device)
    return common.score(federation.logits(w, index), labels, user, len(images))["loss"]


def teachers(run, state, args):
    """Returns O_k of every user: [K, d]. With --teacher final it is G_{E_G+1}, which all users are
    sent."""
    if args.teacher == "optimal":
        return state.O
    run.sent(up=0, down=state.O.numel())
    return state.G.expand(len(state.O), -1)


def best_students(federation, students, images):
    """Returns the accuracies of the students [K, 11, d] on these images of each user: [K, 11], nan
    for a student that diverged. Also returns each user's best student (the first one, if tied): its
    index in GRID [K] and its weights [K, d]."""
    accuracy = accuracies(federation, students, images)
    best = np.nan_to_num(accuracy, nan=-1).argmax(1)  # the first of the best (D6)
    best_here = torch.from_numpy(best[federation.clients])  # of this process's users
    return accuracy, best, students[torch.arange(len(students)), best_here]


def accuracies(federation, students, images):
    """Returns the accuracies of every user's students [K, 11, d] on the images numbered images[k]:
    [K, 11], nan for a student that diverged."""
    found = [federation.evaluate_clients(W, images)["per_client"]  # [11, K]
             for W in students.unbind(1)]
    sound = federation.gather(students.isfinite().all(2).long()).cpu().numpy() > 0  # [K, 11]
    return np.where(sound, np.array(found).T, np.nan)


def measure(federation, state, students, accuracy, best, args):
    """Returns the last round's personal measures, and others for the record. `accuracy`
    [K, 11] is that of the students [K, 11, d] on validation images. `best` [K] are the
    indices in GRID of those kept."""
    on_test, _, A_by_test = best_students(federation, students, federation.split.test)
    models = {"fedavg": state.G, "lambda=0": students[:, 0], "val": state.A, "test": A_by_test}
    found = {name: federation.evaluate_clients(W) for name, W in models.items()}
    rounds = federation.gather(state.round_of_O).tolist()
    if args.teacher == "final":
        rounds = [args.rounds + 1] * federation.K  # a further round would begin with this G
    users = {"FedAvg": found["fedavg"]["per_client"], "fine-tuned": on_test[:, 0].tolist(),
             "PersFL": found["val"]["per_client"], "T": [GRID[i][0] for i in best],
             "lambda": [GRID[i][1] for i in best], "teacher's round": rounds}
    short = {f"personal@{name}": common.without_clients(part) for name, part in found.items()}
    return {"personal": found["val"], **short, "users": users, "grid": GRID,
            "students": {"val": accuracy.tolist(), "test": on_test.tolist()}}


def average(parts):
    """Returns averages over several runs' measures: the table of users, the mean and the standard
    deviation over users, and the accuracies of the students."""
    table = {name: np.mean([part["users"][name] for part in parts], 0)  # D10
             for name in parts[0]["users"]}
    students = np.mean([part["students"]["test"] for part in parts], 0)  # [K, 11]
    return {
        "users": {name: column.tolist() for name, column in table.items()},
        "mean": {name: column.mean() for name, column in table.items()},
        "std": {name: column.std(ddof=min(1, len(column) - 1)) for name, column in table.items()},
        "students": students.tolist(),
    }


def show(rows, out, args):
    """Prints and returns the averages of `rows`, each run's last round. With --plot also draws
    them, like Figs. 2 to 8."""
    averages = average(rows)
    titles = ["PersFL-GD" if title == "PersFL" and args.soft == "ce" else title
              for title in averages["users"]]
    common.say(f"\n{'user':<10}" + "".join(f"{title:>17}" for title in titles))
    lines = dict(enumerate(zip(*averages["users"].values())))
    lines |= {name: averages[name].values() for name in ("mean", "std")}
    for user, line in lines.items():
        # the first three are accuracies, in %
        values = [100 * value if i < 3 else value for i, value in enumerate(line)]
        common.say(f"{user:<10}" + "".join(f"{value:>17.2f}" for value in values))
    if args.plot:
        draw(averages, len(rows), out)
    return averages


def draw(averages, runs, out):
    """Draws students-users.png like Figs. 3 to 8, and teachers-users.png like Fig. 2."""
    students = np.array(averages["students"])  # [K, 11]
    columns = min(5, len(students))
    lines = -(-len(students) // columns)  # rounded up
    with common.drawing(out / "students-users.png", lines, columns, (3 * columns, 3 * lines),
                        "accuracy of the students, by $\\lambda$ and $T$") as axes:
        for user, (axis, accuracy) in enumerate(zip(np.ravel(axes), students)):
            for T in sorted({T for T, _ in GRID}):
                points = sorted((lam, a) for (of, lam), a in zip(GRID, accuracy)
                                if of == T or lam in (0, 1))  # all T share these
                axis.plot(*zip(*points), marker="o", label=f"$T$ = {T}")
            axis.set(title=f"user {user}", xlabel=r"$\lambda$",
                     ylabel="" if user % columns else "test accuracy")
    with common.drawing(out / "teachers-users.png") as axis:
        axis.bar(np.arange(len(students)), averages["users"]["teacher's round"])
        axis.set(xlabel="user", ylabel="round of its teacher",
                 title=f"mean over {runs} runs" if runs > 1 else "")


if __name__ == "__main__":
    main()
