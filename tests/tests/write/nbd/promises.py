# Run by nbdsh: what a writable export promises in the handshake, it keeps. SOCKET is mica's; the disk
# has 16 MiB and starts as zeros. What must be on it in the end is written to MODEL.
import errno
import os

import nbd

SIZE = 16 << 20


def connect():
    client = nbd.NBD()
    client.add_meta_context("base:allocation")
    # What the client library would refuse by itself shall reach the server.
    client.set_strict_mode(0)
    client.connect_unix(os.environ["SOCKET"])
    return client


def refused(error, call):
    try:
        call()
    except nbd.Error as said:
        assert said.errnum == error, (said, error)
    else:
        raise AssertionError("not refused")


client = connect()
assert client.get_size() == SIZE
assert not client.is_read_only()
for promise in ["flush", "fua", "trim", "zero", "fast_zero", "multi_conn", "df"]:
    assert getattr(client, f"can_{promise}")(), promise

# Writes of every length, with FUA and without, at odd places too.
model = bytearray(SIZE)


def write(at, data, flags=0):
    client.pwrite(data, at, flags)
    model[at:at + len(data)] = data


write(0, b"\x01" * 512)
write(4096, b"\x02" * (1 << 20), nbd.CMD_FLAG_FUA)
write(1000, b"\x03" * 24)
write((2 << 20) + 511, b"\x04" * 1026)
write(SIZE - 1, b"\x05")
client.zero(1 << 16, 8192)
model[8192:8192 + (1 << 16)] = bytes(1 << 16)
client.zero(700, 4100, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
model[4100:4800] = bytes(700)
write(3 << 20, b"\x06" * (1 << 20))
client.trim(1 << 19, 3 << 20)
trimmed = client.pread(1 << 19, 3 << 20)
model[3 << 20:(3 << 20) + (1 << 19)] = trimmed
assert set(trimmed) <= {0, 6}
client.flush()
assert client.pread(SIZE, 0) == model

# Many at once.
pending = []
for index in range(200):
    data = bytes([index % 250 + 1]) * 4096
    at = (8 << 20) + index * 4096
    pending.append(client.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), at))
    model[at:at + 4096] = data
while pending:
    client.poll(-1)
    pending = [cookie for cookie in pending if not client.aio_command_completed(cookie)]

# What one connection was told is written, another reads, and flushes (CAN_MULTI_CONN).
other = connect()
assert other.pread(SIZE, 0) == model
write(5 << 20, b"\x07" * 4096)
other.flush()
assert other.pread(4096, 5 << 20) == b"\x07" * 4096

# What makes no sense is refused with the right error, and the connection lives.
refused(errno.ENOSPC, lambda: client.pwrite(b"x" * 1024, SIZE - 512))
refused(errno.ENOSPC, lambda: client.zero(1024, SIZE - 512))
refused(errno.EINVAL, lambda: client.trim(1024, SIZE - 512))
refused(errno.EINVAL, lambda: client.pread(1024, SIZE - 512))
assert client.pread(512, 0) == model[:512]

client.flush()
open(os.environ["MODEL"], "wb").write(model)
client.shutdown()
other.shutdown()
print("all kept")
