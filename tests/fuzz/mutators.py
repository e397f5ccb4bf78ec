"""Valid files made wrong: bytes at random, and for each format the lies that only somebody who knows it would tell."""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

DEEP = 100_000
BOMB_ELEMENTS = 600_000_000
TEXTS = ("", "\0", "\x1b[2J", "\u202e", "\ud800", "../../x", "/etc/passwd", "nan", "x" * 100_000, "{text}", "é" * 300)
NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, float("nan"), float("inf"), -0.0, 1e-320)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], {"a": {}}, [1] * 1000)
WORDS = [n.to_bytes(8, "little", signed=n < 0) for n in (0, 1, -1, 2**31, 2**40, 2**62, -(2**63))]


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip, overwrite, cut, repeat or insert, once or a few times."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5, 30])):
        at, other = (chance.randrange(len(changed) + 1) for _ in range(2))
        size = chance.choice([1, 2, 4, 8, 64, 512])
        match chance.choice(["flip", "flip", "word", "noise", "cut", "tail", "repeat", "insert", "zero"]):
            case "flip" if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case "word":
                changed[at : at + 8] = chance.choice(WORDS)[: len(changed) - at]
            case "noise":
                changed[at : at + size] = chance.randbytes(len(changed[at : at + size]))
            case "cut":
                del changed[at : at + size]
            case "tail":
                del changed[max(at, other) :]
            case "repeat":
                changed[at:at] = changed[other : other + size]
            case "insert":
                changed[at:at] = chance.randbytes(size)
            case "zero":
                changed[at : at + size] = bytes(len(changed[at : at + size]))
    return bytes(changed)


def mutate_json(data: bytes, chance: random.Random) -> bytes:
    """Change, drop, repeat or bury a value, somewhere in one JSON document."""
    if chance.random() < 0.3:
        return mutate_bytes(data, chance)
    root = [json.loads(data)]
    holder, key = chance.choice(list(_places(root)))
    match chance.choice(["value", "value", "value", "drop", "add", "bury", "grow"]):
        case "value":
            holder[key] = chance.choice(chance.choice([TEXTS, NUMBERS, OTHERS]))
        case "drop" if len(holder) > 1:
            del holder[key]
        case "add" if isinstance(holder, dict):
            holder[chance.choice(TEXTS)] = chance.choice(OTHERS)
        case "bury":
            holder[key] = "@deep@"
        case "grow":
            holder[key] = [holder[key]] * chance.choice([2, 300])
    deep = chance.choice(["[", '{"a":']) * DEEP
    text = json.dumps(root[0], ensure_ascii=chance.random() < 0.9)
    return text.replace('"@deep@"', deep).encode(errors="surrogatepass")


def mutate_sealed(data: bytes, chance: random.Random) -> bytes:
    """Change a line of JSON that ends with its checksum; of lines that are no records with the right checksum again."""
    if chance.random() < 0.4:
        return mutate_bytes(data, chance)
    lines = data.splitlines(keepends=True)
    at = chance.choice([number for number, line in enumerate(lines) if not line.startswith(b'{"id":')])
    value = json.loads(lines[at])
    value.pop("seal")
    body = mutate_json(json.dumps(value).encode(), chance).rstrip(b"}\n")
    return b"".join([*lines[:at], body + b', "seal": "%08x"}\n' % zlib.crc32(body), *lines[at + 1 :]])


def mutate_toml(data: bytes, chance: random.Random) -> bytes:
    """Give a key another value, or another name."""
    if chance.random() < 0.4:
        return mutate_bytes(data, chance)
    lines = data.decode().splitlines()
    at = chance.choice([number for number, line in enumerate(lines) if "=" in line])
    values = [json.dumps(text) for text in TEXTS] + [str(number) for number in NUMBERS]
    values += ["true", "[]", "[[]]", "{a = {}}", "1979-05-27", "[" * DEEP, "{a=" * DEEP, "'" * 3, "0x_1", "1__0"]
    name = lines[at].partition("=")[0]
    if chance.random() < 0.1:
        name = chance.choice(["a." * 1000 + "b", "trust_remote_code", "'\\u202e'", "path"])
    lines[at] = f"{name} = {chance.choice(values)}"
    return "\n".join(lines).encode(errors="surrogatepass")


def mutate_jsonl(data: bytes, chance: random.Random) -> bytes:
    """Change one row of many."""
    if chance.random() < 0.3:
        return mutate_bytes(data, chance)
    lines = data.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = mutate_json(lines[at], chance)
    return chance.choice([b"\n", b"\n", b"\r\n", b"\n\n", b"\xe2\x80\xa8\n"]).join(lines)


def mutate_gzip(data: bytes, chance: random.Random) -> bytes:
    """Change what is in it, or the stream itself, or let it swell."""
    if chance.random() < 0.5:
        return mutate_bytes(data, chance)
    if chance.random() < 0.05:  # more than a gigabyte in one line
        return data + gzip.compress(b" " * (48 << 20)) * 25
    return gzip.compress(mutate_jsonl(gzip.decompress(data), chance)) + chance.choice([b"", b"", b"junk", data])


def mutate_parquet(data: bytes, chance: random.Random) -> bytes:
    """Change bytes, or write columns of other types, some of them far larger than their file."""
    if chance.random() < 0.8:
        return mutate_bytes(data, chance)
    import pyarrow
    import pyarrow.parquet

    columns: list[Any] = [
        ["a", "b"],
        [None, None],
        [1, 2],
        [float("nan"), 1.0],
        [b"\xff", b"b"],
        [["a"], ["b"]],
        [{"a": "b"}, None],
        ["x" * 20_000_000] * 60,
    ]
    text, name = chance.choice(columns), chance.choice(columns[:-1])
    names = (name * len(text))[: len(text)]
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": names, "text": text}), stream, compression="zstd")
    return stream.getvalue()


def mutate_hdf5(data: bytes, chance: random.Random) -> bytes:
    """Change bytes, or with h5py what a file says and where it leads."""
    if chance.random() < 0.6:
        return mutate_bytes(data, chance)
    stream = io.BytesIO(data)
    with h5py.File(stream, "r+") as file:
        found: list[Any] = [file]
        file.visititems(lambda name, item: found.append(item))
        item = chance.choice(found)
        if chance.random() < 0.5:
            _change_attribute(item, chance)
        elif item != file:
            _change_item(item, chance)
    return stream.getvalue()


def _change_attribute(item: Any, chance: random.Random) -> None:
    names = list(item.attrs) or ["new"]
    values: list[Any] = [*(text for text in TEXTS if text not in ("\0", "\ud800")), *NUMBERS[:4], float("nan")]
    values += [np.zeros(7000), h5py.Empty("f4"), np.bytes_(b"\xff\xfe"), ["a", "b"], np.bytes_(b"[" * 60_000)]
    name, value = chance.choice(names), chance.choice(values)
    match chance.choice(["set", "set", "delete", "rename"]):
        case "delete" if name in item.attrs:
            del item.attrs[name]
        case "rename" if name in item.attrs:
            h5py.h5a.rename(item.id, name.encode(), name.encode() + b"x")
        case _ if isinstance(value, str) and chance.random() < 0.6:
            item.attrs[name] = np.array(value.encode(), dtype=h5py.string_dtype("utf-8", max(1, len(value.encode()))))
        case _:
            item.attrs[name] = value


def _change_item(item: Any, chance: random.Random) -> None:
    parent, name = item.parent, item.name.rsplit("/", 1)[-1]
    makers: list[Callable[[], Any]] = [
        lambda: parent.__setitem__(name, h5py.SoftLink(chance.choice(["/", "..", "/nowhere", "/kv"]))),
        lambda: parent.__setitem__(name, h5py.ExternalLink("/etc/passwd", "/")),
        lambda: parent.__setitem__(name, parent),  # a group in itself
        lambda: parent.create_group(name),
        lambda: parent.create_dataset(name, (BOMB_ELEMENTS,), "i8", chunks=(1 << 20,), compression="gzip"),
        lambda: parent.create_dataset(name, (BOMB_ELEMENTS,), "S1"),
        lambda: parent.create_dataset(name, data=np.full((4, 1, 4), np.nan)),
        lambda: parent.create_dataset(name, data=np.arange(5, dtype=chance.choice(["u1", "f8", ">i8", "i2"]))),
        lambda: parent.create_dataset(name, data=np.array(["a", "b"], dtype=h5py.string_dtype())),
        lambda: parent.create_dataset(name, data=np.zeros(2, dtype=[("a", "i4"), ("b", "f8")])),
        lambda: parent.create_dataset(name, (3,), "i8", external=[("/dev/zero", 0, 24)]),
        lambda: _bomb(parent, name),
        lambda: None,
    ]
    del parent[name]
    chance.choice(makers)()


def _bomb(parent: Any, name: str) -> None:
    """Make a dataset of 4.8 GB whose every chunk is there: the same few bytes of gzip."""
    chunk = 1 << 24
    made = parent.create_dataset(name, (36 * chunk,), "i8", chunks=(chunk,), compression="gzip")
    packed = zlib.compress(bytes(8 * chunk), 9)
    for number in range(36):
        made.id.write_direct_chunk((number * chunk,), packed)


def mutate_lock(data: bytes, chance: random.Random) -> bytes:
    """Change a lock's JSON, or its bytes."""
    return mutate_json(data.rstrip(), chance).ljust(1023) + b"\n"


def _places(holder: Any) -> Any:
    """Yield (container, key) of every value."""
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for key, value in list(items):
        yield holder, key
        if isinstance(value, (dict, list)):
            yield from _places(value)
