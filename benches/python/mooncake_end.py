"""One end of the comparison with Mooncake's own engine: serves memory, or reads and times it.

Does what each line on standard input says, and answers with a line. Uses nothing but the wheel and
the standard library.
"""

import ctypes
import json
import mmap
import sys
import time

from mooncake.engine import TransferEngine

engine = TransferEngine()
kept = []


def start():
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    return {"code": code, "session": f"127.0.0.1:{engine.get_rpc_port()}"}


def register(size):
    """Pages that are really there, in memory that Mooncake knows."""
    pages = mmap.mmap(-1, size)
    pages.write(bytes(range(256)) * (size // 256))
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    kept.append(pages)
    return {"code": engine.register_memory(address, size), "address": address}


def read(session, own, addresses, size, times):
    """Nanoseconds of each of `times` calls that read all addresses."""
    places = [own + i * size for i in range(len(addresses))]
    sizes = [size] * len(addresses)
    took = []
    for _ in range(times):
        if len(addresses) == 1:
            before = time.perf_counter_ns()
            code = engine.transfer_sync_read(session, own, addresses[0], size)
        else:
            before = time.perf_counter_ns()
            code = engine.batch_transfer_sync_read(session, places, addresses, sizes)
        took.append(time.perf_counter_ns() - before)
        if code:
            return {"code": code}
    return {"code": 0, "took": took}


for line in sys.stdin:
    request = json.loads(line)
    print(json.dumps(globals()[request.pop("do")](**request)), flush=True)
