"""Psi-Net: features allocated by grouped structure. Yu et al., "Heterogeneous Federated Learning", 2020, arXiv 2008.06767,
later published as Fed2 (KDD 2021). We had notes on the paper, and four of Fed2's figures. No official code was found.

    python psinet.py --dataset cifar10                          (VGG-9, normalisation ablation; published: top-1 .8826)
    python psinet.py --dataset cifar10 --groups 0 --norm gn     (FedAvg with GroupNorm: .8334; bn: .8546; none: .8413)
    python psinet.py --dataset cifar100 --groups 20             (VGG-16, in Fed2's figure: .6817)

What to expect on CIFAR-10: 10 nodes, 4 classes each, --precision bf16, seed 0; about 2 min a round.

    method                rounds   global, last   record
    Psi-Net               100      .8356          results/psinet-norm/psinet-cifar10-prune/0
    FedAvg, GroupNorm     100      .8117          results/psinet-norm/psinet-cifar10-groups-0-norm-gn/0

The method (sections 3 and 4), in our words. There is one model Omega. omega^i is what node i trains: a copy of Omega, or of
Omega_shared and node i's groups G_i. "global": Omega on the central test images. "personal": Omega on test images for each
node, drawn from the central ones with the node's class shares. fedavg.py says how to read [d] and grad.

    Structure
     1  choose the number G of groups, the classes M(g) of each group g, and the depth: the layer where groups begin
     2  layers below the depth are shared by all classes: convolutions, each with BatchNorm
     3  convolutions from the depth on are cut into G groups; behind each convolution is GroupNorm
     4  fully connected layers have G blocks: block g sees block g of the layer before. In the last layer it gives M(g)'s logits
    Server
     5  choose Omega = {Omega_shared, Omega_1, ..., Omega_G}
     6  G_i = set of node i's groups: all; in extreme non-IID cases those for which node i has images of a class in M(g)
     7  for each round t = 0, 1, ..., T-1, with the nodes S (D8: all):
     8      for each node i in S, in parallel:  omega^i = LocalUpdate(i, Omega_shared and Omega_g for g in G_i)
     9      Omega_shared = average of omega^i_shared over the nodes i in S, BatchNorm's running statistics included
    10      Omega_g = average of omega^i_g over the nodes i in S with g in G_i
    LocalUpdate(i, omega)
    11  for each of E local epochs, for each minibatch b:
    12      omega = omega - eta * gradient of the cross-entropy; running statistics move by a tenth towards b's, as in PyTorch

Choices that change a number. docs/psinet.md has each in full.

    D1  Line 3: the first layer with groups sees all shared channels (--enter slice: slices). Its initial weights: as ungrouped.
    D2  Lines 3, 4: the ungrouped widths, rounded up to multiples of G. Line 5: a group's initial weights fit its own size.
    D3  Line 1: G = 10; depth: VGG-9 (FedMA's, no dropout) conv5, VGG-16 conv3-2. M(g) are consecutive labels.
    D4  Line 3: GroupNorm has as many groups as the node's network. FedAvg (--groups 0): 2 groups, behind all convolutions.
    D5  Lines 9, 10: node i counts n_i times (n_i: its images); the notes don't say so. A group that no node of S has stays.
    D6  Line 6: we take every split as extreme; --no-prune: G_i is all groups. Line 12: the softmax has only G_i's classes.
    D7  Line 12: eta, B, momentum, decay: FedMA's code; flip, crop: FedSLR's. Momentum starts each round at 0. T, E: from Fed2.
    D8  Line 7: all nodes take part; --fraction samples some. Line 11: a node's images are shuffled in every epoch.
    D9  --tv suggests a depth: the first layer whose total variance is in the upper half of the range.
"""

import argparse
from math import ceil
from types import SimpleNamespace as State

import torch
from torch.utils.flop_counter import FlopCounterMode

import common

# VGG-9 in 10 groups from conv5 on, for CIFAR-10. A group sees and gives channels or neurons. weights: with those of the norm.
#
#     layer       groups   group sees     gives   norm         weights
#     conv1       shared            3        32   BatchNorm        960   l.2
#     conv2       shared           32        64   BatchNorm     18,624   l.2
#     conv3       shared           64       128   BatchNorm     74,112   l.2
#     conv4       shared          128       128   BatchNorm    147,840   l.2
#     conv5       10              128        26   GroupNorm    300,300   l.3: the first layer with groups (D1)
#     conv6       10               26        26   GroupNorm     61,620   l.3
#     fc1         10              416        52                216,840   l.4: sees 26 channels of 4 x 4 pixels
#     fc2         10               52        52                 27,560   l.4
#     fc3         10               52         1                    530   l.4: gives the logit of the group's class


class Layers(common.Weights):
    """Hands a model its layers: shared ones below the depth, and from there on layers cut into s groups.

    s: how many groups this node has, 1 to G. G_i [s]: which ones. Where common.vgg9 asks for m.conv("conv6", x, 256, 3,
    padding=1), a node with all 10 groups gets a convolution with 260 outputs in 10 groups. parts: see Weights. running: an
    iterator over the BatchNorms' running statistics. mask: see Weights.running_batchnorm. seen gets each layer's (name, input).
    """

    def __init__(self, net, G_i, parts=None, running=None, mask=None, seen=None):
        super().__init__(parts, net.route)
        self.net, self.G_i, self.running, self.mask, self.seen = net, G_i, running, mask, seen
        self.first = None  # the first layer with groups, once the depth is reached
        self.new_running = {}  # the next running statistics of each BatchNorm: [2, its channels]

    def grouped(self, name, x, out, asked_groups, init):
        """(x, out, groups, init) of a layer: as the model asks for it below the depth, in s groups from there on. In the first
        layer with groups an output sees all shared channels, or a slice of them (D1)."""
        net, depthwise = self.net, asked_groups > 1  # depthwise: MobileNet's layers in which an output sees one channel
        if self.seen is not None:
            self.seen.append((name, x))
        if not depthwise and net.G and f"{name}.".startswith(f"{net.depth}."):  # `depth`, or a part of it: block6.pointwise
            self.first = self.first or name
        if not self.first or depthwise:
            return x, out, asked_groups, init  # l.2; depthwise: an output sees a channel of its own group
        out = net.s * ceil(out / net.G)  # D2: s groups with out/G outputs each, rounded up
        if name == self.first and net.enter == "all":
            return x, out, 1, init  # D1: every output sees the whole of x; initial weights as without groups
        if name == self.first:
            x = slices(x, self.G_i, net.G)  # D1
        return x, out, net.s, start_of_a_group(init, net.G) if init else None  # l.3-4

    def conv(self, name, x, out, kernel, stride=1, padding=0, groups=1, init=None, bias=True):
        x, out, groups, init = self.grouped(name, x, out, groups, init)
        y = super().conv(name, x, out, kernel, stride, padding, groups, init, bias)  # l.2-3
        return self.norm(name + "-norm", y) if bias else y  # without a bias the model asks for a norm itself

    def linear(self, name, x, out, init=None, bias=True):
        x, out, groups, init = self.grouped(name, x, out, 1, init)
        return super().linear(name, x, out, init, bias, groups)  # l.4

    def norm(self, name, x, groups=2):
        if self.net.norm == "none":
            return x
        if self.net.norm == "gn" and (self.first or not self.net.G):
            return super().groupnorm(name, x, self.net.s if self.first else groups)  # l.3 (D4)
        running = next(self.running) if self.running else None
        x, self.new_running[name] = self.running_batchnorm(name, x, running, self.mask)  # l.2
        return x

    groupnorm = norm  # a model's own norms become --norm's (D4)


def client_step(net, args):
    """step: line 12 of LocalUpdate, for one node i, one minibatch b. net: a PsiNet (below) with node i's number of groups."""

    def step(node, b, eta):
        w, r, u, G_i = node  # [d] weights of this net, [d_r] its running statistics, [d] momentum, [s] groups

        def loss(w):
            logits, new_r = net.forward(w, r, b.x, G_i, b.mask)
            return common.cross_entropy(logits, b), new_r  # D6: the logits of other groups are MISSING

        grad_w, r = common.grad(loss, has_aux=True)(w)  # l.12: gradient [d]; and the next r [d_r], which loss gives, too
        w, u = common.sgd(args, w, u, grad_w, eta, net.decayed)  # l.12: w - eta * u', u' = grad_w + momentum * u + decay * w
        return w, r, u, G_i

    return step


def groups_of_nodes(federation, args):
    """has [K, G], for all K nodes: has[i, g] is True if node i has group g."""
    M, labels = federation.net.M, federation.labels
    has = torch.stack([torch.isin(M, labels[images]).any(1) for images in federation.split.train])  # l.6: G_i (D6)
    return has if args.prune else torch.ones_like(has)


def local_updates(federation, networks, has, w, r, S, t):
    """w_i [m, d] and r_i [m, d_r] of the nodes i in S after lines 8 to 12. Where node i lacks a group: the server's numbers."""
    w_i, r_i, has_S = w.repeat(len(S), 1), r.repeat(len(S), 1), has[S]  # [m, d], [m, d_r], [m, G]
    s_i = has_S.sum(1)  # [m]: how many groups node i has
    for s in s_i.unique().tolist():  # nodes with s groups each: equal shapes, so that they can be trained together
        these = (s_i == s).nonzero()[:, 0]  # their places in S
        G_i = has_S[these].nonzero()[:, 1].view(len(these), s)  # [nodes, s]
        has_w, has_r = federation.net.numbers_of(has_S[these])  # which numbers of w and r they have: equally many in each row
        w_part = w_i[these][has_w].view(len(these), -1)  # l.8: Omega_shared, and Omega_g for g in G_i: a smaller network's w
        r_part = r_i[these][has_r].view(len(these), -1)  # l.8
        net, step = networks[s]
        # federation.train does for each of these nodes, at once or one after the other:
        #   for epoch in range(E):                             l.11
        #     for b in minibatches(shuffled(images of i), B):  l.11 (D8)
        #       node = step(node, b, eta)                      l.12
        start = w_part, r_part, torch.zeros_like(w_part), G_i  # momentum 0 (D7)
        w_part, r_part, _, _ = federation.train(step, start, S[these.cpu().numpy()], t, federation.eta(t), net=net)
        w_i[these] = w_i[these].masked_scatter(has_w, w_part)  # back to the places where they were cut out
        r_i[these] = r_i[these].masked_scatter(has_r, r_part)
    return w_i, r_i


def aligned_average(federation, z_i, has_z, n_i, z):
    """For each number of z (w or r): the average over the nodes that have it. A number that none of them has stays as it is.
    z_i [m, d]: the nodes' numbers. has_z [m, d]: whether node i has the number. n_i [m], z [d] -> [d].
    """
    n = federation.sum(has_z.to(z_i.dtype), n_i)  # [d]: images of the nodes that have it (D5)
    return torch.where(n > 0, federation.sum(z_i * has_z, n_i) / n.clamp(min=1), z)


def main(argv=None):
    args = arguments(argv)

    def make_net(_, shape, classes, device):
        return PsiNet(args, shape, classes, device)  # l.1-4: l.1 and l.4 in PsiNet, below; l.2-4 in Layers

    federation = common.Federation(args, make_net)
    run = common.Run(__file__, federation)
    has = groups_of_nodes(federation, args)  # l.6: [K, G]
    networks = {s: (net, client_step(net, args)) for s, net in networks_of_nodes(federation, args, has).items()}
    macs_per_image = multiplications(federation, networks, has)  # [K]

    state = State(w=federation.initial_weights(), r=federation.net.r_0, macs=0.0)  # l.5: Omega, [d] and [d_r] (D2)
    for t, S in run.rounds(state):  # l.7 (D8)
        w_i, r_i = local_updates(federation, networks, has, state.w, state.r, S, t)  # l.8: [m, d], [m, d_r]
        has_w, has_r = federation.net.numbers_of(has[S])  # which numbers node i has, [m, d], [m, d_r]
        n_i = federation.n[S]  # [m]
        state.w = aligned_average(federation, w_i, has_w, n_i, state.w)  # l.9-10: [d]; all nodes have the shared numbers (l.9)
        state.r = aligned_average(federation, r_i, has_r, n_i, state.r)  # l.9-10: [d_r]
        state.macs += args.epochs * float(federation.sum(macs_per_image[S], n_i.double()))  # multiplications, for the record
        sent = int(has_w.sum() + has_r.sum())
        run.sent(up=sent, down=sent)
        if run.evaluates():
            Omega = torch.cat([state.w, state.r])
            own = {"macs": state.macs, **measure_tv(federation, Omega, t)}
            run.log(federation.evaluate(Omega), federation.evaluate_clients(Omega), **own)
    show(run)


# ---------------------------------------------------------------------------------------------------------------------
# Around it

# Nodes and classes of each: "10 x 4" of the normalisation ablation, "10 x 50" of the ablation of G. The rest: D3, D7, D8.
DEFAULTS = dict(model="vgg9", split="classes", clients=10, per_client=4, client_test=0.0, fraction=1.0, rounds=100, epochs=1,
                batch_size=64, lr=0.01, momentum=0.9, weight_decay=1e-4, transform="fedslr")
BY_DATASET = {
    "cifar100": dict(model="vgg16", per_client=50, rounds=200),
    # ours, for a quick look
    "shapes": dict(model="cnn", transform="normalize", rounds=12, batch_size=20, lr=0.02, eval_every=2),
}
DEPTH = {"vgg9": "conv5", "vgg16": "conv3-2", "mobilenet": "block6", "cnn": "conv3"}  # D3; cnn's is ours
MISSING = -1e9  # the logit of a class that a pruned node doesn't have: its probability is 0 (D6)


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    flags = parser.add_argument_group("Psi-Net")
    flags.add_argument("--groups", type=common.nonnegative_int, default=10, help="G; 0: FedAvg on the network without groups")
    flags.add_argument("--depth", help="the layer where grouping starts (unless given: "
                                     + ", ".join(f"{layer} of {model}" for model, layer in DEPTH.items()) + ")")
    flags.add_argument("--norm", choices=("none", "bn", "gn"), default="gn",
                     help="behind convolutions. gn: GroupNorm behind those with groups, BatchNorm below (with --groups 0: "
                          "GroupNorm everywhere); bn: BatchNorm everywhere")
    flags.add_argument("--enter", choices=("all", "slice"), default="all",
                     help="which shared channels a group sees in the first layer with groups")
    flags.add_argument("--prune", action=argparse.BooleanOptionalAction, default=True,
                     help="G_i: a node lacks a group if it has no image of its classes; --no-prune: nodes have all groups")
    flags.add_argument("--tv", action="store_true", help="after the last round, the layers' total variance TV, and tv.png")
    args = common.parse(parser, BY_DATASET, argv)
    args.prune = args.prune and args.groups > 0
    if args.tv and args.groups:
        common.refuse("--tv needs a network without groups (D9); use --groups 0")
    if args.groups and not args.depth and args.model not in DEPTH:
        common.refuse(f"--model {args.model} has no default depth; give --depth LAYER (compare.py: --set psinet.depth=LAYER)")
    if (args.groups or args.tv) and args.model in ("resnet18", "tfcnn"):  # shortcuts or normalisation join groups
        common.refuse(f"--model {args.model} can't be grouped; use one of {', '.join(DEPTH)}")
    return args


# The network


class PsiNet(common.Net):
    """A model of common.py in G groups, or the part of it that a node with s of the G groups has.

    Omega is two vectors: the weights w [d], and the running statistics r [d_r] of all BatchNorms, at first r_0. group [d] and
    group_r [d_r]: the group of each number of w and of r, -1 if it is shared. A BatchNorm's statistics (mean, variance) have
    the groups of its weights (scale, shift). M [G, classes/G]: the classes of each group. --groups 0 counts as one group here.
    """

    def __init__(self, args, shape, classes, device="cpu", s=None):
        self.G, self.norm, self.enter = args.groups, args.norm, args.enter
        self.depth = args.depth or DEPTH.get(args.model)  # l.1 (D3)
        if self.G and classes % self.G:
            common.refuse(f"--groups {self.G} can't have equally many of the {classes} classes; use a divisor of {classes}")
        self.M = torch.arange(classes, device=device).view(max(self.G, 1), -1)  # l.1 (D3)
        self.s, self.route = s or len(self.M), "conv"  # Layers reads both
        asked = Layers(self, torch.arange(self.s))
        super().__init__(args.model, shape, classes, device, weights=asked)  # asks for all layers once
        slice_of = dict(self.layers)
        if self.G and not asked.first:
            names = dict.fromkeys(layer.split(".")[0] for layer in slice_of if "norm" not in layer)
            common.refuse(f"--depth {self.depth}: no layer of {args.model} to group from; it has {', '.join(names)}")
        self.name += f" in {self.s} groups from {self.depth} on" if self.G else " without groups"
        self.group = torch.full((self.d,), -1, device=device)
        for size, (_, span, _) in zip(self.sizes, self.tensors):
            if asked.first and span.start >= slice_of[asked.first].start:  # a tensor's groups lie one after the other
                self.group[span] = torch.arange(self.s, device=device).repeat_interleave(size // self.s)
        self.batchnorms, r_0 = list(asked.new_running), [new.flatten().to(device) for new in asked.new_running.values()]
        self.sizes_r, self.r_0 = [len(new) for new in r_0], torch.cat([torch.zeros(0, device=device), *r_0])
        self.group_r = torch.cat([self.group[:0], *(self.group[slice_of[name]] for name in self.batchnorms)])

    def numbers_of(self, has):
        """Which numbers of w and r nodes have: their groups' and the shared ones (-1). has [m, G] -> [m, d], [m, d_r]."""
        return tuple(has[:, group.clamp(min=0)] | (group < 0) for group in (self.group, self.group_r))

    def forward(self, w, r, x, G_i, mask=None, seen=None):
        """The logits [B, classes], and the next r. G_i [s]: this network's groups. mask [B]: given in training (see
        Weights.running_batchnorm). seen: see Layers."""
        running = (part.view(2, -1) for part in r.split(self.sizes_r))
        layers = Layers(self, G_i, zip(self.names, w.to(x.dtype).split(self.sizes)), running, mask, seen)
        logits = self.model(layers, x, self.classes).to(w.dtype)  # [B, s * classes/G]
        labels = self.M[G_i].flatten().expand(len(x), -1)  # l.4: the classes whose logits they are; all others are MISSING
        logits = torch.full((len(x), self.classes), MISSING, dtype=w.dtype, device=x.device).scatter(1, labels, logits)
        return logits, torch.cat([r[:0], *(new.flatten() for new in layers.new_running.values())])

    def __call__(self, Omega, x):
        """For evaluation: Omega = [w | r] -> logits [B, classes]."""
        return self.forward(Omega[: self.d], Omega[self.d :], x, torch.arange(self.s, device=x.device))[0]


def slices(x, G_i, G):
    """--enter slice: x's channels are cut into G slices, and group g sees slice g. Slices overlap if G doesn't divide them."""
    start, size = G_i[:, None] * x.shape[1] // G, ceil(x.shape[1] / G)
    return x[:, (start + torch.arange(size, device=x.device)).flatten()]


def start_of_a_group(init, G):
    """The initial distribution of a layer that is cut into G groups: its fans are G times smaller (D2)."""
    (kind, scale), offset = init
    return (kind, scale * G**0.5), offset


def networks_of_nodes(federation, args, has):
    """{s: the network with s groups} for every s that occurs. Puts the table of layers into federation.notes."""
    net, counts = federation.net, federation.gather(has.sum(1)).tolist()  # of the nodes of all processes
    shape = tuple(federation.transform(federation.images[:1]).shape[1:])  # of an image: C, H, W
    networks = {s: net if s == net.s else PsiNet(args, shape, net.classes, federation.device, s) for s in set(counts)}
    if net.G:
        federation.notes += [
            f"groups  {'layer':<20}{'groups':<8}{'group sees':>10}{'gives':>7}   {'norm':<11}{'weights':>10}",
            *("        {:<20}{:<8}{:>10}{:>7}   {:<11}{:>10,}".format(*row) for row in table(net)),
            "M       " + ", ".join(f"{g}: {' '.join(map(str, classes))}" for g, classes in enumerate(net.M.tolist())),
            f"nodes   {common.spread(counts)} of {net.G} groups, {common.spread([networks[s].d for s in counts])} weights "
            "(least/mean/most)"]
    return networks


def table(net):
    """For each layer: name, groups, channels or neurons that one group sees and gives, the norm behind it, weights of both."""
    kernels = {name.removesuffix(".weight"): shape for name, _, shape in net.tensors if name.endswith(".weight")}
    for (name, where), (following, behind) in zip(net.layers, [*net.layers[1:], ("", None)]):
        if len(kernels[name]) > 1:
            grouped, normed = net.group[where.start] >= 0, following in kernels and len(kernels[following]) == 1
            yield (name, net.s if grouped else "shared", kernels[name][1], kernels[name][0] // (net.s if grouped else 1),
                   ("BatchNorm" if following in net.batchnorms else "GroupNorm") if normed else "",
                   (behind if normed else where).stop - where.start)


def multiplications(federation, networks, has):
    """Of convolutions and fully connected layers, for one image in the network of each node: [K]."""
    x, macs = federation.transform(federation.images[:1]), {}
    for s, (net, _) in networks.items():
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net(torch.zeros(net.d + len(net.r_0), device=x.device), x)
        macs[s] = counter.get_total_flops() // 2  # it counts multiplications and additions
    return torch.tensor([macs[s] for s in has.sum(1).tolist()], dtype=torch.double, device=x.device)


# The choice of a depth, on a trained network without groups


def preferences(federation, Omega, images=20):
    """The class preferences P = [p_1, ..., p_C] of the neurons of each layer but the last: name -> [neurons, classes] (D9).

    p_c = sum over images x of class c of A(x) * dZ_c/dA(x). A(x): its activation, behind ReLU and pooling. Z_c: the logit.
    """
    net, P = federation.net, {}
    neurons = {name.removesuffix(".weight"): shape[0] for name, _, shape in net.tensors}
    w = Omega[: net.d].detach().requires_grad_()
    for c in range(net.classes):
        index, seen = (federation.labels[: federation.data.n_train] == c).nonzero()[:images, 0], []
        x = federation.transform(federation.images[index])
        Z, _ = net.forward(w, Omega[net.d :], x, torch.arange(net.s, device=w.device), seen=seen)
        activations = [A for _, A in seen[1:]]  # a layer's are what the next layer sees
        for (name, _), A, dZ in zip(seen, activations, torch.autograd.grad(Z[:, c].sum(), activations)):
            p = (A * dZ).detach().reshape(len(index), neurons[name], -1).sum((0, 2))  # over images, and over a channel's pixels
            P.setdefault(name, []).append(p)
    return {name: torch.stack(p, 1) for name, p in P.items()}


def total_variance(P):
    """TV of a layer: the mean over its neurons q of ||P_q - mean over q of P_q||_2. P_q: row q of P, divided by its sum (D9).

    P [neurons, classes]. The sum is of absolute values, since entries have both signs.
    """
    P_q = P / P.abs().sum(1, keepdim=True).clamp(min=1e-30)
    return (P_q - P_q.mean(0)).norm(dim=1).mean()


def measure_tv(federation, Omega, t):
    """With --tv, after the last round, what the record gets: TV by layers."""
    if not federation.args.tv or t < federation.args.rounds - 1:
        return {}
    return {"tv": {name: float(total_variance(P)) for name, P in preferences(federation, Omega).items()}}


def show(run):
    """With --tv, prints TV of each layer and the depth it suggests; draws tv.png."""
    tv = run.record()["final"].get("tv")
    if not tv:
        return
    middle = (min(tv.values()) + max(tv.values())) / 2
    depth = next(name for name, value in tv.items() if value >= middle).split(".")[0]  # D9
    print("\n" + "\n".join(f"TV      {name:<20}{value:8.4f}" for name, value in tv.items()))
    print(f"TV      suggests --depth {depth}, the first layer that reaches {middle:.4f}")
    with common.drawing(run.out / "tv.png", size=(1.5 + 0.45 * len(tv), 3.5)) as axis:
        axis.bar(list(tv), list(tv.values()))
        axis.axhline(middle, color="black", linestyle="--", linewidth=1)
        axis.tick_params(axis="x", rotation=90)
        axis.set(ylabel="TV", title=f"{run.federation.net.name}, {run.federation.data.name}: suggests {depth}")


if __name__ == "__main__":
    main()
