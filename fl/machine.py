"""Errors and output, devices, and the processes that torchrun starts."""

import atexit
import contextlib
import ctypes
import datetime
import os
import pathlib
import platform
import random
import re
import sys
import time

import filelock
import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm


def world_size():
    """Returns how many processes torchrun has started, 1 without it. Refuses a WORLD_SIZE that is
    left over from something else: its processes would never come."""
    said = os.environ.get("WORLD_SIZE", "1")
    if said != "1" and not dist.is_torchelastic_launched():
        print(f"{program()}: error: WORLD_SIZE is {said!r}, but torchrun has not started this "
              "program; unset WORLD_SIZE RANK", file=sys.stderr)
        raise SystemExit(2)
    return int(said)


def is_main_process():
    """Returns whether this is the only process, or the one of torchrun's that prints and writes."""
    return world_size() == 1 or os.environ["RANK"] == "0"


def program():
    return pathlib.Path(sys.argv[0]).name


def refuse(message, alone=False):
    """Ends the program with one line on stderr and exit code 2. Only the first process prints the
    line; if `alone`, this one does, since the others don't come here."""
    if not (is_main_process() or alone):
        raise SystemExit  # without an error: at the first error torchrun ends all processes
    print(f"{program()}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def when_interrupted(how_to_go_on=None):
    """Has Ctrl-C print one line, with what how_to_go_on() returns, and end the program at once with
    exit code 130, though threads may still train. Without it, the line alone, unless a function
    was given before."""
    if how_to_go_on is None and sys.excepthook is not sys.__excepthook__:
        return

    def end(kind, problem, trace):
        if kind is not KeyboardInterrupt:
            return sys.__excepthook__(kind, problem, trace)
        how = f"; {how_to_go_on()}" if how_to_go_on else ""
        if is_main_process():
            print(f"\ninterrupted{how}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(130)

    sys.excepthook = end


def first_line(problem):
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def say(text):
    """Prints a line, above a progress bar, by the first process alone. If nobody reads any more
    (`| head`), the run goes on."""
    if is_main_process():
        try:
            encoding = sys.stdout.encoding or "utf-8"
            tqdm.write(text.encode(encoding, "replace").decode(encoding))  # ascii has no ±
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def one_at_a_time(path):
    """Lets one run after the other make the file `path`, where the file system has locks."""
    lock = filelock.FileLock(path.with_name(f".{path.stem}.lock"))
    with contextlib.suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            say(f"data    another run gets {path.stem}; this one waits for it")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def find_device(name):
    """Returns the torch.device of this name, with its number. Refuses one that isn't there."""
    several = world_size() > 1
    if several and name.startswith("cuda:"):
        refuse(f"--device {name} is one GPU for {world_size()} processes; use --device cuda, which "
               "gives each its own")
    try:
        own = f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and several else name
        device = torch.zeros(1, device=own).device
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
    except (RuntimeError, AssertionError) as problem:
        refuse(f"--device {name} can't be used: {first_line(problem)}; use --device cpu",
               alone=name == "cuda" and torch.cuda.is_available())  # fewer GPUs than processes
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return device


def lacks_tf32(name="cuda"):
    """Returns whether this GPU lacks TF32 and is slow with bf16: NVIDIA's from before Ampere."""
    with contextlib.suppress(RuntimeError, AssertionError):  # find_device refuses what isn't there
        if torch.version.hip:
            return not torch.cuda.is_tf32_supported()
        return torch.cuda.get_device_capability(name) < (8, 0)
    return False


def join_processes(device):
    """Joins torchrun's other processes, if any. Returns the rank and the number of processes."""
    processes = world_size()
    atexit.unregister(dist.destroy_process_group)  # Run.finish registers it
    if processes > 1 and not dist.is_initialized():
        nccl = device.type == "cuda" and dist.is_nccl_available()  # Windows has only gloo
        patience = datetime.timedelta(hours=2)  # the others wait while one downloads
        dist.init_process_group("nccl" if nccl else "gloo", timeout=patience,
                                device_id=device if nccl else None)
    return int(os.environ["RANK"]) if processes > 1 else 0, processes


def cores(limit="/sys/fs/cgroup/cpu.max"):
    """Returns how many CPU cores this process may use: its share, if torchrun started several.
    limit: the file in which Linux says how much of them a container gets."""
    whole = len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0))
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
        quota, period = map(int, pathlib.Path(limit).read_text().split())
        whole = min(whole, -(-quota // period))
    return max(1, whole // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = found.group(1) if found else platform.processor() or "CPU"
    # CPUs of one name with other instructions round otherwise
    return f"{name} ({cores()} cores, {torch.backends.cpu.get_cpu_capability()})"


def free_memory(device):
    """Returns the bytes of a GPU that nothing holds, with those that PyTorch keeps for the next
    tensor; infinity for a CPU."""
    if device.type != "cuda":
        return float("inf")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def keep_memory():
    """Has glibc keep freed memory for the next tensor. Otherwise large ones go back to the system
    and are zeroed page by page when they are asked for again: a tenth of a step on a CPU."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another system's C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: nothing has pages of its own
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD


def now(device):
    """Waits until the device has finished its work. Returns the clock, in seconds."""
    getattr(torch, device.type).synchronize(device)  # torch.cpu's does nothing
    return time.perf_counter()


def generators(device):
    """Returns the states of the generators that a network or a client could draw from."""
    own = [torch.get_rng_state(), torch.from_numpy(np.random.get_state()[1].astype(int))]
    if torch.device(device).type == "cuda":
        own.append(torch.cuda.get_rng_state(device))
    return [z.tolist() for z in own], np.random.get_state()[2], random.getstate()
