"""The vocabulary, the corpus, windows of clean bytes; and the struct of a command-line flag, which all files share.

The ids of a file are its bytes: no tokenizer, no preparation. A file is mapped; the standard library and the files of a
folder are joined in memory, and a pipe is copied to the run's folder. Byte 0 (NUL) is also EOT, the end of a document.
What a training step reads is a pure function of (seed, step), so a resumed run, another evaluation interval or another
number of micro-batches sees the same bytes.

B rows, n raw bytes in a row, N bytes in a split of a source, S sources
"""
import bz2
import codecs
import collections
import ctypes
import hashlib
import lzma
import os
import shutil
import sys
import sysconfig
import warnings
import zlib
from dataclasses import dataclass

warnings.filterwarnings("ignore", "Failed to initialize NumPy")                     # NumPy is not required
import torch  # noqa: E402

# ids 0..255 are the bytes themselves; the ids after them never occur in a corpus
EOT = 0                                         # NUL: text never contains it, and C strings end with it
PAD, MASK, CLS, SEP, PRE, SUF, MID, MODE_R, MODE_S, MODE_X = range(256, 266)
SENTINEL = 272                                  # <extra_id_0>; 266..271 are spare
N_SENTINELS = 240
VOCAB_SIZE = SENTINEL + N_SENTINELS             # 512 = 4 * 128
ID_NAMES = {EOT: "<EOT>", PAD: "<PAD>", MASK: "<MASK>", CLS: "<CLS>", SEP: "<SEP>", PRE: "<PRE>", SUF: "<SUF>",
            MID: "<MID>", MODE_R: "<R>", MODE_S: "<S>", MODE_X: "<X>",
            **{SENTINEL + i: f"<extra_id_{i}>" for i in range(N_SENTINELS)}}
ID_SYMBOLS = {EOT: "∅", 9: "⇥", 10: "⏎", PAD: "░", MASK: "█", CLS: "Ⓒ", SEP: "‖", PRE: "Ⓟ", SUF: "Ⓢ", MID: "Ⓜ",
              MODE_R: "ⓡ", MODE_S: "ⓢ", MODE_X: "ⓧ"}

N_CANDIDATES = 4                                # offsets that are tried for a window without a NUL
MIN_BLOCK_SIZE = 32                             # positions of the shortest rows
CRC_BYTES = 1 << 26                             # of a larger corpus, evenly spaced samples are checksummed
COMPRESSED_BYTES = 1 << 24                      # the compressors read at most so many bytes
TEXT_BYTES = 1 << 20                            # at the start of a source, checked for being text
STDIN_COPY = "stdin.bin"                        # in a run's folder: what it read from standard input


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


def error_reason(e):  # an error -> why, without its number, its path and further lines
    return getattr(e, "strerror", None) or (str(e).splitlines() or [type(e).__name__])[0]


# ---- bytes and ids

def encode(text):  # str or bytes -> list of n ids below 256
    """Nothing in a text is special: "<MASK>" is six bytes."""
    if isinstance(text, str):
        try:
            text = text.encode("utf-8", "surrogateescape")      # how a POSIX shell hands over any bytes
        except UnicodeEncodeError:
            text = text.encode("utf-8", "replace")
    return list(text)


def decode(ids):  # n ids -> str
    """Never fails: bytes that are not UTF-8 come out as U+FFFD, special ids in angle brackets."""
    text = b"".join(bytes([i]) if i < 256 else ID_NAMES.get(i, f"<{i}>").encode() for i in map(int, ids))
    return text.decode("utf-8", "replace")


def to_symbol(i):  # id -> one character, to print rows with one character a position
    if i in ID_SYMBOLS:
        return ID_SYMBOLS[i]
    if i < 0:                                   # no target
        return "·"
    if i >= SENTINEL:
        return chr(0x2460 + (i - SENTINEL) % 20)                # circled numbers
    return chr(i) if 32 <= i < 127 else "�"


def to_bytes(t):  # (N,) uint8 on the CPU -> bytes
    t = t.contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel())  # t.numpy() would need NumPy


def from_bytes(b):  # bytes -> (N,) uint8
    return torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else torch.empty(0, dtype=torch.uint8)


# ---- the corpus: a list of sources, dicts {name, weight, train (N,) uint8, val (N,) uint8, size, crc, notes}
# notes: lines for the user, of files that were skipped and of bytes that are no text

def open_corpus(specs, out_dir=None, resume=False):  # ["a.txt:0.95", "folder:0.05"] -> list of S sources
    """Opens what --data names: "-" (standard input), or files, folders or "stdlib", each with an optional ":weight".
    The weights returned add up to 1. Fails where a source is missing, empty, unreadable or holds no text."""
    corpus = []
    if specs.count("-") > 1:
        fail("--data -: standard input can be read once. Try files")
    for spec in specs:
        path, weight = split_weight(spec)
        notes = []
        try:
            if path == "stdlib":
                train, val = split_documents([*read_stdlib().values()])
            elif path == "-":
                train, val = split_file(map_file(copy_stdin(out_dir, resume)))
            elif os.path.isdir(path):
                documents, skipped = read_folder(path, out_dir)
                notes.append(f"{path}: {len(documents):,} files read, skipped {skipped or 'none'}")
                train, val = split_documents([*documents.values()])
            else:
                train, val = split_file(map_file(path))
        except OSError as e:
            fail(f"--data {path}: cannot be read ({error_reason(e)}). Try another file")
        notes += [f"{path}: {what}" for what in text_warnings(to_bytes(train[:TEXT_BYTES]))]
        corpus.append(dict(name=path, weight=weight, train=train, val=val, size=len(train) + len(val),
                           crc=checksum(val, checksum(train)), notes=notes))
    total = sum(s["weight"] for s in corpus)
    for s in corpus:
        s["weight"] /= total
    return corpus


def split_weight(spec):  # "old.txt:0.05" -> ("old.txt", 0.05)
    """A colon that is part of a path stays one."""
    path, colon, weight = spec.rpartition(":")
    if not colon or os.path.exists(spec):       # C:\text.txt and a:b.txt are paths
        return spec, 1.0
    try:
        weight = float(weight)
    except ValueError:
        return spec, 1.0
    if not 1e-9 < weight < 1e9:
        fail(f"--data {spec}: the weight after the colon must be a positive number, as in {path}:0.5")
    return path, weight


def text_warnings(text):  # the first bytes of a source -> why they may not be text, in words
    """Bytes of any kind are trained on as they are, but the user should know."""
    if text.count(0) > len(text) / 4:           # Latin letters in UTF-16 are every other byte
        return ["a quarter of its first MB is NUL, the end of a document: UTF-16, or no text"]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)    # the last character may be cut
    except UnicodeDecodeError:
        return ["bytes that are not UTF-8 in its first MB: another encoding, or no text"]
    return []


def map_file(path, flag="--data"):  # -> (N,) uint8, memory-mapped: private memory does not grow with the file
    if not os.path.isfile(path):
        what = "not a regular file" if os.path.exists(path) else "no such file or folder"
        fail(f"{flag} {path}: {what}. Try a path to text")
    size = os.path.getsize(path)
    if not size:
        fail(f"{flag} {path}: is empty. Try a file with text in it")
    try:
        return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    except RuntimeError as e:                   # what torch makes of an OSError
        fail(f"{flag} {path}: cannot be read ({error_reason(e)}). Try another file")


def copy_stdin(out_dir, resume):  # -> path of the copy that lets the run be resumed
    path = os.path.join(out_dir or ".", STDIN_COPY)
    if resume:
        return path
    if sys.stdin is None or sys.stdin.isatty():
        fail("--data -: standard input is a terminal, or closed. Try: cat book.txt | python train.py --data -")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    copy = path + ".tmp"
    try:
        with open(copy, "wb") as f:
            shutil.copyfileobj(sys.stdin.buffer, f)
        if not os.path.getsize(copy):
            fail("--data -: standard input is empty. Try: cat book.txt | python train.py --data -")
        os.replace(copy, path)
    except OSError as e:
        fail(f"--data -: could not be copied to {path} ({error_reason(e)}). "
             "Try freeing disk space, or another --out_dir")
    finally:
        if os.path.exists(copy):
            os.remove(copy)
    return path


def read_folder(folder, out_dir):  # -> {path: document (bytes)}, sorted by path; what was skipped, in words
    """Every text file under a folder. Files with a NUL (binaries), hidden files, exact duplicates and the
    folders of runs are left out. Documents are held in memory: join a larger corpus into one file."""
    paths = []
    n_hidden = 0
    n_runs = 0
    for root, dirs, files in os.walk(folder):
        if "ckpt.pt" in files or (out_dir and os.path.abspath(root) == os.path.abspath(out_dir)):
            n_runs += 1
            dirs[:] = []
            continue
        visible = [os.path.join(root, name) for name in files if not name.startswith(".")]
        visible_dirs = [name for name in dirs if not name.startswith(".")]
        n_hidden += len(files) - len(visible) + len(dirs) - len(visible_dirs)
        dirs[:] = visible_dirs
        paths += visible
    documents, skipped = read_documents(paths)
    if not documents:
        fail(f"--data {folder}: holds no text file (files with a NUL byte do not count). Try another folder")
    skipped["hidden"] = n_hidden
    skipped["folders of runs"] = n_runs
    return documents, ", ".join(f"{n:,} {why}" for why, n in skipped.items() if n)


def read_stdlib():  # -> {path: document}: the source of Python's own standard library, without tests
    top = sysconfig.get_paths()["stdlib"]
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for root, dirs, files in os.walk(top):
        dirs[:] = [d for d in dirs if d not in skip]
        paths += [os.path.join(root, f) for f in files if f.endswith(".py")]
    documents, _ = read_documents(paths)
    if not documents:
        fail(f"--data stdlib: this Python keeps no source under {top}. Try --data with a text file")
    return documents


def read_documents(paths):  # -> {path: contents} in sorted order, text only, each once; {why: how many were skipped}
    documents = {}
    skipped = collections.Counter()
    seen = set()
    for path in sorted(paths, key=lambda p: p.replace(os.sep, "/")):
        if not os.path.isfile(path):            # sockets, pipes, dangling links
            skipped["not regular files"] += 1
            continue
        with open(path, "rb") as f:
            text = f.read()
        digest = hashlib.blake2b(text).digest()
        if not text:
            skipped["empty"] += 1
        elif b"\0" in text:
            skipped["with a NUL byte (binary)"] += 1
        elif digest in seen:
            skipped["duplicates"] += 1
        else:
            seen.add(digest)
            documents[path] = text
    return documents, skipped


def split_documents(documents):  # -> train (N,), val (N,) uint8
    """Every tenth document is for validation, so that both splits are of one kind. A NUL ends each
    document."""
    if len(documents) < 10:                     # too few to hold whole ones out
        return split_file(from_bytes(b"\0".join(documents) + b"\0"))
    val = documents[9::10]
    train = [d for i, d in enumerate(documents) if i % 10 != 9]
    return tuple(from_bytes(b"\0".join(d) + b"\0") for d in (train, val))


def split_file(data):  # (N,) -> the first 90% for training, the last 10% for validation
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def checksum(data, crc=0):  # (N,) uint8 -> crc32 of the bytes, or of 1024 samples of a large corpus
    if len(data) <= CRC_BYTES:
        return zlib.crc32(to_bytes(data), crc)
    piece = CRC_BYTES // 1024
    for i in range(1024):
        start = i * (len(data) - piece) // 1023
        crc = zlib.crc32(to_bytes(data[start:start + piece]), crc)
    return crc


# ---- windows

def make_rng(key, device="cpu"):  # "1,200,windows" -> torch.Generator
    """A generator seeded with a hash of its key. torch's CPU generator uses only the low 32 bits of a seed, so
    (seed << 32 | step) would give every seed the same numbers."""
    return reseed(torch.Generator(device), key)


def reseed(g, key):  # -> g in the state of make_rng(key)
    return g.manual_seed(zlib.crc32(key.encode()))


def sample_windows(corpus, split, n, B, g, single_document=False):  # -> source (B,), offset (B, 1 or N_CANDIDATES)
    """Samples B windows of n bytes, as long tensors on the CPU. Stratified: a batch holds each source's share to within
    a row, and its offsets come one from each of B equal parts of a source, in random order.

    single_document: a row gets N_CANDIDATES offsets, so that read_windows can choose a window without a NUL. A bool, or
    bools (b,), one for each row of a micro-batch."""
    edges = torch.tensor([s["weight"] for s in corpus], dtype=torch.double).cumsum(0)
    n_offsets = torch.tensor([len(s[split]) - n + 1 for s in corpus])
    # u: one number from each B-th of [0, 1), in random order
    u = (torch.randperm(B, generator=g) + torch.rand(B, generator=g, dtype=torch.double)) / B
    source = torch.searchsorted(edges, u, right=True).clamp(max=len(corpus) - 1)
    u = (torch.randperm(B, generator=g)[:, None] + torch.rand(B, N_CANDIDATES, generator=g, dtype=torch.double)) / B
    offset = (u * n_offsets[source, None]).long()
    if isinstance(single_document, torch.Tensor):               # other rows get the same candidate several times
        wants = single_document.repeat(B // len(single_document))
        return source, offset.where(wants[:, None], offset[:, :1])
    return source, offset if single_document else offset[:, :1]


def read_windows(corpus, split, source, offset, n):  # source (B,), offset (B, candidates) -> (B, n) long, clean bytes
    """The windows' bytes, on the device that holds the corpus. Of a row's candidates it takes the first without a NUL
    inside, which lies within one document, or the first of all where every candidate has one."""
    x = None
    for i, s in enumerate(corpus):              # reads every source for every row, so that shapes are constant
        data = s[split]
        candidates = data.unfold(0, n, 1)[offset.clamp(max=len(data) - n)]          # (B, candidates, n)
        x = candidates if x is None else torch.where((source == i)[:, None, None], candidates, x)
    if offset.size(1) > 1:
        first = (x != EOT).all(2).byte().argmax(1)                                  # (B,)
        x = x.gather(1, first[:, None, None].expand(-1, 1, n))
    return x[:, 0].long()


def document_ids(x):  # (B, T) -> (B, T) long: which document of its row a byte belongs to; EOT ends its own
    end = (x == EOT).long()
    return end.cumsum(1) - end


def check_sizes(corpus, n, T):
    """Fails where a split is shorter than one window, the n bytes that fill a row of T positions."""
    for s in corpus:
        if min(len(s["train"]), len(s["val"])) < n:
            is_cut = len(s["val"]) >= n and len(s["train"]) + len(s["val"]) < s["size"]             # by --train_bytes
            hint = "a larger --train_bytes" if is_cut else "more text"
            if T > MIN_BLOCK_SIZE:
                hint += ", or a smaller --block_size"
            fail(f"--data {s['name']}: {len(s['train'])} bytes to train on and {len(s['val'])} to validate on, "
                 f"but a row of --block_size {T} needs {n}. Try {hint}")


# ---- compressors, to compare bits per byte with

def compressor_bits(data):  # (N,) uint8 -> bits per byte of the standard library's compressors on one stream, in words
    text = to_bytes(data[:COMPRESSED_BYTES].cpu())
    sizes = {"zlib": len(zlib.compress(text, 9)), "bz2": len(bz2.compress(text)), "lzma": len(lzma.compress(text))}
    part = f"all {len(text):,}" if len(text) == len(data) else f"the first {len(text):,} of {len(data):,}"
    bits = ", ".join(f"{name} {8 * size / len(text):.3f}" for name, size in sizes.items())
    return f"{bits} bits/byte on {part} bytes as one stream"
