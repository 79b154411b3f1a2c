"""Psi-Net: features allocated by a grouped structure. Yu et al., "Heterogeneous Federated
Learning", 2020, arXiv 2008.06767, later Fed2 (KDD 2021). We had only notes and four figures.

    python psinet.py --dataset cifar10                         VGG-9, ten nodes with four classes
    python psinet.py --dataset cifar10 --groups 0 --norm gn    FedAvg with GroupNorm

    global (paper)  100 rounds, bf16, seed 0
    .8356 (.883)    Psi-Net  results/psinet-norm/psinet-cifar10-prune/0
    .8117 (.833)    FedAvg   results/psinet-norm/psinet-cifar10-groups-0-norm-gn/0

"personal" tests Omega on images in each node's class proportions. docs/psinet.md explains these:

    D1  Line 3: each group of the first grouped layer sees all channels.
    D2  Widths are rounded up to multiples of G. A later group starts like a layer of its size.
    D3  Line 1: G = 10; the depth is conv5 (VGG-9) or conv3-2 (VGG-16); M(g) are consecutive labels.
    D4  GroupNorm has as many groups as the layer. FedAvg's has two, after each convolution.
    D5  Lines 9, 10 weight node i by its images. A group that no node of S has keeps its value.
    D6  Line 6: all splits count as extreme. The softmax leaves pruned groups out.
    D7  Lines 7, 11, 12: eta, B, momentum, decay are FedMA's; T and E Fed2's; crops FedSLR's.
    D8  Line 7 takes all nodes, or samples some with --fraction. Line 11 shuffles in every epoch.
    D9  papers/psinet_depth.py suggests a depth: the first layer with a high total variance.

Omega [e]: weights w [d] and running statistics r [e-d] of all groups; n_i: i's number of images.

    Structure
     1  choose the number G of groups, the classes M(g) of each, and the depth, where groups begin
     2  layers below the depth are shared by all classes: convolutions, each with BatchNorm
     3  convolutions from the depth on are cut into G groups, each followed by GroupNorm
     4  linear layers have G blocks: block g sees group g; in the last layer it gives M(g)'s logits
    Server
     5  choose Omega = {Omega_shared, Omega_1, ..., Omega_G}
     6  G_i = node i's groups: all, or in extreme cases (D6) those with a class that i holds
     7  for each round t = 0, 1, ..., T-1, with the nodes S:
     8      for each i in S, in parallel: omega^i = LocalUpdate(i, Omega_shared and G_i's Omega_g)
     9      Omega_shared = average of omega^i_shared over i in S, running statistics included
    10      Omega_g = average of omega^i_g over the nodes i in S with g in G_i
    LocalUpdate(i, omega)
    11  for each of E local epochs, for each minibatch b:
    12      omega = omega - eta * gradient of the cross-entropy (D6); running statistics follow b's
"""

import argparse
from math import ceil
from types import SimpleNamespace as State

import torch
import torch.nn.functional as F
from torch import nn

import common

# VGG-9 in ten groups for CIFAR-10. A group "sees" its inputs and "gives" its outputs, which are
# channels or neurons.
#     layer       groups   group sees     gives   norm         weights
#     conv1       shared            3        32   BatchNorm        960   l.2
#     conv2       shared           32        64   BatchNorm     18,624   l.2
#     conv3       shared           64       128   BatchNorm     74,112   l.2
#     conv4       shared          128       128   BatchNorm    147,840   l.2
#     conv5       10              128        26   GroupNorm    300,300   l.3: sees all channels (D1)
#     conv6       10               26        26   GroupNorm     61,620   l.3
#     fc1         10              416        52                216,840   l.4: 26 channels of 4 x 4
#     fc2         10               52        52                 27,560   l.4
#     fc3         10               52         1                    530   l.4: its class's logit


class PsiNet(nn.Module):
    """A network in G groups; G = 0 means no groups, for FedAvg. `plain` is the same network without
    groups, an nn.Sequential of named layers (VGG9 of fl/models.py). Layers keep their names;
    conv5-norm follows conv5. `depth` is the first layer with groups; `norm` is "gn", "bn" or
    "none". Block g of the last layer gives the logits of M(g), labels g*C/G to
    (g+1)*C/G - 1 of C classes."""

    def __init__(self, plain, G, depth, norm):
        super().__init__()
        self.grouped = []  # the names of the layers with groups
        old = new = 1  # outputs of the previous layer: in `plain`, and here
        for name, layer in plain.named_children():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                outputs, inputs = layer.weight.shape[:2]  # channels or neurons
                width = G * ceil(outputs / max(G, 1))  # D2
                if self.grouped:  # group g sees group g of the previous layer
                    layer = cut(layer, inputs // old * new, width, groups=G)  # l.3-4
                    self.grouped.append(name)
                elif name == depth:  # l.1: here groups begin; each sees all inputs (D1)
                    layer = cut(layer, inputs, width, groups=1)  # l.3
                    self.grouped.append(name)
                old, new = outputs, len(layer.weight)
            self.add_module(name, layer)  # l.2: unchanged below the depth
            if isinstance(layer, nn.Conv2d) and norm != "none":
                if norm == "gn" and (self.grouped or not G):
                    after = nn.GroupNorm(G or 2, layer.out_channels)  # l.3 (D4)
                else:
                    after = BatchNorm(layer.out_channels)  # l.2
                self.add_module(name + "-norm", after)

    def forward(self, x, mask=None):
        """Returns logits [B, classes] (l.4) and the BatchNorms' next running statistics [e-d]. In
        training, mask [B] is 1 for images and 0 for padding."""
        running = [x.new_zeros(0)]
        for layer in self.children():
            if isinstance(layer, BatchNorm):
                x, mean, var = layer(x, mask)
                running += [mean, var]
            else:
                x = layer(x)
        return x, torch.cat(running)


def cut(layer, inputs, outputs, groups):
    """Returns a layer like `layer` in which group g of the outputs sees group g of the inputs."""
    bias = layer.bias is not None
    if isinstance(layer, nn.Linear):
        return GroupedLinear(inputs // groups, outputs, bias)
    shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    return nn.Conv2d(inputs, outputs, *shape, groups, bias, layer.padding_mode)


class GroupedLinear(nn.Linear):
    """Block g of the outputs sees block g of the inputs; the weight is [outputs, inputs/groups]."""

    def forward(self, x):  # [B, inputs] -> [B, outputs]
        groups = x.shape[1] // self.in_features
        if groups == 1:
            return super().forward(x)
        x, W = x.unflatten(1, (groups, -1)), self.weight.unflatten(0, (groups, -1))
        y = torch.einsum("bgi,goi->bgo", x, W).flatten(1)  # l.4: block g of x, block g of W
        return y if self.bias is None else y + self.bias


def groups_of_nodes(federation, args):
    """Returns has [K, G]: whether node i has group g; and has_class [K, classes]: whether it has
    that class's group."""
    G, classes = max(args.groups, 1), federation.data.classes
    group = torch.arange(classes, device=federation.device) * G // classes  # l.1: M(g) (D3)
    has = torch.zeros(federation.K, G, dtype=torch.bool, device=federation.device)
    for i, images in enumerate(federation.split.train):
        has[i, group[federation.labels[images]]] = True  # l.6: G_i (D6)
    has = has if args.prune else torch.ones_like(has)
    return has, has[:, group]


MISSING = -1e9  # the logit of a class whose group a node lacks, so that its probability is 0 (D6)


def local_training(net, args):
    """Returns local_update(Omega, has_class, epochs, eta), LocalUpdate of a node. `epochs` yields E
    passes over its images, each cut into minibatches b (common.Epochs). has_class [classes]: which
    classes are in its groups."""
    sgd = common.sgd(args, net.decayed)  # w - eta * gradient, with momentum and decay (D7)

    @common.step  # on a GPU it runs for all nodes at once, or as a CUDA graph
    def step(w, u, r, has_class, b, eta):  # weights, their momentum, running statistics
        def loss(w):
            logits, next_r = net.forward(w, r, b.x, b.mask)
            logits = torch.where(has_class, logits, MISSING)  # l.12 (D6): [B, classes]
            return common.cross_entropy(logits, b), next_r

        gradient, r = common.grad(loss, has_aux=True)(w)  # l.12: 0 for groups that i lacks
        w, u = sgd(w, u, gradient, eta)  # l.12: w - eta * gradient
        return w, u, r  # l.12: r from BatchNorm

    def local_update(Omega, has_class, epochs, eta):
        w, r = Omega[..., : net.d], Omega[..., net.d :]
        u = torch.zeros_like(w)  # momentum (D7)
        for minibatches in epochs:  # l.11 (D8)
            for b in minibatches:  # l.11: step does line 12
                w, u, r = step(w, u, r, has_class, b, eta)
        return torch.cat([w, r], -1)

    return local_update


def aligned_average(Omega_i, has, n_i, Omega):
    """Returns the mean of each entry of Omega_i [m, e] over nodes that have it (has [m, e];
    all have Omega_shared), weighted by n_i [m] (D5). An entry that no node has keeps its value in
    Omega [e]."""
    n = n_i @ has.to(Omega_i.dtype)  # [e]: images of the nodes that have it
    return torch.where(n > 0, n_i @ (Omega_i * has) / n.clamp(min=1), Omega)  # l.9-10 (D5)


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm that also returns its next statistics: vmap allows no change in place."""

    def forward(self, x, mask=None):
        """Returns x [B, C, H, W] normalised, the next running means and variances [C]. In training,
        mask [B] selects the images whose statistics normalise x."""
        next_mean, next_var = mean, var = self.running_mean, self.running_var
        precision, (x, weight, bias) = x.dtype, (z.to(mean) for z in (x, self.weight, self.bias))
        if mask is not None and common.may_look(x) and mask.all() and x[:, 0].numel() > 1:
            mean, var = mean.clone(), var.clone()  # l.12: F.batch_norm is fast and moves both
            return F.batch_norm(x, mean, var, weight, bias, training=True).to(precision), mean, var
        if mask is not None:
            mask = mask.to(x.dtype)
            real = mask[:, None] / mask.sum().clamp(min=1)
            own_var, own_mean = torch.var_mean(x, (2, 3), correction=0)  # [B, C]: of each image
            mean = (real * own_mean).sum(0)  # [C]: of all real images
            var = (real * (own_var + (own_mean - mean) ** 2)).sum(0)
            n = (mask.sum() * x.shape[2:].numel()).clamp(min=2)
            next_mean = 0.9 * next_mean + 0.1 * mean  # l.12: a tenth of the way to b's
            next_var = 0.9 * next_var + 0.1 * (var * n / (n - 1))  # l.12
        factor = weight * (var + 1e-5).rsqrt()
        y = x * factor[:, None, None] + (bias - mean * factor)[:, None, None]
        return y.to(precision), next_mean, next_var


class GroupedNet(common.Net):
    """PsiNet as a function of Omega = [w | r]: its weights w, of which there are self.d, and all
    BatchNorms' running statistics r. group: the group of each entry of Omega, -1 if shared.
    --groups 0 counts as one group."""

    def __init__(self, args, shape, classes, device="cpu"):
        plain = common.Net(args.model, shape, classes, device, args.batchnorm, args.no_dropout)
        G, depth = args.groups, None  # l.1
        if G:
            depth = args.depth or DEPTH[args.model]  # l.1
        self.G = max(G, 1)
        refuse_what_cannot_be_cut(args.model, plain.module, classes, G, depth)
        super().__init__(args.model, shape, classes, device,
                         build=lambda: PsiNet(plain.build(), G, depth, args.norm))

        def start(name, shape):  # as in fl/models.py, adapted to groups (D2)
            layer = name.rpartition(".")[0]
            kind, scale = plain.start(name, shape)  # "uniform" needs no change
            if kind == "normal":
                scale = plain.start(name, plain.module.get_parameter(f"{layer}.weight").shape)[1]
                if layer in self.module.grouped[1:]:  # its fan is G times smaller
                    scale *= G**0.5
            return kind, scale

        if plain.start:
            self.module.start = start
        self.name += f" in {G} groups from {depth} on" if G else " without groups"
        self.notes = plain.notes
        if G and not plain.start:
            self.notes.append(f"note    from {depth} on, layers begin with PyTorch's own weights")
        self.running = [name for name in self.constants if ".running_" in name]
        self.sizes_r = [self.constants[name].numel() for name in self.running]
        groups = []
        for name, size in zip(self.names + self.running, self.sizes + self.sizes_r):
            layer = name.rpartition(".")[0].removesuffix("-norm")  # its groups lie side by side
            own = range(self.G) if layer in self.module.grouped else [-1]
            groups.append(torch.tensor(own, device=device).repeat_interleave(size // len(own)))
        self.group = torch.cat(groups)

    def entries(self, has):
        """Returns which entries of Omega nodes have [m, e], given their groups `has` [m, G]."""
        return has[:, self.group.clamp(min=0)] | (self.group < 0)  # l.9-10

    def with_statistics(self, w):
        """Returns Omega = [w | r] with the first r: means 0 and variances 1, or those of --init."""
        return torch.cat([w, *(self.constants[name] for name in self.running)])

    def forward(self, w, r, x, mask=None):
        """Returns what PsiNet returns, with the weights w and the running statistics r."""
        values = self.values(w.to(x.dtype).split(self.sizes))
        values |= dict(zip(self.running, r.split(self.sizes_r)))
        logits, next_r = self.call(values, (x, mask))
        return logits.to(w.dtype), next_r.to(r.dtype)

    def __call__(self, Omega, x):
        return self.forward(Omega[: self.d], Omega[self.d :], x)[0]

    def state_dict(self, Omega):
        running = zip(self.running, Omega[self.d :].cpu().split(self.sizes_r))
        return super().state_dict(Omega[: self.d]) | {name: z.clone() for name, z in running}


def main(argv=None):
    args = arguments(argv)
    federation = common.Federation(args, lambda *images: GroupedNet(args, *images))  # l.1-4
    net = federation.net
    run = common.Run(__file__, federation)
    local_update = local_training(net, args)
    has, has_class = groups_of_nodes(federation, args)  # l.6: [K, G], [K, classes]
    describe(run, has)

    Omega = net.with_statistics(federation.initial_weights())  # l.5 (D2): [e]
    state = State(Omega=Omega)
    for t in run.rounds(state, model="Omega"):  # l.7
        S = federation.sample(t)  # l.7 (D8): [m]
        # for each node of S, train calls local_update with its rows of `own`, its epochs and what
        # is shared
        own = [state.Omega.expand(len(S), -1), has_class[S]]
        Omega_i = federation.train(local_update, S, t, own=own,
                                   shared=[federation.eta(t)])  # l.8: [m, e]
        has_entry, n_i = net.entries(has[S]), federation.n[S]  # [m, e], [m]
        state.Omega = aligned_average(Omega_i, has_entry, n_i, state.Omega)  # l.9-10
        sent = int(has_entry.sum())
        run.sent(up=sent, down=sent)  # for the record: how many weights are sent
        if run.evaluates():
            run.log(federation.evaluate(state.Omega), federation.evaluate_clients(state.Omega))
    return run.record()


# --------------------------------------------------------------------------------------------------
# Around it

# The notes' ablation of norms gives each node 4 classes, that of G (CIFAR-100) 50. See D3, D7, D8
DEFAULTS = dict(model="vgg9", split="classes", clients=10, per_client=4, client_test=0.0,
                fraction=1.0, rounds=100, epochs=1, batch_size=64, lr=0.01, momentum=0.9,
                weight_decay=1e-4, transform="fedslr")
# ours, for a quick look
QUICK = dict(model="cnn", transform="normalize", rounds=12, batch_size=20, lr=0.02, eval_every=2)
BY_DATASET = {"cifar100": dict(model="vgg16", per_client=50, rounds=200), "shapes": QUICK}
DEPTH = {"vgg9": "conv5", "vgg16": "conv3-2", "cnn": "conv3"}  # l.1: ours (D3; see D9)


def arguments(argv):
    parser = common.parser(__doc__, **DEFAULTS)
    flags = parser.add_argument_group("Psi-Net")
    flags.add_argument("--groups", type=common.nonnegative_int, default=10, help="G; 0 is FedAvg")
    flags.add_argument("--depth", help=f"the first layer with groups (default: {DEPTH})")
    flags.add_argument("--norm", choices=("none", "bn", "gn"), default="gn",
                       help="after convolutions; gn is GroupNorm, below the depth BatchNorm")
    flags.add_argument("--prune", action=argparse.BooleanOptionalAction, default=True,
                       help="node i has only groups with a class of its images (--no-prune: all)")
    args = common.parse(parser, BY_DATASET, argv)
    args.prune = args.prune and args.groups > 0
    if args.groups and not args.depth and args.model not in DEPTH:
        common.refuse(f"--model {args.model} has no default depth; use {', '.join(DEPTH)}, or give "
                      "--depth LAYER (compare.py: --set psinet.depth=LAYER)")
    return args


CHAIN = (nn.Conv2d, nn.Linear, nn.Flatten, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh,
         nn.Sigmoid, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


def refuse_what_cannot_be_cut(model, plain, classes, G, depth):
    """Refuses all but chains of layers: a shortcut or a norm over all channels joins groups."""
    layers = dict(plain.named_children())
    odd = [f" (it has {name}, a {type(layer).__name__})" for name, layer in layers.items()
           if type(layer) not in CHAIN or getattr(layer, "groups", 1) > 1
           or getattr(layer, "start_dim", 1) != 1]
    odd += [f" ({name} has a hook or requires_grad = False)"
            for name, layer in {**layers, "it": plain}.items()
            if {**layer._forward_hooks, **layer._forward_pre_hooks, **layer._backward_hooks}
            or not all(z.requires_grad for z in layer.parameters())]
    found = [name for name, layer in layers.items() if hasattr(layer, "weight")]
    if found and type(layers[found[-1]]) is not nn.Linear:
        odd.append(f" (its last layer with weights, {found[-1]}, is not nn.Linear)")
    chain = type(plain).forward is nn.Sequential.forward
    if chain and len(layers) < len(plain):
        odd.append(" (it has a layer twice)")
    odd.append("")
    if not chain or odd[0]:
        common.refuse(f"--model {model} can't be cut into groups{odd[0]}; use {', '.join(DEPTH)}, "
                      "or an nn.Sequential of convolutions, linear layers, activations and pooling")
    if G and classes % G:
        common.refuse(f"--groups {G}: use a divisor of {classes}, the number of classes")
    if G and depth not in found:
        common.refuse(f"--depth {depth}: {model} can't be cut there; it has {', '.join(found)}")


def describe(run, has):
    """Notes how many groups and weights the nodes have."""
    net = run.federation.net
    if run.args.groups:
        weights = net.entries(has)[:, : net.d].sum(1).tolist()
        run.note(f"nodes   {common.spread(has.sum(1).tolist())} of {net.G} groups, "
                 f"{common.spread(weights)} weights (least/mean/most)")


if __name__ == "__main__":
    main()
