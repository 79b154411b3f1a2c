"""The flags that all files share, their types, and `parse`."""

import argparse
import os
import re
import sys

import torch

from .data import DATASETS
from .files import find, seed_all
from .machine import lacks_tf32, refuse
from .models import MODELS
from .splits import SPLITS, USED_BY, scheme, unused
from .transforms import TRANSFORMS


class Parser(argparse.ArgumentParser):
    def error(self, message):
        if "unrecognized arguments: --seeds" in message:
            message += "; one run has one --seed, and python compare.py --seeds N makes several"
        refuse(f"{message} (see --help)")


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        plain = action.default is None or action.default is False
        return action.help if plain else super()._get_help_string(action)


def between(kind, low, high=float("inf"), without_low=False):
    """An argparse type: a finite number in [low, high], or in (low, high]."""

    def parse_number(text):
        value, inf = kind(text), float("inf")
        if not (low < value <= high if without_low else low <= value <= high) or value == inf:
            limits = f"{'above' if without_low else 'at least'} {low}"
            limits += f" and at most {high}" if high < inf else ""
            limits = "finite" if value == inf == high else limits
            raise argparse.ArgumentTypeError(f"{text} must be {limits}")
        return value

    parse_number.__name__ = "number" if kind is float else "whole number"
    return parse_number


positive_int, nonnegative_int = between(int, 1), between(int, 0)
positive, nonnegative = between(float, 0, without_low=True), between(float, 0)
fraction, positive_fraction = between(float, 0, 1), between(float, 0, 1, without_low=True)


def ascending(text):
    """An argparse type: whole numbers as 1,3,10, each above the one before. Returns the text."""
    numbers = [positive_int(word) for word in text.split(",")]
    if numbers != sorted({*numbers}):
        raise argparse.ArgumentTypeError(f"{text} must ascend, as 1,3,10")
    return text


class Arguments(argparse.Namespace):
    __slots__ = "argv",  # the command line, which vars(args) lacks


def parser(doc, **defaults):
    """Returns a parser of the common flags, with an algorithm's defaults. doc: the file's."""
    about, command, *_ = (doc or "").split("\n\n") + [""]
    p = Parser(description=about, epilog=command, formatter_class=Help, allow_abbrev=False)
    flag = p.add_argument_group("data (the same in every file)").add_argument
    flag("--dataset", default="cifar10",
         help=f"{' '.join(DATASETS)}, the path of a .npz or of a folder of images, or leaf:FOLDER "
              "(docs/extend.md); defaults of other flags depend on it (--dataset NAME --help)")
    flag("--data-dir", default="data",
         help="NAME.npz is taken from here if it exists, else downloads go here")
    flag("--resize", type=positive_int, metavar="N",
         help="scale and cut the images of a folder to N x N pixels")
    flag("--test-share", type=fraction, metavar="SHARE",
         help="of a data set without test images: hold out this share of each class")
    flag("--classes", type=positive_int,
         help="how many classes there are, if the training images lack some")
    flag("--limit", type=positive_int,
         help="use only this many training images, equally many of each class")
    flag("--limit-test", type=positive_int,
         help="test on only this many central images, equally many of each class, and on as many "
              "of all clients' own test images together")
    flag("--augment-once", action="store_true",
         help="move every image by up to 4 pixels each way and mirror half of them, once "
              "and for all")
    flag("--split", default="shards", metavar="NAME",
         help=f"how the training images are given to the clients: {' '.join(SPLITS)}, or "
              "path/to/file.py:function (docs/extend.md); natural: as the data set says (the "
              "array client_train of a .npz, the users of LEAF)")
    flag("--alpha", type=nonnegative, default=1.0,
         help="alpha of the Dirichlet splits. dirichlet-classes, fedma: of each class's shares "
              "over the clients; fedslr: of each client's shares over the classes; "
              "unequal-classes: of Gamma amounts before scaling; dirichlet-hsu: alpha * p, where p "
              "are the classes' shares; others refuse it")
    flag("--per-client", type=positive_int, default=2,
         help="s, shards (--split shards) or classes (--split classes, "
              "unequal-classes, lognormal) a client; others refuse it")
    flag("--clients", type=positive_int, default=100,
         help="K, clients in all (--split semantic and natural find their own)")
    flag("--client-test", type=fraction, default=0.2,
         help="share of a client's images held out as its own test images; 0: it is tested on "
              "central test images instead, drawn in its class proportions")
    flag("--client-val", type=fraction, default=0.0,
         help="share of a client's images held out for validation: the record then has val_mean "
              "and val_loss; superfed.py and persfl.py also choose on these images")
    flag("--transform", default="scale", choices=TRANSFORMS,
         help="of pixels. scale: to [0, 1]; centre: to [-1/2, 1/2]; half: to [-1, 1], by (x - .5)"
              " / .5; normalize: each channel to mean 0 and deviation 1; the others: a paper's")
    flag = p.add_argument_group("training (the same in every file)").add_argument
    flag("--model", default="cnn", metavar="NAME",
         help=f"the network: {' '.join(MODELS)}, torchvision:NAME, or path/to/file.py:NAME of a "
              "class or function that gives an nn.Module (docs/extend.md)")
    flag("--batchnorm", choices=("group", "frozen"),
         help="for networks with BatchNorm. group: GroupNorm replaces each BatchNorm; frozen: its "
              "running statistics are constants, for a pretrained --init")
    flag("--no-dropout", action="store_true",
         help="makes a network's dropout inactive, as in eval()")
    flag("--init", metavar="FILE", help="w_0: the state dict of a network, as torch.save writes it")
    flag("--fraction", type=fraction, default=0.1,
         help="C, share of the clients in a round; at least one is drawn")
    flag("--rounds", type=positive_int, default=100, help="T, R or E_G, rounds of communication")
    flag("--epochs", type=positive_int, default=1, help="E (E_L in PersFL), local epochs")
    flag("--batch-size", type=nonnegative_int, default=20,
         help="B, local minibatch; 0: all the client has")
    flag("--lr", type=positive, default=0.01, help="eta, local learning rate")
    flag("--lr-decay", type=positive_fraction, default=1.0,
         help="eta is multiplied by this every round")
    flag("--momentum", type=fraction, default=0.0,
         help="of local SGD; its buffer starts at 0 in every round")
    flag("--weight-decay", type=nonnegative, default=0.0,
         help="adds this times w to the gradient (of tfcnn: for the kernels of its two hidden "
              "fully connected layers)")
    flag = p.add_argument_group("running (the same in every file)").add_argument
    seed = between(int, 0, 2**32 - 1)
    flag("--seed", type=seed, default=0,
         help="of initial weights, sampled clients, order of images, augmentation")
    flag("--split-seed", type=seed, default=0, help="of the split, and of --augment-once")
    flag("--device", default="cuda" if torch.cuda.is_available() else "cpu",
         help="cpu, cuda, cuda:1, ...")
    flag("--parallel", type=positive_int,
         help="on a CPU: clients trained at once, a thread each (default: its cores)")
    flag("--precision", choices=("fp32", "tf32", "bf16"),
         help="of a network in training (tf32: of its matrix products and convolutions); all else "
              "is fp32 (default: tf32 on a GPU from Ampere on, else fp32)")
    flag("--engine", choices=("auto", "loop"), default="auto",
         help="on a GPU. auto: all clients at once, or CUDA graphs, where they give what the loop "
              "gives; loop: plainly one client after the other")
    flag("--eval-every", type=positive_int, default=5,
         help="rounds between evaluations; the last is always evaluated")
    flag("--fine-tune", type=ascending, metavar="E,...",
         help="after the last round train each client's model (where there is none, the global "
              "one) for E more epochs on the client's own images, and measure it; e.g. 1,3,10")
    flag("--fine-tune-lr", type=positive, metavar="ETA",
         help="its learning rate (default: the eta of the next round)")
    if "target" in defaults:  # of files that call run.stop_at_target
        flag("--target", type=positive_fraction, nargs="*", metavar="TOP1",
             help="measure the global model after every round; stop when its accuracy has reached "
                  "all these")
    flag("--out", help="folder of the record (default: runs/<algorithm>-<dataset>-<seed>)")
    flag("--resume", action="store_true",
         help="continue the run whose state lies in the --out folder")
    flag("--save-clients", action="store_true",
         help="write the clients' own models, if there are any, to clients.pt, beside the global "
              "model.pt")
    flag("--tensorboard", action="store_true",
         help="write the measures for TensorBoard into --out, too (needs the package tensorboard)")
    flag("--plot", action="store_true",
         help="draw learning curves, accuracy per client and the split into --out")
    p.set_defaults(**defaults)
    p.common = flags = {action.dest for action in p._actions}
    # perhaps flags of the file's own
    p.unknown = {name: z for name, z in defaults.items() if name not in flags}
    return p


def parse(p, by_dataset, argv=None):
    """Returns the parsed argv. by_dataset[DATASET], then by_dataset[DATASET, SPLIT], if given,
    replace defaults."""
    argv = sys.argv[1:] if argv is None else [*map(str, argv)]
    if not isinstance(by_dataset, dict):
        refuse("common.parse(parser, BY_DATASET, argv) takes a dict second, as {}")
    if odd := [name for name, z in by_dataset.items() if not isinstance(z, dict)]:
        refuse(f"common.parse: BY_DATASET[{odd[0]!r}] is no dict; BY_DATASET has one, of defaults, "
               "for each data set")
    named = [name[0] if isinstance(name, tuple) else name for name in by_dataset]
    if odd := [name for name in named if not (
            name in DATASETS or re.search("[/.:]", name) or os.path.isdir(name))]:
        refuse(f"common.parse: BY_DATASET has {odd[0]!r}, which is none of {', '.join(DATASETS)}, "
               "no path and no folder")
    if odd := [action.option_strings[-1] for action in p._actions if action.type is bool]:
        refuse(f"{odd[0]} has type=bool, to which every word is True, False too; use "
               "action=argparse.BooleanOptionalAction, with --no-... for False")
    shown = {action.dest: action.option_strings for action in p._actions}
    if odd := [action for action in p._actions if action.option_strings != shown[action.dest]]:
        refuse(f"{odd[0].option_strings[-1]} and {shown[odd[0].dest][-1]} both set "
               f"args.{odd[0].dest}; give one another dest")
    common, own = getattr(p, "common", ()), getattr(p, "unknown", {})
    if odd := [action.option_strings[-1] for action in p._actions if action.dest not in common
               and isinstance(action, argparse._StoreTrueAction) and action.default]:
        refuse(f"{odd[0]} is True without being given, so nothing makes it False; use "
               "action=argparse.BooleanOptionalAction")
    if odd := [action for action in p._actions
               if own.get(action.dest, action.default) != action.default]:
        refuse(f"the defaults say {odd[0].dest}={own[odd[0].dest]}, and add_argument "
               f"default={odd[0].default}; leave out one")
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", default=p.get_default("dataset"))
    first.add_argument("--split")
    for name in USED_BY:
        first.add_argument(f"--{name}".replace("_", "-"))
    given = first.parse_known_args(argv)[0]
    p.set_defaults(**by_dataset.get(given.dataset, {}))
    if given.dataset.startswith("leaf:"):
        p.set_defaults(split="natural")
    split = given.split or p.get_default("split")
    p.set_defaults(**by_dataset.get((given.dataset, split), {}))
    flags = {action.dest for action in p._actions}
    named = [*own, *(name for z in by_dataset.values() for name in z)]
    if unknown := [name for name in named if name not in flags]:
        refuse(f"the defaults name {unknown[0]}, but there is no flag "
               f"--{unknown[0].strip('_').replace('_', '-')}")
    for action in p._actions:  # argparse has a flag's type see texts alone
        value = p.get_default(action.dest)
        if action.type and type(value) in (int, float):
            try:
                action.type(str(value))
            except (argparse.ArgumentTypeError, ValueError) as problem:
                refuse(f"the defaults say {action.dest}={value}: {problem}")
    args = p.parse_args(argv, Arguments())
    args.argv = argv
    if not args.model.startswith("torchvision:"):
        find("model", args.model, MODELS)  # refuses a name that nothing has
    scheme(args.split)
    for name in unused(args.split):
        if getattr(given, name):
            default = "" if given.split else " (the default here)"
            flag = "--" + name.replace("_", "-")
            p.error(f"--split {args.split}{default} has no use for {flag}; leave it out, or take "
                    f"--split {' or '.join(USED_BY[name])}")
    if args.fine_tune_lr and not args.fine_tune:
        p.error("--fine-tune-lr is the rate of --fine-tune E, which is not given; leave it out")
    if args.out == "":
        p.error("--out is empty; name a folder, or leave it out")
    gpu = args.device.startswith("cuda")
    old = gpu and lacks_tf32(args.device)
    args.precision = args.precision or ("tf32" if gpu and not old else "fp32")
    if args.precision == "tf32" and not gpu:
        p.error("--precision tf32 is for GPUs; use fp32 or bf16")
    if args.precision != "fp32" and old:
        p.error(f"--precision {args.precision} is for GPUs from Ampere on; use fp32")
    seed_all(args.seed)  # what a method draws before its loop
    return args
