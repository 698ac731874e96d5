"""Container images without a builder or registry: OCI layouts as containerd imports them.

    images.py pause OUT.tar
    images.py program OUT.tar NAME FOLDER-OF-THE-C-LIBRARY PATH-IN-THE-IMAGE=FILE...
    images.py python OUT.tar NEEDS.json     (what `workload.py needs` printed)
"""

import hashlib
import io
import json
import os
import struct
import sys
import tarfile

REGISTRY = "highwater.local"


class Layer:
    """A tar archive that is the same for the same content."""

    def __init__(self):
        self.content = io.BytesIO()
        self.tar = tarfile.open(fileobj=self.content, mode="w", format=tarfile.GNU_FORMAT)
        self.names = set()

    def _add(self, name, kind, mode, data=b"", target=""):
        name = name.strip("/")
        if name in self.names:
            return
        self.names.add(name)
        info = tarfile.TarInfo(name)
        info.type, info.mode, info.linkname, info.size = kind, mode, target, len(data)
        self.tar.addfile(info, io.BytesIO(data))

    def file(self, name, data, mode=0o644):
        self._add(name, tarfile.REGTYPE, mode, data)

    def link(self, name, target):
        self._add(name, tarfile.SYMTYPE, 0o777, target=target)

    def directory(self, name, mode=0o755):
        self._add(name, tarfile.DIRTYPE, mode)

    def copy(self, path):
        """A file of this machine at its own path, with the links on the way to it."""
        folder = os.path.realpath(os.path.dirname(path))
        path = os.path.join(folder, os.path.basename(path))
        if os.path.islink(path):
            target = os.readlink(path)
            self.link(path, target)
            self.copy(os.path.join(folder, target))
            return
        with open(path, "rb") as file:
            self.file(path, file.read(), 0o755)

    def usual_links(self):
        """/bin, /lib and so on, as they are on this machine."""
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.islink("/" + name):
                self.link(name, os.readlink("/" + name))

    def accounts(self):
        self.directory("tmp", 0o1777)
        self.file("etc/passwd", b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")
        self.file("etc/group", b"root:x:0:\nnogroup:x:65534:\n")

    def finish(self):
        self.tar.close()
        return self.content.getvalue()


def pause():
    """A program that waits for ever, as an x86-64 executable of one loop around pause(2)."""
    code = bytes([0xB8, 34, 0, 0, 0, 0x0F, 0x05, 0xEB, 0xF7])  # mov eax, 34; syscall; jmp to the mov
    base, start = 0x400000, 64 + 56
    size = start + len(code)
    header = struct.pack("<4s5B7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 0, 2, 62, 1, base + start, 64, 0,
                         0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    layer = Layer()
    layer.file("pause", header + segment + code, 0o755)
    return image("pause", ["/pause"], [layer.finish()])


def program(name, libraries, *files):
    """Programs of ours with the C library that they were built with; the first one is what runs."""
    base, own = Layer(), Layer()
    for link, target in (("bin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
        base.link(link, target)
    for file in sorted(os.listdir(libraries)):
        with open(os.path.join(libraries, file), "rb") as content:
            base.file(f"usr/lib/x86_64-linux-gnu/{file}", content.read(), 0o755)
    loader = "ld-linux-x86-64.so.2"
    base.link(f"usr/lib64/{loader}", f"/usr/lib/x86_64-linux-gnu/{loader}")
    base.accounts()
    paths = [file.partition("=")[::2] for file in files]
    for path, file in paths:
        with open(file, "rb") as content:
            own.file(path, content.read(), 0o755)
    return image(name, ["/" + paths[0][0]], [base.finish(), own.finish()])


def python(needs):
    """The libraries of this machine that its Python maps; Python's folders are mounted by the pod."""
    layer = Layer()
    layer.usual_links()
    layer.copy("/lib64/ld-linux-x86-64.so.2")
    for path in needs["files"]:
        layer.copy(path)
        folder = os.path.dirname(path)
        if path == needs["executable"]:
            continue
        # Programs ask for a library by its short name, a link beside it.
        for name in sorted(os.listdir(folder)):
            beside = os.path.join(folder, name)
            if os.path.islink(beside) and os.path.realpath(beside) == path:
                layer.copy(beside)
    layer.accounts()
    return image("python", [needs["executable"]], [layer.finish()])


def image(name, entrypoint, layers):
    config = json.dumps({
        "architecture": "amd64", "os": "linux",
        "config": {"Entrypoint": entrypoint, "Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(layer) for layer in layers]},
    }).encode()
    kind = "application/vnd.oci.image."
    manifest = json.dumps({
        "schemaVersion": 2, "mediaType": kind + "manifest.v1+json",
        "config": descriptor(kind + "config.v1+json", config),
        "layers": [descriptor(kind + "layer.v1.tar", layer) for layer in layers],
    }).encode()
    entry = descriptor(kind + "manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": f"{REGISTRY}/{name}:dev"}
    archive = Layer()
    archive.file("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
    archive.file("index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
    for blob in [*layers, config, manifest]:
        archive.file("blobs/" + digest(blob).replace(":", "/"), blob)
    return archive.finish()


def digest(blob):
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def descriptor(kind, blob):
    return {"mediaType": kind, "digest": digest(blob), "size": len(blob)}


def main():
    kind, out, *rest = sys.argv[1:]
    if kind == "pause":
        archive = pause()
    elif kind == "program":
        archive = program(*rest)
    elif kind == "python":
        with open(rest[0], encoding="utf-8") as file:
            archive = python(json.load(file))
    else:
        raise SystemExit(__doc__)
    with open(out, "wb") as file:
        file.write(archive)


if __name__ == "__main__":
    main()
