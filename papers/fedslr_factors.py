"""FedSLR's factors: the GKR of a finished run as a network of thinner layers, and its latency.

    python -m papers.fedslr_factors FOLDER

Reads FOLDER/result.json and FOLDER/model.pt, which fedslr.py has written. Writes the factorised
network to FOLDER/factors.pt, as a state dict. Measures the median milliseconds that the dense and
the factorised network take for 20 test images (Table 9), and adds them to result.json as
final["latency"].
"""

import copy
import pathlib
import statistics

import torch
from torch import nn

import common
import fedslr
from fl import records

from . import reading


def factorised(network, ranks):
    """Returns a copy of the network in which two layers replace each convolution (without groups)
    and linear layer whose two factors have fewer numbers than its weight. ranks: name of a layer ->
    rank of its weight."""
    network = copy.deepcopy(network)
    for name, layer in list(network.named_modules()):
        whole = type(layer) in (nn.Conv2d, nn.Linear) and getattr(layer, "groups", 1) == 1
        if name in ranks and whole:  # not a subclass, which may compute something else
            rank, (rows, columns) = max(ranks[name], 1), fedslr.pi(layer.weight).shape
            if rank * (rows + columns) < rows * columns:
                network.set_submodule(name, two_layers(layer, rank))
    return network


@torch.no_grad()
def two_layers(layer, rank):
    """Returns two layers that together compute what the layer does, whose weight has this rank."""
    n, c, k1, k2 = (*layer.weight.shape, 1, 1)[:4]
    U, s, Vh = torch.linalg.svd(fedslr.pi(layer.weight), full_matrices=False)
    tall, wide = U[:, :rank] * s[:rank].sqrt(), s[:rank, None].sqrt() * Vh[:rank]
    bias = layer.bias is not None
    if type(layer) is nn.Linear:
        pair = [nn.Linear(c, rank, bias=False), nn.Linear(rank, n, bias)]
    else:  # first along the rows of an image, then along its columns
        step, pad, gaps, mode = layer.stride, layer.padding, layer.dilation, layer.padding_mode
        pads = [pad, pad] if isinstance(pad, str) else [(0, pad[1]), (pad[0], 0)]
        pair = [nn.Conv2d(c, rank, (1, k2), (1, step[1]), pads[0], (1, gaps[1]), 1, False, mode),
                nn.Conv2d(rank, n, (k1, 1), (step[0], 1), pads[1], (gaps[0], 1), 1, bias, mode)]
    pair = nn.Sequential(*pair).to(layer.weight)
    pair[0].weight.copy_(wide.reshape(pair[0].weight.shape))  # [rank, c*k2] -> [rank, c, 1, k2]
    tall = tall.view(n, k1, rank).transpose(1, 2)
    pair[1].weight.copy_(tall.reshape(pair[1].weight.shape))  # [n, rank, k1] -> [n, rank, k1, 1]
    if bias:
        pair[1].bias.copy_(layer.bias)
    return pair


@torch.no_grad()
def milliseconds(network, x, repeats=50):
    """Returns the median time of network(x), after ten calls that do not count."""
    times = []
    for _ in range(repeats + 10):
        start = common.now(x.device)
        network(x)
        times.append(1000 * (common.now(x.device) - start))
    return round(statistics.median(times[10:]), 3)


def main(argv=None):
    parser = common.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=pathlib.Path, help="--out of a finished run of fedslr.py")
    parser.add_argument("--device", help="where to measure (default: the run's)")
    given = parser.parse_args(argv)
    record, federation, dense = reading.trained(given.folder, "fedslr", given.device)
    thin = factorised(dense, record["final"]["ranks"])
    x = federation.transform(federation.images[federation.data.n_train :][:20])
    times = {"dense_ms": milliseconds(dense, x), "factorised_ms": milliseconds(thin, x)}
    torch.save(thin.cpu().state_dict(), given.folder / "factors.pt")
    record["final"]["latency"] = times
    part = given.folder / "result.part"  # so that a full disk does not cost the record
    part.write_text(records.text(record))
    part.replace(given.folder / "result.json")
    common.say(f"{given.folder}/factors.pt: 20 images take {times['factorised_ms']} ms, the dense "
               f"network {times['dense_ms']} ms")


if __name__ == "__main__":
    main()
