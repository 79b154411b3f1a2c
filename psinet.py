"""Psi-Net: features allocated by grouped structure, from Yu et al., "Heterogeneous Federated Learning", 2020, arXiv 2008.06767
(published as Fed2, KDD 2021). We had notes on the paper and images of four of Fed2's figures, not the papers; no official code
was found.

    python psinet.py --dataset cifar10                        (VGG-9, normalisation ablation; published top-1 .8826)
    python psinet.py --dataset cifar10 --groups 0 --norm none (FedAvg on the network without groups: .8413; bn .8546, gn .8334)
    python psinet.py --dataset cifar10 --depth conv4          (grouping from another layer on)
    python psinet.py --dataset cifar100 --groups 20           (VGG-16; Fed2's figure: .682; 10: .682, 100: .672; FedAvg: .653)
    python psinet.py --dataset cifar10 --per-client 2 --prune (a node drops every group none of whose classes it has)
    python psinet.py --dataset cifar10 --groups 0 --norm bn --clients 1 --split iid --rounds 50 --tv     (which depth to choose)

Measured, VGG-9 on CIFAR-10, 10 x 4, 8 of the 100 rounds in bf16, seed 0, 2 CPU cores, 11, 11 and 9 min
(results/MEASURED.md has five ways):
    results/scale-0.08/psinet-norm/psinet-cifar10/0: global 0.4201
    results/scale-0.08/psinet-norm/psinet-cifar10-prune/0: global 0.6575, with --prune
    results/scale-0.08/psinet-norm/psinet-cifar10-groups-0-norm-gn/0: global 0.4557, FedAvg with GroupNorm

There is one model Omega = {Omega_shared, Omega_1, ..., Omega_G}: the weights w and, in b, BatchNorm's running means and
variances. "global" is the server's Omega on the central test images, taken to be the paper's measure; "personal" is the same
unpruned Omega on central test images drawn with each client's class shares. Clients are called nodes; "N x c" is N nodes with c
classes each. In the record `macs` counts the multiplications of all forward passes in training so far, and `tv` has line 15's
TV_l by layers.

The method (its sections 3 and 4), in our words:

    Structure
     1  choose G, the depth and M: M(g) are the classes of group g, and no class is in two groups
     2  layers below the depth are shared by all classes: convolutions, each with BatchNorm
     3  convolutions from the depth on are group convolutions with G groups, each with GroupNorm
     4  fully connected layers have G blocks: block g sees group g's features alone and gives the logits of M(g)
    Server
     5  choose Omega
     6  G_i, the groups of node i: all; in the extreme non-IID case those g for which it has images of a class in M(g)
     7  for each round t = 0, 1, ..., T-1:
     8      for each node i, in parallel:
     9          omega^i = LocalUpdate(i, Omega_shared and Omega_g for g in G_i)
    10      Omega_shared = Avg over all i of omega^i_shared, BatchNorm's scale, shift, running mean and variance included
    11      Omega_g = Avg over I_g = {i: g in G_i} of omega^i_g, GroupNorm's scale and shift included
    LocalUpdate(i, omega)
    12  for each of E local epochs, for each minibatch of node i:
    13      omega = omega - eta * gradient of the cross-entropy, the running means and variances a step to the minibatch's (D4)
    To choose the depth, on a trained model
    14  P = [p_1, ..., p_C] of each neuron: p_c = sum over images x of class c of A(x) * dZ_c/dA(x), A activation, Z_c logit
    15  TV_l = 1/I * sum over the I neurons i of layer l of ||P_i - E(P)||_2, each P divided by the sum of its entries
    16  share the layers of small TV, group the others

Deviations. The notes are silent unless they are quoted. No effect is measured unless stated.
    D1  Line 3: in the first grouped layer every group sees all shared channels; only its outputs are in blocks. Shared
        features are said to serve all classes; cut into G slices they would serve one group each, and the last shared layer
        would in effect be grouped already. --enter slice does cut them, which the notes' "group convolution" can mean
        (neighbouring slices overlap where G does not divide the channels). With --dataset shapes --limit 3000 --rounds 12,
        seeds 0 to 2 (results/LOG.md, 2026-11-20), global is .73 +- .07 with all channels, .78 +- .04 with slices, .87 +- .02
        with all channels and --prune. A depthwise convolution with which the depth begins (MobileNet) is still shared.
    D2  Lines 3 and 4: the grouped network's widths aren't known. Here they are the ungrouped network's, rounded up to a
        multiple of G. With 10 groups that leaves 848,386 of 3,493,258 weights (VGG-9) and 2.6 of 15.3 million (VGG-16). VGG-9
        is taken to be FedMA's, here without its dropout; VGG-16 and MobileNet are common.py's. A group starts as a layer of
        the group's size would; the first grouped layer as the ungrouped layer, unless its input is cut into slices.
    D3  Line 1: G and the depth of the published VGG-9 rows aren't known; the notes call C3-2 to C5-2 (second convolution of
        stage 3 to that of stage 5) nearly optimal, for a network that can't be this VGG-9, which has three stages. Defaults:
        C3-1 (conv5) for VGG-9, so that a convolution follows the first grouped one; C3-2 for VGG-16; for MobileNet the start
        of its 512 channels. Each group has equally many classes, consecutive labels. Which classes a node has in "N x c" is
        random and even.
    D4  Lines 2 and 3: GroupNorm has G groups. The notes compare .8334 (FedAvg) and .8826 (Psi-Net) under "the same GN
        settings". Here these differ: FedAvg with --norm gn has GroupNorm with 2 groups after every convolution, as common.py's
        networks do (10 don't divide its channels), and Psi-Net has BatchNorm in the shared part. With --norm bn all norms are
        BatchNorm, and line 11 averages its statistics, too. Either norm stands between convolution and ReLU and replaces a
        model's own. Every minibatch moves a running statistic a tenth of the way, as PyTorch's default does.
    D5  Lines 10 and 11: averages weigh node i by its images n_i, so that with all groups everywhere this is FedAvg's average.
        The notes' Avg shows no weights; in "N x c" the n_i are equal. A group that no node of a round has stays as it is.
    D6  Lines 6 and 9: a pruned node has no logits for its missing groups; its softmax is over the others. The notes prune a
        group of several classes "only when the local data all satisfy the group's task"; here it goes when the node has none
        of its classes. Which cases are extreme is not said, so --prune is off by default. Its effect with 4 of 10 classes per
        node: above.
    D7  Line 13: eta, B, momentum, weight decay and augmentation aren't known. The first four are those of FedMA's FedAvg runs
        (.01, 64, .9, 1e-4); flip and crop are FedSLR's, whose crop is padded with zeros, FedMA's with reflections. E and T of
        the ablations aren't known either. T = 100 (CIFAR-100: 200) is read off the axes of Fed2's figures. E = 1 is the best
        of 1, 20, 40, 100, 150 in another of its comparisons, in which about 1000 epochs were trained in all: --rounds 1000.
        Nor is it known whether published accuracies are the last or the best.
    D8  Line 8: all nodes take part, as far as is known; --fraction samples some.
    D9  Line 14: the sum is over 20 training images per class, seen as in testing. A is taken after ReLU and pooling, and for a
        channel the sum is over its pixels, too. Line 15: the notes may divide by a sum over one neuron's classes or over the
        neurons. Here it is over the classes, of absolute values: entries have both signs, so that their plain sum can be 0.
    D10  Line 16: the notes give no rule. --tv suggests the first layer whose TV reaches the middle between the smallest and
        the largest. Use it on a network without groups, trained for at least 50 epochs: in grouped layers P is 0 outside M(g).
    D11  Line 12: a node's images are shuffled again in every epoch.
"""

import functools
from types import SimpleNamespace as State

import torch
import torch.nn.functional as F

import common

# N and c: "10 x 4" of the normalisation ablation, "10 x 50" of the ablation of G. The rest: D3, D7, D8.
DEFAULTS = dict(model="vgg9", split="classes", clients=10, per_client=4, client_test=0.0, fraction=1.0, rounds=100, epochs=1,
                batch_size=64, lr=0.01, momentum=0.9, weight_decay=1e-4, transform="fedslr")
BY_DATASET = {
    "cifar100": dict(model="vgg16", per_client=50, rounds=200),
    # ours, for a quick look
    "shapes": dict(model="cnn", transform="scale", rounds=20, batch_size=20, lr=0.02, eval_every=2),
}
DEPTH = {"vgg9": "conv5", "vgg16": "conv3-2", "mobilenet": "block6", "cnn": "conv3"}  # D3; cnn's is ours
MISSING = -1e9  # the logit of a class that a pruned node doesn't have: a probability of 0


class Surgery:
    """Stands between a model of common.py and its Weights m: groups the layers from the depth on and puts norms in.

    keep [n]: the groups of this network, of G. b: the running statistics [d_b]. mask [B]: given in training, True for real
    images; `new` then gets b's next values. seen: a list that gets (layer, its neurons, their activations [B, ...]).
    """

    def __init__(self, net, m, keep, b=None, mask=None, seen=None):
        self.net, self.m, self.keep, self.b, self.mask, self.seen = net, m, keep, b, mask, seen
        self.entry, self.last, self.new, self.macs = None, None, [], 0

    def layer(self, name, x, out, init, depthwise=False):
        """(x, out, groups, init): what the model asks for below the depth, in groups from there on."""
        net, n = self.net, self.net.n
        if self.seen is not None and self.last:
            self.seen.append((*self.last, x))
        deep = self.entry or (net.G and f"{name}.".startswith(f"{net.depth}."))
        if depthwise or not deep:
            return x, out, 1, init  # l.2 (D1)
        out = n * -(-out // net.G)  # D2
        if not self.entry:
            self.entry = name
            if net.enter == "all":
                return x, out, 1, init  # D1
            C = x.shape[1]
            x = x[:, (self.keep[:, None] * C // net.G + torch.arange(-(-C // net.G), device=x.device)).flatten()]
        if init:
            (kind, scale), offset = init
            init = (kind, scale * net.G**0.5), offset  # D2: its fans are G times smaller
        return x, out, n, init

    def conv(self, name, x, out, kernel, stride=1, padding=0, groups=1, init=None, bias=True):
        x, out, n, init = self.layer(name, x, out, init, groups > 1)
        y = self.m.conv(name, x, out, kernel, stride, padding, max(n, groups), init, bias)  # l.2-3
        self.last, self.macs = (name, out), self.macs + y.shape[1:].numel() * (x.shape[1] // max(n, groups)) * kernel**2
        return self.groupnorm(name + "-norm", y) if bias else y  # a model's convolutions without bias have their own norm

    def linear(self, name, x, out, init=None, bias=True):
        x, out, n, init = self.layer(name, x, out, init)
        self.last, self.macs = (name, out), self.macs + out * (x.shape[1] // n)
        if n == 1:
            return self.m.linear(name, x, out, init, bias)
        shape = (out, x.shape[1] // n)
        weight, offset = init or common.default_init(shape)
        weight = self.m.take(name + ".weight", shape, weight).unflatten(0, (n, -1))  # [n, out/n, in/n]
        y = torch.einsum("bgi,goi->bgo", x.unflatten(1, (n, -1)), weight).flatten(1)  # l.4
        return y + self.m.take(name + ".bias", (out,), offset) if bias else y

    def groupnorm(self, name, x, groups=2):
        """The norm that --norm asks for here."""
        if self.net.norm == "none":
            return x
        if self.net.norm == "gn" and (self.entry or not self.net.G):
            return self.m.groupnorm(name, x, self.net.n if self.entry else groups)  # l.3 (D4)
        scale = self.m.take(name + ".weight", x.shape[1:2], ("constant", 1.0))
        shift = self.m.take(name + ".bias", x.shape[1:2], ("constant", 0.0))
        i = len(self.new)
        self.new.append(None)
        if self.b is None:  # Net reads the table
            self.net.stats.append((x.shape[1], self.entry))
            return x
        precision, x = x.dtype, x.to(self.b.dtype)
        mean, var = self.b.split(self.net.sizes_b)[i].view(2, -1)  # [C] each
        if self.mask is not None and not common.vmapped() and self.mask.all() and x[:, 0].numel() > 1:  # PyTorch's own is fast
            mean, var = mean.clone(), var.clone()
            x = F.batch_norm(x, mean, var, scale.to(x.dtype), shift.to(x.dtype), training=True)
            self.new[i] = torch.stack([mean, var])
            return x.to(precision)
        if self.mask is not None:
            mask, pixels = self.mask.to(x.dtype), x.shape[2:].numel()
            real = mask[:, None] / mask.sum().clamp(min=1)
            v, m = torch.var_mean(x, (2, 3), correction=0)  # [B, C]: of each image, then of the real ones
            old, mean = torch.stack([mean, var]), (real * m).sum(0)
            var = (real * (v + (m - mean) ** 2)).sum(0)
            n = (mask.sum() * pixels).clamp(min=2)
            self.new[i] = 0.9 * old + 0.1 * torch.stack([mean, var * n / (n - 1)])  # D4
        a = scale * (var + 1e-5).rsqrt()
        return (x * a[:, None, None] + (shift - mean * a)[:, None, None]).to(precision)  # l.2


class PsiNet(common.Net):
    """A model of common.py in groups: `forward` of w [d] and b [d_b]. A pruned node's network has only n of the G groups.

    M [G, classes/G]: the classes of each group. group [d], group_b [d_b]: of each number of w and of b its group, -1 if it is
    shared. macs: the multiplications for one image. G = 0 is the plain network, in which all is shared and M has one row.
    """

    def __init__(self, args, shape, classes, device="cpu", n=None, M=None):
        self.base, self.G, self.norm, self.enter = common.MODELS[args.model], args.groups, args.norm, args.enter
        self.depth = args.depth or DEPTH.get(args.model)  # D3
        if self.G and classes % self.G:
            common.refuse(f"--groups {self.G} can't have equally many of the {classes} classes; use a divisor of {classes}")
        self.M = torch.arange(classes).view(max(self.G, 1), -1) if M is None else M  # l.1 (D3)
        self.M, self.n, self.stats = self.M.to(device), n or len(self.M), []
        self.every = torch.arange(self.n, device=device)
        name = f"{args.model} " + (f"in {self.n} groups from {self.depth} on" if self.G else "without groups")

        @functools.wraps(self.base)  # which keeps its `decayed`
        def model(m, x, classes):  # what common.Net reads the table of tensors from
            surgery = Surgery(self, m, self.every.cpu())
            y = self.base(surgery, x, classes)
            self.entry, self.macs = surgery.entry, surgery.macs
            return y

        super().__init__(name, shape, classes, device, model)
        if self.G and not self.entry:
            names = dict.fromkeys(layer.split(".")[0] for layer, _ in self.layers if "norm" not in layer)
            common.refuse(f"--depth {self.depth}: no layer of {args.model} to group from; it has {', '.join(names)}")
        start = next((s.start for layer, s in self.layers if layer == self.entry), self.d)
        spans = [(s.stop - s.start, s.start >= start) for _, s, _ in self.tensors]
        self.group = self.owners(spans).to(device)
        self.sizes_b = [2 * width for width, _ in self.stats]
        self.group_b = self.owners([(width, entry) for width, entry in self.stats for _ in range(2)]).to(device)

    def owners(self, spans):
        """[sum of sizes]: the groups of tensors (size, whether grouped). Groups lie one after the other in their first axis."""
        parts = [torch.zeros(0, dtype=torch.long)]
        for z, grouped in spans:
            parts.append(torch.arange(self.n).repeat_interleave(z // self.n) if grouped else torch.full((z,), -1))
        return torch.cat(parts)

    def init_b(self):
        """Running means 0 and variances 1: [d_b]."""
        zeros_ones = [torch.arange(2.0).repeat_interleave(z // 2) for z in self.sizes_b]
        return torch.cat([*zeros_ones, torch.zeros(0)]).to(self.group.device)

    def forward(self, w, b, x, keep, mask=None, seen=None):
        """Logits [B, classes] and the next b. keep [n]: this network's groups. mask [B]: given in training (see Surgery)."""
        surgery = Surgery(self, self.weights(w, x), keep, b, mask, seen)
        z = self.base(surgery, x, self.classes)  # [B, n * classes/G]
        own = self.M[keep].flatten() == torch.arange(self.classes, device=z.device)[:, None]  # [classes, n * classes/G]
        logits = z[:, own.int().argmax(1)].to(w.dtype).masked_fill(~own.any(1), MISSING)  # l.4 (D6)
        return logits, b if mask is None else torch.cat([*(s.flatten() for s in surgery.new), b[:0]])

    def __call__(self, z, x):
        """For evaluation: z = [w | b] -> logits [B, classes]."""
        return self.forward(z[: self.d], z[self.d :], x, self.every)[0]


def client_step(net, args):
    """LocalUpdate's body, for one node and one minibatch."""

    def step(node, batch, eta):
        w, b, u, keep = node  # [d] weights, [d_b] running statistics, [d] momentum, [n] groups

        def loss(w):
            logits, new_b = net.forward(w, b, batch.x, keep, batch.mask)
            return common.cross_entropy(logits, batch), new_b

        g, b = common.grad(loss, has_aux=True)(w)  # l.13: [d]
        w, u = common.sgd(args, w, u, g, eta, net.decayed)  # l.13: w - eta * u, u = momentum * u + g + decay * w (D7)
        return w, b, u, keep

    return step


def local_updates(federation, parts, state, S, t, eta, has):
    """Lines 8 and 9: omega^i for the m nodes i in S as W [m, d], B [m, d_b]; in groups that a node lacks the server's values.

    parts: number of groups -> (network, step). has [K, G+1], of all nodes of this process: whether node i has group g (line 6's
    G_i). The last column is True: it stands for what is shared, since group number -1 picks it.
    """
    net, has = federation.net, has[S]
    W, B = state.w.repeat(len(S), 1), state.b.repeat(len(S), 1)
    counts = has[:, :-1].sum(1)
    for n, (part, step) in parts.items():
        i = (counts == n).nonzero()[:, 0]  # nodes with equally many groups have networks of one shape
        if not len(i):
            continue
        own_w, own_b = has[i][:, net.group], has[i][:, net.group_b]
        w, b = W[i][own_w].view(len(i), -1), B[i][own_b].view(len(i), -1)  # l.9
        keep = has[i, :-1].nonzero()[:, 1].view(len(i), n)
        start = w, b, torch.zeros_like(w), keep
        w, b, _, _ = federation.train(step, start, S[i.cpu().numpy()], t, eta, net=part)  # l.8, l.12 (D11)
        W[i], B[i] = W[i].masked_scatter(own_w, w), B[i].masked_scatter(own_b, b)
    return W, B


def aligned_average(federation, W, own, n_k, old):
    """Lines 10 and 11: each number is averaged over the nodes that have it. W [m, d], own [m, d] bool, n_k [m], old [d]."""
    n = federation.sum(own.to(W.dtype), n_k)  # [d] (D5)
    return torch.where(n > 0, federation.sum(W * own, n_k) / n.clamp(min=1), old)


def preferences(federation, z, images=20):
    """P of z = [w | b] by layers: name -> [neurons, classes]; without the last layer, whose neurons are the Z_c."""
    net, P = federation.net, {}
    w = z[: net.d].detach().requires_grad_()
    for c in range(net.classes):
        index = (federation.labels[: federation.data.train] == c).nonzero()[:images, 0]
        seen = []
        logits, _ = net.forward(w, z[net.d :], federation.transform(federation.images[index]), net.every, seen=seen)
        gradients = torch.autograd.grad(logits[:, c].sum(), [A for _, _, A in seen])
        for (name, neurons, A), dZ in zip(seen, gradients):
            p = (A * dZ).detach().reshape(len(index), neurons, -1).sum((0, 2))  # l.14 (D9)
            P.setdefault(name, []).append(p)
    return {name: torch.stack(p, 1) for name, p in P.items()}


def total_variance(P):
    """TV of one layer: P [neurons, classes] -> scalar."""
    P = P / P.abs().sum(1, keepdim=True).clamp(min=1e-30)  # D9
    return (P - P.mean(0)).norm(dim=1).mean()  # l.15


def show(run, tv):
    """Prints TV of each layer and the depth it suggests; draws tv.png."""
    middle = (min(tv.values()) + max(tv.values())) / 2
    depth = next(name for name, value in tv.items() if value >= middle).split(".")[0]  # l.16 (D10)
    print("\n" + "\n".join(f"TV      {name:<20}{value:8.4f}" for name, value in tv.items()))
    print(f"TV      suggests --depth {depth}, the first layer that reaches {middle:.4f}")
    with common.drawing(run.out / "tv.png", size=(1.5 + 0.45 * len(tv), 3.5)) as axis:
        axis.bar(list(tv), list(tv.values()))
        axis.axhline(middle, color="black", linestyle="--", linewidth=1)
        axis.tick_params(axis="x", rotation=90)
        axis.set(ylabel="TV", title=f"{run.federation.net.name}: suggests {depth}")


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    own = parser.add_argument_group("Psi-Net")
    own.add_argument("--groups", type=common.nonnegative_int, default=10, help="G; 0: FedAvg on the network without groups")
    own.add_argument("--depth", help="the layer where grouping starts (unless given: "
                                           + ", ".join(f"{layer} of {model}" for model, layer in DEPTH.items()) + ")")
    own.add_argument("--norm", choices=("none", "bn", "gn"), default="gn",
                     help="gn: BatchNorm below the depth, GroupNorm from there on (with --groups 0 everywhere); bn: BatchNorm "
                          "everywhere")
    own.add_argument("--enter", choices=("all", "slice"), default="all", help="the shared channels that a group sees")
    own.add_argument("--prune", action="store_true", help="nodes do without groups of which they have no class")
    own.add_argument("--tv", action="store_true", help="after the last round, the layers' total variance, and tv.png")
    args = common.parse(parser, BY_DATASET, argv)
    if args.tv and args.groups:
        common.refuse("--tv chooses where to group a network without groups (D10); use --groups 0")
    if args.groups and not args.depth and args.model not in DEPTH:
        common.refuse(f"--model {args.model} has no default depth; give --depth LAYER")
    if (args.groups or args.tv) and args.model in ("resnet18", "tfcnn"):  # shortcuts or normalisation join groups
        common.refuse(f"--model {args.model} can't be grouped; use one of {', '.join(DEPTH)}")
    return args


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args, lambda _, *images: PsiNet(args, *images))
    data, device, net = federation.data, federation.device, federation.net  # l.1-4
    shape = federation.transform(federation.images[:1]).shape[1:]
    run = common.Run(__file__, args, federation)

    has = torch.ones(len(federation.clients), len(net.M) + 1, dtype=torch.bool, device=device)  # [K, G+1]
    if args.prune:
        for i, index in enumerate(federation.split.train):
            has[i, :-1] = torch.isin(net.M, federation.labels[index]).any(1)  # l.6 (D6)
    counts = federation.gather(has[:, :-1].sum(1)).tolist()  # of all nodes
    nets = {n: net if n == net.n else PsiNet(args, shape, data.classes, device, n) for n in sorted(set(counts))}
    parts = {n: (part, client_step(part, args)) for n, part in nets.items()}
    macs = torch.tensor([nets[n].macs for n in counts], dtype=torch.double, device=device)  # of all nodes
    if args.groups:
        print("M       " + ", ".join(f"{g}: {' '.join(map(str, own))}" for g, own in enumerate(net.M.tolist())))
        weights, work = ([getattr(nets[n], name) for n in counts] for name in ("d", "macs"))
        print(f"nodes   {common.spread(counts)} of {args.groups} groups, {common.spread(weights)} weights, "
              f"{common.spread(work)} multiplications per image (least/mean/most)")

    state = State(w=federation.initial_weights(), b=net.init_b(), macs=0.0)  # l.5: [d], [d_b]; the run's multiplications
    for t, S in run.rounds(state):  # l.7 (D8)
        eta = federation.eta(t)
        W, B = local_updates(federation, parts, state, S, t, eta, has)  # l.8-9, l.12: [m, d], [m, d_b]
        own_w, own_b = has[S][:, net.group], has[S][:, net.group_b]  # [m, d], [m, d_b]
        n_k = federation.n[S]  # [m]
        state.w = aligned_average(federation, W, own_w, n_k, state.w)  # l.10-11: [d]
        state.b = aligned_average(federation, B, own_b, n_k, state.b)  # l.10-11: [d_b]
        state.macs += args.epochs * float(federation.all_reduce(macs[federation.clients[S]] @ n_k.double()))
        sent = int(own_w.sum() + own_b.sum())
        run.sent(up=sent, down=sent)
        if run.evaluates():
            z = torch.cat([state.w, state.b])
            more = {"macs": state.macs}  # of all forward passes in training so far
            if args.tv and t == args.rounds - 1:
                more["tv"] = {name: float(total_variance(P)) for name, P in preferences(federation, z).items()}
            run.log(federation.evaluate(z), federation.evaluate_clients(z), **more)
    if args.tv:
        show(run, run.record()["final"]["tv"])


if __name__ == "__main__":
    main()
