"""The vocabulary, the corpus and windows of clean bytes.

A file is its ids: no tokenizer, no preparation, no copy. Byte 0 (NUL) is also EOT, the end of a document.
What a training step reads is a pure function of (seed, step), so a resumed run, another evaluation interval
or another number of micro-batches sees the same bytes.

B rows, n raw bytes in a row, N bytes in a split of a source, S sources
"""
import ctypes
import hashlib
import os
import shutil
import sys
import sysconfig
import warnings
import zlib

warnings.filterwarnings("ignore", "Failed to initialize NumPy")                     # nothing here needs it
import torch  # noqa: E402

# ids 0..255 are the bytes themselves; the ids after them never occur in a corpus
EOT = 0                                         # NUL: text never contains it, and C strings end with it
PAD, MASK, CLS, SEP, PRE, SUF, MID, MODE_R, MODE_S, MODE_X = range(256, 266)
SENTINEL = 272                                  # <extra_id_0>; 266..271 are spare
N_SENTINELS = 240
V = SENTINEL + N_SENTINELS                      # 512 = 4 * 128
NAMES = {EOT: "<EOT>", PAD: "<PAD>", MASK: "<MASK>", CLS: "<CLS>", SEP: "<SEP>", PRE: "<PRE>", SUF: "<SUF>",
         MID: "<MID>", MODE_R: "<R>", MODE_S: "<S>", MODE_X: "<X>",
         **{SENTINEL + i: f"<extra_id_{i}>" for i in range(N_SENTINELS)}}
GLYPHS = {EOT: "∅", 9: "⇥", 10: "⏎", PAD: "░", MASK: "█", CLS: "Ⓒ", SEP: "‖", PRE: "Ⓟ", SUF: "Ⓢ", MID: "Ⓜ",
          MODE_R: "ⓡ", MODE_S: "ⓢ", MODE_X: "ⓧ"}

TRIES = 4                                       # candidate offsets for a window without a NUL
CRC_BYTES = 1 << 26                             # a larger corpus is fingerprinted by evenly spaced samples


def fail(message):
    """Ends the program at its boundary: one line on stderr (what, where, what to try), exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


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
    text = b"".join(bytes([i]) if i < 256 else NAMES.get(i, f"<{i}>").encode() for i in map(int, ids))
    return text.decode("utf-8", "replace")


def glyph(i):  # id -> one character, to show rows position by position
    if i >= SENTINEL:
        return chr(0x2460 + (i - SENTINEL) % 20)                # circled numbers
    return GLYPHS.get(i) or (chr(i) if 32 <= i < 127 else "·" if i < 0 else "�")


def to_bytes(t):  # (N,) uint8 on the CPU -> bytes
    t = t.contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel())  # numpy is not among the requirements


def from_bytes(b):  # bytes -> (N,) uint8
    return torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else torch.empty(0, dtype=torch.uint8)


# ---- sources: a corpus is a list of dicts {name, weight, train (N,) uint8, val (N,) uint8, size, crc}

def open_corpus(specs, out_dir=None, resume=False):  # ["a.txt:0.95", "folder:0.05"] -> list of S sources
    """Opens what --data names: files, folders, "-" (standard input) or "stdlib", each perhaps with ":weight".
    The weights returned add up to 1. Fails where one is missing, empty, cannot be read, or holds no text."""
    corpus = []
    for spec in specs:
        path, weight = split_weight(spec)
        try:
            if path == "stdlib":
                train, val = split_documents([*read_stdlib().values()])
            elif path == "-":
                train, val = split_file(map_file(keep_stdin(out_dir, resume)))
            elif os.path.isdir(path):
                train, val = split_documents([*read_folder(path, out_dir).values()])
            else:
                train, val = split_file(map_file(path))
        except (OSError, RuntimeError) as e:    # torch reports a file that cannot be opened as a RuntimeError
            fail(f"--data {path}: cannot be read ({str(e).splitlines()[0]}). Try another file")
        corpus.append(dict(name=path, weight=weight, train=train, val=val, size=len(train) + len(val),
                           crc=fingerprint(val, fingerprint(train))))
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


def map_file(path, flag="--data"):  # -> (N,) uint8, memory-mapped: private memory does not grow with the file
    if not os.path.isfile(path):
        what = "not a regular file" if os.path.exists(path) else "no such file or folder"
        fail(f"{flag} {path}: {what}. Try a path to text")
    size = os.path.getsize(path)
    if not size:
        fail(f"{flag} {path}: is empty. Try a file with text in it")
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)


def keep_stdin(out_dir, resume):  # -> path of the copy that lets the run be resumed
    path = os.path.join(out_dir or ".", "stdin.bin")
    if not resume:
        if sys.stdin is None or sys.stdin.isatty():
            fail("--data -: standard input is a terminal. Try: cat book.txt | python train.py --data -")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".tmp", "wb") as f:
            shutil.copyfileobj(sys.stdin.buffer, f)
        os.replace(path + ".tmp", path)
    return path


def read_folder(folder, out_dir):  # -> {path: document (bytes)}, sorted by path
    """Every text file under a folder. Files with a NUL (binaries), hidden files, exact duplicates and the
    folders of runs are left out. Documents are held in memory: join a larger corpus into one file."""
    paths = []
    for root, dirs, files in os.walk(folder):
        is_run = "ckpt.pt" in files or (out_dir and os.path.abspath(root) == os.path.abspath(out_dir))
        dirs[:] = [] if is_run else [d for d in dirs if not d.startswith(".")]
        paths += [] if is_run else [os.path.join(root, f) for f in files if not f.startswith(".")]
    documents = read_documents(paths)
    if not documents:
        fail(f"--data {folder}: holds no text file (files with a NUL byte do not count). Try another folder")
    return documents


def read_stdlib():  # -> {path: document}: the source of Python's own standard library, without tests
    top = sysconfig.get_paths()["stdlib"]
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for root, dirs, files in os.walk(top):
        dirs[:] = [d for d in dirs if d not in skip]
        paths += [os.path.join(root, f) for f in files if f.endswith(".py")]
    documents = read_documents(paths)
    if not documents:
        fail(f"--data stdlib: this Python keeps no source under {top}. Try --data with a text file")
    return documents


def read_documents(paths):  # -> {path: contents} in sorted order, text only, each once
    documents, seen = {}, set()
    for path in sorted(paths, key=lambda p: p.replace(os.sep, "/")):
        if not os.path.isfile(path):            # sockets, pipes, dangling links
            continue
        with open(path, "rb") as f:
            text = f.read()
        digest = hashlib.blake2b(text).digest()
        if text and b"\0" not in text and digest not in seen:
            seen.add(digest)
            documents[path] = text
    return documents


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


def fingerprint(data, crc=0):  # (N,) uint8 -> crc32 of the bytes, or of 1024 samples of a large corpus
    if len(data) <= CRC_BYTES:
        return zlib.crc32(to_bytes(data), crc)
    piece = CRC_BYTES // 1024
    for i in range(1024):
        start = i * (len(data) - piece) // 1023
        crc = zlib.crc32(to_bytes(data[start:start + piece]), crc)
    return crc


# ---- windows

def generator(key, device="cpu"):  # "1,200,windows" -> torch.Generator
    """A generator seeded from a hash of its key. torch's CPU generator uses the low 32 bits of a seed alone,
    so that (seed << 32 | step) would give every seed the same numbers."""
    return reseed(torch.Generator(device), key)


def reseed(g, key):  # -> g, as if it were generator(key)
    return g.manual_seed(zlib.crc32(key.encode()))


def draw(corpus, split, n, B, g, whole=False):  # -> source (B,), offset (B, 1 or TRIES), long, on the CPU
    """Where the B windows of n bytes lie. Sources and offsets are stratified: every batch holds each source's
    share to within a row, and the rows of a batch come each from its own B-th of a source, in random order.

    whole: whether rows want windows without a NUL, and get TRIES candidates; a bool, or one for each row
    (b,), repeated over the batch."""
    edges = torch.tensor([s["weight"] for s in corpus], dtype=torch.double).cumsum(0)
    # room: offsets that fit; u: one number from each B-th of [0, 1), in random order
    room = torch.tensor([len(s[split]) - n + 1 for s in corpus])
    u = (torch.randperm(B, generator=g) + torch.rand(B, generator=g, dtype=torch.double)) / B
    source = torch.searchsorted(edges, u, right=True).clamp(max=len(corpus) - 1)
    u = (torch.randperm(B, generator=g)[:, None] + torch.rand(B, TRIES, generator=g, dtype=torch.double)) / B
    offset = (u * room[source, None]).long()
    if isinstance(whole, torch.Tensor):         # a row that takes any window has one candidate, several times
        return source, offset.where(whole.repeat(B // len(whole))[:, None], offset[:, :1])
    return source, offset if whole else offset[:, :1]


def gather(corpus, split, source, offset, n):  # source (B,), offset (B, tries) -> (B, n) long, clean bytes
    """The windows' bytes, on the device that holds the corpus: of a row's candidates the first without a NUL
    inside, so that it lies within one document; the first of all where none is."""
    x = None
    for i, s in enumerate(corpus):              # every source answers for every row: shapes stay the same
        data = s[split]
        here = data.unfold(0, n, 1)[offset.clamp(max=len(data) - n)]                # (B, tries, n)
        x = here if x is None else torch.where((source == i)[:, None, None], here, x)
    if offset.size(1) > 1:
        first = (x != EOT).all(2).byte().argmax(1)                                  # (B,)
        x = x.gather(1, first[:, None, None].expand(-1, 1, n))
    return x[:, 0].long()


def document_ids(x):  # (B, T) -> (B, T) long: which document of its row a byte belongs to; EOT ends its own
    end = (x == EOT).long()
    return end.cumsum(1) - end


def check_sizes(corpus, n, T):
    """Fails where a split cannot fill one window of n bytes, as many as a row of T positions wants."""
    for s in corpus:
        if min(len(s["train"]), len(s["val"])) < n:
            fail(f"--data {s['name']}: {len(s['train'])} bytes to train on and {len(s['val'])} to validate on, "
                 f"but a row of --block_size {T} needs {n}. Try a smaller --block_size, or more text")
