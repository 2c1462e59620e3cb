"""Mooncake's own Python client doing the calls that the store bench measures; one JSON command a line.

    python mooncake_store.py MASTER SEGMENT_BYTES    with a segment it only provides memory

The bench (cargo xtask bench store) starts it; every get is compared with what was put, unmeasured.
"""
import json
import sys
import time

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

store = MooncakeDistributedStore()
rc = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
config = ReplicateConfig()
config.replica_num = 1
config.with_hard_pin = True
cases, serial, clock = {}, 0, time.perf_counter


def prepare(case, sizes):
    total = sum(sizes)
    source = (np.arange(total // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.uint8)[:total].copy()
    target = np.ones(total, dtype=np.uint8)
    for a in (source, target):
        if store.register_buffer(a.ctypes.data, total):
            raise SystemExit("register_buffer failed")
    offsets = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    cases[case] = (source, target, sizes, [source.ctypes.data + o for o in offsets],
                   [target.ctypes.data + o for o in offsets])
    return {}


def run(case, batch):
    global serial
    source, target, sizes, sp, tp = cases[case]
    serial += 1
    keys = [f"python/{serial}/g1/{i}" for i in range(len(sizes))]
    target.fill(1)
    t0 = clock()
    put = store.batch_put_from(keys, sp, sizes, config) if batch else [store.put_from(*x, config) for x in zip(keys, sp, sizes)]
    t1 = clock()
    got = store.batch_get_into(keys, tp, sizes) if batch else [store.get_into(*x) for x in zip(keys, tp, sizes)]
    t2 = clock()
    gone = store.batch_remove(keys, True) if batch else [store.remove(k, True) for k in keys]
    t3 = clock()
    if any(put) or list(got) != sizes or any(gone) or not np.array_equal(source, target):
        raise SystemExit("a call failed, or the data differs")
    return {"put": t1 - t0, "get": t2 - t1, "remove": t3 - t2}


print("@@" + json.dumps({"setup": rc}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    print("@@" + json.dumps({"prepare": prepare, "run": run}[request.pop("cmd")](**request)), flush=True)
store.close()
