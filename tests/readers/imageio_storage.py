"""Where ovirt-imageio's tests have their files: folders, in place of its loop devices."""

import os
import tempfile

import userstorage.backend


class Folder(userstorage.backend.Base):
    """A file in a folder that goes with the process."""

    def __init__(self, name):
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="mica-")
        self.path = os.path.join(self.folder.name, "file")

    def exists(self):
        return True

    def setup(self):
        # What mica kept of a disk that was here.
        for name in os.listdir(self.folder.name):
            os.remove(os.path.join(self.folder.name, name))
        with open(self.path, "w"):
            pass


NAMES = [f"file-{sector}-{system}" for sector in ("512", "4k") for system in ("ext2", "ext4", "xfs")]
BACKENDS = {name: Folder(name) for name in NAMES}
