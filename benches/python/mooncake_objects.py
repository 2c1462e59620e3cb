"""Mooncake's own Python structured objects with the same payload, on a real master.

    python mooncake_objects.py MASTER KIND MIB REPS WARMUP      KIND: numpy or torch

This process puts and adds the object memory, as slime's rollout side does; a child without memory gets.
Prints one JSON line with the seconds of each timed repeat.
"""
import gc
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

import payload
from mooncake import structured_object_store as so
from mooncake.store import MooncakeDistributedStore


def transfer(master, segment, buffer):
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup answers {code}")
    return so.MooncakeBundleTransfer(store, key_prefix="slime-rollout"), store


def schemas(kind):
    def field(codec, section, dtype=None):
        metadata = {"section": section, **({"dtype": dtype} if dtype else {})}
        return so.FieldSchema(codec=codec, nullable=False, metadata=metadata)
    rows = "non_tensor_batch"
    ragged = "ragged_tensor" if kind == "torch" else "typed_ragged"
    spec = {name: field(ragged, rows) for name in payload.RAGGED}
    for name in ("partition", "response_lengths", "truncated", "sample_indices", "rollout_ids"):
        spec[name] = field("ndarray", rows, "int64")
    spec["rewards"] = field("ndarray", rows, "float32")
    spec["rollout_mask_sums"] = field("tensor", "batch", "float32")
    for name in ("raw_reward", "total_lengths", "global_batch_sizes", "num_microbatches", "micro_batch_indices"):
        spec[name] = field("auto", "meta_info")
    return spec


def read(master, size):
    objects, store = transfer(master, 0, size + (256 << 20))
    print("@@ready", flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        gc.collect()
        start = time.perf_counter()
        found = objects.get(so.import_ref(ask["ref"]), type="dict")
        took = time.perf_counter() - start
        sums = payload.checksums(found) if ask["check"] else None
        objects.release_result(found)
        found = None
        gc.collect()
        print("@@" + json.dumps({"get": took, "sums": sums}), flush=True)
    store.close()


def main():
    if sys.argv[1] == "--read":
        return read(sys.argv[2], int(sys.argv[3]))
    master, kind, (mib, reps, warmup) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:6])
    data = payload.make(mib << 20)
    size, want = payload.nbytes(data), payload.checksums(data)
    if kind == "torch":
        data = payload.to_torch(data)
    objects, store = transfer(master, 2 * size + (512 << 20), size + (256 << 20))
    reader = subprocess.Popen([sys.executable, __file__, "--read", master, str(size)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer():
        for line in reader.stdout:
            if line.startswith("@@"):
                return line[2:]
        raise SystemExit("the reader ended")

    try:
        answer()
        puts, gets, sums, keys = [], [], None, 0
        spec = {name: schema for name, schema in schemas(kind).items() if name in data}
        data.pop("source_names", None)  # without a codec it would go into the handle
        for i in range(warmup + reps):
            gc.collect()
            start = time.perf_counter()
            ref = objects.put(data, type="dict", namespace="slime", partition="dp0", stage="rollout",
                              field_schemas=spec)
            exported = so.export_ref(ref)
            put = time.perf_counter() - start
            reader.stdin.write(json.dumps({"ref": exported, "check": i + 1 == warmup + reps}) + "\n")
            reader.stdin.flush()
            got = json.loads(answer())
            sums = got["sums"] or sums
            objects.cleanup_dataproto(so.import_ref(exported))
            if i >= warmup:
                puts.append(put)
                gets.append(got["get"])
        if sums != want:
            raise SystemExit("the data differs after the transfer")
        print("@@" + json.dumps({"bytes": size, "put": puts, "get": gets}), flush=True)
    finally:
        reader.stdin.close()
        reader.wait(30)
        store.close()


main()
