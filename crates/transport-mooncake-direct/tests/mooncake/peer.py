"""A process of Mooncake's own for the tests: it does what each line on standard input says, and
answers with a line. Uses nothing but the wheel and the standard library.

Usage: peer.py HOST PROTOCOL
"""

import ctypes
import json
import mmap
import os
import sys

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
FIXED_NOREPLACE = 0x100000


def memory(size, at=None):
    """Pages of this process, at an address that is asked for or anywhere."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (FIXED_NOREPLACE if at else 0)
    address = libc.mmap(at, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def pattern(salt, size):
    """The bytes that the tests expect: see `byte` in their support module."""
    period = bytes((31 * salt + i) % 256 for i in range(251))
    return (period * (size // 251 + 1))[:size]


class Peer:
    def __init__(self, host, protocol):
        self.host = host
        self.engine = TransferEngine()
        self.code = self.engine.initialize(host, "P2PHANDSHAKE", protocol, "")

    def session(self):
        port = self.engine.get_rpc_port() if self.code == 0 else 0
        return {"session": f"{self.host}:{port}", "code": self.code}

    def register(self, size, salt, at=None):
        address = memory(size, at)
        ctypes.memmove(address, pattern(salt, size), size)
        return {"code": self.engine.register_memory(address, size), "address": address}

    def unregister(self, address):
        return {"code": self.engine.unregister_memory(address)}

    def read(self, session, address, size, salt):
        own = memory(size)
        self.engine.register_memory(own, size)
        code = self.engine.transfer_sync_read(session, own, address, size)
        return self.outcome(code, own, size, salt)

    def read_many(self, session, addresses, size, salt):
        own = memory(size * len(addresses))
        self.engine.register_memory(own, size * len(addresses))
        places = [own + i * size for i in range(len(addresses))]
        sizes = [size] * len(addresses)
        code = self.engine.batch_transfer_sync_read(session, places, addresses, sizes)
        equal = all(ctypes.string_at(p, size) == pattern(salt, size) for p in places)
        self.engine.unregister_memory(own)
        return {"code": code, "equal": equal}

    def write(self, session, address, size, salt, message=None):
        own = memory(size)
        ctypes.memmove(own, pattern(salt, size), size)
        self.engine.register_memory(own, size)
        arguments = [session, own, address, size, TransferOpcode.Write]
        if message is not None:
            arguments.append(TransferNotify("peer", message))
        return self.outcome(self.engine.transfer_sync(*arguments), own, size, salt)

    def outcome(self, code, own, size, salt):
        equal = ctypes.string_at(own, size) == pattern(salt, size)
        self.engine.unregister_memory(own)
        return {"code": code, "equal": equal}

    def probe(self, session):
        return {"code": self.engine.send_probe(session)}

    def notified(self):
        return {"messages": [note.msg for note in self.engine.get_notifies()]}


def main():
    peer = Peer(*sys.argv[1:])
    print(json.dumps(peer.session()), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(peer, request.pop("do"))(**request)
        print(json.dumps(answer), flush=True)


main()
