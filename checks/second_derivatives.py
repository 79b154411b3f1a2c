"""What a gradient costs all clients at once, by torch.func.grad and by vjp (common.grad): the
operations of a step, without views, and the most memory that its tensors take. They are counted on
the meta device, which computes nothing.

    python checks/second_derivatives.py
"""

import pathlib
import sys
import weakref

import torch
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
import common
import fl.net
import fl.training

CLIENTS, B = 10, 20


class Count(TorchDispatchMode):
    """operations, and the most bytes of tensors that are made here and alive at a time."""

    operations = held = peak = 0

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        old = {z.untyped_storage()._cdata for z in tree_leaves((args, kwargs))
               if torch.is_tensor(z)}
        made = {z.untyped_storage()._cdata for z in tree_leaves(found) if torch.is_tensor(z)} - old
        self.operations += bool(made) or op._schema.is_mutable  # views are free
        for z in tree_leaves(found):
            place = z.untyped_storage()._cdata if torch.is_tensor(z) else None
            if place is not None and place not in self.seen | old:
                self.seen.add(place)
                size = z.untyped_storage().nbytes()
                weakref.finalize(z.untyped_storage(), self.drop, place, size)
                self.held += size
                self.peak = max(self.peak, self.held)
        return found

    def drop(self, place, size):
        self.seen.discard(place)
        self.held -= size


def main():
    print(f"{CLIENTS} clients, B = {B}{'grad':>22}{'vjp':>22}")
    for model in ("cnn", "vgg9", "resnet18"):
        net = fl.net.Net(model, (3, 32, 32), 10)
        net.constants = {name: z.to("meta") for name, z in net.constants.items()}
        batch = common.Batch(torch.empty(CLIENTS, B, 3, 32, 32, device="meta"),
                             torch.empty(CLIENTS, B, dtype=torch.long, device="meta"),
                             torch.empty(CLIENTS, B, device="meta"), None)
        W, cells = torch.empty(CLIENTS, net.d, device="meta"), []
        for gradient in (grad, fl.training.grad):
            def of_one(w, x, y, mask, gradient=gradient):
                b = common.Batch(x, y, mask, None)
                return gradient(lambda w: common.cross_entropy(net(w, b.x), b))(w)

            with Count() as count, torch.no_grad(), fl.training.set_in_thread(vmapped=True):
                vmap(of_one)(W, *batch[:3])
            cells.append(f"{count.operations:>9} ops {count.peak / 2**20:>6.0f} MiB")
        print(f"{model:<24}{cells[0]:>22}{cells[1]:>22}")


if __name__ == "__main__":
    main()
