"""Mooncake's own structured objects, as a producer and consumer in Python: one JSON command a line.

    python peer.py MASTER SEGMENT_BYTES

Answers start with @@. Dicts are made here from their names, so that what comes back can be compared
value for value, type for type, with what was put.
"""
import json
import math
import sys

import numpy as np
from mooncake import structured_object_store as so
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
rc = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
NON_TENSOR = "non_tensor_batch"


def field(codec, dtype=None, nullable=False, section=NON_TENSOR):
    metadata = {"section": section, **({"dtype": dtype} if dtype else {})}
    return so.FieldSchema(codec=codec, nullable=nullable, metadata=metadata)


def slime(rows, scale):
    """What slime's rollout side puts for one rank, with rows of numpy."""
    prompt = [3 + (7 * i) % 11 for i in range(rows)]
    response = [scale * ((5 * i) % 13) for i in range(rows)]  # row 0 is empty
    total = [p + r for p, r in zip(prompt, response)]
    log_probs = [-(np.arange(r, dtype=np.float32) + i) / 8 for i, r in enumerate(response)]
    if rows > 2 and response[2] > 4:
        log_probs[2][:4] = [math.nan, -math.inf, math.inf, -0.0]
    data = {
        "partition": [3 * i for i in range(rows)],
        "tokens": [np.arange(n, dtype=np.int64) * 7 - i for i, n in enumerate(total)],
        "loss_masks": [np.arange(r, dtype=np.int32) % 2 for r in response],
        "rollout_log_probs": log_probs,
        "rollout_routed_experts": [
            np.arange((n - 1) * 6, dtype=np.int32).reshape(n - 1, 3, 2) for n in total],
        "response_lengths": response,
        "rewards": [0.1 * i for i in range(rows)],
        "truncated": [i % 2 for i in range(rows)],
        "source_names": [["dapo", "Na\u00efve \u8bc1\u660e \U0001f600", "", "a\nb\x01"][i % 4] for i in range(rows)],
        "notes": [None if i % 3 == 1 else {"step": i, "tags": ["x", None, 1.5]} for i in range(rows)],
        "images": [None if i % 4 == 2 else bytes(range(i % 256)) for i in range(rows)],
        "raw_reward": [1.0, 0, True, None, "text", {"a": [1, 2.5]}],
        "total_lengths": total + total,
        "micro_batch_indices": [[i] for i in range(rows)] + [[]],
    }
    schema = {name: field("typed_ragged") for name in
              ("tokens", "loss_masks", "rollout_log_probs", "rollout_routed_experts")}
    schema.update({name: field("ndarray", "int64") for name in
                   ("partition", "response_lengths", "truncated")})
    schema["rewards"] = field("ndarray", "float64")
    schema["source_names"] = field("utf8_ragged")
    schema["notes"] = field("msgpack_ragged", nullable=True)
    schema["images"] = field("bytes_ragged", nullable=True)
    schema.update({name: field("auto", section="meta_info") for name in
                   ("raw_reward", "total_lengths", "micro_batch_indices")})
    return data, schema


def nested():
    rows = [
        {"pixels": np.arange(6, dtype=np.uint8).reshape(2, 3), "size": [2, 3]},
        {"pixels": np.arange(4, dtype=np.uint8).reshape(2, 2)},
        {"pixels": np.zeros((0, 3), dtype=np.uint8), "size": [0, 3]},
    ]
    return {"multimodal": rows, "names": ["a", "b", "c"]}, None


def one_row():
    data, schema = slime(1, 1)
    return data, schema


DICTS = {
    "slime": lambda: slime(12, 3),
    "large": lambda: slime(40, 2000),
    "one row": one_row,
    "nested": nested,
}


def same(a, b):
    """Whether two values are of the same type and have the same bits."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}"
        return None if a.tobytes() == b.tobytes() else "other elements"
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return f"{len(a)} entries are not {len(b)}"
        return next((f"[{i}]: {why}" for i, (x, y) in enumerate(zip(a, b)) if (why := same(x, y))), None)
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return f"{sorted(a)} are not {sorted(b)}"
        return next((f"{k}: {why}" for k in a if (why := same(a[k], b[k]))), None)
    if isinstance(a, np.generic):
        a = a.item()
    if isinstance(b, np.generic):
        b = b.item()
    if type(a) is not type(b):
        return f"{type(a).__name__} is not {type(b).__name__}"
    return None if a == b else f"{a!r} is not {b!r}"


def plain(value):
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def kind(value):
    return f"ndarray {value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def transfer(ask):
    return so.MooncakeBundleTransfer(store, key_prefix=ask.get("prefix", "live"))


def put(ask):
    data, schema = DICTS[ask["name"]]()
    options = {"chunk_bytes": ask["chunk"]} if "chunk" in ask else {}
    if schema is not None:
        options["field_schemas"] = schema
    ref = transfer(ask).put(data, type="dict", namespace="live", partition="dp0", stage="rollout", **options)
    rows = {name: [kind(row) for row in rows] for name, rows in data.items()
            if isinstance(rows, list) and rows and any(isinstance(row, np.ndarray) for row in rows)}
    return {"ref": so.export_ref(ref), "values": plain(data), "arrays": rows}


def get(ask):
    data, _ = DICTS[ask["name"]]()
    t = transfer(ask)
    found = t.get(so.import_ref(ask["ref"]), type="dict")
    why = same(data, {name: list(v) if isinstance(v, list) else v for name, v in found.items()})
    t.release_result(found)
    return {"why": why}


def cleanup(ask):
    transfer(ask).cleanup_dataproto(so.import_ref(ask["ref"]))
    return {}


def exists(ask):
    return {"found": [key for key in ask["keys"] if store.is_exist(key) == 1]}


def say(answer):
    print("@@" + json.dumps(answer), flush=True)


say({"setup": rc, "module": so.__file__})
for line in sys.stdin:
    ask = json.loads(line)
    try:
        say({"put": put, "get": get, "cleanup": cleanup, "exists": exists}[ask["op"]](ask))
    except Exception as error:  # the other side decides what may fail
        say({"error": f"{type(error).__name__}: {error}"})
store.close()
