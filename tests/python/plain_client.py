"""A capture client as they exist today: standard library only, no featurestore code.

Speaks the documented capture request over HTTP, reads the arena over Mooncake's tcp wire (peer
handshake, then data frames), frees by newline-separated JSON lists of keys, and prints one JSON
object: per sample the sha256 of every tensor, and the server's health before and after the frees.

usage: plain_client.py BASE_URL PROMPTS.json [--proto 1|2] [--plugin]

PROMPTS.json: a list of {"sample_id", "input_ids", "loss_mask"}.
"""

import argparse
import hashlib
import json
import socket
import struct
import time
import urllib.request
import uuid

TIMEOUT_S = 20
ITEM_SIZE = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int64": 8,
    "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}


def post(url, body):
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)


def get(url):
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        return json.load(response)


def receive(connection, count):
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("the peer closed in mid-frame")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def connect(session):
    host, port = session.rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S)


def handshake(session):
    """Type 1 (metadata): u64 length of what follows, one type byte, JSON text."""
    own = json.dumps({"name": "plain-client", "protocol": "tcp", "buffers": []}).encode()
    with connect(session) as connection:
        connection.sendall(struct.pack("<QB", len(own) + 1, 1) + own)
        (length,) = struct.unpack("<Q", receive(connection, 8))
        assert length <= 1 << 20, length
        frame = receive(connection, length)
    assert frame[0] == 1, frame[:1]
    return json.loads(frame[1:])


class Reader:
    """One data connection: a 24-byte header per read, and in version 2 a status frame before the body."""

    def __init__(self, session, proto=None):
        meta = handshake(session)
        assert meta["protocol"] == "tcp", meta
        self.buffers = [(b["addr"], b["length"]) for b in meta["buffers"]]
        self.proto = proto or meta.get("tcp_proto_version", 1)
        host = meta.get("tcp_data_host") or session.rsplit(":", 1)[0].strip("[]")
        self.connection = socket.create_connection(
            (host, meta["tcp_data_port"]), timeout=TIMEOUT_S
        )

    def read(self, address, length):
        if not length:
            return b""
        assert any(a <= address and address + length <= a + n for a, n in self.buffers), (
            address, length, self.buffers,
        )
        opcode = 0x80 if self.proto >= 2 else 0x00
        self.connection.sendall(struct.pack("<QQB7x", length, address, opcode))
        if self.proto >= 2:
            (status,) = struct.unpack("<Q", receive(self.connection, 8))
            assert status >> 32 == 0x4D435456, hex(status)
            assert status & 0xFFFFFFFF == 0, "the server refused the read: %d" % (status & 0xFFFFFFFF)
        return receive(self.connection, length)


def results_of(response):
    rows = response if isinstance(response, list) else [response]
    for row in rows:
        found = row["meta_info"]["spec_capture"]
        while isinstance(found, list):
            assert len(found) == 1, found
            found = found[0]
        yield found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("prompts")
    parser.add_argument("--proto", type=int)
    parser.add_argument("--plugin", action="store_true")
    options = parser.parse_args()
    with open(options.prompts, encoding="utf-8") as file:
        prompts = json.load(file)

    payloads = []
    for prompt in prompts:
        length = len(prompt["input_ids"])
        payloads.append({
            "store_id": "plain", "sample_id": prompt["sample_id"], "gen": 1, "replace": False,
            "features": {"aux": "hidden_states", "last_hidden": "target_last_hidden_states"},
            "passthrough": [
                {"name": name, "data": prompt[name], "shape": [1, length], "dtype": "int64"}
                for name in ("input_ids", "loss_mask")
            ],
        })
    body = {
        "input_ids": [p["input_ids"] for p in prompts],
        "extra_key": [uuid.uuid4().hex for _ in prompts],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
    }
    if options.plugin:
        body["sampling_params"] = [
            {"temperature": 0.0, "max_new_tokens": 0,
             "custom_params": {"spec_capture": json.dumps(p)}}
            for p in payloads
        ]
    else:
        body["spec_capture"] = payloads
    captured = list(results_of(post(options.base_url + "/generate", body)))
    assert len(captured) == len(prompts), captured

    readers, samples, keys = {}, {}, {}
    for result in captured:
        assert "error" not in result, result
        arena = result["arena"]
        if arena["session"] not in readers:
            readers[arena["session"]] = Reader(arena["session"], options.proto)
        tensors = {}
        for name, feature in result["features"].items():
            count = ITEM_SIZE[feature["dtype"]]
            for dimension in feature["shape"]:
                count *= dimension
            data = readers[arena["session"]].read(feature["address"], count)
            tensors[name] = hashlib.sha256(data).hexdigest()
            keys.setdefault(arena["control"], []).append(
                "%s/%s/g%d/%s" % (result["store_id"], result["sample_id"], result["gen"], name)
            )
        samples[result["sample_id"]] = tensors
    before = get(options.base_url + "/health")

    for control, names in keys.items():
        with connect(control) as connection:
            half = len(names) // 2
            line = json.dumps(names[:half]).encode() + b"\n" + json.dumps(names[half:]).encode() + b"\n"
            cut = len(line) // 2
            connection.sendall(line[:cut])  # frees arrive split, and an unknown key is no error
            connection.sendall(line[cut:] + b'["no/such/g1/key"]\n')
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        after = get(options.base_url + "/health")
        if after["resident_samples"] == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    print(json.dumps({"samples": samples, "before": before, "after": after}))


if __name__ == "__main__":
    main()
