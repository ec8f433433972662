

# In place of QEMU's backup job.

@contextmanager
def full_backup(tmpdir, disk, fmt, sock, checkpoint=None):  # noqa: F811
    """Has mica serve the disk, and keep a state of it, which is exported at sock."""
    import json
    import os
    import subprocess

    mica, control = os.environ["MICA_BIN"], str(tmpdir.join("control"))
    # In it no port can be opened that was not known at the start.
    sandbox = ["--sandbox", "off"] if sock.transport == "tcp" else []
    server = subprocess.Popen([
        mica, "serve", "--format", fmt, "--nbd", str(tmpdir.join("guest.sock")), "--control",
        control, "--export-name", "sda", *sandbox, disk])
    ctl = [mica, "ctl", "--control", control, "--output", "json"]
    try:
        while not os.path.exists(str(tmpdir.join("guest.sock"))):
            assert server.poll() is None
            time.sleep(0.01)
        name = json.loads(subprocess.check_output([*ctl, "status"]))["disks"][0]["name"]
        if sock.transport == "unix":
            place = "unix:" + sock.path
        else:
            place = "tcp:127.0.0.1:{}".format(sock.port)
        begin = ["backup", "begin", name, "--as", checkpoint or "check", "--nbd", place]
        subprocess.check_call([*ctl, *begin])
        yield
        subprocess.check_call([*ctl, "backup", "end", name])
    finally:
        server.terminate()
        server.wait(60)
