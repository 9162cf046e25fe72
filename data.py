"""The vocabulary, the corpus, windows of clean bytes, and the command-line flags and errors that all files share.

The ids of a file are its bytes: no tokenizer, no preparation. Only JSON lines are parsed: each line is an object, and
its "text" is a document. Large files are memory-mapped; the documents of a folder or of JSON lines are joined in
memory. Byte 0 (NUL) is also EOT, the end of a document. Which windows a training step reads depends only on the corpus,
the seed, the step, and the number and length of the windows. So resuming a run, evaluating it more often, or dividing
the same rows into more micro-batches does not change them.

B rows, n bytes in a window, N bytes in a split of a source, S sources
"""
import contextlib
import ctypes
import json
import math
import mmap
import os
import re
import sysconfig
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

# Silence two warnings of torch: at import if NumPy is missing, and when it maps a read-only file. The first is silenced
# only if this file is imported before torch
warnings.filterwarnings("ignore", "Failed to initialize NumPy|The given buffer is not writable")
import torch  # noqa: E402

# ids 0..255 are the bytes themselves; the ids after them never occur in a corpus
EOT = 0                                         # NUL: ordinary text does not contain it
PAD, MASK, CLS, SEP, PRE, SUF, MID, MODE_R, MODE_S, MODE_X = range(256, 266)
SENTINEL = 272                                  # <extra_id_0>; ids 266..271 are unused
N_SENTINELS = 240
VOCAB_SIZE = SENTINEL + N_SENTINELS             # 512 = 4 * 128

CRC_PIECE = 1 << 16                             # bytes that the checksum reads at a time
MAPPED_BYTES = 1 << 26                          # files of at least this size are memory-mapped
START_BYTES = 1 << 20                           # bytes at the start of a file that are examined
CONTROL = bytes({*range(1, 32)} - {*b"\b\t\n\v\f\r\x1b"})         # bytes that a text almost never contains
JSON_LINES = ".jsonl", ".ndjson"                # endings of files with a JSON object in each line
MIN_DOCUMENTS = 100                             # of fewer documents, the last tenth of each is held out
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}   # of the stdlib


# ---- flags and errors
@dataclass(frozen=True)
class Flag:
    """A command-line flag. Values have the type of the default and must be in [low, high]. If the default depends on
    the device or the optimizer, it is a dict such as {"cpu": 4, "cuda": 12}."""
    default: object
    help: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple = ()


def choose_default(default, *keys):  # ({"cpu": 4, "cuda": 12}, "cuda") -> 12; without such a key, the first value
    if not isinstance(default, dict):
        return default
    return next((default[key] for key in keys if key in default), next(iter(default.values())))


class UserError(Exception):
    """A mistake of the user, in one line: where, what, what to try instead. Programs print it and exit with code 2."""


def fail(message):
    raise UserError(message) from None          # the message also says why, so its cause is not shown


# ---- bytes and ids
def to_bytes(t):  # (N,) uint8 on the CPU -> bytes; t.numpy() would need NumPy
    assert t.dtype == torch.uint8, t.dtype
    t = t.contiguous()
    return ctypes.string_at(t.data_ptr(), t.numel())


def from_bytes(b):  # bytes -> (N,) uint8
    return torch.frombuffer(bytearray(b), dtype=torch.uint8) if b else torch.empty(0, dtype=torch.uint8)


# ---- the corpus
def open_corpus(specs):
    """Reads the sources of --data: files, folders or "stdlib", all with a ":weight" or all without. Returns a list of S
    dicts {name, weight, train (N,) uint8, val (N,) uint8, size, crc}. The weight is the share of the windows that are
    read from a source. By default it is proportional to the size of train."""
    named = [parse_weight(spec) for spec in specs]
    unweighted = [path for path, weight in named if not weight]
    if 0 < len(unweighted) < len(named):
        fail(f"--data {unweighted[0]}: has no weight, but another source has one. Try one for each, as in a.txt:0.05")
    corpus = []
    for path, weight in named:
        try:
            train, val = read_source(path)
        except OSError as e:
            fail(f"--data {path}: cannot be read ({e}). Try another file or folder")
        corpus.append(dict(
            name=path, weight=weight or max(1, len(train)), train=train, val=val,
            size=len(train) + len(val), crc=checksum(val, checksum(train))))
    if len({(s["size"], s["crc"]) for s in corpus}) < len(corpus):
        fail(f"--data {' '.join(specs)}: two sources are the same text. Try each text once, or give it a larger weight")
    total = sum(s["weight"] for s in corpus)
    for s in corpus:
        s["weight"] /= total
    return corpus


def parse_weight(spec):  # "old.txt:0.05" -> ("old.txt", 0.05); no weight, or a path with a colon: (spec, 0.0)
    path, _, weight = spec.rpartition(":")
    if os.path.exists(spec) or not re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", weight):
        return spec, 0.0
    if not 1e-9 < float(weight) < 1e9:
        fail(f"--data {spec}: the weight after the colon must be between 1e-9 and 1e9, as in {path}:0.5")
    return path, float(weight)


def read_source(path):  # a file, a pipe, a folder or "stdlib" -> train (N,), val (N,) uint8
    if path == "stdlib":
        # every tenth file is held out, not by a checksum: the pages' figures were measured with this division
        documents = [*read_stdlib().values()]
        train = [document for i, document in enumerate(documents) if i % 10 != 9]
        return join_documents(train), join_documents(documents[9::10])
    if os.path.isdir(path):
        documents, n_skipped = read_folder(path)
        if not documents:
            fail(f"--data {path}: contains no text without a NUL. Try another folder, or iconv -f utf-16 -t utf-8")
        return hold_out(path, documents, n_skipped)
    if not (os.path.isfile(path) or Path(path).is_fifo()):
        fail(f"--data {path}: neither a file nor a folder nor an open pipe. Try the path of a text file or a folder")
    data = read_file(path)                      # once: a pipe cannot be read again
    if path.lower().endswith((".json", *JSON_LINES)):
        contents = to_bytes(data)
        documents, n_skipped = keep_documents([(path, contents)]) if has_json_lines(path, contents) else ({}, 0)
        if not documents:
            fail(f'--data {path}: no text was found; it begins {contents[:60]}. Try lines such as {{"text": "..."}} in '
                 'UTF-8; the first line of a .json file must be one')
        return hold_out(path, documents, n_skipped)
    check_text(path, data)
    cut = len(data) * 9 // 10                   # the last 10% is for validation
    return data[:cut], data[cut:]


def hold_out(path, documents, n_skipped):  # {name: text} of a folder or a file -> train (N,), val (N,) uint8
    train, val, n_held_out = divide_documents([*documents.values()])
    held_out = f"{n_held_out:,} of" if n_held_out else "the last tenth of each of"
    print(f"--data {path}: {held_out} {len(documents):,} documents held out; {n_skipped:,} files or lines skipped: "
          'empty, not text, duplicate, or without a "text"')
    return train, val


def read_file(path):  # a file or a pipe -> (N,) uint8
    with open(path, "rb") as f:
        if os.path.getsize(path) < MAPPED_BYTES:                # or a pipe, whose size is 0
            return from_bytes(f.read())
        return torch.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)   # no copy


def has_json_lines(path, contents):  # by the name of the file, or of a .json by its first line
    if path.lower().endswith(".json"):
        first_line = contents.lstrip().partition(b"\n")[0]
        return bool(parse_line(first_line))
    return path.lower().endswith(JSON_LINES)


def is_text(contents):  # bytes -> bool
    """Text has almost no control characters: at most two in 1,000 bytes, and at most one NUL, which ends a
    document, in 20; a short text may have one of each. Of compressed data about a tenth are control characters,
    of UTF-16 a few percent; text in other encodings has none. Parquet may contain columns of plain text, so it is
    known by its first bytes."""
    start = contents[:START_BYTES]
    n_control = len(start) - len(start.translate(None, CONTROL))
    few_control = n_control <= 1 + len(start) / 500 and start.count(b"\0") <= 1 + len(start) / 20
    return few_control and not start.startswith(b"PAR1")


def check_text(path, data, flag="data"):  # fails if data (N,), the contents of path, does not begin as a text does
    if not len(data):
        fail(f"--{flag} {path}: is empty. Try another file (a pipe can be read only once; > empties a file)")
    if not is_text(to_bytes(data[:START_BYTES])):
        fail(f"--{flag} {path}: is not text, but compressed, binary, UTF-16 or ids of tokens (it has many control "
             "characters). Try its text in UTF-8, as from zcat or iconv -f utf-16 -t utf-8")


def read_stdlib():  # -> {path: contents} of the sources of Python's standard library, without its tests
    documents, _ = read_folder(sysconfig.get_paths()["stdlib"], ".py", SKIPPED_FOLDERS)
    return {path: text.replace(b"\r\n", b"\n") for path, text in documents.items()}            # CRLF on Windows


def read_folder(folder, suffix="", skipped_folders=()):  # -> {name: text}, number of skipped files and lines
    """Sorts the files by path. Ignores hidden files and folders, links to folders, and folders that hold a run."""
    paths = []
    for root, dirs, files in os.walk(folder):
        if {"ckpt.pt", "best.pt"} & set(files):
            dirs.clear()                        # os.walk does not enter the folders that are removed from dirs
            continue
        dirs[:] = [name for name in dirs if name not in skipped_folders and not name.startswith(".")]
        paths += [os.path.join(root, name) for name in files if name.endswith(suffix) and not name.startswith(".")]
    paths = [path for path in paths if os.path.isfile(path)]    # no pipes, no sockets
    paths.sort(key=lambda path: path.replace(os.sep, "/"))
    return keep_documents((path, Path(path).read_bytes()) for path in paths)


def keep_documents(files):  # files: (path, contents) -> {name: text}, number of skipped ones
    """Keeps each text once. Skips those that are empty, are not text, or contain a NUL. All are held in memory, while a
    single large file is not."""
    name_of = {}                                # {text: name}
    n = 0
    for path, contents in files:
        texts = texts_of(path, contents)
        n += len(texts)
        for name, text in texts.items():
            if text and b"\0" not in text and is_text(text):
                name_of.setdefault(text, name)
    return {name: text for text, name in name_of.items()}, n - len(name_of)


def texts_of(path, contents):  # -> {path: contents}, or of JSON lines {path:line number: text}
    if not has_json_lines(path, contents):
        return {path: contents}
    lines = contents.removesuffix(b"\n").split(b"\n")
    return {f"{path}:{i}": parse_line(line) for i, line in enumerate(lines, 1)}


def parse_line(line):  # of a .jsonl file -> its "text" in UTF-8; b"" if it is not a JSON object with such a string
    item = None
    with contextlib.suppress(ValueError, RecursionError):
        item = json.loads(line.decode("utf-8-sig"))             # given bytes, loads would guess the encoding
    text = item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str):
        return b""
    # a NUL would end the document; half of a surrogate pair becomes "?"
    return text.replace("\0", "").encode("utf-8", "replace")


def divide_documents(documents):  # [bytes] -> train (N,), val (N,) uint8, number of documents in val
    """Holds out the documents whose checksum ends in the digit 9. As long as this rule applies, no document changes
    sides when others are added, removed or edited. If there are fewer than MIN_DOCUMENTS documents, or if the rule
    would hold out less than 2% or more than 30% of the bytes, holds out the last tenth of each document instead, and
    returns 0."""
    train = [document for document in documents if zlib.crc32(document) % 10 != 9]
    val = [document for document in documents if zlib.crc32(document) % 10 == 9]
    share = sum(map(len, val)) / sum(map(len, documents))
    if len(documents) >= MIN_DOCUMENTS and 0.02 <= share <= 0.3:
        return join_documents(train), join_documents(val), len(val)
    cuts = [len(document) * 9 // 10 for document in documents]
    train = [document[:cut] for document, cut in zip(documents, cuts) if cut]
    val = [document[cut:] for document, cut in zip(documents, cuts)]
    return join_documents(train), join_documents(val), 0


def join_documents(documents):  # [bytes] -> (N,) uint8, with a NUL after each document
    return from_bytes(b"\0".join(documents) + b"\0")


def checksum(data, crc=0):  # (N,) uint8 -> crc32 of the bytes, or of 1,024 evenly spaced pieces of a large corpus
    for start in range(0, len(data), max(CRC_PIECE, len(data) // 1024)):
        crc = zlib.crc32(to_bytes(data[start:start + CRC_PIECE]), crc)
    return crc


# ---- windows
def to_seed(key):  # "1,200,windows" -> a 32-bit hash; torch's CPU generator ignores the higher bits of a seed
    return zlib.crc32(key.encode())


def make_rng(key, device="cpu"):  # -> torch.Generator
    return torch.Generator(device).manual_seed(to_seed(key))


def stratified_uniform(B, g):  # -> (B,) double: a random number from each of B equal parts of [0, 1), shuffled
    return (torch.randperm(B, generator=g) + torch.rand(B, generator=g, dtype=torch.double)) / B


def sample_windows(corpus, split, n, B, g):  # -> source (B,), offset (B,) of windows of n bytes, long, on the CPU
    """Samples a source for each window, then the offset of its first byte in that source. Both are stratified over the
    B windows. For example, sources with weights .75 and .25 divide [0, 1) at .75. For B = 4, one number from each
    quarter of [0, 1), such as .6, .1, .9, .3, selects the sources 0, 0, 1, 0. So the number of windows from a source
    always differs by less than two from weight * B. A window may contain the end of a document, as in GPT's packing."""
    edges = torch.tensor([s["weight"] for s in corpus], dtype=torch.double).cumsum(0)
    n_offsets = torch.tensor([len(s[split]) - n + 1 for s in corpus])
    source = torch.searchsorted(edges, stratified_uniform(B, g), right=True)
    # the last edge may be below 1: by rounding, or because validation reads one of several sources
    source = source.clamp(max=len(corpus) - 1)
    offset = stratified_uniform(B, g) * n_offsets[source]
    return source, offset.long()


def read_windows(corpus, split, source, offset, n):  # source, offset (B,) -> (B, n) long, on the corpus's device
    x = torch.zeros(len(source), n, dtype=torch.uint8, device=source.device)
    for i, s in enumerate(corpus):              # all rows are read from every source, which keeps shapes constant
        data = s[split]
        rows = data.unfold(0, n, 1)[offset.clamp(max=len(data) - n)]                # (B, n)
        x = torch.where((source == i)[:, None], rows, x)
    return x.long()


def document_ids(x):  # (B, T) -> (B, T): the number of each position's document; an EOT belongs to the one it ends
    end = (x == EOT).long()
    return end.cumsum(1) - end


def check_sizes(corpus, n, T):  # fails if a split is shorter than the n bytes that a row of T positions needs
    for s in corpus:
        if min(len(s["train"]), len(s["val"])) < n:
            fail(f"--data {s['name']}: {len(s['train'])} bytes to train on and {len(s['val'])} to validate on, but a "
                 f"row of --block_size {T} needs {n}. Try more text, or a smaller --block_size")
