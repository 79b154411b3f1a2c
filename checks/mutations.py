"""Do the tests see a small fault? Makes one at a time in a copy of the working tree, and runs the
tests that concern the file.

    nice -n 19 python checks/mutations.py                  (all; some ten minutes)
    nice -n 19 python checks/mutations.py fedavg common    (those of fedavg.py and common.py)

For each fault it prints what caught it, and the seconds of CPU that this took: "tests", derived by
hand or in numpy; "golden", only the numbers in results/golden.json; or "SURVIVES". The exit code is
1 if any survives.
"""

import contextlib
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import matplotlib.pyplot  # noqa: F401  # what is slow to import, once and not for each fault
import pytest
import scipy.optimize  # noqa: F401
import torch.func  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = {  # those that are derived; the matrix comes second
    "fedavg": "test_fedavg", "fedavgm": "test_fedavgm test_fedavg",
    "superfed": "test_superfed test_fedavg", "fedslr": "test_fedslr test_fedavg",
    "psinet": "test_psinet", "persfl": "test_persfl",
    "baselines": "test_baselines test_baselines_more test_fedavg",
    "common": "test_common test_fedavg test_fedavgm test_superfed test_paths",
}

FAULTS = [line.split(" ==> ") for line in """
fedavg ==> descend(w, eta, gradient) ==> descend(w, -eta, gradient)
fedavg ==> n_k @ w_k / n_k.sum() ==> w_k.mean(0)
fedavg ==> n_k @ w_k / n_k.sum() ==> n_k @ w_k / federation.n.sum()
fedavg ==> federation.n[S] ==> federation.n[: len(S)]
fedavg ==> eta = federation.eta(t) ==> eta = federation.eta(t + 1)
fedavg ==> federation.sample(t, m) ==> federation.sample(0, m)
fedavg ==> + 1e-9), 1) ==> ), 1)
fedavgm ==> torch.addcmul(gradient, decay, w) ==> torch.addcmul(gradient, decay, w, value=-1)
fedavgm ==> args.weight_decay * net.decayed ==> args.weight_decay
fedavgm ==> args.beta * state.v + dw ==> state.v + dw
fedavgm ==> (dw + args.beta * state.v) ==> (dw + state.v)
fedavgm ==> dw = state.w - n_k @ w_k / n_k.sum() ==> dw = state.w - w_k.mean(0)
fedavgm ==> state.w = state.w - state.v ==> state.w = state.w - args.beta * state.v
fedavgm ==> + 1e-9), 1) ==> ), 1)
superfed ==> return (1 - lam) * w_f + lam * w_l ==> return lam * w_f + (1 - lam) * w_l
superfed ==> nu * cos**2 ==> nu * cos
superfed ==> mu * squared_distance ==> mu * squared_distance.sqrt()
superfed ==> float(t >= phase_two_from) ==> float(t > phase_two_from)
superfed ==> state.w_l[S] = w_l_k ==> state.w_l[S] = w_f_k
superfed ==> "initialisation", 0, k + 1) ==> "initialisation", 0, k)
superfed ==> n_k @ w_f_k / n_k.sum() ==> w_f_k.mean(0)
superfed ==> w_g = w_f  # ==> w_g = 0 * w_f  #
superfed ==> w_l, u_l = sgd(w_l, u_l, gradient_l, eta) ==> w_l, u_l = sgd(w_l, u_f, gradient_l, eta)
superfed ==> + 1e-9), 1) ==> ), 1)
superfed ==> train[: len(test)] ==> train
psinet ==> device) * G // classes ==> device) % G
psinet ==> torch.where(has_class, logits, MISSING) ==> logits + 0
psinet ==> n = n_i @ has.to(Omega_i.dtype) ==> n = n_i.sum() * has.any(0)
psinet ==> 0.9 * next_mean + 0.1 * mean ==> 0.1 * next_mean + 0.9 * mean
psinet ==> has[:, self.group.clamp(min=0)] | (self.group < 0) ==> has[:, self.group.clamp(min=0)]
psinet ==> nn.GroupNorm(G or 2, ==> nn.GroupNorm(1,
psinet ==> (Omega_i * has) / n.clamp(min=1) ==> (Omega_i * has) / n_i.sum()
psinet ==> return torch.cat([w, r], -1) ==> return torch.cat([w, Omega[..., net.d :]], -1)
psinet ==> G * ceil(outputs / max(G, 1)) ==> outputs // max(G, 1) * G
psinet ==> layer in self.module.grouped[1:] ==> layer in self.module.grouped
fedslr ==> h = g - gamma + 1 ==> h = g + gamma + 1
fedslr ==> 1 / args.eta_g * (w - w_t) ==> args.eta_g * (w - w_t)
fedslr ==> eta * args.mu) ==> args.mu)
fedslr ==> args.eta_g * (state.gamma.sum(0) / M) ==> args.eta_g * state.gamma[S].mean(0)
fedslr ==> 1 / args.eta_g * (state.w - w_i[j]) ==> 1 / args.eta_g * (w_i[j] - state.w)
fedslr ==> tau = args.lambda_ * args.eta_g ==> tau = args.lambda_
fedslr ==> .transpose(1, 2).reshape(n * k1, c * k2) ==> .reshape(n * k1, c * k2)
fedslr ==> order=1) ==> order=0)
fedslr ==> net(w_t + p, b.x) ==> net(p, b.x)
fedslr ==> + 1e-9), 1) ==> ), 1)
fedslr ==> lambda S: state.w + state.p[S]) ==> lambda S: state.p[S])
persfl ==> (1 - lam) * hard + lam * T**2 * soft ==> (1 - lam) * hard + lam * T * soft
persfl ==> better = l_k < state.l_prime ==> better = l_k <= state.l_prime
persfl ==> (log_s.exp() * per_class) ==> (log_a.exp() * per_class)
persfl ==> federation.n @ w_k / federation.n.sum() ==> w_k.mean(0)
persfl ==> federation.losses(state.G, validation) ==> federation.losses(state.G)
persfl ==> state.l_prime = torch.where(better, l_k, state.l_prime) ==> state.l_prime = l_k
persfl ==> federation, students, validation) ==> federation, students, federation.split.test)
persfl ==> distil, everyone, args.rounds, ==> distil, everyone, args.rounds - 1,
persfl ==> torch.tensor(args.distill_lr, ==> torch.tensor(args.lr,
baselines ==> mu * (w - w_t), eta) ==> mu * w, eta)
baselines ==> c_k - c + (x - y) / (reach * eta) ==> c_k - c + (x - y) / eta
baselines ==> (c_plus - c_k).sum(0) / federation.K ==> (c_plus - c_k).mean(0)
baselines ==> state.h - alpha / K ==> state.h + alpha / K
baselines ==> return theta, g_k - alpha * (theta - w) ==> return theta, g_k + alpha * (theta - w)
baselines ==> eta * ((v - w) * g).sum()) ==> eta * ((w - v) * g).sum())
baselines ==> args.ditto_lambda * (v - w_t) ==> args.ditto_lambda * (w_t - v)
baselines ==> state.V[S] = trained[:, head]  # l.4 ==> state.V[S] = trained[:, head].flip(0)  # l.4
baselines ==> epochs.again(epochs=args.body_epochs) ==> epochs.again(order=1)
baselines ==> epochs.again(order=1):  # l.4 ==> epochs.again(order=0):  # l.4
baselines ==> sgd(v, u_v, alpha * g, eta) ==> sgd(v, u_v, g, eta)
baselines ==> lam * (theta - w)) ==> lam * theta)
baselines ==> trained.mean(0) ==> federation.n[S] @ trained / federation.n[S].sum()
baselines ==> sgd(w, u, M * g, eta) ==> sgd(w, u, g, eta)
baselines ==> cos(pi * t / args.rounds) ==> cos(pi * t)
baselines ==> in_order(U, Pi).mean(0) ==> U.mean(0)
common ==> * nth, round, client] ==> * nth, round]
common ==> ("order", "augmentation", "algorithm")) ==> ("order", "order", "algorithm"))
common ==> * self.args.lr_decay**t ==> * self.args.lr_decay**(t + 1)
common ==> math.ceil(len(top1) / 10) ==> max(1, len(top1) // 10)
common ==> (top1 * n).sum() / n.sum() ==> top1.mean()
common ==> top1.std(ddof=1) ==> top1.std()
common ==> batch.mask.sum().clamp(min=1) ==> len(batch.mask)
common ==> torch.add(gradient, u, alpha ==> torch.add(u, gradient, alpha
common ==> if args.momentum else gradient ==> if args.momentum else gradient + u
common ==> (sure * bins).ceil().long() - 1 ==> (sure * bins).long()
common ==> self.split.train if images is None ==> self.split.test if images is None
common ==> size = fed.args.batch_size or len(index) ==> size = len(index)
""".strip().splitlines()]


def outcome(folder, file, old, new):
    """Returns what catches a fault: "tests", "golden" or "SURVIVES"."""
    path = folder / f"{file}.py"
    text = path.read_text()
    assert text.count(old) >= 1, f"{file}.py has no {old}"
    path.write_text(text.replace(old, new, 1))
    try:
        if not passes(folder, *(f"tests/{name}.py" for name in TESTS[file].split())):
            return "tests"
        names = "" if file in ("common", "baselines") else f" and {file}"
        golden = ["tests/test_matrix.py", "-k", f"numbers{names}"]
        return "SURVIVES" if passes(folder, *golden) else "golden"
    finally:
        path.write_text(text)


def passes(folder, *tests):
    """Returns whether all of these tests pass; the first that fails ends them. They run in a copy
    of this process, which has imported torch."""
    if not (child := os.fork()):
        os.chdir(folder)
        sys.path.pop(0)  # this folder
        with open("said", "w") as file, contextlib.redirect_stdout(file):
            code = pytest.main(["-q", "-x", "-n0", "-m", "not slow and not pages", "-p",
                                "no:cacheprovider", *tests])
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1):
        sys.exit((folder / "said").read_text()[-4000:])
    return not code


def cpu_seconds():
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def main(*files):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                                capture_output=True, text=True, check=True).stdout.splitlines()
        for path in listed:
            if (ROOT / path).is_file() and not path.endswith((".png", ".svg")):
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, folder / path)
        for file in files or TESTS:
            if not passes(folder, *(f"tests/{name}.py" for name in TESTS[file].split())):
                sys.exit(f"the tests of {file}.py fail without a fault")
        found = []
        for file, old, new in FAULTS:
            if not files or file in files:
                start = cpu_seconds()
                found.append(outcome(folder, file, old, new))
                seconds = cpu_seconds() - start
                print(f"{found[-1]:<9}{seconds:4.0f} s  {file:<10} {old}  ->  {new}", flush=True)
    print(f"{len(found) - found.count('SURVIVES')} of {len(found)} faults are caught, "
          f"{found.count('tests')} by tests that are derived")
    return int("SURVIVES" in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
