"""The guard: PyTorch and the driver's own calls under a quota, and programs that avoid it."""

import os
import queue
import shutil
import subprocess
import threading
import time

import driver_cases
import torch_cases
from common import (
    GIB, INTERVAL, MIB, NAMESPACE, NOISE, ROUND, Failed, Page, Reader, by_pod, mib, until,
)

HERE = os.path.dirname(os.path.abspath(__file__))
LANES = 3
# What the driver may take for a process by itself beside a context, and the agent may still have to learn.
# What the driver takes by itself beside contexts: modules that are loaded when they are first used, and
# workspaces. Measured 92 MiB for a process that multiplies matrices.
GROWTH = 160 * MIB
SCRAPE = 0.03  # what reading the metrics may take
TOUCH = GIB  # what an avoider takes


def policy(quota, total):
    everybody_else = {"matchExpressions": [{"key": "app", "operator": "In",
                                            "values": [f"plain-{lane}" for lane in range(LANES)]}]}
    return {"mode": "Enforce", "nodes": {}, "namespaces": {"matchLabels": {"highwater-check": "yes"}},
            "quota": {"default": {"limit": str(quota)},
                      "rules": [{"name": "plain", "pods": everybody_else, "limit": str(total * 9 // 10)}]},
            "remediation": {"victims": {"ownerKinds": ["ReplicaSet"]},
                            "budget": {"maxUnavailable": 1, "haltAtCondemnedPercent": 100}}}


def check(report, nvml, cluster, total):
    quota = 16 * GIB if total > 100 * GIB else total // 4 // (2 * MIB) * (2 * MIB)
    guarded = [f"guarded-{lane}" for lane in range(LANES)]
    plain = [f"plain-{lane}" for lane in range(LANES)]
    cluster.policy("guard", policy(quota, total))
    try:
        for app in guarded + plain:
            cluster.create(app, guard=app in guarded)
        pods = {app: cluster.running(app, guard=app in guarded) for app in guarded + plain}
        names = {app: pod["metadata"]["name"] for app, pod in pods.items()}
        strength(report, nvml, cluster, {app: pods[app] for app in guarded})
        cases(report, cluster, guarded, plain, names, quota)
        live(report, cluster, guarded[0], quota, total)
        avoid(report, nvml, cluster, pods, guarded)
    finally:
        for app in guarded + plain:
            cluster.remove(app)
        cluster.without_policy("guard")


def strength(report, nvml, cluster, pods):
    """Before anything counts: that the pods really have the guard, and that all agree on what they hold."""
    jobs, names = [], {app: pod["metadata"]["name"] for app, pod in pods.items()}
    for app in pods:
        rest = os.path.join(cluster.folder(app), "rest")
        os.makedirs(rest)
        cluster.target(os.path.join(app, "rest"), GIB, 4 * GIB)
        jobs.append(cluster.start(app, "rest", "workload.py", "run", "/control/rest", "--backend", cluster.backend))
    for app in pods:
        until(f"{app} holds memory", 60, lambda app=app: cluster.state(os.path.join(app, "rest"))["reached"],
              lambda: " ".join(job.trouble() for job in jobs))
    time.sleep(1)

    def seen():
        page = Page()
        return all(page.strength(name) == "Guard" and (page.of(name, "highwater_guard_processes") or 0) >= 1
                   for name in names.values()) and page

    page = until("the strength of every guarded pod is Guard", 15, seen,
                 lambda: str({name: (Page().strength(name), Page().of(name, "highwater_guard_processes"))
                              for name in names.values()}))
    report.claim(True, "guard: the strength is Guard, by a connected guard",
                 f"{len(names)} pods, processes {[page.of(name, 'highwater_guard_processes') for name in names.values()]}")
    # The agent brings what was estimated of a context to what it is.
    time.sleep(1)
    worst, apart, views, driver = 0, 0, [], 0
    for _ in range(10):
        before, page, after = nvml.settled(), Page(), nvml.settled()
        if before.processes != after.processes:
            continue
        for app, pod in pods.items():
            size, count = by_pod(after).get(pod["metadata"]["uid"], (0, 1))
            name = names[app]
            used, charged = page.pod(name) or 0, page.of(name, "highwater_pod_guard_charged_bytes") or 0
            parts = {part: page.of(name, "highwater_pod_memory_difference_bytes", part=part) or 0
                     for part in ("context", "outside_guard", "driver")}
            worst = max(worst, abs(used - size) / count)
            apart = max(apart, abs(used - charged - sum(parts.values())))
            driver = max(driver, abs(parts["driver"]), abs(parts["outside_guard"]))
            views = [used, charged, parts]
        time.sleep(INTERVAL)
    report.claim(worst <= NOISE, "guard: the ledger is right at rest, 2 MiB a process", f"largest difference {mib(worst)}")
    report.claim(bool(views) and apart <= NOISE and driver <= GROWTH, "guard: three views, and what makes them differ",
                 f"driver {mib(views[0])}, charged {mib(views[1])}, of the difference "
                 + ", ".join(f"{part} {mib(size)}" for part, size in views[2].items()) + f"; not named {mib(apart)}")
    for job in jobs:
        job.stop()


def cases(report, cluster, guarded, plain, names, quota):
    """Every case in a pod with the guard and in one without, and what the agent says meanwhile."""
    todo, answers, lock = queue.Queue(), {}, threading.Lock()
    wanted = [("driver_cases.py", case) for case in driver_cases.CASES]
    if cluster.backend == "torch":
        # The long ones first.
        wanted = [("torch_cases.py", case) for case in reversed(torch_cases.CASES)] + wanted
    for one in wanted:
        todo.put(one)

    def lane(index):
        while True:
            try:
                script, case = todo.get_nowait()
            except queue.Empty:
                return
            job = f"{script.split('_')[0]}-{case}"
            try:
                under = cluster.start(guarded[index], job, script, case, "--quota", quota)
                without = cluster.start(plain[index], job, script, case)
                answer = torch_cases.judge(case, without.result(150), under.result(150), quota)
            except (Failed, OSError, LookupError, ValueError) as error:
                answer = False, f"{type(error).__name__}: {error}"
            with lock:
                answers[script, case] = answer

    threads = [threading.Thread(target=lane, args=(index,), daemon=True) for index in range(LANES)]
    for thread in threads:
        thread.start()
    pages, weaker, outside = 0, {}, 0
    while any(thread.is_alive() for thread in threads):
        page = Page()
        pages += 1
        for app in guarded:
            found = page.strength(names[app])
            if found != "Guard":
                weaker[app] = found
            outside = max(outside, page.of(names[app], "highwater_pod_memory_difference_bytes", part="outside_guard") or 0)
        time.sleep(0.1)
    for script, case in sorted(wanted):
        holds, numbers = answers[script, case]
        what = f"guard: {script.split('_')[0]} {case}"
        if holds is None:
            report.say(f"      {what}: not run, {numbers}")
        else:
            report.claim(holds, what, numbers)
    report.claim(not weaker and outside == 0, "guard: the strength was Guard all the time",
                 f"{pages} pages, weaker at times {weaker}, outside the guard {mib(outside)}")

    def left():
        page = Page()
        return {app: page.of(names[app], "highwater_pod_guard_charged_bytes") or 0 for app in guarded}

    try:
        until("nothing is left charged", 3, lambda: not any(left().values()))
        holds = True
    except Failed:
        holds = False
    page = Page()
    refusals = [int(page.all("highwater_guard_refusals_total", namespace=NAMESPACE, pod=names[app]) or 0)
                for app in guarded]
    report.claim(holds, "guard: nothing is left charged when its processes end",
                 f"charged {left()}; refusals that guards told of: {refusals}")


def live(report, cluster, app, quota, total):
    """A limit that is lowered under a running process."""
    job = cluster.start(app, "watch", "driver_cases.py", "watch")
    job.says("total")
    begun = time.monotonic()
    cluster.policy("guard", policy(quota * 3 // 4, total))

    def seen():
        return next((line for line in job.lines() if line["total"] == quota * 3 // 4), None)

    line = until("the process sees the lower limit", 10, seen, lambda: str(job.lines()))
    report.claim(line["at"] - begun <= 2, "guard: a limit edited live is seen within 2 s",
                 f"{(line['at'] - begun) * 1e3:.0f} ms after the edit the device is {mib(line['total'])} large for it")
    job.stop()


def compiled(cluster, app):
    """A program that is linked statically; None where no compiler is at hand."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    path = os.path.join(cluster.folder(app), "thief-static")
    if compiler is None:
        return None
    command = [compiler, "-O1", "-static", "-o", path, os.path.join(HERE, "thief.c"), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return path if done.returncode == 0 else None


def avoid(report, nvml, cluster, pods, guarded):
    ways = [("namespace", guarded[0], ["thief.py", "namespace"], "in a link namespace of its own"),
            ("copy", guarded[1], ["thief.py", "copy"], "by a private copy of the library"),
            ("handles", guarded[2], ["thief.py", "handles"], "by handles, without a context")]
    if compiled(cluster, guarded[0]):
        ways.append(("static", guarded[0], ["/control/thief-static"], "linked statically"))
    else:
        report.say("      guard: no program that is linked statically: there is no compiler here")
    for job_name, app, command, what in ways:
        pod = pods[app]
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        until(f"{app} is at rest", 20, lambda: Page().strength(name) == "Guard" and uid not in by_pod(nvml.sample()))
        with Reader(nvml) as reader:
            begun = time.monotonic()
            job = cluster.start(app, job_name, *command, TOUCH)
            try:
                if job_name == "handles":
                    unlisted(report, cluster, job, pod, what)
                else:
                    listed(report, cluster, job, pod, what, reader, begun)
            except Failed as error:
                ended = job.ended()
                if job_name in ("static", "namespace") and ended and ended["code"] != 0:
                    # No danger either: the driver does not live with a second C library in its process.
                    report.say(f"      guard: a program {what} ended with {ended['code']} before it had memory")
                    continue
                report.claim(False, f"guard: a program {what} is found", str(error))
        job.stop()


def listed(report, cluster, job, pod, what, reader, begun):
    """A process in the driver's list that its pod's guards know nothing of."""
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

    page = Page()
    while page.strength(name) == "Guard":
        if job.ended():
            raise Failed(f"it ended: {job.trouble()}")
        if time.monotonic() > begun + 30:
            raise Failed(f"it was not found in 30 s: {job.lines()} {job.trouble()}")
        time.sleep(0.004)
        page = Page()
    readings = list(zip(reader.times, reader.samples))
    first = next((at for at, (_, held) in readings if at >= begun and held.get(uid)), page.answered)
    delay = page.answered - first
    job.says("taken")
    time.sleep(3 * INTERVAL)
    after = Page()
    outside = after.of(name, "highwater_pod_memory_difference_bytes", part="outside_guard") or 0
    events = cluster.events(pod, "StrengthFell")
    report.claim(delay <= INTERVAL + ROUND + SCRAPE and outside >= TOUCH, f"guard: a program {what} is found at once",
                 f"{delay * 1e3:.0f} ms after the driver listed it its pod was {page.strength(name)}; outside the guard "
                 f"{mib(outside)}; told: {events[0]['message'][:140] if events else 'not again'}")


def unlisted(report, cluster, job, pod, what):
    """Memory that no list shows: who may have it is named."""
    said = job.says("taken")
    event = until("a candidate is named", 15, lambda: cluster.events(pod, "UnlistedMemory"))[0]
    named = time.monotonic() - said["at"]
    unattributed = Page().device("highwater_device_unattributed_bytes") or 0
    report.claim(named <= 2, f"guard: a program {what} is named as a candidate",
                 f"{named:.1f} s after it had taken {mib(said['taken'])}; unattributed {mib(unattributed)}; "
                 f"{event['message'][:160]}")
