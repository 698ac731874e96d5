"""What runs in the pods of check_leaks.py: a program of leaks/, and beside it an endpoint that says of the program what a
framework would say of itself.

    leaks_case.py VARIANT PORT SPEED DEVICE FOLDER

Prints a line of JSON when the story begins and one when it ended; times are of the clock that all processes of the machine
share.
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


def page(slot):
    """The program's numbers, once it is up."""
    state, allocated, reserved, work, replays, _ = slot.read()
    if state != Slot.READY:
        return ""
    return (f"highwater_framework_allocated_bytes {allocated:.0f}\nhighwater_framework_reserved_bytes {reserved:.0f}\n"
            f"highwater_work_total {work:.0f}\nhighwater_graph_replays_total {replays:.0f}\n")


def serve(slot, port):
    """A process of its own answers, however busy the program is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = page(slot).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main():
    name, port, speed, kind, folder = sys.argv[1:]
    variant = variants.BY_NAME[name]
    os.makedirs(folder)
    with open(f"{folder}/slots", "wb") as file:
        file.write(bytes(Slot.SIZE))
    slot = Slot(f"{folder}/slots", 0)
    serve(slot, int(port))
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


if __name__ == "__main__":
    main()
