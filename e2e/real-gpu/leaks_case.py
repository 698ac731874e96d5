"""A program of leaks/ in a pod, and the endpoint that says of it what a framework would say of itself.

    leaks_case.py run VARIANT SPEED DEVICE FOLDER    in the pod: prints a line of JSON when the story begins and one when it
                                                     ended, with times of the clock that all processes of the machine share
    leaks_case.py serve PORT ADDRESS=FOLDER ...      beside the pods: answers at each pod's address (own_address.py)
"""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "leaks")
sys.path.insert(0, HERE)

import variants  # noqa: E402
from programs import Slot  # noqa: E402


def say(**what):
    print(json.dumps({"at": time.monotonic(), **what}), flush=True)


def page(folder):
    """The program's numbers, once it is up."""
    try:
        slot = Slot(f"{folder}/slots", 0)
    except (OSError, ValueError):
        return ""
    state, allocated, reserved, work, replays, _ = slot.read()
    if state != Slot.READY:
        return ""
    return (f"highwater_framework_allocated_bytes {allocated:.0f}\nhighwater_framework_reserved_bytes {reserved:.0f}\n"
            f"highwater_work_total {work:.0f}\nhighwater_graph_replays_total {replays:.0f}\n")


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        """Who asked did not wait: it asks again."""


def serve(port, address, folder):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = page(folder).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    threading.Thread(target=Server((address, port), Handler).serve_forever).start()


def run(name, speed, kind, folder):
    variant = variants.BY_NAME[name]
    os.makedirs(folder)
    with open(f"{folder}/slots", "wb") as file:
        file.write(bytes(Slot.SIZE))
    slot = Slot(f"{folder}/slots", 0)
    command = [sys.executable, f"{HERE}/programs.py", name, str(variant.ranks - 1), folder, "0", speed, kind]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    while slot.read()[0] != Slot.READY and process.poll() is None:
        time.sleep(0.02)
    if process.poll() is None:
        at = time.monotonic() + 0.1
        with open(f"{folder}/begin.new", "w", encoding="utf-8") as file:
            file.write(repr(at))
        os.rename(f"{folder}/begin.new", f"{folder}/begin")
        say(begun=at)
    say(ended=process.wait())


def main():
    command, *rest = sys.argv[1:]
    if command == "run":
        run(*rest)
        return
    port, *pods = rest
    for pod in pods:
        serve(int(port), *pod.split("=", 1))


if __name__ == "__main__":
    main()
