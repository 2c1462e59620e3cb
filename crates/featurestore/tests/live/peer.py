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


def layouts():
    """Every codec and encoder of rows that needs no torch, with nulls where they may be."""
    n = 5
    grid = [np.arange(6, dtype=np.int16).reshape(2, 3) * i for i in range(n)]
    data = {
        "dense": np.arange(n * 4, dtype=np.float32).reshape(n, 4) / 3,
        "flags": np.array([[i % 2 == 0, i > 2] for i in range(n)]),
        "equal": grid,
        "vary": [grid[0], grid[1][:1], None, grid[3][:0], grid[4]],
        "lists": [[1, 2, 3], [], None, [4], [5, 6]],
        "nested_lists": [[[1.5, 2.5]], [[3.5, 4.5], [5.5, -0.0]], [[0.0, 1.0]], [[1.0, 2.0]], [[7.0, 8.0]]],
        "mixed": [np.arange(3, dtype=np.int64), [7, 8], np.arange(1, dtype=np.int64), [], [9]],
        "halves": [np.arange(i, dtype=np.float16) / 7 for i in range(n)],
        "bytes_of": [np.arange(i * 3, dtype=np.uint8) for i in range(n)],
        "truths": [np.arange(i) % 2 == 0 for i in range(n)],
        "empty": [np.zeros(0, dtype=np.int32) for _ in range(n)],
        "scalars": [True, False, True, True, False],
        "holes": [1, None, 3, None, 5],
        "json": [{"a": [1, None, "\u8bc1"]}, 1, "x", [], {"b": 2.5}],
        "packed": [{"a": b"\x00\xff"}, None, [1, 2.5], "t", 7],
        "blobs": [b"", b"\x00\x01", None, b"xyz", b"\n"],
        "media": [b"one", b"", b"three", b"\xff\xd8", b"5"],
        "media_lists": [[b"a", b"bc"], [], None, [b""], [b"d", b"e", b"f"]],
        "text": ["", "a.b/c", "\u8bc1\u660e", "\U0001f600", "x\ny"],
        "about": {"k": [1, 2, {"x": None}]},
    }
    schema = {name: field("typed_ragged", nullable=True) for name in
              ("equal", "vary", "lists", "nested_lists", "mixed", "halves", "bytes_of", "truths", "empty")}
    for name in ("lists", "mixed"):  # the older release makes floats of an empty list beside numbers
        schema[name] = field("typed_ragged", "int64", nullable=True)
    schema["scalars"] = field("ndarray", "bool")
    schema["holes"] = field("ndarray", "int64", nullable=True)
    schema["json"] = field("json_ragged")
    schema["packed"] = field("msgpack_ragged", nullable=True)
    schema["blobs"] = field("bytes_ragged", nullable=True)
    schema["media"] = field("media_bytes")
    schema["media_lists"] = field("media_list_ragged", nullable=True)
    schema["text"] = field("utf8_ragged")
    schema["about"] = field("auto", section="meta_info")
    return data, schema


def tensors():
    """What needs torch: ragged tensors, dicts of tensors, and one tensor over all rows."""
    import torch
    rows = [torch.arange(k * 6, dtype=torch.int32).reshape(k, 3, 2) + k for k in (2, 1, 0, 3)]
    data = {
        "logp": [torch.tensor([-0.5, -math.inf]), torch.empty(0), torch.tensor([math.nan]), torch.tensor([-0.0])],
        "experts": rows,
        "half": [torch.arange(k, dtype=torch.float16) for k in (1, 0, 3, 2)],
        "dicts": [{"pixels": rows[0].float(), "grid": torch.tensor([1, 2])}, None,
                  {"pixels": rows[1].float(), "grid": torch.tensor([3])}, {"pixels": rows[3].float(), "grid": torch.tensor([4])}],
        "sums": torch.tensor([1.5, 2.5, -1.0, 0.0]),
        "wide": torch.arange(24, dtype=torch.int64).reshape(4, 3, 2),
    }
    schema = {name: field("ragged_tensor") for name in ("logp", "experts", "half")}
    schema["dicts"] = field("ragged_tensor_dict", nullable=True)
    schema["sums"] = field("tensor", "float32", section="batch")
    schema["wide"] = field("tensor", "int64", section="batch")
    return data, schema


def one_row():
    data, schema = slime(1, 1)
    return data, schema


DICTS = {
    "slime": lambda: slime(12, 3),
    "large": lambda: slime(40, 2000),
    "one row": one_row,
    "nested": nested,
    "layouts": layouts,
    "tensors": tensors,
}


def is_tensor(value):
    return type(value).__module__ == "torch"


def same(a, b):
    """Whether two values are of the same type and have the same bits."""
    if is_tensor(a) and is_tensor(b):
        return same(a.numpy(), b.numpy()) if a.dtype == b.dtype else f"{a.dtype} is not {b.dtype}"
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
    if isinstance(value, np.ndarray) or is_tensor(value):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


def kind(value):
    if is_tensor(value):
        return f"{value.dtype}{list(value.shape)}"
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
            if isinstance(rows, list) and any(isinstance(row, np.ndarray) or is_tensor(row) for row in rows)}
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
