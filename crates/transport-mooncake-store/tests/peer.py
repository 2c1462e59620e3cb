"""A store client in Python, as today's servers and trainers are: one JSON command a line.

    python peer.py MASTER SEGMENT_BYTES [HOST]

put and get use raw, registered buffers; value number i of a key is (7 * i + seed) % 256.
"""
import json
import sys

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store = MooncakeDistributedStore()
host = sys.argv[3] if len(sys.argv) > 3 else "127.0.0.1"
rc = store.setup(host, "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
config = ReplicateConfig()
config.replica_num = 1
config.with_hard_pin = True


def pattern(length, seed):
    return ((np.arange(length, dtype=np.uint64) * 7 + seed) % 256).astype(np.uint8)


def put(key, length, seed):
    value = pattern(length, seed)
    store.register_buffer(value.ctypes.data, length)
    code = store.put_from(key, value.ctypes.data, length, config)
    store.unregister_buffer(value.ctypes.data)
    return code


def get(key, length, seed):
    value = np.zeros(length, dtype=np.uint8)
    store.register_buffer(value.ctypes.data, length)
    found = store.get_into(key, value.ctypes.data, length)
    store.unregister_buffer(value.ctypes.data)
    return {"found": found, "equal": bool(np.array_equal(value, pattern(length, seed)))}


def say(answer):
    print("@@" + json.dumps(answer), flush=True)


def value(key, length, seed):
    """What the call gives that makes no difference between nothing and no such key."""
    return {"bytes": len(store.get(key)), "exists": store.is_exist(key)}


def name(key, length, seed):
    return store.get_hostname()


say({"setup": rc})
for line in sys.stdin:
    request = json.loads(line)
    command = request.pop("cmd")
    say({"put": put, "get": get, "name": name, "value": value}[command](**request))
store.close()
