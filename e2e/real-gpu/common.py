"""What all checks stand on: claims, the agent's metrics, the driver's numbers, and pods."""

import bisect
import json
import math
import os
import re
import shutil
import threading
import time
import urllib.request

from describe import condition
from kube import Api

MIB, GIB = 1 << 20, 1 << 30
NAMESPACE = "gpu-check"
GROUP = "/apis/highwater.dev/v1alpha1"
NOISE = 2 * MIB  # what rounding may leave, a process
INTERVAL = 0.1  # of the agent's samples, in seconds
ROUND = 0.02  # a round of samples may begin or last this much later
GUARD_DRIVER = "guard.highwater.dev"
METRICS = "http://127.0.0.1:9440/metrics"
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Failed(Exception):
    """Something that was waited for did not come."""


class Report:
    """Claims as they are decided."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")
        self.lines = []

    def say(self, text=""):
        print(text, flush=True)
        print(text, file=self.file, flush=True)

    def claim(self, holds, claim, numbers):
        self.lines.append(bool(holds))
        self.say(f"{'ok  ' if holds else 'FAIL'}  {claim:<58} {numbers}")

    def summary(self):
        held = sum(self.lines)
        self.say(f"\n{held} of {len(self.lines)} claims hold")
        return bool(self.lines) and held == len(self.lines)


def until(what, seconds, attempt, detail=lambda: ""):
    """Calls `attempt` until it returns something true; `detail` says why it did not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        last = attempt()
        if last:
            return last
        time.sleep(0.05)
    raise Failed(f"after {seconds} s still not: {what} {detail()}".rstrip())


def mib(size):
    return f"{size / MIB:.1f} MiB" if abs(size) < 100 * GIB else f"{size / GIB:.2f} GiB"


# --- what the agent says ------------------------------------------------------------------------


class Counted:
    """What a histogram has counted: how many were at most so long, and how long all took together, in seconds."""

    def __init__(self, upto, total):
        self.upto, self.total = upto, total

    def __sub__(self, before):
        upto = {bound: count - before.upto.get(bound, 0) for bound, count in self.upto.items()}
        return Counted(upto, self.total - before.total)

    @property
    def count(self):
        return int(max(self.upto.values(), default=0))

    @property
    def mean(self):
        return self.total / self.count if self.count else math.inf

    def within(self, share):
        """What so large a share took at most: the upper bound of a bucket. Infinite if nothing was counted."""
        enough = [bound for bound, count in self.upto.items() if count and count >= share * self.count]
        return min(enough, default=math.inf)


class Page:
    """One scrape of the agent's metrics."""

    LINE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
    LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

    def __init__(self):
        self.asked = time.monotonic()
        with DIRECT.open(METRICS, timeout=5) as answer:
            text = answer.read().decode()
        self.answered = time.monotonic()
        self.series = {}
        for line in text.splitlines():
            found = self.LINE.match(line)
            if found:
                labels = dict(self.LABEL.findall(found.group(2) or ""))
                self.series.setdefault(found.group(1), []).append((labels, float(found.group(3))))

    def value(self, name, **labels):
        """The one series with these labels; None if it is missing."""
        for have, value in self.series.get(name, []):
            if all(have.get(key) == wanted for key, wanted in labels.items()):
                return value
        return None

    def all(self, name, **labels):
        """The sum over every series with these labels; None if there is none."""
        found = [value for have, value in self.series.get(name, [])
                 if all(have.get(key) == wanted for key, wanted in labels.items())]
        return sum(found) if found else None

    def histogram(self, name, **labels):
        """What a histogram has counted."""
        upto = {}
        for have, count in self.series.get(name + "_bucket", []):
            if all(have.get(key) == wanted for key, wanted in labels.items()):
                bound = float(have["le"])
                upto[bound] = upto.get(bound, 0) + count
        return Counted(upto, self.all(name + "_sum", **labels) or 0)

    def buckets(self):
        return {labels["bucket"]: int(value) for labels, value in
                self.series.get("highwater_device_memory_bytes", []) if labels["device"] == "0"}

    def pod(self, name):
        return self.of(name, "highwater_pod_memory_used_bytes")

    def of(self, name, metric, **labels):
        """A number of a pod on the first device; None if it is missing."""
        value = self.value(metric, namespace=NAMESPACE, pod=name, device="0", **labels)
        return None if value is None else int(value)

    def device(self, metric):
        """A number of the first device; None if it is missing."""
        value = self.value(metric, device="0")
        return None if value is None else int(value)

    def strength(self, name):
        """How firmly a pod's quota holds on the first device."""
        for labels, _ in self.series.get("highwater_pod_strength_info", []):
            if (labels["namespace"], labels["pod"], labels["device"]) == (NAMESPACE, name, "0"):
                return labels["strength"]
        return None


def component(cluster, name):
    """Processes of a part of the product: PID -> program."""
    pods = cluster.api.get("/api/v1/namespaces/highwater-system/pods?"
                           f"labelSelector=app.kubernetes.io%2Fcomponent%3D{name}")["items"]
    uids, found = {pod["metadata"]["uid"] for pod in pods}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if pod_of(int(entry)) in uids:
                found[int(entry)] = os.path.basename(os.readlink(f"/proc/{entry}/exe"))
        except OSError:
            continue
    return found


def resident(pid, kind="VmRSS"):
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return int(re.search(kind + r":\s+(\d+) kB", file.read()).group(1)) * 1024


# --- what the driver says -----------------------------------------------------------------------


OWNERS = {}  # of processes: a process does not change its pod


def pod_of(pid):
    """UID of the pod that a process belongs to."""
    if pid not in OWNERS:
        try:
            with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
                found = re.search(r"pod([0-9a-f]{8}[-_][0-9a-f_-]{27})", file.read())
        except OSError:
            return None
        OWNERS[pid] = found.group(1).replace("_", "-") if found else None
    return OWNERS[pid]


def by_pod(sample):
    """Pod UID -> (bytes, number of processes)."""
    pods = {}
    for pid, used in sample.processes.items():
        size, count = pods.get(pod_of(pid), (0, 0))
        pods[pod_of(pid)] = (size + (used or 0), count + 1)
    return pods


class Reader(threading.Thread):
    """Reads the driver every few milliseconds and keeps what it read."""

    def __init__(self, nvml):
        super().__init__(daemon=True)
        self.nvml, self.times, self.samples, self.ended = nvml, [], [], threading.Event()

    def run(self):
        while not self.ended.is_set():
            sample = self.nvml.sample()
            pods = {uid: size for uid, (size, _) in by_pod(sample).items()}
            self.samples.append((sample.used, pods))
            self.times.append(sample.at)
            time.sleep(0.004)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.join()

    def window(self, begin, end):
        """What was read in that time, and the last before and the first after."""
        first = max(bisect.bisect_left(self.times, begin) - 1, 0)
        return self.samples[first:bisect.bisect_right(self.times, end) + 1]


# --- pods ---------------------------------------------------------------------------------------


class Job:
    """A program that runs in a pod."""

    def __init__(self, folder, pod, name):
        self.folder, self.what, self.name = folder, f"job {name} of {pod}", name

    def path(self, part, suffix=""):
        return os.path.join(self.folder, part, self.name + suffix)

    def lines(self):
        """What it printed so far, line by line as JSON."""
        try:
            with open(self.path("out"), encoding="utf-8") as file:
                text = file.read()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(True) if line.startswith("{") and line.endswith("}\n")]

    def ended(self):
        """How it ended, once it did."""
        try:
            with open(self.path("done", ".json"), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def says(self, key, seconds=60):
        """Waits until it printed a line with that key; the line."""
        def found():
            line = next((line for line in self.lines() if key in line), None)
            if line is None and self.ended():
                raise Failed(f"{self.what} ended without a word of {key}: {self.trouble()}")
            return line
        return until(f"{self.what} says {key}", seconds, found, self.trouble)

    def result(self, seconds=60):
        """Waits for its end; what it printed last."""
        ended = until(f"{self.what} ends", seconds, self.ended, self.trouble)
        lines = self.lines()
        if ended["code"] != 0 or not lines:
            raise Failed(f"{self.what} ended with code {ended['code']}: {self.trouble()}")
        return lines[-1]

    def stop(self):
        """Ends it."""
        with open(self.path("stop"), "w", encoding="utf-8"):
            pass
        until(f"{self.what} stops", 20, self.ended)

    def trouble(self):
        try:
            with open(self.path("out", ".err"), encoding="utf-8", errors="replace") as file:
                return "(" + " | ".join(file.read().strip().splitlines()[-4:]) + ")"
        except FileNotFoundError:
            return "(it has not begun)"


class Cluster:
    """The pods of the check."""

    def __init__(self, arguments):
        self.api, self.work, self.backend, self.node = Api(), arguments.work, arguments.backend, arguments.node
        with open(os.path.join(self.work, "needs.json"), encoding="utf-8") as file:
            self.needs = json.load(file)
        self.api.apply({"apiVersion": "v1", "kind": "Namespace",
                        "metadata": {"name": NAMESPACE, "labels": {"highwater-check": "yes"}}})

    def folder(self, name):
        return os.path.join(self.work, "control", name)

    def target(self, name, size, rate):
        """Tells a pod up to how much it holds, and how fast it gets there."""
        path = os.path.join(self.folder(name), "target.json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump({"bytes": size, "bytesPerSecond": rate}, file)
        os.rename(path + ".new", path)

    def state(self, name):
        try:
            with open(os.path.join(self.folder(name), "state.json"), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return {"bytes": 0, "turn": 0, "reached": False}

    def deploy(self, name, size=None, **how):
        """A Deployment of one pod; the pod once it runs.

        It holds `size`, or without one runs jobs (`start`).
        """
        self.create(name, size, **how)
        return self.running(name, size, how.get("guard", False))

    def create(self, name, size=None, stubborn=False, guard=False, told=False, labels=None, annotations=None,
               own_address=False):
        """Makes such a Deployment. `told`: it has a volume for the pressure file. `own_address`: it
        does not share the machine's network; nothing in it can be reached then."""
        shutil.rmtree(self.folder(name), ignore_errors=True)
        os.makedirs(self.folder(name))
        if size is None:
            for part in ("todo", "done", "stop", "out"):
                os.makedirs(os.path.join(self.folder(name), part))
            program = ["/highwater/runner.py", "/control"]
        else:
            self.target(name, size, 4 * GIB)
            program = ["/highwater/workload.py", "run", "/control", "--backend", self.backend]
            program += ["--ignore-sigterm"] if stubborn else []
        folders = self.needs["folders"]
        mounts = [{"name": f"python-{i}", "mountPath": path, "readOnly": True} for i, path in enumerate(folders)]
        mounts += [{"name": "program", "mountPath": "/highwater", "readOnly": True},
                   {"name": "control", "mountPath": "/control"}]
        volumes = [{"name": f"python-{i}", "hostPath": {"path": path, "type": "Directory"}}
                   for i, path in enumerate(folders)]
        volumes += [{"name": "program", "hostPath": {"path": os.path.join(self.work, "pod")}},
                    {"name": "control", "hostPath": {"path": self.folder(name)}}]
        if told:
            volumes.append({"name": "highwater", "emptyDir": {}})
            mounts.append({"name": "highwater", "mountPath": "/run/highwater"})
        env = {"PYTHONPATH": ":".join(self.needs["packages"]), "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}
        container = {"name": "main", "image": "highwater.local/python:dev", "imagePullPolicy": "Never",
                     "command": [self.needs["executable"], *program],
                     "env": [{"name": key, "value": value} for key, value in env.items()],
                     "resources": {"limits": {"nvidia.com/gpu": "1"}}, "volumeMounts": mounts,
                     "terminationMessagePolicy": "FallbackToLogsOnError"}
        labels = {"app": name, **({"highwater.dev/guard": "true"} if guard else {}), **(labels or {})}
        self.api.apply({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": {
                "metadata": {"labels": labels, "annotations": annotations or {}},
                "spec": {"hostNetwork": not own_address, "dnsPolicy": "Default", "terminationGracePeriodSeconds": 20,
                         "automountServiceAccountToken": False, "containers": [container], "volumes": volumes}}}})

    def running(self, name, size=None, guard=False):
        """The pod of a Deployment, once it runs."""
        until(f"{name} runs" if size is None else f"{name} holds {mib(size)}", 60,
              lambda: self.state(name)["reached"],
              lambda: f"(it says {self.state(name)}, its pod {self.statuses(name)})")
        pod = self.pod(name)
        if guard and not any(v.get("csi", {}).get("driver") == GUARD_DRIVER for v in pod["spec"]["volumes"]):
            raise Failed(f"the pod of {name} was not given the volume of the guard")
        return pod

    def start(self, name, job, *command, **env):
        """Starts a program in a pod that runs jobs: Python scripts of this folder, or what is named in full."""
        program, *rest = command
        argv = [program, *rest] if program.startswith("/control/") else \
            [self.needs["executable"], f"/highwater/{program}", *rest]
        argv = [str(word) for word in argv]
        path = os.path.join(self.folder(name), "todo", job + ".json")
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump({"argv": argv, "env": {key: str(value) for key, value in env.items()}}, file)
        os.rename(path + ".new", path)
        return Job(self.folder(name), name, job)

    def job(self, name, job, *command, seconds=60, **env):
        """Runs a program in a pod to its end; what it printed last, as JSON."""
        return self.start(name, job, *command, **env).result(seconds)

    def pods(self, name):
        return self.api.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app%3D{name}")["items"]

    def statuses(self, name):
        return [json.dumps(pod["status"].get("containerStatuses", pod["status"].get("conditions")))[:600]
                for pod in self.pods(name)]

    def pod(self, name):
        live = [pod for pod in self.pods(name) if "deletionTimestamp" not in pod["metadata"]]
        if len(live) != 1:
            raise Failed(f"{name} has {len(live)} pods, not 1")
        return live[0]

    def remove(self, name):
        self.api.delete(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}")
        for pod in self.pods(name):
            self.api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}", grace=1)
        until(f"the pods of {name} are gone", 40, lambda: not self.pods(name))

    def incidents(self, uid):
        found = self.api.get(f"{GROUP}/namespaces/{NAMESPACE}/gpumemoryincidents")["items"]
        return [one for one in found if one["spec"].get("subject", {}).get("uid") == uid]

    def events(self, pod, reason):
        """Events of that reason about a pod."""
        found = self.api.get(f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
        return [event for event in found if event["reason"] == reason
                and event["involvedObject"].get("uid") == pod["metadata"]["uid"]]

    def processes(self, pod, nvml):
        """PIDs of a pod that the driver lists."""
        return [pid for pid in nvml.sample().processes if pod_of(pid) == pod["metadata"]["uid"]]

    def without_policy(self, name):
        """Deletes a policy, and waits until the agent follows a plan without it."""
        self.api.delete(f"{GROUP}/gpumemorypolicies/{name}")
        plan = f"{GROUP}/gpumemorynodes/{self.node}"
        until(f"no plan comes of {name} any more", 20, lambda: name not in json.dumps(self.api.get(plan)["spec"]))

    def policy(self, name, spec):
        self.api.apply({"apiVersion": "highwater.dev/v1alpha1", "kind": "GpuMemoryPolicy",
                        "metadata": {"name": name}, "spec": spec})
        path = f"{GROUP}/gpumemorypolicies/{name}"

        def is_(kind):
            return condition(self.api.get(path), kind)

        until(f"policy {name} is Programmed", 20, lambda: is_("Programmed")["status"] == "True",
              lambda: f"({is_('Accepted')} {is_('Programmed')})")
        plan = f"{GROUP}/gpumemorynodes/{self.node}"

        def followed():
            node = self.api.get(plan)
            return node["spec"].get("layers") and \
                node.get("status", {}).get("observedGeneration") == node["metadata"]["generation"]

        until(f"the agent follows the plan of {name}", 20, followed)
