# Run by nbdsh: what the server promises in the handshake, it keeps. SOCKET is mica's, FLAT holds the
# disk as QEMU reads it.
import os

import nbd

flat = open(os.environ["FLAT"], "rb").read()


def connect(structured=True, context=True):
    client = nbd.NBD()
    if context:
        client.add_meta_context("base:allocation")
    client.set_request_structured_replies(structured)
    client.set_export_name("disk")
    client.connect_unix(os.environ["SOCKET"])
    return client


def read_all(client, step):
    return b"".join(bytes(client.pread(min(step, len(flat) - at), at)) for at in range(0, len(flat), step))


# Structured and simple replies bring the same bytes, in requests of any alignment.
assert read_all(connect(), 1 << 20) == flat
assert read_all(connect(structured=False, context=False), 1000003) == flat

# A structured read tells holes without sending them, and covers every byte once.
client = connect()
seen = bytearray(b"\xee" * (4 << 20))
covered = 0


def chunk(data, offset, status, error):
    global covered
    covered += len(data)
    seen[offset:offset + len(data)] = data if status != nbd.READ_HOLE else bytes(len(data))


client.pread_structured(4 << 20, 0, chunk)
assert covered == 4 << 20 and bytes(seen) == flat[:4 << 20]

# With DF the answer comes in one chunk.
pieces = []
client.pread_structured(256 << 10, (1 << 20) - 4096, lambda data, *rest: pieces.append(len(data)), nbd.CMD_FLAG_DF)
assert pieces == [256 << 10], pieces

# Block status never lies about zeros; REQ_ONE brings one extent that does not pass the request.
extents = []
client.block_status(len(flat), 0, lambda name, offset, entries, error: extents.append((name, entries)))
assert extents[0][0] == "base:allocation"
at = 0
for length, flags in zip(extents[0][1][::2], extents[0][1][1::2]):
    assert length > 0
    assert not flags & nbd.STATE_ZERO or flat[at:at + length].count(0) == len(flat[at:at + length])
    at += length
one = []
client.block_status(4096, 1 << 20, lambda name, offset, entries, error: one.append(entries), nbd.CMD_FLAG_REQ_ONE)
assert len(one[0]) == 2 and one[0][0] <= 4096, one

# Many requests in flight, answered in any order.
buffers = [(at, nbd.Buffer(65536)) for at in range(0, len(flat), 65536)]
cookies = [(client.aio_pread(buffer, at), at, buffer) for at, buffer in buffers]
while cookies:
    client.poll(-1)
    left = []
    for cookie, at, buffer in cookies:
        if client.aio_command_completed(cookie):
            assert bytes(buffer.to_bytearray()) == flat[at:at + 65536]
        else:
            left.append((cookie, at, buffer))
    cookies = left

# What lies beyond the end, or would write, is refused with the right error, and the connection lives.
client.set_strict_mode(0)
for wrong in (
    lambda: client.pread(512, len(flat)),
    lambda: client.pread(1024, len(flat) - 512),
    lambda: client.pwrite(b"x" * 512, 0),
    lambda: client.zero(4096, 0),
    lambda: client.trim(4096, 0),
):
    try:
        wrong()
    except nbd.Error as error:
        assert error.errno in ("EINVAL", "EPERM", "ENOSPC", "EROFS", "ENOTSUP"), error.errno
    else:
        raise AssertionError("a wrong request was accepted")
    assert bytes(client.pread(4096, 1 << 20)) == flat[1 << 20:(1 << 20) + 4096]
client.shutdown()

# Haggling: list, info, an unknown export, then go on the same connection.
client = nbd.NBD()
client.set_opt_mode(True)
client.set_export_name("no such export")
client.connect_unix(os.environ["SOCKET"])
names = []
client.opt_list(lambda name, description: names.append((name, description)))
assert ("disk", "a test") in names, names
try:
    client.opt_info()
except nbd.Error:
    pass
else:
    raise AssertionError("an unknown export was found")
client.set_export_name("")
client.opt_go()
assert client.get_size() == len(flat)
assert bytes(client.pread(512, 1 << 20)) == flat[1 << 20:(1 << 20) + 512]
client.shutdown()
print("all kept")
