"""The vocabulary, the corpus, windows of clean bytes; and the struct of a command-line flag, which all files share.

The ids of a file are its bytes: no tokenizer, no preparation. A large file is mapped, a folder's files are joined in
memory. Byte 0 (NUL) is also EOT, the end of a document. What a training step reads is a pure function of (seed, step),
so a resumed run, another evaluation interval or another number of micro-batches sees the same bytes.

B rows, n raw bytes in a row, N bytes in a split of a source, S sources
"""
import bz2
import contextlib
import ctypes
import itertools
import lzma
import mmap
import os
import sys
import sysconfig
import warnings
import zlib
from dataclasses import dataclass

# torch warns where NumPy is not installed, which is not needed here. All files import this one before torch
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
warnings.filterwarnings("ignore", "The given buffer is not writable")               # a mapped file
import torch  # noqa: E402

# ids 0..255 are the bytes themselves; the ids after them never occur in a corpus
EOT = 0                                         # NUL: text never contains it, and C strings end with it
PAD, MASK, CLS, SEP, PRE, SUF, MID, MODE_R, MODE_S, MODE_X = range(256, 266)
SENTINEL = 272                                  # <extra_id_0>; 266..271 are spare
N_SENTINELS = 240
VOCAB_SIZE = SENTINEL + N_SENTINELS             # 512 = 4 * 128
ID_SYMBOLS = {-100: "·", EOT: "∅", 9: "⇥", 10: "⏎", PAD: "░", MASK: "█", CLS: "Ⓒ", SEP: "‖", PRE: "Ⓟ", SUF: "Ⓢ",
              MID: "Ⓜ", MODE_R: "ⓡ", MODE_S: "ⓢ", MODE_X: "ⓧ",
              **{SENTINEL + i: "①②③④⑤⑥⑦⑧⑨"[i % 9] for i in range(N_SENTINELS)}}

MIN_BLOCK_SIZE = 32                             # positions of the shortest rows
CRC_PIECE = 1 << 16                             # bytes of a corpus that are checksummed together
MAPPED_BYTES = 1 << 26                          # files from this size on are mapped
COMPRESSED_BYTES = 1 << 24                      # the compressors read at most so many bytes
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}   # of stdlib


# ---- flags and errors, of every program
@dataclass(frozen=True)
class Flag:
    """A command-line flag. Its type is that of its default; a dict of defaults depends on the device or optimizer."""
    default: object
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple = ()


def fail(message):
    """Reports a user's error: one line on stderr (what, where, what to try), exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ---- bytes and ids
def to_symbol(i):  # id -> one character, to print rows with one character a position
    return ID_SYMBOLS.get(i, chr(i) if 32 <= i < 127 else "�")


def to_bytes(t):  # (N,) uint8 on the CPU -> bytes
    assert t.dtype == torch.uint8, t.dtype
    t = t.contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel())  # t.numpy() would need NumPy


def from_bytes(b):  # bytes -> (N,) uint8
    return torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else torch.empty(0, dtype=torch.uint8)


# ---- the corpus: a list of sources, dicts {name, weight, train (N,) uint8, val (N,) uint8, size, crc}
def open_corpus(specs):  # ["a.txt:0.95", "folder:0.05"] -> list of S sources
    """Files, folders or "stdlib", each with a ":weight" or none of them; without weights their shares follow from their
    sizes. The weights returned add up to 1."""
    named = [split_weight(spec) for spec in specs]
    without = [path for path, weight in named if not weight]
    if 0 < len(without) < len(named):
        fail(f"--data {without[0]}: has no weight, another source has. Try {without[0]}:0.05, or no weight at all")
    corpus = []
    for path, weight in named:
        try:
            if path == "stdlib":
                train, val = split_documents([*read_stdlib().values()])
            elif os.path.isdir(path):
                documents, n_skipped = read_folder(path)
                print(f"--data {path}: {len(documents):,} files; {n_skipped:,} empty, binary, duplicate or unreadable")
                train, val = split_documents([*documents.values()])
            else:
                train, val = split_file(read_file(path))
        except OSError as e:
            fail(f"--data {path}: cannot be read ({e}). Try another file")
        corpus.append(dict(name=path, weight=weight or max(1, len(train)), train=train, val=val,
                           size=len(train) + len(val), crc=checksum(val, checksum(train))))
    total = sum(s["weight"] for s in corpus)
    for s in corpus:
        s["weight"] /= total
    return corpus


def split_weight(spec):  # "old.txt:0.05" -> ("old.txt", 0.05); 0: no weight; a colon that is part of a path stays one
    path, colon, weight = spec.rpartition(":")
    try:
        weight = float(weight)
    except ValueError:
        return spec, 0.0
    if not colon or os.path.exists(spec):
        return spec, 0.0
    if not 1e-9 < weight < 1e9:
        fail(f"--data {spec}: the weight after the colon must be a positive number, as in {path}:0.5")
    return path, weight


def read_file(path):  # -> (N,) uint8; a large file is mapped, so that private memory does not grow with it
    size = os.path.getsize(path) if os.path.isfile(path) else 0
    if not size:
        fail(f"--data {path}: no such file or folder, or empty. Try a path to text")
    with open(path, "rb") as f:
        if size < MAPPED_BYTES:
            return from_bytes(f.read())
        return torch.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)


def read_stdlib():  # -> {path: document}: the source of Python's own standard library, without tests
    return read_folder(sysconfig.get_paths()["stdlib"], ".py", SKIPPED_FOLDERS)[0]


def read_folder(folder, suffix="", skipped_folders=()):  # -> {path: document (bytes)} in sorted order, number skipped
    """Every text file under a folder, each text once. Files with a NUL (binaries), empty, hidden and unreadable files
    and the folders of runs are left out. Documents are held in memory: join a larger corpus into one file."""
    paths = []
    for root, dirs, files in os.walk(folder):
        if {"ckpt.pt", "best.pt"} & set(files):
            dirs[:] = []
            continue
        dirs[:] = [name for name in dirs if name not in skipped_folders and not name.startswith(".")]
        paths += [os.path.join(root, name) for name in files if name.endswith(suffix) and not name.startswith(".")]
    paths = sorted(filter(os.path.isfile, paths), key=lambda p: p.replace(os.sep, "/"))         # no pipe, no socket
    documents = {}                              # {contents: path}
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as f:
            text = f.read()
            if text and b"\0" not in text:
                documents.setdefault(text, path)
    if not documents:
        fail(f"--data {folder}: holds no readable text file (none with a NUL byte is text). Try another folder")
    return {path: text for text, path in documents.items()}, len(paths) - len(documents)


def split_documents(documents):  # [bytes] -> train (N,), val (N,) uint8, with a NUL after each document
    """Every tenth document is for validation. If these hold less than 5% or more than 20% of the bytes, others are
    chosen, spread over the list, that hold about a tenth. If no whole documents do, it is the last tenth of the bytes.
    """
    sizes = [len(d) for d in documents]
    every_tenth = [i % 10 == 9 for i in range(len(sizes))]
    for is_val in every_tenth, spread_tenth(sizes):
        share = sum(itertools.compress(sizes, is_val)) / sum(sizes)
        if 0.05 <= share <= 0.2:
            val = itertools.compress(documents, is_val)
            train = itertools.compress(documents, [not each for each in is_val])
            return from_bytes(b"\0".join(train) + b"\0"), from_bytes(b"\0".join(val) + b"\0")
    return split_file(from_bytes(b"\0".join(documents) + b"\0"))


def spread_tenth(sizes):  # -> [bool]: which documents to hold out, so that at any place about a tenth of the bytes is
    chosen = []
    seen = 0
    held = 0
    for size in sizes:
        seen += size
        chosen.append(abs(held + size - seen / 10) < abs(held - seen / 10))
        held += size * chosen[-1]
    return chosen


def split_file(data):  # (N,) -> the first 90% for training, the last 10% for validation
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def checksum(data, crc=0):  # (N,) uint8 -> crc32 of the bytes, or of 1,024 evenly spaced pieces of a large corpus
    for start in range(0, len(data), max(CRC_PIECE, len(data) // 1024)):
        crc = zlib.crc32(to_bytes(data[start:start + CRC_PIECE]), crc)
    return crc


# ---- windows
def to_seed(key):  # "1,200,windows" -> its hash, in 32 bits: torch's CPU generator ignores all others of a seed
    return zlib.crc32(key.encode())


def make_rng(key, device="cpu"):  # -> torch.Generator
    return torch.Generator(device).manual_seed(to_seed(key))


def sample_windows(corpus, split, n, B, g):  # -> source (B,), offset (B,) of windows of n bytes, long, on the CPU
    """Stratified: a batch holds each source's share to within a row, and its offsets come one from each of B equal
    parts of a source, in random order. A window may hold the end of a document, as in GPT's packing."""
    edges = torch.tensor([s["weight"] for s in corpus], dtype=torch.double).cumsum(0)
    n_offsets = torch.tensor([len(s[split]) - n + 1 for s in corpus])
    # u: one number from each B-th of [0, 1), in random order
    u = (torch.randperm(B, generator=g) + torch.rand(B, generator=g, dtype=torch.double)) / B
    source = torch.searchsorted(edges, u, right=True).clamp(max=len(corpus) - 1)
    u = (torch.randperm(B, generator=g) + torch.rand(B, generator=g, dtype=torch.double)) / B
    return source, (u * n_offsets[source]).long()


def read_windows(corpus, split, source, offset, n):  # source, offset (B,) -> (B, n) long, on the corpus's device
    x = torch.zeros(len(source), n, dtype=torch.uint8, device=source.device)
    for i, s in enumerate(corpus):              # reads every source for every row, so that shapes are constant
        data = s[split]
        rows = data.unfold(0, n, 1)[offset.clamp(max=len(data) - n)]                # (B, n)
        x = torch.where((source == i)[:, None], rows, x)
    return x.long()


def document_ids(x):  # (B, T) -> (B, T) long: which document of its row a byte belongs to; EOT ends its own
    end = (x == EOT).long()
    return end.cumsum(1) - end


def check_sizes(corpus, n, T):  # fails where a split is shorter than one window, the n bytes that fill a row of T
    for s in corpus:
        if min(len(s["train"]), len(s["val"])) < n:
            fail(f"--data {s['name']}: {len(s['train'])} bytes to train on and {len(s['val'])} to validate on, but a "
                 f"row of --block_size {T} needs {n}. Try more text, or a smaller --block_size")


# ---- compressors, to compare bits per byte with
def compressor_bits(data):  # (N,) uint8 -> bits per byte of the standard library's compressors on one stream, in words
    text = to_bytes(data[:COMPRESSED_BYTES].cpu())
    sizes = {"zlib": len(zlib.compress(text, 9)), "bz2": len(bz2.compress(text)), "lzma": len(lzma.compress(text))}
    bits = ", ".join(f"{name} {8 * size / len(text):.3f}" for name, size in sizes.items())
    return f"{bits} bits/byte on {len(text):,} of {len(data):,} bytes as one stream"
