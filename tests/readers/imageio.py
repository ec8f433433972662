"""ovirt-imageio as the reader of mica's backups: its NBD client, by which its daemon reads them, and
its HTTP client, which asks the daemon.

Runs in a folder with its sources, whose `test` folder has the helpers that are used here.
"""

import os
import subprocess
import sys

sys.path[:0] = [os.getcwd(), os.path.dirname(os.path.abspath(__file__))]

import scene  # noqa: E402
from ovirt_imageio import client  # noqa: E402
from ovirt_imageio._internal import config, nbd, nbdutil, server  # noqa: E402
from test import backup, testutil  # noqa: E402

NAME = "sda"
CERTIFICATE = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
               "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"]


def flat(image):
    raw = image + ".raw"
    scene.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", image, raw)
    return scene.read(raw)


def by_nbd(disk, state, since):
    """A state, or what changed, copied as oVirt's backup tests copy it, into an image."""
    url = f"nbd:unix:{disk.export}:exportname={NAME}"
    target = disk.path(f"nbd-{state}.qcow2")
    below = ["-b", disk.path(f"nbd-{since}.qcow2"), "-F", "qcow2"] if since else []
    scene.run("qemu-img", "create", "-q", "-f", "qcow2", *below, target, str(disk.length))
    copy = backup.copy_dirty if since else backup.copy_disk
    copy(url, target)
    scene.same(f"NBD client, {state}", flat(target), disk.state(state))
    with nbd.Client(nbd.UnixAddress(disk.export), NAME, dirty=since is not None) as c:
        if since:
            assert c.dirty_bitmap == f"qemu:dirty-bitmap:{since}", c.dirty_bitmap
        assert sum(part.length for part in nbdutil.extents(c, dirty=since is not None)) == disk.length


def by_http(daemon, disk, state, since):
    """The same through its daemon."""
    ticket = testutil.create_ticket(
        url=f"nbd:unix:{disk.export}:exportname={NAME}", size=disk.length, ops=["read"],
        dirty=since is not None)
    daemon.auth.add(ticket)
    url = f"https://localhost:{daemon.remote_service.address[1]}/images/{ticket['uuid']}"
    target = disk.path(f"http-{state}.qcow2")
    below = {}
    if since:
        below = {"backing_file": disk.path(f"http-{since}.qcow2"), "backing_format": "qcow2"}
    client.download(url, target, daemon.config.tls.ca_file, incremental=since is not None, **below)
    daemon.auth.remove(ticket["uuid"])
    scene.same(f"HTTP client, {state}", flat(target), disk.state(state))


def main():
    with scene.Disk(NAME) as disk:
        key, certificate = disk.path("key.pem"), disk.path("cert.pem")
        subprocess.check_call([*CERTIFICATE, "-keyout", key, "-out", certificate],
                              stderr=subprocess.DEVNULL)
        conf = disk.path("daemon.conf")
        with open(conf, "w") as file:
            file.write(f"[daemon]\ndrop_privileges = false\nsystemd_enable = false\n"
                       f"[tls]\nkey_file = {key}\ncert_file = {certificate}\nca_file = {certificate}\n"
                       f"[remote]\nport = 0\n[local]\nsocket =\n"
                       f"[control]\ntransport = unix\nsocket = {disk.path('imageio.sock')}\n")
        daemon = server.Server(config.load([conf]))
        daemon.start()
        try:
            since = None
            for night, count in enumerate([400, 80, 80, 2000]):
                disk.change(count)
                state = f"n{night}"
                disk.begin(state, since)
                by_nbd(disk, state, since)
                by_http(daemon, disk, state, since)
                disk.end()
                since = state
        finally:
            daemon.stop()


main()
