"""What runs in pods that are told what to do: a server of jobs, since nothing here can `exec` in a pod.

    runner.py FOLDER

FOLDER/todo/NAME.json {"argv": [...], "env": {...}} starts a program; its output goes to FOLDER/out/NAME and NAME.err,
its end to FOLDER/done/NAME.json. FOLDER/stop/NAME ends it.
"""

import json
import os
import signal
import subprocess
import sys
import time


def write(path, value):
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.rename(path + ".new", path)


def adopted(running):
    """Takes leave of processes whose parents ended before them: this is the first process of its container."""
    ours = {process.pid for process in running.values()}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in ours:
            return
        os.waitpid(ended.si_pid, 0)


def main():
    folder = sys.argv[1]
    running, begun, turn = {}, {}, 0

    def at(*parts):
        return os.path.join(folder, *parts)

    def leave(*_):
        for process in running.values():
            process.kill()
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    while True:
        for entry in sorted(os.listdir(at("todo"))):
            if not entry.endswith(".json"):
                continue
            name = entry[:-len(".json")]
            with open(at("todo", entry), encoding="utf-8") as file:
                job = json.load(file)
            os.unlink(at("todo", entry))
            begun[name] = time.monotonic()
            with open(at("out", name), "wb") as out, open(at("out", name + ".err"), "wb") as err:
                try:
                    running[name] = subprocess.Popen(job["argv"], env={**os.environ, **job["env"]}, cwd="/tmp",
                                                     stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                                     start_new_session=True)
                except OSError as error:
                    err.write(str(error).encode())
                    write(at("done", name + ".json"), {"code": 127, "seconds": 0})
        for name, process in list(running.items()):
            if os.path.exists(at("stop", name)):
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            code = process.poll()
            if code is not None:
                del running[name]
                write(at("done", name + ".json"), {"code": code, "seconds": time.monotonic() - begun[name]})
        adopted(running)
        turn += 1
        write(at("state.json"), {"bytes": 0, "turn": turn, "pid": os.getpid(), "reached": True})
        time.sleep(0.01)


if __name__ == "__main__":
    main()
