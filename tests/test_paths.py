"""What stands between client_update and its minibatches: plans, epochs, steps, threads, and the
ways of a GPU, here with Python in place of CUDA graphs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

import common
import fedavg
import fl.gpu
import fl.models
import fl.training
import pretend
from conftest import QUICK, eager, federation, on_a_gpu, paths, refused

LINEAR = [*QUICK, "--split", "iid", "--model", "mnistnet", "--fraction", "1"]
UNEQUAL = [*LINEAR, "--split", "dirichlet-classes", "--alpha", "1"]


def trained(fed, S=range(8), t=0):
    """fedavg.py's clients after one round."""
    client_update = fedavg.local_training(fed.net, fed.args)
    w = fed.initial_weights().expand(len(S), -1)
    return fed.train(client_update, np.array(S), t, own=[w], shared=[torch.tensor(0.1)])


# Plans and epochs


def test_a_plan_by_hand():
    """45 images in minibatches of 20: each epoch its own permutation. Random numbers are drawn as
    if the last minibatch, of 5 images, were full."""
    fed = federation([*QUICK, "--transform", "fedslr"])  # four random numbers for each image
    own, k = np.arange(100, 145), 3
    index, uniform, draws = fed.plan(k, own, 7, epochs=2, order=5,
                                     draw=lambda rng, steps: rng.random((steps, 2)))
    shuffle, augment, draw = (common.stream(0, purpose, 7, k, 5)
                              for purpose in ("order", "augmentation", "algorithm"))
    assert draws.shape == (2, 3, 2)
    assert np.array_equal(index, [shuffle.permutation(own) for _ in range(2)])
    assert np.array_equal(uniform, augment.random((2, 60, 4), np.float32)[:, :45])
    assert np.allclose(draws.reshape(6, 2), draw.random((6, 2)))
    for size in (100, 0):  # more than a client has, and all
        fed.args.batch_size = size
        index, _, draws = fed.plan(k, own, 7, epochs=2)
        assert index.shape == (2, 45) and draws.shape == (2, 1, 0)


def test_epochs_by_hand():
    """`for minibatches in epochs: for b in minibatches` sees the plan's images, also in others."""
    fed = federation(LINEAR)
    own = fed.dealt[:45]
    epochs = common.Epochs(fed, 2, own, 0, 1, None, 0)
    for more in ({}, {"epochs": 2}, {"order": 3}):
        index, *_ = fed.plan(2, own, 0, **{"epochs": 1, **more})
        seen = [[b for b in minibatches] for minibatches in epochs.again(**more)]
        assert [[len(b.y) for b in e] for e in seen] == [[20, 20, 5]] * len(index)
        labels = np.concatenate([b.y for e in seen for b in e])
        assert np.array_equal(labels, fed.data.labels[index.flatten()])
        assert all(b.mask.eq(1).all() and len(b.mask) == len(b.y) for e in seen for b in e)


def test_minibatches_are_filled_up_to_one_shape():
    """7 images in minibatches of 5, filled up to 6; 7 and 12 images in one minibatch each."""
    fed = federation(LINEAR)
    fed.args.batch_size, fed.training.B = 5, 6
    one, two = (common.Epochs(fed, k, np.arange(n), 0, 2, None, 0) for k, n in ((0, 7), (1, 12)))
    filled = fl.gpu.FilledEpochs
    for epoch, index in zip(filled(fed, [one], "graphs"), one.plan()[0]):
        inputs = [b.inputs for b in epoch]
        assert [mask.tolist() for *_, mask in inputs] == [[1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
        assert [z.shape for z in inputs[0]] == [z.shape for z in inputs[1]]
        assert np.array_equal(torch.cat([z[mask > 0] for z, *_, mask in inputs]), index)
    fed.args.batch_size = 0
    for fed.training.B, width in ((15, 15), (10, 12)):
        (b,), (_,) = filled(fed, [one, two], "together")
        index, uniform, draw, mask = b.inputs
        assert index.shape == mask.shape == (2, width) and mask.sum(1).tolist() == [7, 12]
        assert uniform.shape == (2, width, 0) and draw.shape == (2, 0)
        assert sorted(index[1, :12].tolist()) == [*range(12)] and not index[:, 12:].any()


# The ways


@pytest.mark.parametrize("more, alike", [
    ([], True), (["--batch-size", "0"], True), (["--batch-size", "1000"], True),
    (["--clients", "1"], True), (["--split", "dirichlet-classes"], False),
    (["--split", "dirichlet-classes", "--batch-size", "0"], True)])
def test_every_way_gives_what_the_loop_gives(more, alike, monkeypatch):
    """With clients of equal and unequal size, smaller than a minibatch, and with one client. Those
    with unequally many minibatches do not go together."""
    fed = federation([*LINEAR, *more, "--epochs", "2"])
    S, used, found = fed.everyone, [], []
    for _ in paths(fed, monkeypatch):
        found.append(trained(fed, S))
        used.append(fed.training.used)
        assert len(fed.training.graphs) == (used[-1] != "loop")  # one shape for all
    assert used == ["loop", "graphs", "together" if alike else "graphs"]
    change = (found[0] - fed.initial_weights()).norm()
    assert all((z - found[0]).norm() < 1e-5 * change for z in found[1:])


@pytest.mark.parametrize("threads", ["1", "3"])
def test_threads_change_no_bit(threads):
    assert torch.equal(trained(federation([*UNEQUAL, "--parallel", threads])),
                       trained(federation(UNEQUAL)))


MANY = [*QUICK, "--split", "iid", "--model", "mnistnet", "--clients", "40", "--fraction", "1",
        "--limit", "240", "--batch-size", "4"]


@pytest.mark.parametrize("m, widths", [(32, [32]), (33, [17, 17]), (40, [20, 20])])
def test_at_most_32_clients_go_together(m, widths, monkeypatch):
    """In chunks of one width, hence one graph. Of 33 clients the second chunk has 16, filled up
    with client 0, whose result is that of the first chunk."""
    fed, seen, filled = federation(MANY), [], fl.gpu.FilledEpochs
    found = []
    monkeypatch.setattr(fl.gpu, "FilledEpochs",
                        lambda fed, clients, way: (seen.append(len(clients)),
                                                   filled(fed, clients, way))[1])
    for way in paths(fed, monkeypatch):
        seen.clear()
        found.append(trained(fed, range(m)))
        if way == "together":
            assert seen[-len(widths) :] == widths and len(fed.training.graphs) == 1
    change = (found[0] - fed.initial_weights()).norm()
    assert all((z - found[0]).norm() < 1e-5 * change for z in found[1:])


def test_a_share_of_100_clients_needs_one_graph(monkeypatch):
    """Under torchrun on three GPUs each process has 33 or 34 of them in every round."""
    monkeypatch.setattr(fl.gpu, "capture", eager)
    class Third(pretend.Training):  # its results are exchanged with nobody
        def exchange(self, tree, ends=None):
            return tree

        agree = exchange

    fed = federation([*MANY, "--limit", "400", "--clients", "100"])
    fed.training = Third(fed.device, fed.args, fl.gpu.WAYS)
    fed.training.rank, fed.training.processes = 2, 3
    fed.training.begin(fed.net.d, 4)
    shares = [fed.training.share(100, rank) for rank in range(3)]
    assert [*map(len, shares)] == [33, 33, 34] and [*shares[0], *shares[1], *shares[2]] == [
        *range(100)]
    client_update, S = fedavg.local_training(fed.net, fed.args), np.arange(100)
    for t in range(2):
        w = fed.initial_weights().expand(100, -1)
        found = fed.train(client_update, S, t, own=[w], shared=[torch.tensor(0.1)])
    assert len(fed.training.graphs) == 1 and fed.training.used == "together"
    loop = on_a_gpu(fed, "loop")
    want = loop.train(client_update, S, 1, own=[w], shared=[torch.tensor(0.1)])
    assert (found[66:] - want[66:]).norm() < 1e-5 * (want - w)[66:].norm()


def test_graphs_that_fail_leave_together_alone(monkeypatch, capsys):
    """Unequal clients in the first call, equal ones in the second."""
    fed = on_a_gpu(federation(LINEAR))
    client_update = fedavg.local_training(fed.net, fed.args)

    def capture(function, device):
        if not graphs_work:
            raise RuntimeError("no capture")
        return eager(function, device)

    monkeypatch.setattr(fl.gpu, "capture", capture)
    w, used = fed.initial_weights().expand(2, -1), []
    for graphs_work, sizes in ((False, (40, 10)), (True, (40, 40))):  # noqa: B007
        images = [fed.split.train[k][:n] for k, n in enumerate(sizes)]
        fed.train(client_update, np.arange(2), 0, own=[w], shared=[torch.tensor(0.1)],
                  images=images)
        used.append(fed.training.used)
    assert used == ["loop", "together"] and [*fed.training.gave_up] == ["graphs"]
    said = capsys.readouterr().out
    assert "engine  'loop' in place of 'graphs' from here on, slower: no capture" in said


# The proof of a way


def spoiled(fed, fault, way):
    """Returns a client_update which is wrong in this way alone."""
    part = fed.net.tensors[1][1]  # fc1.bias

    @common.step
    def step(w, b, eta):
        def loss(w):
            if fault == "last shape":  # no mask: right where a minibatch is full
                return F.cross_entropy(fed.net(w, b.x), b.y)
            return common.cross_entropy(fed.net(w, b.x), b)

        return w - eta * common.grad(loss)(w)

    def client_update(w, epochs, eta):
        wrong = getattr(epochs, "way", "loop") == way
        for minibatches in epochs:
            for b in minibatches:
                before, w = w, step(w, b, eta)
                if wrong and fault == "untrained":
                    w[..., part] = before[..., part]
                if wrong and fault == "rate":
                    w = before + 1.2 * (w - before)
                if wrong and fault == "last row":
                    w = torch.cat([w[:-1], before[-1:]])
        return w

    return client_update


@pytest.mark.parametrize("fault, way", [
    ("untrained", "together"), ("untrained", "graphs"), ("rate", "together"), ("rate", "graphs"),
    ("last shape", "together"), ("last shape", "graphs"), ("last row", "together"),
    (None, "together"), (None, "graphs")])
def test_a_way_that_is_wrong_is_given_up(fault, way, monkeypatch, capsys):
    """Only the fourth of eight clients has a last minibatch that is not full."""
    fed = federation(LINEAR)
    images = [index[: 25 if k == 3 else 40] for k, index in enumerate(fed.split.train)]
    given = dict(own=[fed.initial_weights().expand(8, -1)], shared=[torch.tensor(0.1)],
                 images=images)
    monkeypatch.setattr(fl.gpu, "capture", eager)
    client_update = spoiled(fed, fault, way)
    want = fed.train(client_update, np.arange(8), 0, **given)
    on_a_gpu(fed, way)
    found = fed.train(client_update, np.arange(8), 0, **given)
    lost = {"last shape": fl.gpu.WAYS[fl.gpu.WAYS.index(way) : -1], None: ()}
    assert [*fed.training.gave_up] == [*lost.get(fault, (way,))]
    assert all(why == "a minibatch does not give what the plain loop gives"
               for why in fed.training.gave_up.values())
    torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_a_loop_that_diverges_proves_nothing(monkeypatch):
    fed = on_a_gpu(federation(LINEAR))
    monkeypatch.setattr(fl.gpu, "capture", eager)
    found = fed.train(fedavg.local_training(fed.net, fed.args), np.arange(8), 0,
                      own=[fed.initial_weights().expand(8, -1)], shared=[torch.tensor(torch.inf)])
    assert not found.isfinite().all()
    why = "the plain loop diverges in its first minibatch"
    assert fed.training.gave_up == {"together": why, "graphs": why}


@pytest.mark.parametrize("slip", ["the clients' axis", "the round"])
def test_a_way_is_proved_again(slip, monkeypatch):
    """In the first round clients keep zeros, and a graph has the round's own number."""
    fed, rounds = federation(LINEAR), []
    monkeypatch.setattr(fl.gpu, "capture", frozen)

    @common.step
    def step(w, b, eta):
        return w - eta * (len(rounds) if slip == "the round" else 1) * w

    def client_update(w, v, epochs, eta):
        w = torch.cat([w[:2] + v[:2], w[2:]]) if slip == "the clients' axis" else w + v
        for minibatches in epochs:
            for b in minibatches:
                w = step(w, b, eta)
        return w

    w, v, eta = fed.initial_weights().expand(8, -1), torch.rand(8, fed.net.d), torch.tensor(0.1)
    rounds.extend("ab")
    want = fed.train(client_update, np.arange(8), 1, own=[w, v], shared=[eta])
    on_a_gpu(fed), rounds.pop()
    fed.train(client_update, np.arange(8), 0, own=[w, 0 * v], shared=[eta])
    assert not fed.training.gave_up
    rounds.append("b")
    found = fed.train(client_update, np.arange(8), 1, own=[w, v], shared=[eta])
    assert [*fed.training.gave_up] == ["together"]
    torch.testing.assert_close(found, want)


def frozen(function, device):
    """In place of gpu.capture, as a CUDA graph: what lies outside of the tensors in the
    graph's memory has the value that it had at the capture."""
    graph = make_fx(function)()
    return lambda: graph()


class Normalised(torch.nn.Module):
    """GroupNorm with a group for each channel takes away what conv's bias adds."""

    def __init__(self, channels, classes, size):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, 8, 3)
        self.norm = torch.nn.GroupNorm(8, 8)
        self.fc = torch.nn.Linear(8, classes)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.parametrize("model, precision", [
    ("cnn", "fp32"), ("cnn", "bf16"), ("normalised", "fp32"), ("normalised", "bf16"),
    pytest.param("tfcnn", "bf16", marks=pytest.mark.slow),
    pytest.param("vgg9", "bf16", marks=pytest.mark.slow),
    pytest.param("resnet18", "fp32", marks=pytest.mark.slow)])
def test_each_tensor_of_a_model_is_proved_by_itself(model, precision, monkeypatch):
    """Where one of them stays as it was, or its rate is twice too large, that is found; rounding
    is not taken for a fault, though it is all of the bias before GroupNorm."""
    monkeypatch.setitem(common.MODELS, "normalised", Normalised)
    monkeypatch.setattr(fl.gpu, "capture", eager)
    fed = on_a_gpu(federation([*QUICK, "--limit", "60", "--clients", "2", "--split", "iid",
                               "--batch-size", "4", "--model", model, "--precision", precision,
                               "--transform", "normalize"]))
    client_update, w = fedavg.local_training(fed.net, fed.args), fed.initial_weights()
    clients = [common.Epochs(fed, k, fed.split.train[k][:4], 0, 1, None, 0) for k in (0, 1)]
    given = [w.expand(2, -1)], clients, [torch.tensor(0.05)]
    want = fed.one_by_one(client_update, *given)[1]
    found = fed.training.by("together", fed, client_update, *given, 2)[1]
    proof = lambda found: fl.gpu.compare(fed.net, [w], want, found, precision)
    proof(found)
    with pytest.raises(ValueError, match="does not give"):
        proof(w + 1.2 * (found - w))
    passed = []
    for name, where, _ in fed.net.tensors[:: 8 if model == "resnet18" else 1]:
        for share in (0, 2):
            wrong = found.clone()
            wrong[where] = w[where] + share * (found - w)[where]
            try:
                proof(wrong)
                passed.append(name)
            except ValueError:
                pass
    assert {*passed} == ({"conv.bias"} if model == "normalised" else set())


# Steps and graphs


def total(b):
    return (b.x.flatten(1).sum(1) * b.mask).sum()


STEPS = {
    "swaps": lambda w, u, b, eta: (u + eta * total(b), w),
    "hands on a part": lambda w, u, b, eta: (w * eta, torch.cat([w[1:], u[:1]])),
    "hands on a view": lambda w, u, b, eta: (w.flip(0) + total(b), w[:1].expand(3)),
    "returns what it got": lambda w, u, b, eta: (w, u + eta * w),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_may_return_its_tensors_in_another_place(name, monkeypatch):
    """And what it has returned stays as it is, which is not so of a CUDA graph's memory."""
    fed, step = federation(LINEAR), common.step(STEPS[name])
    own = [torch.arange(24.0).view(8, 3), torch.ones(8, 3)]

    def client_update(w, u, epochs, eta):
        kept = []
        for minibatches in epochs:
            for b in minibatches:
                w, u = step(w, u, b, eta)
                kept.append(w)
        return w, u, sum(kept)

    found = [fed.train(client_update, np.arange(8), 0, own=own, shared=[torch.tensor(0.5)])
             for _ in paths(fed, monkeypatch)]
    for z in found[1:]:
        torch.testing.assert_close(z, found[0])


def test_a_graph_sees_what_changes(monkeypatch):
    """A tensor that was changed in place, another one of the same shape, and one of the CPU."""
    fed = federation(LINEAR)

    @common.step
    def step(w, b, eta):
        return w - eta

    def client_update(w, epochs, eta):
        for minibatches in epochs:
            for b in minibatches:
                w = step(w, b, eta)
        return w

    eta, w = torch.tensor(1.0), torch.zeros(2, 3)
    for _ in paths(fed, monkeypatch):
        for eta, expected in ((torch.tensor(1.0), -2), (torch.tensor(2.0), -4)):
            for more in (0, 1):
                eta += more
                found = fed.train(client_update, np.arange(2), 0, own=[w], shared=[eta])
                assert found.eq(expected - 2 * more).all()
        assert len(fed.training.graphs) == (fed.training.used != "loop")


def test_a_step_with_too_many_kinds_of_arguments_goes_by_the_loop(monkeypatch, capsys):
    """A number that changes from call to call would make a graph for each."""
    fed = on_a_gpu(federation(LINEAR))
    monkeypatch.setattr(fl.gpu, "capture", eager)

    @common.step
    def step(w, b, number):
        return w + number

    def client_update(w, epochs, number):
        for minibatches in epochs:
            for b in minibatches:
                w = step(w, b, number)
        return w

    for t in range(2 * fl.gpu.MOST + 1):
        w = fed.train(client_update, np.arange(2), t, own=[torch.zeros(2, 3)], shared=[float(t)])
        assert w.eq(2 * t).all() and len(fed.training.graphs) <= fl.gpu.MOST
    assert fed.training.used == "loop"
    assert capsys.readouterr().out.count("pass numbers as tensors") == 2


def test_grad_is_that_of_torch_func():
    """Of one argument and of two, beside a second result, and of an argument that is not used."""
    make = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 3, 5, generator=make, dtype=torch.double)

    def f(a, b, c=None):
        return (a.sin() * b**2).sum()

    def with_aux(a, b):
        return f(a, b), (a * b, b)

    def same(x, y):
        torch.testing.assert_close(x, y, atol=0, rtol=0)

    same(fl.training.grad(f)(a, b), a.cos() * b**2)
    same(fl.training.grad(f, argnums=(1, 0))(a, b), torch.func.grad(f, argnums=(1, 0))(a, b))
    same(fl.training.grad(f, argnums=(0, 2))(a, b, a), (a.cos() * b**2, torch.zeros_like(a)))
    g, aux = fl.training.grad(with_aux, has_aux=True)(a, b)
    same((g, aux), torch.func.grad(with_aux, has_aux=True)(a, b))
    # a state that held on to its history would fill the memory
    assert not any(z.requires_grad for z in (a, b, g, *aux))
    with torch.no_grad():
        same(fl.training.grad(f)(a, b), torch.func.grad(f)(a, b))
    same(fl.training.grad(f, each=True)(a, b), a.cos() * b**2)

    def looks(a, b):  # which vmap can't do
        return f(a, b) if a.sum().item() > 0 else f(a, 2 * b)
    same(fl.training.grad(looks, each=True)(a, b),
         a.cos() * b**2 * torch.where(a.sum(1) > 0, 1, 4)[:, None])
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(fl.training.STEPS, "vmapped", True, raising=False)
    same(vmap(fl.training.grad(f))(a, b), vmap(torch.func.grad(f))(a, b))
    same(vmap(fl.training.grad(with_aux, (1, 0), has_aux=True))(a, b),
         vmap(torch.func.grad(with_aux, (1, 0), has_aux=True))(a, b))
    deep = [fl.training.grad(f, each=True), vmap(torch.func.grad(f))]  # PersFL: vmap in vmap
    same(*(vmap(g)(a[..., None], b[..., None]) for g in deep))
    monkeypatch.undo()


@pytest.mark.parametrize("vmapped", (False, True))
def test_grad_inside_what_is_differentiated_is_refused(vmapped, capsys, monkeypatch):
    """One step of MAML, of sum(w^3): with torch.func.grad inside, the gradient is the whole one."""
    w, ours, whole = torch.tensor([[0.1, 0.2]]), fl.training.grad, torch.func.grad

    def adapted(inner):
        def loss(w):
            u = w - 0.5 * inner(lambda v: (v**3).sum())(w)
            return (u**3).sum()
        return loss
    u = w - 0.5 * 3 * w**2
    monkeypatch.setattr(fl.training.STEPS, "vmapped", vmapped, raising=False)
    each = vmap if vmapped else lambda f: lambda w: f(w[0])[None]
    torch.testing.assert_close(each(ours(adapted(whole)))(w), 3 * u**2 * (1 - 3 * w))
    for outer in ours, whole:
        refused(capsys, "would lack second derivatives", each(outer(adapted(ours))), w)
    closed = ours(lambda w: ours(lambda v: (v * w**2).sum())(w.detach()).sum())
    refused(capsys, "would lack second derivatives", each(closed), w)
    torch.testing.assert_close(each(ours(lambda w: (w**2).sum()))(w), 2 * w)


# Precision


def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(monkeypatch):
    seen, forward = [], fl.models.MnistNet.forward
    monkeypatch.setattr(fl.models.MnistNet, "forward",
                        lambda self, x: (seen.append(x.dtype), forward(self, x))[1])
    fed = federation([*UNEQUAL, "--precision", "bf16"])
    seen.clear()
    W = trained(fed)
    assert set(seen) == {torch.bfloat16} and W.dtype == torch.float32
    seen.clear()
    fed.evaluate(W[0])
    fed.evaluate_clients(W)
    assert set(seen) == {torch.float32}
    exact = trained(federation(UNEQUAL))
    change = (exact - fed.initial_weights()).norm()
    assert 1e-5 < (W - exact).norm() / change < 0.1  # it does differ, and not by much


def test_tf32_is_for_gpus_from_ampere_on(capsys, monkeypatch):
    parser = common.parser("test")
    refused(capsys, "--precision tf32 is for GPUs", federation, [*QUICK, "--precision", "tf32"])
    for old, default in ((False, "tf32"), (True, "fp32")):
        monkeypatch.setattr("fl.flags.lacks_tf32", lambda name, old=old: old)
        assert common.parse(parser, {}, ["--device", "cuda"]).precision == default
        assert common.parse(parser, {}, ["--device", "cpu"]).precision == "fp32"
    refused(capsys, "--precision bf16 is for GPUs from Ampere on", common.parse, parser, {},
            ["--device", "cuda", "--precision", "bf16"])


def test_tf32_and_cudnns_timing_are_for_training_alone():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    flags = lambda: (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    for precision, tf32, search in (("tf32", True, True), ("fp32", False, False)):
        with fl.gpu.fast_kernels(precision, search):
            assert flags() == (tf32, tf32, search)
        assert flags() == (False, False, False)
