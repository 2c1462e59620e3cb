"""Ray's object store with the same payload: the driver puts the dict, an actor gets it.

    python ray_objects.py KIND MIB REPS WARMUP      KIND: numpy, torch or torch-zero-copy

Prints one JSON line with the seconds of each timed repeat.
"""
import gc
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

HERE = str(pathlib.Path(__file__).resolve().parent)
kind, mib, reps, warmup = sys.argv[1], *map(int, sys.argv[2:5])
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_MEMORY_MONITOR="1", PYTHONDONTWRITEBYTECODE="1")
if kind == "torch-zero-copy":
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"

import payload
import ray


class Reader:
    def __init__(self, needs_torch):
        if needs_torch:
            import torch
            torch.set_num_threads(1)

    def ready(self):
        return True

    def read(self, box, check):
        import payload
        gc.collect()
        start = time.perf_counter()
        data = ray.get(box[0])
        took = time.perf_counter() - start
        return took, payload.checksums(data) if check else None


def main():
    data = payload.make(mib << 20)
    size, want = payload.nbytes(data), payload.checksums(data)
    if kind != "numpy":
        data = payload.to_torch(data)
    folder = tempfile.mkdtemp(prefix="rollout-ray-")
    env = {"PYTHONPATH": HERE}
    if kind == "torch-zero-copy":
        env["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    try:
        ray.init(num_cpus=2, object_store_memory=3 * size + (512 << 20), include_dashboard=False,
                 _node_ip_address="127.0.0.1", _temp_dir=folder, runtime_env={"env_vars": env},
                 logging_level="ERROR", log_to_driver=False)
        reader = ray.remote(Reader).remote(kind != "numpy")
        ray.get(reader.ready.remote())
        puts, gets, sums = [], [], None
        for i in range(warmup + reps):
            gc.collect()
            start = time.perf_counter()
            ref = ray.put(data)
            put = time.perf_counter() - start
            got, found = ray.get(reader.read.remote([ref], i + 1 == warmup + reps))
            sums = found or sums
            if i >= warmup:
                puts.append(put)
                gets.append(got)
            del ref
            time.sleep(0.3)  # Ray gives the object's memory back in its own time
        if sums != want:
            raise SystemExit("the data differs after the transfer")
        print("@@" + json.dumps({"bytes": size, "put": puts, "get": gets, "version": ray.__version__}))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


main()
