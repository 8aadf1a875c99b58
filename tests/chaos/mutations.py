"""Damage files as a bad disk, a broken download or an attacker might.

`damage` changes a file of a folder in one way, which it draws at random.
"""

import gzip
import json
import math
import pathlib
import random
import struct
import zlib

STRANGE = (  # values to put into JSON where another kind of value is expected
    None,
    True,
    [],
    {},
    "",
    "x",
    [[]],
    {"x": {}},
    -1,
    0,
    0.5,
    2**31,
    2**63,
    10**30,
    -(10**18),
    math.nan,
    math.inf,
    ["a", 1, None],
    "../../../../etc/passwd",
    "/etc/passwd",
    "\ud800",
    "a\x00b",
    "x" * 5000,
)
PICKLE = b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system"
HUGE = [b"\xff" * 8, b"\x7f" + b"\xff" * 7, struct.pack("<Q", 2**40), b"9" * 20]
DEEP = 100_000  # nested brackets


def damage(path: pathlib.Path, rng: random.Random) -> str:
    """Change a file in one random way and return a description of the change."""
    raw = path.read_bytes()
    ways = WAYS + (STRUCTURED if _structure(path, raw) else [])
    way = rng.choice(ways)
    way(path, raw, rng)
    return f"{way.__name__.strip('_')} {path.name}"


def _flip(path, raw, rng):
    data = bytearray(raw or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _truncate(path, raw, rng):
    path.write_bytes(raw[: rng.choice((0, 1, 8, rng.randrange(len(raw) + 1)))])


def _delete(path, raw, rng):
    first, last = _range(raw, rng)
    path.write_bytes(raw[:first] + raw[last:])


def _insert(path, raw, rng):
    first, _ = _range(raw, rng)
    size = rng.choice((1, 4, 100))
    path.write_bytes(raw[:first] + rng.randbytes(size) + raw[first:])


def _swap(path, raw, rng):
    a, b, c, d = sorted(rng.randrange(len(raw) + 1) for _ in range(4))
    path.write_bytes(raw[:a] + raw[c:d] + raw[b:c] + raw[a:b] + raw[d:])


def _duplicate(path, raw, rng):
    first, last = _range(raw, rng)
    path.write_bytes(raw[:last] + raw[first:])


def _overwrite(path, raw, rng):
    first, _ = _range(raw[:4096] if rng.random() < 0.7 else raw, rng)
    number = rng.choice(HUGE)
    path.write_bytes(raw[:first] + number + raw[first + len(number) :])


def _head(path, raw, rng):
    number = rng.choice([*HUGE, bytes(8), struct.pack("<Q", len(raw))])
    path.write_bytes(number + raw[8:])


def _not_utf8(path, raw, rng):
    first, _ = _range(raw, rng)
    bad = rng.choice((b"\xff\xfe", b"\xc3(", b"\xed\xa0\x80", b"\xf8", b"\x00"))
    path.write_bytes(raw[:first] + bad + raw[first:])


def _pickle(path, raw, rng):
    path.write_bytes(rng.choice((PICKLE, b"PK\x03\x04" + PICKLE)) + raw[:200])


def _nest(path, raw, rng):
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    first, _ = _range(raw, rng)
    deep = opening * DEEP + rng.choice((b"1" + closing * DEEP, b""))
    path.write_bytes(rng.choice((deep, raw[:first] + deep + raw[first:])))


def _random(path, raw, rng):
    path.write_bytes(rng.randbytes(rng.choice((1, 16, 4096))))


def _remove(path, raw, rng):
    path.unlink()


def _directory(path, raw, rng):
    path.unlink()
    path.mkdir()


def _exchange(path, raw, rng):
    """Replace the contents by those of another file in the folder."""
    others = [p for p in path.parent.iterdir() if p.is_file() and p != path]
    path.write_bytes(rng.choice(sorted(others)).read_bytes() if others else b"")


def _range(raw, rng):
    """Return two positions in the bytes, in order; usually close to each other."""
    first = rng.randrange(len(raw) + 1)
    size = rng.choice((1, 16, 200, len(raw)))
    return first, min(len(raw), first + rng.randrange(size + 1))


WAYS = [_flip, _truncate, _delete, _insert, _swap, _duplicate, _overwrite, _head]
WAYS += [_not_utf8, _pickle, _nest, _random, _remove, _directory, _exchange]


def _structure(path, raw):
    """Return a file's (JSON value, function that packs another value into bytes).

    None for files that hold no JSON.
    """
    try:
        if path.suffix == ".gz":
            whole = _structure(path.with_suffix(""), gzip.decompress(raw))
            return whole and (whole[0], lambda value: gzip.compress(whole[1](value)))
        if path.suffix == ".safetensors":
            (size,) = struct.unpack("<Q", raw[:8])
            rest = raw[8 + size :]

            def packed(value):
                head = _text(value)
                return struct.pack("<Q", len(head)) + head + rest

            return json.loads(raw[8 : 8 + size]), packed
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in raw.split(b"\n")[:-1]]
            return rows, lambda rows: b"".join(_text(row) + b"\n" for row in rows)
        return json.loads(raw), _text
    except (ValueError, OSError, EOFError, RecursionError, struct.error, zlib.error):
        return None


def _text(value):
    return json.dumps(value).encode()


def _places(value):
    """Yield every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _edit(path, raw, rng, change):
    value, packed = _structure(path, raw)
    places = list(_places(value)) if isinstance(value, dict | list) else []
    if places:
        change(*_chosen(places, rng))
    else:
        value = rng.choice(STRANGE)
    path.write_bytes(packed(value if isinstance(value, dict | list) else [value]))


def _chosen(places, rng):
    """Draw a place; those near the top more often than, say, a vocabulary's entries."""
    return rng.choice(places[:20] if rng.random() < 0.3 else places)


def _value(path, raw, rng):
    def change(held, key):
        held[key] = rng.choice(STRANGE)

    _edit(path, raw, rng, change)


def _number(path, raw, rng):
    """Replace a value by another number."""

    def change(held, key):
        numbers = (0, -1, 1, 3, 7.5, 10**6, 10**9, 2**31, 2**63, 10**400, 1e308)
        held[key] = rng.choice(numbers)

    _edit(path, raw, rng, change)


def _drop(path, raw, rng):
    def change(held, key):
        del held[key]

    _edit(path, raw, rng, change)


def _rename(path, raw, rng):
    def change(held, key):
        if isinstance(held, dict):
            held[rng.choice(("x", "", "../x", "__class__"))] = held.pop(key)

    _edit(path, raw, rng, change)


def _twice(path, raw, rng):
    def change(held, key):
        if isinstance(held, list):
            held.append(held[key])
        else:
            held[rng.choice(list(held))] = held[key]

    _edit(path, raw, rng, change)


STRUCTURED = 3 * [_value, _value, _number, _drop, _rename, _twice]
