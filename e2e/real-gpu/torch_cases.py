"""What PyTorch does in real workloads, each way of taking memory a case. A case prints one line of JSON: what it
computed, and what became of it at the quota.

    torch_cases.py CASE [--quota BYTES]     one case; with a quota it also runs into it
    torch_cases.py --list

With `--rest FOLDER` the ranks of a case that is in `RANKS` rest once they have computed something, each with a file
there, until there is a file `go`: so that somebody can compare what they hold with what is charged for it.

`judge` compares a run under a quota with one without.
"""

import argparse
import json
import os
import queue
import socket
import sys
import time

CASES = {}
# The ranks of the cases that have some: on one device, or where there are two devices one on each.
RANKS = {"two_gloo_ranks": 2, "one_nccl_rank": 1, "two_nccl_ranks": 2}
REST = "TORCH_CASES_REST"
STEP = 256 << 20
# How much of a quota contexts, libraries and what a case itself holds may take before it is refused.
OVERHEAD = 3 << 30


def case(**environment):
    """A case, and the environment that PyTorch reads when it starts."""

    def register(function):
        CASES[function.__name__] = (function, environment)
        return function

    return register


def checksum(tensor):
    """Of exact values, so that with and without a guard they are the same to the bit."""
    return int(tensor.to("cpu").double().mul(1024).round().long().sum())


def train(torch, steps=6):
    """A small model trained with a fixed seed; the checksum of its weights."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 16)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        batch = torch.randn(256, 512, device="cuda")
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    return sum(checksum(parameter.detach()) for parameter in model.parameters())


def run_into(torch, quota, full=lambda: None):
    """Allocates until it is refused, calls `full` with all of it held, frees, and goes on: how that went."""
    if quota is None:
        return {}
    held, refused = [], None
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        while len(held) * STEP < 4 * quota:
            held.append(torch.ones(STEP, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        refused = type(error).__name__
    count, reserved = len(held), torch.cuda.memory_reserved()
    left = torch.cuda.mem_get_info()[0]
    full()
    held.clear()
    torch.cuda.empty_cache()
    after = torch.ones(STEP, dtype=torch.uint8, device="cuda")
    return {"refused": refused, "held_at_refusal": count * STEP, "reserved_at_refusal": reserved, "total": total,
            "total_of_device": properties, "free_at_first": free, "free_at_refusal": left,
            "goes_on": int(after.sum(dtype=torch.int64)) == STEP}


def judge(case, without, under, quota):
    """Whether a run under a quota is as it must be, and its numbers. `None` where the case cannot be run here."""
    if "skipped" in under or "skipped" in without:
        return None, under.get("skipped") or without.get("skipped")
    wrong = []
    if under["result"] != without["result"]:
        wrong.append(f"it computed {under['result']}, not {without['result']}")
    # Each rank that has a device of its own ran into the quota there, all at once.
    runs = under.get("ranks", [under])
    numbers = []
    for number, run in enumerate(runs):
        whose = f"rank {number} " if len(runs) > 1 else ""
        wrong += [f"{whose or 'it '}{what}" for what in wrong_at_quota(run, quota)]
        numbers.append(f"{whose}refused ({run.get('refused')}) with {run.get('held_at_refusal', 0) / 2**30:.2f} GiB held, "
                       f"sees {run.get('total', 0) / 2**30:.2f} GiB, {run.get('free_at_first', 0) / 2**30:.2f} free at first")
    return not wrong, "; ".join([*wrong, *numbers, f"result {str(under['result'])[:60]}"])


def wrong_at_quota(run, quota):
    """What is not as it must be of a process that ran into its quota on a device."""
    wrong = []
    if run.get("refused") not in ("OutOfMemoryError", 2):
        wrong.append(f"was refused by {run.get('refused')}")
    if not quota - OVERHEAD <= run.get("held_at_refusal", 0) <= quota:
        wrong.append("was refused at the wrong place")
    if {run.get("total"), run.get("total_of_device")} != {quota}:
        wrong.append("does not see its quota as the device")
    if not run.get("free_at_first", quota + 1) <= quota:
        wrong.append("sees more free than it has")
    if not run.get("goes_on"):
        wrong.append("did not go on")
    return wrong


@case()
def caching(torch, quota):
    return {"result": train(torch), **run_into(torch, quota)}


def allocator(setting):
    """The environment that chooses an allocator, by its new name and by its old."""
    return {"PYTORCH_ALLOC_CONF": setting, "PYTORCH_CUDA_ALLOC_CONF": setting}


@case(**allocator("expandable_segments:True"))
def expandable(torch, quota):
    return {"result": train(torch), **run_into(torch, quota)}


@case(**allocator("backend:cudaMallocAsync"))
def malloc_async(torch, quota):
    return {"result": train(torch), **run_into(torch, quota)}


@case()
def graphs(torch, quota):
    torch.manual_seed(3)
    fixed = torch.randn(256, 256, device="cuda")
    weight = torch.randn(256, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            (fixed @ weight).relu()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = (fixed @ weight).relu() * 2
    for _ in range(10):
        fixed.copy_(torch.ones(256, 256, device="cuda"))
        graph.replay()
    torch.cuda.synchronize()
    return {"result": checksum(out), **run_into(torch, quota)}


class Numbers:
    """Thirty-two samples, each its own index over and over."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        import torch
        return torch.full((64,), float(index))


@case()
def forked_loader(torch, quota):
    torch.ones(1, device="cuda")  # the parent has a context when it forks
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=4, multiprocessing_context="fork")
    result = sum(checksum(batch.cuda(non_blocking=True)) for batch in loader)
    return {"result": result, **run_into(torch, quota)}


def _rank(rank, world, backend, port, quota, results):
    import torch
    import torch.distributed as dist
    # The ranks are on one machine, which may have no other network.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group(backend, rank=rank, world_size=world)
    # Ranks wait for each other here without needing memory of a device.
    meeting = dist.new_group(backend="gloo")
    own_device = backend == "nccl" and world > 1
    device = torch.device("cuda", rank if own_device else 0)
    torch.cuda.set_device(device)

    def reduced():
        values = torch.full((1 << 20,), float(rank + 1), device=device)
        dist.all_reduce(values)
        return checksum(values)

    out = {"rank": rank, "result": [reduced()]}
    kept = torch.ones(STEP, dtype=torch.uint8, device=device)
    rest(rank)
    del kept
    if own_device or rank == 0:
        # Where each has a device of its own, all are full at the same time.
        out.update(run_into(torch, quota, (lambda: dist.barrier(group=meeting)) if own_device else (lambda: None)))
    dist.barrier(group=meeting)
    # What was refused has not disturbed what the ranks have with each other.
    out["result"].append(reduced())
    dist.barrier()
    dist.destroy_process_group()
    results.put(out)


def rest(rank, most=120):
    """Waits until whoever wants to look at the ranks has done so."""
    folder = os.environ.get(REST)
    if not folder:
        return
    with open(os.path.join(folder, f"rank-{rank}"), "w", encoding="utf-8"):
        pass
    end = time.monotonic() + most
    while not os.path.exists(os.path.join(folder, "go")):
        if time.monotonic() > end:
            raise RuntimeError(f"nobody has said in {most} s how to go on")
        time.sleep(0.02)


def distributed(torch, world, backend, quota):
    """Ranks as processes. Each that has a device of its own also runs into the quota; where they share one, the first
    does, and the quota is that of all of them together."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, world, backend, port, quota, results)) for rank in range(world)]
    for process in ranks:
        process.start()
    answers = []
    while len(answers) < world:
        try:
            answers.append(results.get(timeout=1))
        except queue.Empty:
            failed = [process.exitcode for process in ranks if process.exitcode]
            if failed:
                for process in ranks:
                    process.kill()
                raise RuntimeError(f"ranks ended with {failed}") from None
    for process in ranks:
        process.join(60)
    answers.sort(key=lambda answer: answer["rank"])
    at_quota = [answer for answer in answers if "refused" in answer]
    return {"result": [answer["result"] for answer in answers], **({"ranks": at_quota} if at_quota else {})}


@case()
def two_gloo_ranks(torch, quota):
    return distributed(torch, 2, "gloo", quota)


@case()
def one_nccl_rank(torch, quota):
    return distributed(torch, 1, "nccl", quota)


@case()
def two_nccl_ranks(torch, quota):
    if torch.cuda.device_count() < 2:
        return {"skipped": "needs two devices"}
    return distributed(torch, 2, "nccl", quota)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", nargs="?", choices=sorted(CASES))
    parser.add_argument("--quota", type=int)
    parser.add_argument("--rest")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    if arguments.list or not arguments.case:
        print("\n".join(CASES))
        return
    function, environment = CASES[arguments.case]
    if any(os.environ.get(name) != value for name, value in environment.items()):
        # PyTorch reads these once, when it is loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})
    if arguments.rest:
        os.environ[REST] = arguments.rest
    import torch
    started = time.monotonic()
    answer = function(torch, arguments.quota)
    print(json.dumps({"case": arguments.case, **answer, "seconds": round(time.monotonic() - started, 2)}), flush=True)


if __name__ == "__main__":
    main()
