"""The deterministic rollout dict of `rollout_codec::payload`, made with numpy; `--check` compares it."""
import sys

import numpy as np

U64 = np.uint64
SEED, GAMMA = 0x5113E01709, 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
BASE_ROWS = 1000
RESPONSE = [64, 700, 1300, 1900, 2600, 3300, 4100, 5000, 6000, 7200, 8600, 10300, 12400, 15000, 18500, 24000, 32768]
PROMPT = [32, 60, 75, 88, 100, 112, 125, 140, 156, 175, 198, 226, 262, 312, 390, 560, 1024]
RAGGED = ("tokens", "loss_masks", "rollout_log_probs")


def draws(purpose, row, count):
    """Numbers 0 .. count-1 of one stream: splitmix64 of a counter."""
    seed = (SEED + purpose * 0x100000001 + row * 0x9E3779B9) & MASK
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=U64) * U64(GAMMA) + U64(seed)
        z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def lengths(purpose, table):
    p = draws(purpose, 0, BASE_ROWS) >> U64(48)
    knot, part = (p >> U64(12)).astype(int), (p & U64(4095)).astype(int)
    table = np.array(table)
    return (table[knot] + ((table[knot + 1] - table[knot]) * part >> 12)).tolist()


def make(target_bytes):
    """Rows of the profile `text` until they have at least `target_bytes`; each in memory of its own."""
    prompt, response = lengths(1, PROMPT), lengths(2, RESPONSE)
    rows, total = [], 0
    while total < target_bytes:
        base = len(rows) % BASE_ROWS
        p, r = prompt[base], response[base]
        total += 8 * (p + r) + 8 * r
        rows.append((base, p, r))
    data = {name: [] for name in RAGGED}
    for i, (base, p, r) in enumerate(rows):
        if i >= BASE_ROWS:
            for name in RAGGED:
                data[name].append(data[name][base].copy())
            continue
        data["tokens"].append((draws(3, base, p + r) % U64(151936)).astype(np.int64))
        mask = np.ones(r, dtype=np.int32)
        if base % 8 == 0:
            mask[r // 4:r // 2] = 0
        data["loss_masks"].append(mask)
        unit = (draws(4, base, r) >> U64(40)).astype(np.float32) * np.float32(2.0**-24)
        data["rollout_log_probs"].append(-unit * np.float32(4))
    n = len(rows)
    bits = (draws(7, 0, n) & U64(1)).astype(int).tolist()
    whole = list(range(n))
    data.update(
        partition=whole, sample_indices=list(whole), rollout_ids=list(whole),
        response_lengths=[r for _, _, r in rows], total_lengths=[p + r for _, p, r in rows],
        truncated=[int(r >= 30000) for _, _, r in rows], rewards=[bit - 0.5 for bit in bits],
        raw_reward=[float(bit) for bit in bits], source_names=["dapo-math-17k"] * n,
        rollout_mask_sums=np.array([m.sum() for m in data["loss_masks"]], dtype=np.float32),
        global_batch_sizes=[n], num_microbatches=[n], micro_batch_indices=[[i] for i in range(n)])
    return data


def nbytes(data):
    return sum(int(row.nbytes) for name in RAGGED for row in data[name])


def checksums(data):
    """Of each ragged field: wrapping sum of its rows as little-endian u64 words, padded, and elements."""
    out = {}
    for name in RAGGED:
        total, count = 0, 0
        for row in data[name]:
            raw = np.asarray(row).reshape(-1).view(np.uint8)
            whole = raw.size // 8 * 8
            total += int(raw[:whole].view(U64).sum(dtype=U64))
            total += int.from_bytes(raw[whole:].tobytes(), "little")
            count += np.asarray(row).size
        out[name] = [f"{total & MASK:016x}", count]
    return out


def to_torch(data):
    """The same dict with torch rows, each with storage of its own."""
    import torch
    rows = {name: [torch.from_numpy(row.copy()) for row in data[name]] for name in RAGGED}
    sums = torch.from_numpy(data["rollout_mask_sums"].copy())
    return {**data, **rows, "rollout_mask_sums": sums}


if __name__ == "__main__" and "--check" in sys.argv:
    found = checksums(make(128 << 20))
    assert found == {
        "tokens": ["00000096aace515d", 8515985],
        "loss_masks": ["003d8427003d85fb", 8299795],
        "rollout_log_probs": ["a8d5c57c4676de96", 8299795],
    }, found
    print("the payload is the one of rollout_codec::payload")
