"""A disk that mica serves and backs up, for readers of other projects.

`MICA_BIN` is the program. What a state held is what `qemu-img` reads of its file.
"""

import json
import os
import random
import subprocess
import tempfile
import time

LEN = 64 << 20
SECTOR = 512


def run(*args):
    """Runs a program, and returns what it says."""
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{args}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


class Disk:
    """A chain of two layers, served as `name`, whose states are kept."""

    def __init__(self, name="sda", seed=1, length=LEN):
        self.name, self.random, self.length = name, random.Random(seed), length
        self.folder = tempfile.TemporaryDirectory(prefix="mica-")
        self.socket, self.export = self.path("nbd"), self.path("backup")
        run("qemu-img", "create", "-q", "-f", "qcow2", self.path("base.qcow2"), str(length))
        run("qemu-io", "-f", "qcow2", "-c", "write -q -P 7 1M 3M", self.path("base.qcow2"))
        run("qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2",
            self.path("disk.qcow2"))
        log = open(self.path("log"), "w")
        self.server = subprocess.Popen(
            [os.environ["MICA_BIN"], "serve", "--nbd", self.socket, "--control",
             self.path("control"), "--export-name", name, self.path("disk.qcow2")], stderr=log)
        deadline = time.monotonic() + 30
        while not (os.path.exists(self.socket) and os.path.exists(self.path("control"))):
            if self.server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(open(self.path("log")).read())
            time.sleep(0.01)
        self.disk = json.loads(self.ctl("status"))["disks"][0]["name"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.terminate()
        self.server.wait(60)
        self.folder.cleanup()

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def ctl(self, *verb):
        return run(os.environ["MICA_BIN"], "ctl", "--control", self.path("control"),
                   "--output", "json", *verb)

    def change(self, count, zeros=0.2):
        """The guest writes or zeroes some places."""
        places = []
        for _ in range(count):
            length = self.random.choice([1, 8, 8, 16, 128]) * SECTOR
            at = self.random.randrange((self.length - length) // SECTOR) * SECTOR
            is_zeros = self.random.random() < zeros
            places.append((at, length, 0 if is_zeros else self.random.randrange(1, 256)))
        self.write(places)

    def scatter(self, step, length=4096):
        """The guest writes so much every `step` bytes."""
        self.write([(at, length, at // step % 255 + 1) for at in range(0, self.length, step)])

    def write(self, places):
        """The guest fills places: where, how many bytes, with which one."""
        def words(at, length, byte):
            return "-c", f"write -q {f'-P {byte}' if byte else '-z'} {at} {length}"
        for some in range(0, len(places), 500):
            args = [word for place in places[some:some + 500] for word in words(*place)]
            run("qemu-io", "-f", "raw", *args, f"nbd+unix:///{self.name}?socket={self.socket}")

    def begin(self, state, since=None):
        """Keeps a state and exports it."""
        more = ("--since", since) if since else ()
        self.ctl("backup", "begin", self.disk, "--as", state, *more, "--nbd", self.export)

    def end(self):
        self.ctl("backup", "end", self.disk)

    def state(self, state):
        """The bytes of a state, as QEMU reads its file."""
        raw = self.path("judge.raw")
        run("qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw",
            self.path(f"disk@{state}.qcow2"), raw)
        return read(raw)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def same(what, shown, wanted):
    """Two disks have the same bytes."""
    if shown != wanted:
        at = next((at for at in range(0, len(wanted), SECTOR)
                   if shown[at:at + SECTOR] != wanted[at:at + SECTOR]), len(wanted))
        raise AssertionError(f"{what}: {len(shown)} and {len(wanted)} bytes, not the same at {at:#x}")
    print(f"{what}: the same", flush=True)
