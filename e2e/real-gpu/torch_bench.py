"""What the guard costs PyTorch: a training step and a decode loop, with it and without in alternating pairs.

    torch_bench.py --guard-bench PROGRAM [--library LIBRARY] [--pairs N] [--restarts N] [--control]
    torch_bench.py worker          one side of the pairs, told what to do by the other

Both sides are processes that live at the same time, on the same few processors, since where the kernel puts a process
matters more than what is measured; blocks of work alternate between them, and after some pairs both start anew. Exits 0
if every goal holds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

LIMIT = 48 << 30
PROCESSORS = 4  # for the program, the thread of backward passes, and the driver's
GOAL_MEDIAN, GOAL_LOWER = 0.995, 0.99
WORK = {"train": "training step", "decode": "decode loop"}


# --- one side -----------------------------------------------------------------------------------


def trainer(torch):
    """A block of training steps of a small transformer."""
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(8, 512, 1024, device="cuda")

    def block():
        for _ in range(12):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(batch).float().square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return block


def decoder(torch):
    """A block of tokens, one after the other, with caches that grow: many small launches and allocations."""
    torch.manual_seed(2)
    width, heads, layers, batch = 1024, 16, 12, 8
    kind = {"device": "cuda", "dtype": torch.float16}
    weights = [[torch.randn(width, 3 * width, **kind) / 32, torch.randn(width, width, **kind) / 32,
                torch.randn(width, 4 * width, **kind) / 32, torch.randn(4 * width, width, **kind) / 64]
               for _ in range(layers)]
    function = torch.nn.functional

    @torch.inference_mode()
    def block():
        token = torch.randn(batch, 1, width, **kind)
        caches = [None] * layers
        for _ in range(96):
            for index, (attend, out, up, down) in enumerate(weights):
                normal = function.layer_norm(token, (width,))
                query, key, value = (part.view(batch, 1, heads, -1).transpose(1, 2)
                                     for part in (normal @ attend).chunk(3, dim=-1))
                if caches[index] is not None:
                    key = torch.cat((caches[index][0], key), dim=2)
                    value = torch.cat((caches[index][1], value), dim=2)
                caches[index] = key, value
                seen = function.scaled_dot_product_attention(query, key, value)
                token = token + seen.transpose(1, 2).reshape(batch, 1, width) @ out
                token = token + function.gelu(function.layer_norm(token, (width,)) @ up) @ down

    return block


def worker():
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSORS])
    import torch
    blocks = {"train": trainer(torch), "decode": decoder(torch)}
    for block in blocks.values():
        for _ in range(3):
            block()
    torch.cuda.synchronize()
    print(json.dumps({"total": torch.cuda.get_device_properties(0).total_memory}), flush=True)
    for line in sys.stdin:
        block = blocks[line.strip()]
        torch.cuda.synchronize()
        begun = time.perf_counter()
        block()
        torch.cuda.synchronize()
        print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)


# --- both sides ---------------------------------------------------------------------------------


class Side:
    """A worker, with the guard or without."""

    def __init__(self, before):
        command = [*before, sys.executable, __file__, "worker"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a worker ended early")
        return json.loads(line)

    def block(self, work):
        self.process.stdin.write(work + "\n")
        self.process.stdin.flush()
        return self.hear()["seconds"]

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


def lower_bound(ratios, seed=1):
    """The lower end of a 95 % interval of their mean, by resampling."""
    chance = random.Random(seed)
    means = sorted(statistics.fmean(chance.choices(ratios, k=len(ratios))) for _ in range(4000))
    return means[int(0.025 * len(means))]


def figure(what, value, goal):
    holds = value >= goal
    print(f"{what:<52} {value:>9.3f}      goal >= {goal}      {'ok' if holds else 'short'}", flush=True)
    return holds


def compare(arguments):
    serve = [arguments.guard_bench, "serve", "--limit", str(LIMIT)]
    if arguments.library:
        serve += ["--library", arguments.library]
    if arguments.control:
        print("a control: no guard on either side")
    ratios, times = {work: [] for work in WORK}, {work: [] for work in WORK}
    for _ in range(arguments.restarts):
        without, under = Side([]), Side([] if arguments.control else [*serve, "--"])
        totals = [side.hear()["total"] for side in (without, under)]
        if (totals[1] == LIMIT) == arguments.control or totals[0] == LIMIT:
            raise SystemExit(f"the guard is not where it should be: the devices are seen with {totals} bytes")
        for pair in range(arguments.pairs // arguments.restarts):
            for work in WORK:
                order = (without, under) if pair % 2 == 0 else (under, without)
                took = {side: side.block(work) for side in order}
                ratios[work].append(took[without] / took[under])
                times[work].append(took[without])
        for side in (without, under):
            side.end()
    holds = True
    for work, what in WORK.items():
        found = ratios[work]
        holds &= figure(f"{what}, with / without, median of {len(found)} pairs", statistics.median(found), GOAL_MEDIAN)
        holds &= figure(f"{what}, with / without, lower 95 % bound", lower_bound(found), GOAL_LOWER)
        print(f"  ratios from {min(found):.3f} to {max(found):.3f}; a block takes {statistics.median(times[work]) * 1e3:.0f} "
              "ms without", flush=True)
    sys.exit(0 if holds else 1)


def main():
    if sys.argv[1:2] == ["worker"]:
        worker()
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--guard-bench", required=True)
    parser.add_argument("--library")
    parser.add_argument("--control", action="store_true",
                        help="no guard on either side: what the pairs differ by anyway")
    parser.add_argument("--pairs", type=int, default=36)
    parser.add_argument("--restarts", type=int, default=6)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
