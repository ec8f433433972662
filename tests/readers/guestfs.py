#!/usr/bin/python3
"""libguestfs over NBD: a file system is made on a disk that mica serves, and what a backup exports is
the file system of then.

`--format=raw` is given because libguestfs 1.48 looks for the format of a read-only NBD disk in a
file of that name.
"""

import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import scene  # noqa: E402

NAME = "sda"


def guestfish(uri, *more, script):
    done = subprocess.run(["guestfish", "--format=raw", "-a", uri, *more], input=script, text=True,
                          capture_output=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def said(wanted, *args):
    got = scene.run(*args)
    assert wanted in got, f"{args}: {got}"
    print(args[0], "reads what it has to", flush=True)


def main():
    with scene.Disk(NAME) as disk:
        now = f"nbd:///{NAME}?socket={disk.socket}"
        then = f"nbd:///{NAME}?socket={disk.export}"
        guestfish(now, script=r"""
            run
            part-disk /dev/sda mbr
            mkfs ext4 /dev/sda1
            mount /dev/sda1 /
            mkdir /etc
            write /etc/hostname "before\n"
            umount-all
        """)
        disk.begin("mon")
        guestfish(now, "-m", "/dev/sda1", script='write /etc/hostname after\n')
        of = ("--format=raw", "-a")
        said("before", "virt-cat", *of, then, "-m", "/dev/sda1", "/etc/hostname")
        said("after", "virt-cat", *of, now, "-m", "/dev/sda1", "/etc/hostname")
        said("/dev/sda1,filesystem,ext4", "virt-filesystems", "-l", "--csv", *of, then)
        said("/etc/hostname", "virt-ls", "-R", "-l", *of, then, "-m", "/dev/sda1", "/")
        checked = guestfish(then, "--ro", script="run\ne2fsck /dev/sda1 correct:true\n")
        assert not checked, checked
        disk.end()


main()
