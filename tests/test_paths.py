"""The ways of training beside the plain loop: patches, replayed steps, halves when memory runs out, lower precision."""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import common
import engine
import fedavg
import path
import superfed
from conftest import QUICK, Seen, federation, refused, run

UNEQUAL = [*QUICK, "--split", "dirichlet-classes", "--alpha", "1", "--fraction", "1", "--model", "mnistnet"]


@pytest.mark.parametrize("kernel, stride, padding, bias", [(5, 1, 0, True), (3, 1, 1, False), (3, 2, 1, True), (1, 2, 0, False), (2, 1, 0, True)])
def test_patches_are_a_convolution_in_value_and_gradients(kernel, stride, padding, bias):
    """For one client, and under vmap for three with weights of their own; in float64."""
    make = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=make, dtype=torch.double) for shape in ((3, 2, 4, 9, 9), (3, 6, 4, kernel, kernel)))
    b = torch.randn(3, 6, generator=make, dtype=torch.double)
    patches = lambda x, w, b: engine.conv_by_patches(x, w, b if bias else None, stride, padding)  # noqa: E731
    conv = lambda x, w, b: F.conv2d(x, w, b if bias else None, stride, padding)  # noqa: E731
    d_patches, d_conv = (grad(lambda *a, f=f: f(*a).sin().sum(), argnums=(0, 1)) for f in (patches, conv))
    for ours, theirs in ((patches, conv), (d_patches, d_conv)):
        want = [theirs(*client) for client in zip(x, weight, b)]
        torch.testing.assert_close(ours(x[0], weight[0], b[0]), want[0])
        stacked = torch.stack(want) if theirs is conv else tuple(map(torch.stack, zip(*want)))
        torch.testing.assert_close(vmap(ours)(x, weight, b), stacked)


def test_grad_is_that_of_torch_func():
    """Of one argument and of two, beside a second result, of an argument that is not used, inside vmap and inside itself."""
    a, b = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)

    def f(a, b, c=None):
        return (a.sin() * b**2).sum()

    def with_aux(a, b):
        return f(a, b), (a * b, b)

    same = lambda x, y: torch.testing.assert_close(x, y, atol=0, rtol=0)  # noqa: E731
    same(engine.grad(f)(a, b), a.cos() * b**2)
    same(engine.grad(f, argnums=(1, 0))(a, b), grad(f, argnums=(1, 0))(a, b))
    same(engine.grad(f, argnums=(0, 2))(a, b, a), (a.cos() * b**2, torch.zeros_like(a)))
    g, aux = engine.grad(with_aux, has_aux=True)(a, b)
    same((g, aux), grad(with_aux, has_aux=True)(a, b))
    assert not any(z.requires_grad for z in (a, b, g, *aux))  # a state that held on to its history would fill the memory
    same(vmap(engine.grad(f))(a, b), vmap(grad(f))(a, b))
    same(grad(lambda a: engine.grad(f)(a, b).sum())(a), -a.sin() * b**2)
    with torch.no_grad():
        same(engine.grad(f)(a, b), grad(f)(a, b))


def test_grad_keeps_nothing_for_second_derivatives():
    """Where only vmap is around it, GroupNorm's backward is PyTorch's own, not the formula that can be differentiated again."""

    def f(x):
        return F.group_norm(x, 2).sin().sum()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            names.append(op.overloadpacket.__name__)
            return op(*args, **(kwargs or {}))

    x, found = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double), []
    for gradient in (engine.grad(f), grad(f)):
        names = []
        with Names():
            found.append((vmap(gradient)(x), "native_group_norm_backward" in names))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert [own for _, own in found] == [True, False]


def trained(fed, S):
    """fedavg.py's clients after one round."""
    return trained_by(fed, fedavg.client_step(fed.net, fed.args), S)


def trained_by(fed, step, S=range(8), t=0):
    w = fed.initial_weights().expand(len(S), -1)
    return fed.train(step, (w, torch.zeros_like(w)), np.array(S), t, torch.tensor(0.1))[0]


@pytest.mark.parametrize("problem", [
    torch.cuda.OutOfMemoryError(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("FIND was unable to find an engine to execute this computation")])
def test_out_of_memory_halves_until_it_fits(problem, capsys, monkeypatch):
    """A device that holds three clients: 8 are tried, then 4, then 2 go together."""
    fed = federation(UNEQUAL)
    want = trained(fed, np.arange(8))
    fed.vmap, fed.parallel, fed.checked, sizes = True, None, Seen(), []
    together = engine.train_together

    def small(fed, step, state, plans, shared):
        sizes.append(len(plans))
        if len(plans) > 3:
            raise problem
        return together(fed, step, state, plans, shared)

    monkeypatch.setattr(engine, "train_together", small)
    torch.testing.assert_close(trained(fed, np.arange(8)), want, atol=1e-5, rtol=1e-4)
    assert sizes == [8, 4, 2, 2, 2, 2] and list(fed.ways.values()) == [("conv", 2)]
    line = "memory  the GPU's is too small: {} clients at once from here on\n"
    assert capsys.readouterr().out == line.format(4) + line.format(2)
    fed.checked, fed.ways = set(), {}  # now the way must prove itself: what fits is found there, and once
    sizes.clear()
    torch.testing.assert_close(trained(fed, np.arange(8)), want, atol=1e-5, rtol=1e-4)
    assert sizes == [8, 4, *[2] * 8] and capsys.readouterr().out == line.format(4) + line.format(2)


def test_out_of_memory_with_one_client_is_refused(capsys, monkeypatch):
    """When it doesn't fit without vmap either."""
    fed = federation(UNEQUAL)
    fed.vmap, fed.checked, want = True, Seen(), trained(federation(UNEQUAL), np.arange(8))

    def none(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(engine, "train_together", none)
    assert torch.equal(trained(fed, np.arange(8)), want)
    monkeypatch.setattr(common.Federation, "train_alone", none)
    with pytest.raises(SystemExit):
        trained(fed, np.arange(8))
    assert "out of GPU memory, with one client at a time" in capsys.readouterr().err


def test_evaluation_takes_as_many_clients_at_once_as_fit(capsys, monkeypatch):
    """A device that holds three clients: 8 are tried, then 4, then 2 and from then on. One that holds one goes one by one."""
    fed = federation(UNEQUAL)
    W = fed.initial_weights() * torch.linspace(0.5, 1.5, 8)[:, None]
    want, usual, room = fed.evaluate_clients(W), engine.vmap, 3

    def small(net):
        def together(W, x):
            if len(W) > room:
                raise torch.cuda.OutOfMemoryError
            return usual(net)(W, x)

        return together

    monkeypatch.setattr(engine, "vmap", small)
    fed.vmap, fed.parallel = True, None
    line = "memory  the GPU's is too small: {} clients at once from here on\n"
    for room, said in ((3, line.format(4) + line.format(2)), (3, ""), (1, line.format(1))):
        got = fed.evaluate_clients(W)
        assert got.pop("per_client") == want["per_client"] and got == pytest.approx({k: want[k] for k in got}, rel=1e-5)
        assert capsys.readouterr().out == said


def test_only_the_clients_with_minibatches_left_go_on():
    """Clients of 7, 3, 2 and 1 minibatches: four for a step, then three, two, and the longest alone for four."""
    fed = federation([*UNEQUAL, "--batch-size", "10"])
    fed.split = fed.split._replace(train=[np.arange(n) for n in (30, 70, 5, 20)])
    fed.clients, fed.n = np.arange(4), torch.tensor([30.0, 70, 5, 20])
    want = trained(fed, np.arange(4))
    fed.vmap, fed.parallel, fed.checked, seen = True, None, Seen(), []
    together = engine.vmapped_step

    def watched(fed, step, state, index, *rest):
        seen.append(len(index))
        return together(fed, step, state, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "vmapped_step", watched)
        torch.testing.assert_close(trained(fed, np.arange(4)), want, atol=1e-5, rtol=1e-4)
    assert seen == [4, 3, 2, 1, 1, 1, 1]


def test_a_graph_is_made_once_for_each_set_of_shapes_and_step(monkeypatch):
    fed = federation([*QUICK, "--split", "iid", "--fraction", "1", "--model", "mnistnet"])
    fed.vmap = fed.graphs = True
    fed.checked = Seen()
    fed.parallel = None
    made, init = [], engine.Replay.__init__
    monkeypatch.setattr(engine.Replay, "__init__", lambda self, *args: (made.append(1), init(self, *args))[1])
    step, w = fedavg.client_step(fed.net, fed.args), fed.initial_weights()
    results = []
    for m, eta in ((8, 0.1), (8, 0.2), (4, 0.2), (4, 0.2), (8, 0.1)):
        start = w.expand(m, -1)
        results.append(fed.train(step, (start, torch.zeros_like(start)), np.arange(m), 0, torch.tensor(eta))[0])
    assert len(made) == 2  # for 8 and for 4 clients, when they come again
    assert torch.equal(results[0], results[4]) and not torch.equal(results[0], results[1])  # nothing is left from other calls
    monkeypatch.setattr(engine, "TIMED", 1)
    fed.train(step, (start[:3], torch.zeros_like(start[:3])), np.arange(3), 0, torch.tensor(0.1))
    assert len(made) == 3  # for more minibatches than that at once


def test_after_a_step_that_cannot_be_captured_there_are_no_graphs(capsys, monkeypatch):
    """It is tried and announced once."""
    fed = federation(UNEQUAL)
    want = trained(fed, np.arange(8))
    fed.vmap = fed.graphs = True
    fed.checked, fed.shapes_seen = Seen(), Seen()

    def fail(self, function, *_):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(engine.Replay, "__init__", fail)
    torch.testing.assert_close(trained_by(fed, first := fedavg.client_step(fed.net, fed.args)), want, atol=1e-5, rtol=1e-4)
    assert capsys.readouterr().out.count("a step can't be captured as a CUDA graph (operation not permitted") == 1
    for step in (first, fedavg.client_step(fed.net, fed.args)):
        torch.testing.assert_close(trained_by(fed, step), want, atol=1e-5, rtol=1e-4)
    assert not fed.graphs and capsys.readouterr().out == ""


@pytest.mark.parametrize("function", [lambda s, x: (s[1], s[0], s[2]), lambda s, x: (s[0] * 10, s[0][:, 1:].repeat(1, 2), s[2]),
                                      lambda s, x: (s[0] + 1, s[0], s[1]), lambda s, x: (s[0] + 1, s[2], s[0][:, :2].flip(1))])
def test_a_step_may_hand_on_its_state_in_another_place(function):
    """What one field hands on to another, whole or in part, is not overwritten before it is read."""
    make = torch.Generator().manual_seed(0)
    state = tuple(torch.randn(2, 2, generator=make) for _ in range(3))
    inputs = torch.zeros(3, 2, 1), torch.tensor([[True, True]] * 2 + [[True, False]])
    want = engine.run_steps(function, state, inputs, ())
    got = engine.Replay(function, state, tuple(z[0] for z in inputs), ())(state, inputs, ())
    torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_a_field_may_be_part_of_another():
    state, inputs = (torch.tensor([[1.0, 2, 3]]), torch.zeros(1, 2)), (torch.zeros(2, 1, 1), torch.ones(2, 1, dtype=torch.bool))
    function = lambda s, x: (s[0] * 10, s[0][:, 1:])  # noqa: E731
    got = engine.Replay(function, state, tuple(z[0] for z in inputs), ())(state, inputs, ())
    assert [z.tolist() for z in got] == [[[100, 200, 300]], [[20, 30]]]


WAYS = [("conv", None), ("patches", None), ("conv", 1)]


@pytest.mark.parametrize("slow", [1.2, 3.0])
@pytest.mark.parametrize("fastest", WAYS)
def test_the_fastest_way_is_taken_from_the_fifth_round_on_and_found_in_a_tenth_of_the_run(fastest, slow, monkeypatch):
    """A clock that lets each way take a known time; the run's result is that of the way, whatever it is."""
    fed, seconds, spent, first = federation([*UNEQUAL, "--epochs", "10", "--rounds", "200"]), [0.0], [0.0], [True]
    want, together, tune = trained(fed, np.arange(8)), engine.train_together, engine.tune
    fed.vmap, fed.graphs, fed.tunes, fed.parallel, fed.map, fed.checked = True, True, True, None, map, Seen()

    def timed(fed, step, state, plans, shared):
        way = fed.net.route, 1 if len(plans) == 1 else None
        seconds[0] += (1.0 if way == fastest else slow) * sum(len(plan.index) for plan in plans)
        return together(fed, step, state, plans, shared) if first[0] else state

    def tuned(*args):
        start = seconds[0]
        tune(*args)
        spent[0] += seconds[0] - start

    monkeypatch.setattr(engine, "train_together", timed)
    monkeypatch.setattr(engine, "tune", tuned)
    monkeypatch.setattr(engine, "now", lambda device: seconds[0])
    step = fedavg.client_step(fed.net, fed.args)
    torch.testing.assert_close(trained_by(fed, step), want, atol=1e-3, rtol=1e-2)
    assert spent == [0]  # a step that is used once is not tuned
    first[0] = False
    for t in range(1, 200):
        trained_by(fed, step, t=t)
        if t >= 4:
            assert list(fed.ways.values()) == [fastest] and fed.net.route == fastest[0]  # of the clients' evaluation, too
    assert 0 < spent[0] <= 0.1 * seconds[0] and set(fed.tuning[step].found) == set(WAYS)
    short, before = fedavg.client_step(fed.net, fed.args), spent[0]
    for t in range(180, 200):  # of a step that is used 20 times only, trying would take too long
        trained_by(fed, short, t=t)
    assert spent[0] == before


def test_a_way_whose_proof_fails_is_not_taken(monkeypatch, capsys):
    """It is known as a way that takes for ever, and nothing else is given up."""
    fed, check = federation([*UNEQUAL, "--rounds", "200"]), engine.check
    fed.vmap, fed.tunes, fed.parallel, fed.map, ticks = True, True, None, map, iter(range(10**9))
    monkeypatch.setattr(engine, "now", lambda device: float(next(ticks)))

    def proved(*args, **named):
        if args[7][0] == "patches":
            raise engine.Different
        return check(*args, **named)

    monkeypatch.setattr(engine, "check", proved)
    step = fedavg.client_step(fed.net, fed.args)
    for t in range(40):
        trained_by(fed, step, t=t)
    assert fed.tuning[step].found["patches", None][0] == float("inf") and fed.net.route == "conv" and not fed.failed


@pytest.mark.parametrize("name, most", [("fedavg", 120), ("fedavgm", 120), ("superfed", 150), ("psinet", 150), ("fedslr", 150), ("persfl", 150),
                                        ("scaffold", 150)])
def test_a_round_is_followed_in_few_lines(name, most):
    """Those that a reader opens outside of the algorithm's file (path.py says which)."""
    assert sum(path.entered(name).values()) <= most


# The fast way proves itself where it runs


def breaking(route, fault):
    """Patches that put a fault into one route: wrong numbers or an exception."""
    train, replay, vmapped = engine.train_together, engine.Replay.__call__, engine.vmapped_step

    def fails(*_):
        raise RuntimeError("an untried card")

    def wrong(result):
        return tree_map(lambda z: z + 0.1 * z.roll(1, 0) if z.is_floating_point() else z, result)

    if route == "capture":
        return [(engine.Replay, "__init__", fails)]
    if route == "replay":
        return [(engine.Replay, "__call__", fails if fault == "raises" else lambda *a: wrong(replay(*a)))]
    if route == "step":
        return [(engine, "vmapped_step", fails if fault == "raises" else lambda *a: wrong(vmapped(*a)))]
    if route == "together":  # more than one client at once
        return [(engine, "vmapped_step", lambda fed, step, state, index, *rest: vmapped(fed, step, state, index, *rest)
                 if len(index) == 1 else fails() if fault == "raises" else wrong(vmapped(fed, step, state, index, *rest)))]
    if route == "later":  # behind the minibatches that are compared
        return [(engine, "train_together", lambda fed, step, state, plans, shared: fails() if len(plans[0].index) > 1 else train(
            fed, step, state, plans, shared))]
    assert route == "evaluation"

    def of_evaluation(function, **in_dims):
        if in_dims:  # a step's
            return vmap(function, **in_dims)
        return fails if fault == "raises" else lambda W, x: wrong(vmap(function)(W, x))

    return [(engine, "vmap", of_evaluation)]


@pytest.mark.parametrize("route, fault", [("step", "wrong"), ("step", "raises"), ("replay", "wrong"), ("replay", "raises"), ("capture", "raises"),
                                          ("later", "raises"), ("together", "wrong"), ("together", "raises"),
                                          ("evaluation", "wrong"), ("evaluation", "raises")])
def test_a_fault_of_the_fast_way_is_found_and_the_loop_taken(route, fault, tmp_path, capsys):
    """The run ends as one by the loop, says so in a line, and its record does. Where only clients together fail, each goes alone,
    by graphs."""
    argv = [*UNEQUAL, "--fraction", "0.5"]
    want, want_state = run(superfed, argv, tmp_path / "loop")
    init = common.Federation.__init__

    def on_a_gpu(self, *args):
        init(self, *args)
        self.vmap, self.graphs, self.parallel, self.map = True, True, None, map

    capsys.readouterr()
    alone, replay = [], engine.Replay.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.Federation, "__init__", on_a_gpu)
        patch.setattr(engine.Replay, "__call__", lambda self, *args: (alone.append(len(args[0][0]) == 1), replay(self, *args))[1])
        for fault_ in breaking(route, fault):
            patch.setattr(*fault_)
        record, state = run(superfed, argv, tmp_path / "fast")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("engine", "graphs"))]
    if route == "capture":  # the same step, without a graph
        assert len(lines) == 1 and "can't be captured as a CUDA graph (an untried card)" in lines[0]
    else:
        why = "an untried card" if fault == "raises" else "are not those of one" if route == "evaluation" else "rounding explains"
        steps = 1 if route in ("evaluation", "together") else 2
        assert len(lines) == len(record["environment"]["one_by_one"]) == steps and all("one client after the other" in line and why in line for line in lines)
        assert all(why in line for line in record["environment"]["one_by_one"])
        assert route != "together" or alone.count(False) <= 1 < alone.count(True)  # at most the one that was found to be wrong
    exact = route not in ("capture", "evaluation", "together")
    for name, z in want_state.items():
        if torch.is_tensor(z):
            torch.testing.assert_close(state[name], z, **(dict(atol=0, rtol=0) if exact else dict(atol=1e-4, rtol=1e-2)))
    assert record["final"]["personal"]["mean"] == pytest.approx(want["final"]["personal"]["mean"], abs=0 if exact else 0.02)


def rounded(z, precision):
    """To the numbers that the precision has: 8 binary digits in bf16, 11 in TF32; the gradient passes."""
    if precision == "fp32":
        return z
    digits = {"tf32": 11, "bf16": 8}[precision]
    with torch.no_grad():
        mantissa, exponent = torch.frexp(z)
        low = torch.ldexp((mantissa * 2**digits).round() / 2**digits, exponent)
    return z + (low - z).detach()


@pytest.mark.parametrize("precision", engine.ROUNDING)
@pytest.mark.parametrize("model", ["cnn", "tfcnn", "cifarnet", "mnistnet"])
def test_rounding_is_no_fault_and_every_fault_is_more(model, precision, monkeypatch):
    """One way rounds the factors of all products to the precision, the other does not: as far apart as two kernels can be. And a
    client trained on another's images, on the last minibatch, or with a tenth of its gradient missing is found."""
    words = ["--model", model, "--batch-size", "5", "--limit", "60", "--clients", "3", "--split", "iid", "--momentum", "0.9"]
    fed = federation([*QUICK, "--transform", "normalize", *words])
    fed.args.precision, fed.vmap, fed.parallel, fed.map = precision, True, None, map
    monkeypatch.setattr(fed, "batch", functools.partial(exact_batch, fed))
    step, kind = fedavg.client_step(fed.net, fed.args), [None]
    model_, vmapped = fed.net.model, engine.vmapped_step

    class Rounded(common.Weights):
        def take(self, *args):
            z = super().take(*args)
            return z if common.vmapped() else rounded(z, precision)

    monkeypatch.setattr(common, "Weights", Rounded)
    monkeypatch.setattr(fed.net, "model", lambda m, x, classes: model_(m, x if common.vmapped() else rounded(x, precision), classes))

    def faulty(fed, step, state, index, *rest):
        new = vmapped(fed, step, state, index.roll(1, 0) if kind[0] == "another's" else index, *rest)
        if kind[0] == "part":
            return tree_map(lambda a, b: torch.where(torch.arange(a.shape[1]) < 0.9 * a.shape[1], a, b), new, state)
        return state if kind[0] == "nothing" else new

    monkeypatch.setattr(engine, "vmapped_step", faulty)
    for kind[0], found in ((None, False), ("another's", True), ("nothing", True), ("part", precision != "bf16")):
        fed.failed.clear(), fed.checked.clear()
        trained_by(fed, step, range(3))
        assert bool(fed.failed) == found or kind[0] == "part", (kind, fed.failed)


def exact_batch(fed, index, mask, uniform, draw):
    x = fed.transform(fed.images[index.flatten()], uniform.flatten(0, -2)).unflatten(0, index.shape)
    return common.Batch(x, fed.labels[index], mask, draw)


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(tmp_path):
    seen = []

    def watched(m, x, classes):
        seen.append(x.dtype)
        return m.linear("fc", x.flatten(1), classes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(common.MODELS, "mnistnet", watched)
        fed = federation([*UNEQUAL, "--precision", "bf16"])
        seen.clear()
        W = trained(fed, np.arange(8))
        assert set(seen) == {torch.bfloat16} and W.dtype == torch.float32
        seen.clear()
        fed.evaluate(W[0])
        fed.evaluate_clients(W)
        assert set(seen) == {torch.float32}
        exact = trained(federation(UNEQUAL), np.arange(8))
    change = (exact - fed.initial_weights()).norm()
    assert 1e-5 < (W - exact).norm() / change < 0.05  # it does differ, and not by much


def test_tf32_is_refused_on_a_cpu(capsys):
    refused(capsys, "--precision tf32 is for GPUs", federation, [*QUICK, "--precision", "tf32"])


def test_tf32_and_cudnns_timing_are_for_training_alone():
    assert not torch.backends.cuda.matmul.allow_tf32
    with engine.fast_kernels(tf32=True):
        assert torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32 and not torch.backends.cudnn.benchmark
