#!/usr/bin/python3
"""virtnbdbackup as the reader of mica's backups, without libvirt: its NBD client, its look at
extents, what it writes into its files, and how it restores them.

The first argument is the folder of its sources. What libvirt would tell it of a domain is told here.
"""

import logging
import os
import subprocess
import sys
import types
from argparse import Namespace

sys.path[:0] = [sys.argv[1], os.path.dirname(os.path.abspath(__file__))]

import scene  # noqa: E402
from libvirtnbdbackup import nbdcli  # noqa: E402
from libvirtnbdbackup.backup import disk as backup  # noqa: E402
from libvirtnbdbackup.objects import DomainDisk  # noqa: E402
from libvirtnbdbackup.output import stream  # noqa: E402
from libvirtnbdbackup.restore import data as restore  # noqa: E402
from libvirtnbdbackup.sparsestream import streamer, types as stream_types  # noqa: E402

TARGET = "sda"
LOCAL = types.SimpleNamespace(remoteHost="")


def back_up(disk, folder, state, since, compress, sparse):
    """Writes a state, or what changed, into the folder; returns the file."""
    disk.begin(state, since)
    # With libvirt the bitmap is that of the job.
    nbdcli.context.get = lambda args, _: f"qemu:dirty-bitmap:{since}" if since else ""
    level = "inc" if since else "full"
    # Of a full backup it needs what it would leave out.
    sparse = sparse or not since
    args = Namespace(
        level=level, level_filename=level, offline=False, socketfile=disk.export, nbd_port=0,
        nbd_ip="", qemu=False, no_sparse_detection=not sparse, type="stream", stdout=False,
        output=folder, compress=2 if compress else False, noprogress=True, tls=False,
        cpt=Namespace(name=state, parent=since))
    about = DomainDisk(TARGET, "qcow2", "disk.qcow2", disk.path("disk.qcow2"), [], None)
    _, is_done = backup.backup(args, about, 0, stream.get(args), LOCAL)
    assert is_done
    disk.end()
    name = f"{TARGET}.full.data" if not since else f"{TARGET}.inc.{state}.data"
    return os.path.join(folder, name)


def give_back(disk, files):
    """Restores the files, one after the other, into an image that mica serves."""
    target, socket = disk.path("restored.qcow2"), disk.path("restored.nbd")
    scene.run("qemu-img", "create", "-q", "-f", "qcow2", target, str(disk.length))
    server = subprocess.Popen([os.environ["MICA_BIN"], "serve", "--nbd", socket, target],
                              stderr=subprocess.DEVNULL)
    try:
        connection = nbdcli.client(nbdcli.Unix("restored", "", socket), False).connect()
        args = Namespace(until=None, noprogress=True)
        for file in files:
            sparse = streamer.SparseStream(stream_types)
            assert restore.restore(args, sparse, file, target, connection)
        connection.disconnect()
    finally:
        server.terminate()
        server.wait(60)
    raw = disk.path("restored.raw")
    scene.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", target, raw)
    return scene.read(raw)


def nights(name, changes, zeros=0.2, compress=False, sparse=False):
    """A full backup and incremental ones, each given back."""
    with scene.Disk(TARGET) as disk:
        files, since = [], None
        for night, count in enumerate(changes):
            if count == "scatter":
                disk.scatter(8192)
            else:
                disk.change(count, zeros)
            folder = disk.path("files")
            os.makedirs(folder, exist_ok=True)
            state = f"n{night}"
            files.append(back_up(disk, folder, state, since, compress, sparse))
            scene.same(f"{name}, {state}", give_back(disk, files), disk.state(state))
            since = state


def main():
    logging.basicConfig(level=logging.WARNING)
    sys.stdout.flush()
    nights("plain", [300, 60, 60])
    nights("compressed", [300, 60], compress=True)
    # It leaves out what is a hole by now, and its restore does not know that: so without zeros.
    nights("sparse", [300, 60], zeros=0, sparse=True)
    # More extents than one answer has.
    nights("many extents", ["scatter", 60], zeros=0, sparse=True)


main()
