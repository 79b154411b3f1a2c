"""The networks of models.py; and other people's: which are taken, refused, loaded and written."""

import hashlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import baselines
import common
import fedavg
import fl.models
from conftest import QUICK, federation, refused, run

CPU = ["--device", "cpu"]
TINY = [*QUICK, "--limit", "80", "--clients", "4", "--client-test", "0.2", "--rounds", "1"]


# The networks of models.py


@pytest.mark.parametrize("model, shape, classes, d", [
    ("cnn", (1, 28, 28), 62, 109_022), ("cnn", (3, 32, 32), 10, 94_186),
    ("cnn", (3, 32, 32), 100, 140_356), ("cnn", (3, 64, 64), 200, 181_416),
    ("tfcnn", (3, 24, 24), 10, 1_068_298), ("tfcnn", (3, 32, 32), 10, 1_756_426),
    ("cifarnet", (3, 32, 32), 10, 62_006), ("mnistnet", (1, 28, 28), 10, 79_510),
    ("2nn", (1, 28, 28), 10, 199_210), ("mnistcnn", (1, 28, 28), 10, 1_663_370),
    ("resnet18", (3, 32, 32), 10, 11_173_952), ("resnet18", (3, 32, 32), 100, 11_220_032),
    ("resnet18", (3, 64, 64), 200, 11_279_112), ("vgg9", (3, 32, 32), 10, 3_491_530),
])
def test_numbers_of_weights(model, shape, classes, d):
    assert common.Net(model, shape, classes).d == d


@pytest.mark.parametrize("model", common.MODELS)
def test_a_network_is_a_function_of_its_flat_vector(model):
    """The table covers w without gaps, every weight has an influence, and images do not mix."""
    shape = (1, 28, 28) if model == "mnistnet" else (3, 32, 32)
    net = common.Net(model, shape, 10)
    ends = [0] + [span.stop for _, span, _ in net.tensors]
    assert [span.start for _, span, _ in net.tensors] == ends[:-1] and ends[-1] == net.d
    assert all(int(np.prod(s)) == span.stop - span.start for _, span, s in net.tensors)
    assert [span.start for _, span in net.layers] == [0] + [s.stop for _, s in net.layers][:-1]
    assert all((net.layer_of[span] == i).all() for i, (_, span) in enumerate(net.layers))
    w = net.init(common.stream(0, "initialisation")).requires_grad_()
    x = torch.rand(3, *shape)
    logits = net(w, x)
    assert logits.shape == (3, 10)
    torch.testing.assert_close(logits[1:2], net(w, x[1:2]), atol=1e-4, rtol=1e-3)
    (gradient,) = torch.autograd.grad(logits.square().sum(), w)
    assert all(gradient[span].abs().max() > 0 for _, span, _ in net.tensors)


@pytest.mark.parametrize("shape, classes, pool, kernel", [
    ((1, 28, 28), 62, 2, 2), ((3, 32, 32), 10, 2, 3), ((3, 64, 64), 200, 3, 2)])
def test_cnn_is_superfeds_table_4(shape, classes, pool, kernel):
    """Against the same five layers, with ReLU before the pooling as the paper draws it."""
    model = nn.Sequential(
        nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(pool),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(pool),
        nn.Conv2d(64, 32, kernel), nn.ReLU(), nn.MaxPool2d(pool),
        nn.Flatten(), nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, classes))
    net, x = common.Net("cnn", shape, classes), torch.rand(5, *shape)
    torch.testing.assert_close(net(flat(model), x), model(x).detach(), atol=1e-5, rtol=1e-4)


def flat(module):
    """All parameters of a module as one vector [d]."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def resnet18(tensors, x, small):
    """The logits of ResNet-18 with GroupNorm(2), its 62 tensors in the order of use."""
    left = iter(tensors)

    def conv_norm(x, stride=1, padding=1):
        x = F.conv2d(x, next(left), stride=stride, padding=padding)
        return F.group_norm(x, 2, next(left), next(left))

    x = conv_norm(x).relu() if small else F.max_pool2d(conv_norm(x, 2, 3).relu(), 3, 2, 1)
    for stride in (1, 1, 2, 1, 2, 1, 2, 1):
        y = conv_norm(conv_norm(x, stride).relu())
        x = (y + (conv_norm(x, 2, 0) if stride == 2 else x)).relu()
    return F.linear(x.mean((2, 3)), *left)


@pytest.mark.parametrize("size, classes", [(32, 10), (64, 200)])
def test_resnet18_by_hand(size, classes):
    net, x = common.Net("resnet18", (3, size, size), classes), torch.rand(2, 3, size, size)
    w = torch.empty(net.d).uniform_(-0.1, 0.1)
    tensors = [w[span].view(shape) for _, span, shape in net.tensors]
    torch.testing.assert_close(net(w, x), resnet18(tensors, x, size == 32), atol=1e-3, rtol=1e-3)


def test_resnet18_for_large_images_starts_like_torchvisions():
    model = torchvision.models.resnet18(num_classes=200, norm_layer=lambda n: nn.GroupNorm(2, n))
    net = common.Net("resnet18", (3, 64, 64), 200)
    w_0 = net.init(common.stream(3, "initialisation"))
    for name, span, _ in net.tensors:
        want = pytest.approx(model.state_dict()[name].std().item(), rel=0.15, abs=1e-9)
        assert w_0[span].std().item() == want, name


def test_local_response_norm_is_tensorflows():
    x = torch.randn(2, 11, 3, 3)
    want = torch.empty_like(x)
    for c in range(11):
        around = x[:, max(0, c - 4) : c + 5].square().sum(1)
        want[:, c] = x[:, c] / (1 + 0.001 / 9 * around) ** 0.75
    torch.testing.assert_close(fl.models.LocalResponseNorm(11)(x), want)


@pytest.mark.parametrize("model, name, std", [
    ("cnn", "conv1.weight", (2 / ((32 + 3) * 25)) ** 0.5),
    ("cnn", "conv2.weight", (2 / ((64 + 32) * 25)) ** 0.5),
    ("cnn", "conv3.weight", (2 / ((32 + 64) * 9)) ** 0.5),
    ("cnn", "fc2.weight", (2 / (10 + 512)) ** 0.5), ("cnn", "fc1.weight", (2 / (512 + 32)) ** 0.5),
    ("cnn", "conv1.bias", 0.0), ("cifarnet", "fc1.weight", (1 / 400) ** 0.5 / 3**0.5),
    ("vgg16", "conv3-1.weight", (2 / (256 * 9)) ** 0.5), ("tfcnn", "fc3.weight", 0.04 * 0.8796),
])
def test_initial_weights_have_their_distribution(model, name, std):
    """Xavier's normal, PyTorch's uniform, He's normal over the fan out, and a normal without values
    beyond two deviations, whose deviation is .8796 of the whole one's."""
    net = common.Net(model, (3, 32, 32), 10)
    span = {n: s for n, s, _ in net.tensors}[name]
    w = net.init(common.stream(3, "initialisation"))[span]
    assert w.std().item() == pytest.approx(std, rel=0.03)
    assert abs(w.mean().item()) < 0.03 * std + 1e-9
    if model == "tfcnn":
        assert w.abs().max() <= 2 * 0.04


# Threads


def test_threads_share_no_module():
    """Two threads compute logits at once, with other weights each. functional_call puts the weights
    into the module: with one module for both threads a thread would use the other's weights."""
    meet = threading.Barrier(2, timeout=60)

    class Meeting(nn.Linear):
        def forward(self, x):
            meet.wait()  # both threads have put their weights in place
            y = super().forward(x)
            meet.wait()  # and neither has taken them out before both have used them
            return y

    net = common.Net("mine", (3,), 2, build=lambda: Meeting(3, 2))
    x, W = torch.randn(5, 3), torch.randn(2, 8)

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(net, W, [x, x]))
        for y, w in zip(found, W):
            assert torch.equal(y, F.linear(x, w[:6].view(2, 3), w[6:]))


# Networks from elsewhere

OTHERS = """
import functools
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

class Base(nn.Module):
    def __init__(self, num_classes, in_channels=1, size=(4, 4)):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 2, 3, padding=1)
        self.fc = nn.Linear(2 * size[0] * size[1], num_classes)
    def forward(self, x):
        return self.fc(F.relu(self.conv(x)).flatten(1))

class Sized(Base):
    def __init__(self, channels, classes, size): super().__init__(classes, channels, size)
class More(Base):
    def __init__(self, num_classes=1000, width=2, *args, in_channels, **more):
        super().__init__(num_classes, in_channels)
class Widths(Base):  # `channels` is a width, and `classes` something else
    def __init__(self, in_channels=3, channels=64, num_classes=10, classes="many"):
        assert (channels, classes) == (64, "many")
        super().__init__(num_classes, in_channels)
class Defaults(Base):  # each could be ours
    def __init__(self, channels=3, classes=None, size=(28, 28)):
        super().__init__(classes, channels, size)
class Both(Base):  # one name of each pair
    def __init__(self, in_channels=3, channels=3, num_classes=10, classes=10):
        assert (channels, classes) == (3, 10)
        super().__init__(num_classes, in_channels)
class Named(Base):  # none is ours: a kernel's side, widths
    def __init__(self, num_classes=10, channels=64, in_channels=(64, 64), size=5, classes=True):
        assert (channels, in_channels, size, classes) == (64, (64, 64), 5, True)
        super().__init__(num_classes)
class Word(Base):
    def __init__(self, channels=2, classes=10, size="large"):
        assert (channels, size) == (2, "large")
        super().__init__(classes)
def function(num_classes): return Base(num_classes)
def without(): return Base(3)
partial = functools.partial(Base, in_channels=3, size=(9, 9))
instance = Base(3)

class Residual(nn.Module):
    def __init__(self, in_channels, num_classes):
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(in_channels, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.fc = nn.Linear(5, num_classes)
    def forward(self, x):
        x = F.relu(self.bn1(self.stem(x)))
        x = F.relu(x + self.bn2(self.conv(x)))
        return self.fc(F.dropout(self.head(x.mean((2, 3))), 0.1, self.training))

class Twice(nn.Module):
    def __init__(self, in_channels, num_classes):
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8)
        self.bn2, self.bn3, self.fc = self.bn1, nn.BatchNorm2d(8), nn.Linear(8, num_classes)
        nn.init.zeros_(self.bn3.weight)
        self.bn3.bias.requires_grad_(False)
    def forward(self, x):
        x = self.bn2(F.relu(self.bn1(self.stem(x))))
        return self.fc((x + self.bn3(x)).mean((2, 3)))
class Raises(Base):
    def __init__(self, num_classes): raise KeyError("weights")
class Asks(Base):
    def __init__(self, num_classes, depth, width): pass
class Thick(nn.BatchNorm2d):
    def forward(self, x): return super().forward(x).relu()
def empty(): return nn.Flatten()
def lazy(classes): return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
def five(): return Base(5)
def old(m, x, classes): return m.linear("fc", x.flatten(1), classes)
def number(): return 3
def traced(classes): return torch.jit.trace(Base(classes), torch.zeros(2, 1, 4, 4))
def compiled(classes): return nn.Sequential(torch.compile(Base(classes)))
def parallel(classes): return nn.DataParallel(Base(classes))
names = ["fc"]
"""
IMAGES = (1, 4, 4), 3  # for which most of them are made


def path(folder, name):
    """--model for a network of OTHERS."""
    file = folder / "others.py"
    if not file.exists():
        file.write_text(OTHERS)
    return f"{file}:{name}"


def changed(folder, forward="super().forward(x)", more=""):
    """--model for a Base that does `more` at the end of its constructor, and this in forward."""
    body = forward if "return" in forward else f"return {forward}"
    (folder / "changed.py").write_text(f"""{OTHERS}
class Net(Base):
    def __init__(self, num_classes, in_channels=1, size=(4, 4)):
        super().__init__(num_classes, in_channels, size)
        {more or 'pass'}
    def forward(self, x):
        {body}
""")
    return f"{folder / 'changed.py'}:Net"


BEFORE = "super().forward(self.more(x))"  # `more` makes a layer of this name


def module_of(folder, name):
    """The class of that name in OTHERS."""
    return getattr(common.load_file(path(folder, name).rpartition(":")[0]), name)


@pytest.mark.parametrize("name", [
    "Base", "Sized", "More", "Widths", "Defaults", "Both", "Named", "Word", "function",
    "without", "partial", "instance"])
def test_whatever_makes_a_module_is_a_model(name, tmp_path):
    """A class, a function or an instance; it gets what its signature asks for. Conv2d(1, 2, 3) has
    20 weights, Linear(32, 3) has 99."""
    net = common.Net(path(tmp_path, name), *IMAGES)
    assert net.d == 119 and net.names[:2] == ["conv.weight", "conv.bias"]
    assert net.tensors[2] == ("fc.weight", slice(20, 116), (3, 32))
    w, x, module = torch.randn(net.d), torch.rand(5, *IMAGES[0]), net.build()
    nn.utils.vector_to_parameters(w, module.parameters())
    assert torch.equal(net(w, x), module(x))
    seeds = [net.init(common.stream(seed, "initialisation")) for seed in (0, 0, 1)]
    assert torch.equal(seeds[0], seeds[1])
    same = name == "instance"  # its own weights
    assert torch.equal(seeds[0], seeds[2]) == same
    assert net.notes == ["note    the model's initial weights are the same for every --seed"] * same


def test_what_else_may_be_called_start_or_decayed(tmp_path):
    """A tensor, a layer, a function of other arguments, a number. MODELS mean something by them."""
    net = common.Net(changed(tmp_path, "super().forward(x + self.start.sum())",
                             "self.start = nn.Parameter(torch.zeros(2))"), *IMAGES)
    w = net.init(common.stream(0, "initialisation"))
    assert net.names[0] == "start" and not w[:2].any() and w[2:].all()
    net = common.Net(changed(tmp_path, "super().forward(self.start(x))",
                             "self.start = nn.Conv2d(1, 1, 1)"), *IMAGES)
    assert net.d == 121
    more = "self.start, self.decayed = lambda: 1, 0.9"
    net = common.Net(changed(tmp_path, more=more), *IMAGES)
    assert net.init(common.stream(0, "initialisation")).all() and net.decayed.all()


def test_group_norm_keeps_what_the_constructor_did_to_batchnorm(tmp_path):
    """One layer under two names, a weight that begins with 0, a bias that is not trained."""
    net = common.Net(path(tmp_path, "Twice"), (3, 8, 8), 10, batchnorm="group")
    assert net.notes == ["model   BatchNorm layers that became GroupNorm: 2",
                         "model   8 weights with requires_grad = False stay as they are"]
    where = {name: part for name, part, _ in net.tensors}
    assert net.d == 224 + 16 + 8 + 90 and "bn2.weight" not in where
    w = net.init(common.stream(0, "initialisation"))
    assert not w[where["bn3.weight"]].any() and w[where["bn1.weight"]].all()


def test_a_residual_network_with_batchnorm_and_dropout(tmp_path, capsys):
    model, shape = path(tmp_path, "Residual"), (3, 8, 8)
    for flags, words in (
            ({}, "it draws random numbers; for dropout use --no-dropout, which makes it inactive, "
             "and for BatchNorm --batchnorm group"),
            ({"no_dropout": True}, OTHERS_OF + " group (GroupNorm instead), or --batchnorm frozen"),
            ({"batchnorm": "group"}, "for dropout use --no-dropout")):
        refused(capsys, words, common.Net, model, shape, 10, **flags)
    for kind, said in (("group", "became GroupNorm"),
                       ("frozen", "keep the statistics of --init or of w_0")):
        net = common.Net(model, shape, 10, batchnorm=kind, no_dropout=True)
        assert net.notes == [f"model   BatchNorm layers that {said}: 3"] and net.batchnorms == 3
        module = module_of(tmp_path, "Residual")(3, 10)
        if kind == "group":
            module.bn1, module.bn2 = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)
            module.head[2] = nn.GroupNorm(1, 5)  # an odd number of channels is one group
        w, x = torch.randn(net.d), torch.rand(4, *shape)
        nn.utils.vector_to_parameters(w, module.parameters())
        torch.testing.assert_close(net(w, x), module.eval()(x).detach())


OTHERS_OF = ("an image's logits depend on the others of its minibatch, such as on their number or "
             "largest pixel; for BatchNorm use --batchnorm")
EMPTY = "k starts as NaN or infinite; torch.empty, for instance, initialises nothing"
AGAIN = "with the weights of its model.pt it gives other logits when it is built again"
RANDOM = "it draws random numbers; for dropout use --no-dropout, which makes it inactive"


@pytest.mark.parametrize("forward, more, words", [
    ("F.dropout(super().forward(x), 0.5, self.training)", "", RANDOM),
    (BEFORE, "self.more = nn.Dropout2d()", RANDOM),
    # too low to be heard in the logits of eight images
    ("super().forward(x + 1e-9 * F.dropout(x, 0.01, self.training))", "", RANDOM),
    ("super().forward(x + 1e-9 * np.random.rand())", "", "it draws random numbers"),
    ("super().forward(x.mul_(2))", "", "two calls on one batch differ: it changes x in place"),
    ("super().forward(x) * (1 + torch.is_grad_enabled())", "", "computes otherwise without"),
    ("vars(self).setdefault('w', self.fc.weight.clone()); return F.linear(x.flatten(1), self.w[:, "
     ":16]) + super().forward(x)", "", "two calls on one batch differ: it changes x in place, "
     "keeps something from call to call, or"),
    ("y = self.conv(x).sigmoid(); z = y * y; y.add_(1); return self.fc(z.flatten(1))", "",
     "its gradient can't be computed: one of the variables needed for gradient"),
    ("self.fc(checkpoint(F.relu, self.conv(x), use_reentrant=True).flatten(1))", "",
     "its gradient can't be computed: When use_reentrant=True"),
    ("checkpoint(super().forward, x, use_reentrant=False)", "", "its gradient depends on weights "
     "or buffers that it is not given, but holds elsewhere; write functions as methods, and no "
     "torch.utils.checkpoint"),
    ("self.fc.weight.data = self.fc.weight.data / 2; return super().forward(x)", "",
     "forward changes its weights fc.weight, which the method alone may do"),
    ("torch.no_grad()(self.fc.weight.clamp_)(-0.01, 0.01); return super().forward(x)", "",
     "forward changes its weights fc.weight"),
    ("self.fc.weight.data = torch.renorm(self.fc.weight.data, 2, 0, 2); return super().forward(x)",
     "", "forward changes its weights fc.weight"),  # not the first ones, as in EEGNet
    (BEFORE, "self.more = nn.BatchNorm2d(1)", OTHERS_OF + " group (GroupNorm instead), or "
     "--batchnorm frozen (constant running statistics, for a pretrained --init)"),
    (BEFORE, "self.more = nn.BatchNorm2d(1, eps=1e12, affine=False)", OTHERS_OF),
    (BEFORE, "self.more = Thick(1)", OTHERS_OF),
    ("super().forward(F.batch_norm(x, None, None, training=True))", "", "depend on the others"),
    ("super().forward(x - (len(x) > 32) * x.mean())", "", "depend on the others"),
    ("super().forward(x / 255 if x.max() > 1.5 else x)", "", "depend on the others"),
    ("super().forward(1 - x if x.mean() > 0.25 else x)", "", "depend on the others"),
    ("super().forward(x) * (2 if len(x) == 1 else 1)", "", "depend on the others"),
    # of the images before it alone: batch_first forgotten, an expert's capacity
    ("super().forward(x.cumsum(0))", "", "depend on the others"),
    ("super().forward(x * (torch.ones(len(x)).cumsum(0) <= 16).view(-1, 1, 1, 1))", "",
     "depend on the others"),
    ("super().forward(x)", "self.near = nn.Parameter(self.fc.weight.data[:1])", "near and "
     "fc.weight share their memory, but would be trained and saved apart; assign the nn.Parameter"),
    ("super().forward(x)", "self.register_buffer('old', self.fc.bias.data)", "share their memory"),
    ("super().forward(x)", "self.near = nn.Parameter(self.fc.weight.data[1:2])",
     "fc.weight and near share their memory"),
    ("y = super().forward(x); return y + self.get().mean(1)[:, None]", "seen = {}; self.get = "
     "lambda: seen['x']; self.conv.register_forward_hook(lambda m, z, y: seen.update(x=z[0]."
     "flatten(1)))", "forward reads what another thread's forward has written"),
    (BEFORE, "self.more = nn.InstanceNorm2d(1, track_running_stats=True)", "it changes its buffer "
     "more.running_mean in training, which all clients share; keep it constant (InstanceNorm: "
     "track_running_stats=False)"),
    ("super().forward(x)", "self.fc = parametrizations.spectral_norm(self.fc)", "its spectral_norm "
     "has buffers that must follow the weights; use parametrizations.weight_norm"),
    ("super().forward(x)", "self.fc = nn.utils.weight_norm(self.fc)",
     "and torch.nn.utils.parametrizations in place of old weight_norm or pruning"),
    ("super().forward(x)", "self.fc = nn.Linear(32, num_classes, dtype=torch.cfloat)",
     "fc.weight is complex; torch.complex(a, b) makes it of two real parameters"),
    ("self.more[0](super().forward(x))", "self.more = [nn.Linear(3, 3)]", "it trains tensors that "
     "are not its parameters: register them, as modules in an nn.ModuleList, not in a list"),
    ("z = 1 * x.requires_grad_(); return super().forward(z - torch.autograd.grad(self.conv(z).sum()"
     ", z, create_graph=True)[0])", "", "(for a gradient in forward use torch.func.grad)"),
    ("super().forward(x) + self.more(torch.zeros(1, dtype=int))", "self.more = nn.Embedding(4, 3, "
     "sparse=True)", "the gradient of more.weight is sparse; nn.Embedding(sparse=False) has"),
    ("super().forward(x)", "self.register_buffer('s', torch.eye(3).to_sparse())",
     "s is sparse; make it dense, and call .to_sparse() in forward"),
    ("super().forward(x) + self.k", "self.k = nn.Parameter(torch.empty(3))", EMPTY),
    ("super().forward(x)", "self.k = nn.Parameter(torch.full([1], -torch.inf))", EMPTY),
    ("super().forward(x)", "self.register_buffer('k', torch.Tensor(3), persistent=False)", EMPTY),
    ("self.f(super().forward(x))", "z = np.random.rand(); self.f = lambda x: z * x", AGAIN),
    ("self.f(super().forward(x))", "self.f = functools.partial(torch.mul, torch.rand(1).item())",
     AGAIN),
    ("super().forward(x) * self.k", "self.k = np.random.default_rng().random()", AGAIN),
    ("super().forward(x) * self.k", "self.k = float(self.fc.weight.std())", AGAIN),
    ("super().forward(x) * self.k", "self.register_buffer('k', torch.rand(3), persistent=False)",
     AGAIN),
    ("super().forward(x)", "self.fc.scale = torch.ones(3)", "fc.scale holds a tensor that is "
     "neither parameter nor buffer; use nn.Parameter or register_buffer"),
    ("super().forward(x) + self.c['a'].sum()", "self.c = {'a': torch.randn(3)}",
     "c holds a tensor"),
    ("super().forward(x) + self.f()", "z = torch.randn(3); self.f = lambda: z.sum()",
     "f holds a tensor"),
    ("self.n += 1; return super().forward(x) + (self.n > 99)", "self.n = 0", "keeps something"),
    ("super().forward(x + (self.rng.random() > 0.99))", "self.rng = np.random.default_rng(0)",
     "keeps something from call to call"),
    # counted beside the module: in its class, in a function, in its file
    ("Net.n += 1; return super().forward(x) + (Net.n > 99)", "Net.n = 0", "keeps something"),
    ("f = Net.forward; f.n = vars(f).get('n', 0) + 1; return super().forward(x) + (f.n > 99)", "",
     "keeps something from call to call"),
    ("z = globals(); z['n'] = z.get('n', 0) + 1; return super().forward(x) + (n > 99)", "",
     "keeps something from call to call"),
    # an expert takes 7 of 10 images; of eight different ones none asks for more
    ("z = super().forward(x); k = z.argmax(1); n = (k[:, None] == k).tril().sum(1); return z * (n "
     "< 0.7 * len(x) + 1)[:, None]", "", OTHERS_OF),
    ("super().forward(x)", "self.parameters = lambda: iter([self.fc.weight])", "its parameters() "
     "gives others than named_parameters(), which are trained; set requires_grad = False on"),
    ("super().forward(x)", "self.start = lambda name, shape: ('gauss', 0.1)",
     "its `start` gives 'gauss', which is none of"),
    ("assert len(x) > 1; return super().forward(x)", "", "AssertionError"),
    ("super().forward(x).squeeze()", "", "for 1 image it gives (3,), not logits of the shape (1, 3"
     "); .squeeze() removes the axis of a single image, too; use .flatten(1)"),
    ("super().forward(x); return", "", "for 8 images it gives a NoneType, not logits of the shape "
     "(8, 3); return the logits alone"),
    ("super().forward(x) + self.more(x.flatten(2))[0][:, :, :3].mean(1)", "self.more = nn.GRU(16, "
     "3)", "this layer takes the first axis for time: use batch_first=True; for BatchNorm"),
    ("super().forward(self.norm(x))", "self.register_buffer('k', torch.ones(1)); self.norm = "
     "lambda x: x * self.k", "its gradient depends on weights or buffers that it is not given, but"
     " holds elsewhere; write functions as methods, and no"),
    ("vars(self).setdefault('most', x.max()); return super().forward(x / self.most)", "",
     "keeps something from call to call"),
    ("vars(self).setdefault('mask', self.conv.weight.abs().mean()); return super().forward(x) * "
     "self.mask", "", "keeps something from call to call"),
    ("seen['x'] = self.conv.weight * x.mean((1, 2, 3)).view(-1, 1, 1, 1, 1); y = super().forward(x)"
     "; return y + seen['x'].flatten(1).mean(1)[:, None]", "global seen; seen = {}",
     "forward reads what another thread's forward has written"),
    (BEFORE, "self.more = nn.BatchNorm2d(1); self.eval()", OTHERS_OF),
    ("super().forward(x), x", "", "it gives a tuple, not"),
    ("self.conv(x)", "", "it gives (8, 2, 4, 4), not logits"),
    ("super().forward(x) / 0", "", "its logits are not finite, with weights and pixels drawn at "
     "random"),
    ("super().forward(x).detach()", "", "its logits carry no gradient of its weights"),
    ("torch.from_numpy(np.tanh(super().forward(x).numpy()))", "",
     "numpy() on Tensor that requires grad"),
    ("super().forward(x.double())", "", "(double) and bias type (float) should be the same; "
     "weights and images are float32: tensors that its forward makes or converts need dtype="),
])
def test_what_is_no_function_of_its_weights_and_one_image_is_refused(forward, more, words,
                                                                     tmp_path, capsys):
    refused(capsys, words, common.Net, changed(tmp_path, forward, more), *IMAGES)


@pytest.mark.parametrize("forward, more, flags", [
    (BEFORE, "self.more = nn.Dropout2d()", {"no_dropout": True}),
    ("F.dropout(super().forward(x), 0.5, self.training)", "", {"no_dropout": True}),
    (BEFORE, "self.more = nn.BatchNorm2d(1)", {"batchnorm": "group"}),
    (BEFORE, "self.more = nn.BatchNorm2d(1)", {"batchnorm": "frozen"}),
    (BEFORE, "self.more = Thick(1)", {"batchnorm": "frozen"}),
    ("self.seen[len(x)] = torch.ones(1); return super().forward(x)", "self.seen = {}", {}),
    ("super().forward(x)", "self.again = [self.conv.weight, self.fc]", {}),
    # no softmax: by chance its logits lie between 0 and 1
    ("super().forward(x)", "self.fc.weight.data *= 1e-4; self.fc.bias.data.fill_(0.5)", {}),
    ("super().forward(x)", "self.conv.double(), self.fc.bfloat16()", {}),  # trained as float32
    ("super().forward(x * self.k.abs())", "self.register_buffer('k', torch.ones(4) * 1j)", {}),
    ("self.k = torch.ones(3) if self.k is None else self.k; return super().forward(x) * self.k",
     "self.register_buffer('k', None)", {}),
    # the remedies that lines name
    ("super().forward(x + torch.func.grad(lambda z: self.conv(z).sum())(x))", "", {}),
    ("(self.s.to_sparse() @ super().forward(x).T).T", "self.register_buffer('s', torch.eye(3))",
     {}),
    ("super().forward(x) * self.k.exp()", "self.register_buffer('k', torch.full([3], -torch.inf)); "
     "self.k[0] = 1", {}),
    ("super().forward(x) * self.k", "self.register_buffer('k', torch.rand(3))", {})])
def test_what_the_flags_help_is_taken(forward, more, flags, tmp_path):
    net = common.Net(changed(tmp_path, forward, more), *IMAGES, **flags)
    assert net.batchnorms == ("batchnorm" in flags) and len(net.notes) == net.batchnorms


def test_a_train_of_its_own_is_called(tmp_path):
    more = "Net.train = lambda self, mode=True: self.conv.requires_grad_(False) and self"
    net = common.Net(changed(tmp_path, "super().forward(x)", more), *IMAGES)
    assert net.names == ["fc.weight", "fc.bias"]


@pytest.mark.parametrize("forward, more, flags, words", [
    (BEFORE, "self.more = nn.BatchNorm2d(1, track_running_stats=False)", {"batchnorm": "frozen"},
     OTHERS_OF + " group (GroupNorm instead)\n"),
    (BEFORE, "self.more = Thick(1)", {"batchnorm": "group"}, "a Thick does more than BatchNorm; "
     "--batchnorm group can't replace it"),
    (BEFORE, "self.more = nn.BatchNorm2d(1)", {"no_dropout": True}, "use --batchnorm group"),
    ("super().forward(x + torch.randn_like(x))", "", {"no_dropout": True},
     "it draws random numbers; F.dropout needs training=self.training\n"),
    ("super().forward(x)", "self.fc = parametrizations.spectral_norm(self.fc)",
     {"no_dropout": True}, "its spectral_norm has buffers that must follow")])
def test_what_the_flags_do_not_help_is_refused(forward, more, flags, words, tmp_path, capsys):
    refused(capsys, words, common.Net, changed(tmp_path, forward, more), *IMAGES, **flags)


@pytest.mark.parametrize("name, words", [
    ("lazy", "1.weight has no shape yet; give the layer its number of inputs"),
    ("five", "for 8 images it gives (8, 5), not logits of the shape (8, 3)"),
    ("empty", "it has no parameters to train"), ("Raises", "KeyError: 'weights'"),
    ("traced", "it holds a TopLevelTracedModule; give the plain nn.Module, without torch.compile, "
     "torch.jit and nn.DataParallel"),
    ("compiled", "it holds a OptimizedModule; give"), ("parallel", "it holds a DataParallel; give"),
    ("Asks", ": missing a required argument: 'depth'; it must be a function or class that gives an "
     "nn.Module and asks for nothing else than in_channels (or channels), num_classes (or "
     "classes) and size"),
    ("old", ": missing a required argument: 'm'; it must be"),
    ("number", "it gives a int, not an nn.Module"),
    ("names", "['fc'] is not a callable object; it must be a function or class that gives"),
    ("nosuch", "has no nosuch")])
def test_what_makes_no_network_is_refused(name, words, tmp_path, capsys):
    refused(capsys, words, common.Net, path(tmp_path, name), *IMAGES)


@pytest.mark.parametrize("model, words", [
    ("nosuch.py:f", "there is no file nosuch.py"), ("cnn:f", "no file cnn that ends in .py"),
    ("torchvision:resnet19", "--model torchvision:resnet19: torchvision has no such network for "
     "classification; it has alexnet"), ("torchvision:fcn_resnet50", "no such network for")])
def test_a_command_with_such_a_model_is_refused(model, words, capsys):
    refused(capsys, words, fedavg.main, [*QUICK, "--model", model])


def test_weights_and_buffers_come_from_one_build(tmp_path):
    """A buffer that copies the initial weights makes all logits 0 at the start, with every seed."""
    model = changed(
        tmp_path, "F.linear(F.relu(self.conv(x)).flatten(1), self.fc.weight - self.begin)",
        "self.register_buffer('begin', self.fc.weight.detach().clone())")
    for seed in (0, 1):
        net = common.Net(model, *IMAGES)
        w = net.init(common.stream(seed, "initialisation"))
        assert not net(w, torch.rand(5, *IMAGES[0])).any() and w[20:116].abs().min() > 0
        net.init(common.stream(7, "initialisation"))  # a client's own start, as in FedMA
        assert not net(w, torch.rand(5, *IMAGES[0])).any()


def test_views_and_kept_activations(tmp_path):
    """A transform's images are channels-last in memory, and so is what a convolution makes of them:
    .view(n, -1) then fails, unless they are copied. A forward may keep what it computes."""
    x, w = torch.rand(5, 4, 4, 3).permute(0, 3, 1, 2), torch.randn(155)
    z = F.conv2d(x.contiguous(), w[:54].view(2, 3, 3, 3), w[54:56], padding=1).relu()
    want = F.linear(z.flatten(1), w[56:152].view(3, 32), w[152:])
    for forward in ("self.fc(F.relu(self.conv(x)).view(x.size(0), -1))",
                    "self.last = F.relu(self.conv(x)).flatten(1); return self.fc(self.last)"):
        net = common.Net(changed(tmp_path, forward), (3, 4, 4), 3)
        torch.testing.assert_close(net(w, x), want)
        net.module.load_state_dict(net.state_dict(w))  # as docs/run.md does
        torch.testing.assert_close(net.module(x).detach(), want)


def test_torchvisions_vision_transformer_takes_small_images(monkeypatch):
    """8 * (3 * 16 * 16 + 1) weights cut 32x32 pixels into 4 patches, which have positions, as has
    the class token; a layer, a normalisation and the head."""
    def small(name, weights, **more):
        return torchvision.models.VisionTransformer(patch_size=16, num_layers=1, num_heads=2,
                                                    hidden_dim=8, mlp_dim=16, **more)

    monkeypatch.setattr(torchvision.models, "get_model", small)
    layer = 4 * 8 * 9 + 2 * 8 * 16 + 16 + 8 + 4 * 8
    d = 8 * 769 + 8 * (1 + 4 + 1) + layer + 2 * 8 + 9 * 10
    assert common.Net("torchvision:vit_b_16", (3, 32, 32), 10).d == d


@pytest.mark.parametrize("forward, more, d, note", [
    ("super().forward(x).softmax(1)", "", 119,
     "note    the model's outputs are never negative, as after softmax, sigmoid or ReLU; "
     "cross-entropy wants the logits before it"),
    ("super().forward(x).relu()", "", 119, "note    the model's outputs are never negative"),
    ("y = super().forward(x); return y if self.training else y.softmax(1)", "", 119,
     "note    the model's logits differ in eval(); it stays in train(), in evaluation, too"),
    ("super().forward(x)", "self.conv.requires_grad_(False)", 99,
     "model   20 weights with requires_grad = False stay as they are"),
    ("super().forward(x)", "self.register_buffer('k', torch.ones(1).double())", 119, "note    k is "
     "float64, and is used as float32, as all tensors are"),
    ("super().forward(x)", "self.more = nn.Linear(5, 7)", 161, "note    42 of 161 weights, such as "
     "more.weight, have no influence on the logits of eight images; if they never have, set")])
def test_what_is_noted(forward, more, d, note, tmp_path):
    net = common.Net(changed(tmp_path, forward, more), *IMAGES)
    assert [words[: len(note)] for words in net.notes] == [note] and net.d == d


@pytest.mark.parametrize("more, words", [
    ("self.conv.weight.register_hook(lambda g: 0 * g)", "conv.weight has a hook on its gradient"),
    ("self.fc.bias.register_post_accumulate_grad_hook(print)", "fc.bias has a hook on its"),
    ("self.seen = []; self.conv.register_forward_hook(lambda *_: self.seen[3])", "list index out "
     "of range; its forward hooks must use their argument `module`, not a module that a closure"),
    ("self.conv.weight.data += torch.from_numpy(np.random.default_rng().random(1)).float()",
     "two calls with one --seed give other weights"),
    ("self.register_buffer('R', torch.from_numpy(np.random.default_rng().random(1)).float())",
     "two calls with one --seed give other weights")])
def test_what_a_copy_of_the_network_would_lose(more, words, tmp_path, capsys):
    refused(capsys, words, common.Net, changed(tmp_path, "super().forward(x)", more), *IMAGES)


@pytest.mark.parametrize("build", ["nn.Linear(16, classes)", "SAME"])
def test_weights_that_the_file_keeps_stay_as_they_are(build, tmp_path):
    """The checks change no memory of the file: a pretrained weight, or a module, of all builds."""
    (tmp_path / "kept.py").write_text(f"""from torch import nn
import torch
W, SAME = torch.ones(3, 16), nn.Linear(16, 3)
def net(classes):
    layer = {build}
    layer.weight = nn.Parameter(W)
    return nn.Sequential(nn.Flatten(), layer)
""")
    net = common.Net(f"{tmp_path / 'kept.py'}:net", *IMAGES)
    assert torch.equal(net.init(np.random.default_rng(0))[:48], torch.ones(48))


def test_frozen_parameters_stay_as_they_are(toy, tmp_path):
    """They are in the network and in model.pt."""
    file = tmp_path / "mine.py"
    file.write_text("""
from torch import nn
def mine(classes):
    below, above = nn.Linear(4, 5), nn.Linear(5, classes)
    nn.init.constant_(below.weight, 0.5).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), below, above)
""")
    argv = ["--dataset", toy, "--model", f"{file}:mine", "--split", "iid", "--clients", "4",
            "--rounds", "2", *CPU]
    _, state = run(fedavg, argv, tmp_path / "out")
    net, x = federation(argv).net, torch.rand(2, 1, 2, 2)
    assert net.d == 5 + 15 + 3 and net.names == ["1.bias", "2.weight", "2.bias"]
    w, below = state["w"], x.sum((1, 2, 3))[:, None] / 2
    want = (below + w[:5]) @ w[5:20].view(3, 5).T + w[20:]
    torch.testing.assert_close(net(w, x), want)
    saved = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert torch.equal(saved["1.weight"], torch.full((5, 4), 0.5))
    assert not torch.equal(w, federation(argv).initial_weights())


def test_buffers_ties_and_the_order_of_registration():
    """Positions in a buffer, one tensor for two layers, and layers registered last to first."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.b, self.a = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.register_buffer("code", torch.arange(4.0))
            self.register_buffer("hidden", torch.tensor(2.0), persistent=False)

        def forward(self, x):
            return self.last(self.b(self.a(self.hidden * x.flatten(1) + self.code)))

    module = Odd()
    net, x = common.Net("odd", (1, 2, 2), 3, build=Odd), torch.rand(5, 1, 2, 2)
    assert net.names == ["last.weight", "last.bias", "b.weight", "b.bias", "a.bias"]
    assert net.d == 12 + 3 + 16 + 4 + 4 and [where.start for _, where in net.layers] == [0, 15, 35]
    w = flat(module).requires_grad_()
    torch.testing.assert_close(net(w, x), module(x))
    (gradient,) = torch.autograd.grad(net(w, x).square().sum(), w)
    wanted = torch.autograd.grad(module(x).square().sum(), module.parameters())
    torch.testing.assert_close(gradient, torch.cat([z.flatten() for z in wanted]))
    saved = net.state_dict(w.detach())
    assert list(saved) == list(module.state_dict()) and "hidden" not in saved
    assert torch.equal(saved["a.weight"], saved["b.weight"])
    assert torch.equal(saved["code"], torch.arange(4.0))
    Odd().load_state_dict(saved, strict=True)
    clients = net.state_dict(torch.stack([w, 2 * w]).detach())  # [K, d]
    second = {name: z[1] for name, z in clients.items()}
    Odd().load_state_dict(second, strict=True)
    assert torch.equal(second["a.weight"], 2 * saved["a.weight"])
    assert torch.equal(second["code"], saved["code"])


CUTS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

class Plain(nn.Module):  # a: 16 * 5 + 5 weights, b: 5 * 4 + 4, c: 4 * classes + classes
    order = "abc"
    def __init__(self, classes):
        super().__init__()
        layers = {"a": nn.Linear(16, 5), "b": nn.Linear(5, 4), "c": nn.Linear(4, classes)}
        for name in self.order:
            setattr(self, name, layers[name])
        self.change()
    def change(self): pass
    def forward(self, x): return self.c(self.b(self.a(x.flatten(1)).relu()).relu())
class HeadFirst(Plain): order = "cab"
class Swapped(Plain): order = "bac"
class FrozenHead(Plain):
    def change(self): self.c.requires_grad_(False)
class FrozenBody(Plain):
    def change(self): self.a.requires_grad_(False)
class Normed(Plain):  # c has 3 magnitudes, 12 directions and 3 biases
    def change(self): self.c = parametrizations.weight_norm(self.c)
class Scaled(Plain):
    def change(self): self.scale = nn.Parameter(torch.ones([]))
    def forward(self, x): return self.scale * super().forward(x)
class Positions(Plain):  # 16 weights of its own, added to the pixels
    def change(self): self.code = nn.Parameter(torch.ones(1, 1, 4, 4))
    def forward(self, x): return super().forward(x + self.code)
class TiedHead(Plain):
    def change(self): self.c.weight = nn.Parameter(1 * self.a.weight[:3, :4]); self.d = self.c
    def forward(self, x): return self.c(self.b(self.a(x.flatten(1)).relu() + self.d.weight.sum()))
class Idle(Plain):
    def change(self): self.d = nn.Linear(2, 2)
class Dictionary(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.p = nn.ParameterDict({"a": torch.randn(5, 16), "b": torch.randn(classes, 5)})
    def forward(self, x): return F.linear(F.linear(x.flatten(1), self.p["a"]), self.p["b"])
class TwoNames(nn.Module):  # b has a's matrix, 16 * 16, and a bias; then c, 16 * 3 + 3
    def __init__(self, classes):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, classes)
        self.b.weight = self.a.weight
    def forward(self, x): return self.c(self.b(self.a(x.flatten(1))))
"""


@pytest.mark.parametrize("name, first, last", [  # w's parts: the first layer's, the last layer's
    ("Plain", (0, 85), (109, 124)),
    ("HeadFirst", "an image passes a before c, which is registered before it", "an image passes b "
     "before c, which is registered before it"),
    ("Swapped", "an image passes a before b, which is registered before it", (109, 124)),
    ("FrozenHead", (0, 85), "an image passes b before c, which is registered before it or has "
     "requires_grad = False"),
    ("FrozenBody", "an image passes a before b, which is registered before it or has "
     "requires_grad = False", (24, 39)),
    ("Normed", (0, 85), (109, 127)),
    ("Scaled", "an image passes a before the root module, which is registered before it",
     "an image passes c before the root module, which is registered before it"),
    ("Positions", (0, 16), (125, 140)), ("TiedHead", (0, 85), "an image passes c before b"),
    ("Idle", (0, 85), "an image does not pass d"),
    ("TwoNames", "a and b share a tensor", (288, 339)),
    ("Dictionary", "p holds the weights of several layers", "p holds the weights of several"),
])
def test_layers_are_divided_where_an_image_passes_from_one_to_the_next(name, first, last, tmp_path,
                                                                       capsys):
    """Or the network is refused by what keeps a part of w apart."""
    file = tmp_path / "cuts.py"
    file.write_text(CUTS)
    net = common.Net(f"{file}:{name}", *IMAGES)
    for divide, want in ((net.first_layers, first), (net.last_layers, last)):
        if isinstance(want, str):
            refused(capsys, want, divide, 1)
        else:
            assert divide(1) == slice(*want)
    assert net.several() == ["p"] * (name == "Dictionary")
    if isinstance(last, str):
        refused(capsys, last, net.features, torch.ones(net.d), torch.ones(2, 1, 4, 4))


def test_what_else_a_state_dict_may_hold(tmp_path):
    """A learned scale, and what get_extra_state returns."""
    file = tmp_path / "mine.py"
    file.write_text("""
import torch
from torch import nn
class Mine(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Flatten(), nn.Linear(16, classes))
        self.scale, self.version = nn.Parameter(torch.ones([])), 3
    def forward(self, x): return self.scale * super().forward(x)
    def get_extra_state(self): return {"version": self.version}
    def set_extra_state(self, state): self.version = state["version"]
""")
    net = common.Net(f"{file}:Mine", *IMAGES)
    w = torch.randn(net.d)
    saved, module = net.state_dict(w), common.load_file(file).Mine(3)
    module.load_state_dict(saved, strict=True)
    assert module.version == 3 and module.scale.shape == () and torch.equal(flat(module), w)
    saved["_extra_state"]["version"] = 5
    torch.save(saved, tmp_path / "init.pt")
    assert torch.equal(net.load(str(tmp_path / "init.pt")), w)
    assert net.state_dict(w)["_extra_state"] == {"version": 5}


def test_a_constructor_that_draws_with_numpy_or_random(tmp_path):
    """It is seeded as torch is, and these generators are left as they were."""
    file = tmp_path / "mine.py"
    file.write_text("""
import random
import numpy as np
import torch
from torch import nn
class Mine(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Flatten(), nn.Linear(16, classes))
        self[1].weight.data = torch.from_numpy(np.random.randn(classes, 16).astype("float32"))
        self[1].bias.data.fill_(random.random())
        self.register_buffer("mask", torch.from_numpy(np.random.rand(16).astype("float32")))
    def forward(self, x): return super().forward(x.flatten(1) * self.mask)
""")
    before = np.random.get_state()[1].tolist(), random.getstate()
    nets = [common.Net(f"{file}:Mine", *IMAGES) for _ in range(2)]
    a, b, c = (net.init(common.stream(seed, "initialisation")) for net, seed in
               zip([*nets, nets[0]], (0, 0, 1)))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(nets[0].constants["mask"], nets[1].constants["mask"])
    assert before == (np.random.get_state()[1].tolist(), random.getstate())


def test_a_file_that_has_changed_is_loaded_anew(tmp_path):
    file = tmp_path / "mine.py"
    for n in (3, 5):
        file.write_text(f"import torch\ndef mine(classes): return torch.nn.Sequential(\n"
                        f"    torch.nn.Flatten(), torch.nn.Linear(16, {n}),\n"
                        f"    torch.nn.Linear({n}, classes))  # {'x' * n}\n")
        assert common.Net(f"{file}:mine", *IMAGES).d == 17 * n + 3 * n + 3


def test_files_beside_a_file_are_its_own(tmp_path, capsys):
    """Two folders with a utils.py each: the second is refused, as is a name of Python's own. An
    edited helper is loaded anew."""
    mine = "import torch\nfrom torch import nn\nfrom {0} import width\n" \
        "def mine(classes): return nn.Sequential(nn.Flatten(), nn.Linear(16, width), " \
        "nn.Linear(width, classes))\n"
    for folder, helper in (("a", "own_utils"), ("b", "own_utils"), ("c", "calendar")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(mine.format(helper))
        (tmp_path / folder / f"{helper}.py").write_text("from own_width import width\n")
        (tmp_path / folder / "own_width.py").write_text("width = 3\n")
    net = common.Net(f"{tmp_path / 'a' / 'mine.py'}:mine", *IMAGES)
    assert net.d == 17 * 3 + 4 * 3
    for folder, name in (("b", "own_utils"), ("c", "calendar")):
        own = tmp_path / folder / f"{name}.py"
        refused(capsys, f"mine.py imports {name}, which can be {own} or /", common.Net,
                f"{tmp_path / folder / 'mine.py'}:mine", *IMAGES)
    (tmp_path / "a" / "own_width.py").write_text("width = 5  # now\n")
    assert common.Net(f"{tmp_path / 'a' / 'mine.py'}:mine", *IMAGES).d == 17 * 5 + 6 * 3


def test_bf16_is_tried_at_the_start(tmp_path, capsys):
    """What fails is refused; a buffer that bf16 rounds is noted."""
    assert not common.Net(path(tmp_path, "Base"), *IMAGES, precision="bf16").notes
    model = changed(tmp_path, "super().forward(x * (self.i[1] - self.i[0]))",
                    "self.register_buffer('i', torch.tensor([1000.0, 1001.0]))")
    assert not common.Net(model, *IMAGES).notes
    assert common.Net(model, *IMAGES, precision="bf16").notes == [
        "note    in bf16 logits differ by more than a quarter (its buffers are bf16, too)"]
    model = changed(tmp_path, "super().forward(x - torch.full((1, 1, 4, 4), 0.5))")
    assert not common.Net(model, *IMAGES).notes
    refused(capsys, "with --precision bf16 it fails (Input type (float) and bias type (c10::"
            "BFloat16) should be the same); tensors that its forward makes or converts need",
            common.Net, model, *IMAGES, precision="bf16")


def test_initial_weights_draw_from_no_generator_of_torch(tmp_path):
    """Neither does reading the file, whose instance always has the same weights."""
    before, instances = torch.get_rng_state(), []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        net = common.Net(path(tmp_path / folder, "Base"), *IMAGES)
        w = net.init(common.stream(0, "initialisation"))
        instances.append(common.Net(path(tmp_path / folder, "instance"), *IMAGES))
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(ord(folder))
        before = torch.get_rng_state()
    a, b = (net.init(common.stream(0, "initialisation")) for net in instances)
    assert torch.equal(a, b)
    conv = w[:18]  # PyTorch's: uniform in +-1/3 for 9 inputs
    assert 0.15 < conv.std() < 0.25 and conv.abs().max() <= 1 / 3


def test_torchvisions_mobilenet():
    net = common.Net("torchvision:mobilenet_v3_small", (3, 32, 32), 10, "cpu", "group", True)
    assert net.notes == ["model   BatchNorm layers that became GroupNorm: 34"]
    assert (net.batchnorms, net.d) == (34, 1_528_106)


# State dicts: --init, model.pt, clients.pt


def test_a_state_dict_is_w_0(tmp_path, capsys):
    """With each seed; the record has the file's SHA-256, and another file does not go on."""
    module = module_of(tmp_path, "Base")(10, 3, (32, 32))
    torch.save(module.state_dict(), tmp_path / "init.pt")
    argv = [*TINY, "--model", path(tmp_path, "Base"), "--init", str(tmp_path / "init.pt"),
            "--lr", "1e-30"]  # as good as none
    assert torch.equal(federation([*argv, "--seed", "5"]).initial_weights(), flat(module))
    record, state = run(fedavg, argv, tmp_path / "out")
    assert torch.equal(state["w"], flat(module))
    digest = hashlib.sha256((tmp_path / "init.pt").read_bytes()).hexdigest()
    assert record["environment"]["sources"]["init.pt"] == digest
    torch.save({name: z + 1 for name, z in module.state_dict().items()}, tmp_path / "init.pt")
    refused(capsys, "was made by another version of init.pt", run, fedavg, [*argv, "--resume"],
            tmp_path / "out")


def base(**changes):
    """The state dict of a Base for IMAGES, but for the changes; None: without that tensor."""
    found = {"conv.weight": torch.ones(2, 1, 3, 3), "conv.bias": torch.ones(2),
             "fc.weight": torch.ones(3, 32), "fc.bias": torch.ones(3)}
    found |= {name.replace("_", "."): z for name, z in changes.items()}
    return {name: z for name, z in found.items() if z is not None}


@pytest.mark.parametrize("contents, words", [
    (base(fc_bias=None), 'init.pt can\'t be read as a state dict of'),
    (base(fc_bias=None), 'writes it: Error(s) in loading state_dict for Base: Missing key(s) in '
     'state_dict: "fc.bias".'),
    (base(fc_weight=torch.ones(10, 32)), "size mismatch for fc.weight: copying a param with shape "
     "torch.Size([10, 32]) from checkpoint"),
    (base(fc_extra=torch.ones(1)), 'Unexpected key(s) in state_dict: "fc.extra"'),
    (base(fc_bias=torch.tensor([1.0, 2.0, float("nan")])), "some weights are not finite"),
    (base(fc_bias=torch.ones(3, dtype=torch.int8)), "fc.bias is torch.int8"),
    (base() | {"bn.running_mean": torch.ones(2)},
     'Unexpected key(s) in state_dict: "bn.running_mean". Use --batchnorm frozen.'),
    ({"epoch": 3, "model": base()}, "its entry 'model' is a dict; if that is it, save it alone"),
    ([torch.ones(2)], "Expected state_dict to be dict-like, got <class 'list'>"),
    (nn.Linear(2, 2), "as torch.save(model.state_dict(), FILE) writes it: it holds a whole module"),
    (b"text", "init.pt can't be read as a state dict of"), (None, "[Errno 2] No such file"),
])
def test_other_files_are_refused(contents, words, tmp_path, capsys):
    if isinstance(contents, bytes):
        (tmp_path / "init.pt").write_bytes(contents)
    elif contents is not None:
        torch.save(contents, tmp_path / "init.pt")
    net = common.Net(path(tmp_path, "Base"), *IMAGES)
    refused(capsys, words, net.load, str(tmp_path / "init.pt"))


def test_noise_that_comes_with_the_state_dict_is_refused(tmp_path, capsys):
    net = common.Net(changed(
        tmp_path, "super().forward(F.dropout(x, float(self.rate), bool(self.rate > 0)))",
        "self.register_buffer('rate', torch.tensor(0.0))"), *IMAGES)
    torch.save(base(rate=torch.tensor(0.001)), tmp_path / "init.pt")
    refused(capsys, "init.pt: it draws random numbers", net.load, str(tmp_path / "init.pt"))


def test_frozen_batchnorm_keeps_the_statistics_of_the_state_dict(tmp_path):
    """They come with --init, are constants in training, and stand in model.pt."""
    module = module_of(tmp_path, "Residual")(3, 10)
    module.train()
    with torch.no_grad():
        for _ in range(3):
            module(2 + 3 * torch.randn(16, 3, 8, 8))  # moves the running statistics
    before = {name: z.clone() for name, z in module.state_dict().items()}
    argv = [*TINY, "--model", path(tmp_path, "Residual"), "--batchnorm", "frozen", "--no-dropout",
            "--lr", "0.1", "--init", str(tmp_path / "init.pt")]
    torch.save(module.state_dict(), tmp_path / "init.pt")
    fed, x = federation(argv), torch.randn(6, 3, 32, 32)
    w_0 = fed.initial_weights()
    torch.testing.assert_close(fed.net(w_0, x), module.eval()(x).detach())
    record, state = run(fedavg, argv, tmp_path / "out")
    after = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert before["bn1.running_mean"].norm() > 0.1
    for name, z in before.items():
        constant = "running" in name or "tracked" in name
        assert torch.equal(after[name], z) == constant, name
    module.load_state_dict(after, strict=True)
    assert accuracy(fed, module) == pytest.approx(record["final"]["global"]["top1"])


def accuracy(fed, module, index=None):
    """Of a torch module on images of a federation, by default the central test images."""
    index = np.arange(fed.data.n_train, len(fed.data.images)) if index is None else index
    with torch.no_grad():
        guess = module.eval()(fed.transform(fed.images[index])).argmax(1).numpy()
    return (guess == fed.data.labels[index]).mean()


def test_model_pt_is_the_modules_own_state_dict(tmp_path):
    """In the bare module it gives the accuracy of the record."""
    argv = [*QUICK, "--model", path(tmp_path, "Base"), "--lr", "0.03",
            "--split", "iid", "--transform", "normalize"]
    record, state = run(fedavg, argv, tmp_path / "out")
    module = module_of(tmp_path, "Base")(10, 3, (32, 32))
    found = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    module.load_state_dict(found, strict=True)
    assert torch.equal(flat(module), state["w"])
    right = accuracy(federation(argv), module)
    assert right == pytest.approx(record["final"]["global"]["top1"])
    start = [*argv, "--init", str(tmp_path / "out" / "model.pt")]  # goes on from there
    assert torch.equal(federation(start).initial_weights(), state["w"])


@pytest.mark.parametrize("method", ["fedper", "ditto"])
def test_clients_pt_has_a_model_for_each_client(method, tmp_path, capsys):
    """Names -> [K, ...]. A client's model gives the client's accuracy in the record."""
    argv = ["--method", method, *QUICK, "--model", path(tmp_path, "Base"), "--lr", "0.1"]
    record, _ = run(baselines, [*argv, "--save-clients"], tmp_path / "out")
    found = torch.load(tmp_path / "out" / "clients.pt", weights_only=True)
    shapes = {name: tuple(z.shape) for name, z in found.items()}
    assert shapes == {"conv.weight": (8, 2, 3, 3, 3), "conv.bias": (8, 2),
                      "fc.weight": (8, 10, 2048), "fc.bias": (8, 10)}
    module = module_of(tmp_path, "Base")(10, 3, (32, 32))
    fed = common.Federation(SimpleNamespace(**record["args"]))
    accuracies = []
    for k in range(8):
        module.load_state_dict({name: z[k] for name, z in found.items()}, strict=True)
        accuracies.append(accuracy(fed, module, fed.split.test[k]))
    assert accuracies == pytest.approx(record["final"]["personal"]["per_client"])
    assert (found["fc.bias"][0] != found["fc.bias"][1]).any()
    assert (tmp_path / "out" / "model.pt").exists() == (method == "ditto")  # fedper has no such
    said, keeps = "keeps no clients' models, so there is no clients.pt", capsys.readouterr().out
    run(fedavg, [*argv[2:], "--rounds", "1", "--save-clients"], tmp_path / "without")
    assert said not in keeps and said in capsys.readouterr().out
