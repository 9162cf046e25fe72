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
import io
import json
import mmap
import os
import re
import shlex
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
SIGNATURES = {                                  # first bytes of formats that are not text
    b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh91AY&SY": "bzip2", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip",
    b"PAR1": "Parquet", b"ARROW1\0": "Arrow", b"\xff\xff\xff\xff": "Arrow", b"\x93NUMPY": "NumPy", b"\x89HDF": "HDF5",
    b"SQLite format 3\0": "SQLite", b"\x80\x02": "pickle", b"\x80\x03": "pickle", b"\x80\x04": "pickle",
    b"\x80\x05": "pickle", b"%PDF-": "PDF", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "Word", b"RIFF": "WAV or AVI",
    b"GIF87a": "GIF", b"GIF89a": "GIF", b"\x89PNG": "PNG", b"\xff\xd8\xff": "JPEG", b"\x7fELF": "ELF"}
JSON_LINES = ".jsonl", ".ndjson"                # endings of files with a JSON object in each line
DECOMPRESSORS = {"gzip": "gzip -dc", "xz": "xzcat", "bzip2": "bzcat", "zstd": "zstdcat"}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}   # of the stdlib


# ---- flags and errors
@dataclass(frozen=True)
class Flag:
    """A command-line flag. Values have the type of the default and must be in [low, high]. If the default depends on
    the device or the optimizer, it is a dict such as {"cpu": 4, "cuda": 12}."""
    default: object
    help: str
    low: float | None = None
    high: float | None = None
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
    dicts {name, weight, train (N,) uint8, val (N,) uint8, division, size, crc}. The weight is the share of the
    windows that are read from a source. By default it is proportional to the size of train. division: as
    read_source returns it"""
    named = [split_weight(spec) for spec in specs]
    unweighted = [path for path, weight in named if not weight]
    if 0 < len(unweighted) < len(named):
        fail(f"--data {unweighted[0]}: has no weight, but another source has one. Try {unweighted[0]}:0.05, or none")
    corpus = []
    for path, weight in named:
        train, val, division = read_source(path)
        corpus.append(dict(
            name=path, weight=weight or max(1, len(train)), train=train, val=val, division=division,
            size=len(train) + len(val), crc=checksum(val, checksum(train))))
    total = sum(s["weight"] for s in corpus)
    for s in corpus:
        s["weight"] /= total
    return corpus


def split_weight(spec):  # "old.txt:0.05" -> ("old.txt", 0.05); no weight, or a path with a colon: (spec, 0.0)
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


def read_source(path):  # a file, a pipe, a folder or "stdlib" -> train (N,), val (N,) uint8, division
    """division: how documents were divided, "whole documents" or "last tenths". It is empty for a file and for
    "stdlib", for which there is one way."""
    if path == "stdlib":
        # every tenth file is held out, not by a checksum: the pages' figures were measured with this division
        documents = [*read_stdlib().values()]
        train = [document for i, document in enumerate(documents) if i % 10 != 9]
        return join_documents(train), join_documents(documents[9::10]), ""
    if os.path.isdir(path):
        documents, n_skipped = read_folder(path)
        if not documents:
            fail(f"--data {path}: contains no text without a NUL. Try another folder, or iconv -f utf-16 -t utf-8")
        return hold_out(path, documents, n_skipped)
    if not (os.path.isfile(path) or os.path.exists(path) and Path(path).is_fifo()):
        fail(f"--data {path}: neither a file nor a folder nor an open pipe. Try the path of a text file or a folder")
    try:
        data = read_file(path)                  # once: a pipe cannot be read again
    except OSError as e:
        fail(f"--data {path}: cannot be read ({e}). Try another file")
    is_json = path.lower().endswith((".json", *JSON_LINES))
    contents = to_bytes(data) if is_json else b""               # a large text is not copied
    if is_json and has_json_lines(path, contents):
        documents, n_skipped = keep_documents([(path, contents)], is_folder=False)
        if not documents:
            fail(f'--data {path}: no line can be read as a JSON object with a "text". Try UTF-8 and {{"text": "..."}}')
        return hold_out(path, documents, n_skipped)
    check_text(path, data)
    if is_json and re.match(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{", contents):
        fail(f'--data {path}: is JSON, but no object such as {{"text": "..."}} in each line. For an array of objects '
             f"try python -c 'import json; [print(json.dumps(x)) for x in json.load(open(\"{path}\"))]' > new.jsonl")
    cut = len(data) * 9 // 10                   # the last 10% is for validation
    return data[:cut], data[cut:], ""


def hold_out(path, documents, n_skipped):  # {name: text} of a folder or a file -> train, val, division
    train, val, n_held_out = divide_documents([*documents.values()])
    held_out = f"{n_held_out:,} of" if n_held_out else "the last tenth of each of"
    print(f"--data {path}: {held_out} {len(documents):,} documents held out; {n_skipped:,} files or lines skipped: "
          'empty, binary, duplicate, unreadable, behind a link, or without a "text"')
    return train, val, "whole documents" if n_held_out else "last tenths"


def read_file(path):  # a file or a pipe -> (N,) uint8
    with open(path, "rb") as f:
        if os.path.getsize(path) < MAPPED_BYTES:                # or a pipe, whose size is 0
            return from_bytes(f.read())
        return torch.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)   # no copy


def has_json_lines(path, contents):  # is each line an object? By the name, or for a .json by its first line
    if not path.lower().endswith(".json"):
        return path.lower().endswith(JSON_LINES)
    first = next((line for line in io.BytesIO(contents) if line.strip()), b"")
    return first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") and isinstance(parse_json(first), dict)


def find_format(start):  # first bytes of a file -> name of its format if it is not text, or ""
    return next((name for signature, name in SIGNATURES.items() if start.startswith(signature)), "")


def check_text(path, data, flag="data"):  # fails if data (N,), the contents of path, does not begin as a text does
    if not len(data):
        fail(f"--{flag} {path}: is empty. Try another file (a pipe can be read only once; > empties a file)")
    start = data[:START_BYTES]
    found = "tar" if to_bytes(start[257:262]) == b"ustar" else find_format(to_bytes(start[:64]))
    if found in DECOMPRESSORS:
        stem, ending = os.path.splitext(path)   # the new file keeps the ending .jsonl of a .jsonl.gz
        new = shlex.quote(stem if ending in (".gz", ".xz", ".bz2", ".zst") else os.path.basename(path) + ".txt")
        fail(f"--{flag} {path}: is a {found} file. Try {DECOMPRESSORS[found]} {shlex.quote(path)} > {new}, then {new}")
    if found:
        fail(f"--{flag} {path}: is a {found} file. Try its text, or JSON lines (bytes are read, not ids of tokens)")
    has_utf16_mark = to_bytes(start[:2]) in (b"\xff\xfe", b"\xfe\xff")
    if has_utf16_mark or int((start < ord("\t")).sum()) > len(start) / 10:
        fail(f"--{flag} {path}: is UTF-16 or binary (control characters), such as ids of tokens. Try UTF-8, as from "
             "iconv -f utf-16 -t utf-8")


def read_stdlib():  # -> {path: contents} of the sources of Python's standard library, without its tests
    documents, _ = read_folder(sysconfig.get_paths()["stdlib"], ".py", SKIPPED_FOLDERS)
    return {path: text.replace(b"\r\n", b"\n") for path, text in documents.items()}            # CRLF on Windows


def read_folder(folder, suffix="", skipped_folders=()):  # -> {name: text}, number of skipped files and lines
    """Sorts the files by path. Ignores hidden files and folders, and folders that hold a run. Does not follow links to
    folders, but counts them as skipped."""
    paths = []
    n_links = 0
    for root, dirs, files in os.walk(folder):
        if {"ckpt.pt", "best.pt"} & set(files):
            dirs.clear()                        # os.walk does not enter the folders that are removed from dirs
            continue
        dirs[:] = [name for name in dirs if name not in skipped_folders and not name.startswith(".")]
        n_links += sum(os.path.islink(os.path.join(root, name)) for name in dirs)
        paths += [os.path.join(root, name) for name in files if name.endswith(suffix) and not name.startswith(".")]
    paths = [path for path in paths if os.path.isfile(path)]    # no pipes, no sockets
    paths.sort(key=lambda path: path.replace(os.sep, "/"))
    documents, n_skipped = keep_documents((path, read_or_empty(path)) for path in paths)
    return documents, n_skipped + n_links


def read_or_empty(path):  # -> contents; b"" if they cannot be read
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def keep_documents(files, is_folder=True):  # files: (path, contents) -> {name: text}, number of skipped ones
    """Keeps each text once. Skips those that are empty or binary (by their first bytes, or with a NUL). All are
    held in memory, while a single large file is not."""
    name_of = {}                                # {text: name}
    n = 0
    for path, contents in files:
        texts = texts_of(path, contents, is_folder)
        n += len(texts)
        for name, text in texts.items():
            is_array = path.lower().endswith(".json") and re.match(rb"\s*\[\s*\{", text)
            if text and not is_array and b"\0" not in text and not find_format(text):
                name_of.setdefault(text, name)
    return {name: text for text, name in name_of.items()}, n - len(name_of)


def texts_of(path, contents, is_folder):  # -> {path: contents}, or of JSON lines {path:line number: text}
    if not has_json_lines(path, contents):
        return {path: contents}
    lines = contents.removesuffix(b"\n").split(b"\n")
    texts = {f"{path}:{i}": parse_line(line) for i, line in enumerate(lines, 1)}
    # in a folder, a .json file without a "text" is part of a code base, and text itself
    if is_folder and path.lower().endswith(".json") and not any(texts.values()):
        return {path: contents}
    return texts


def parse_json(line):  # bytes -> the value, or None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line.decode("utf-8-sig"))             # given bytes, loads would guess the encoding


def parse_line(line):  # of a .jsonl file -> its "text" in UTF-8; b"" if it is not a JSON object with such a string
    item = parse_json(line)
    text = item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str):
        return b""
    # a NUL would end the document; half of a surrogate pair becomes "?"
    return text.replace("\0", "").encode("utf-8", "replace")


def divide_documents(documents):  # [bytes] -> train (N,), val (N,) uint8, number of documents in val
    """Holds out the documents whose checksum ends in the digit 9. As long as this rule applies, no document changes
    sides when others are added, removed or edited. If these are less than 2% or more than 30% of the bytes, holds out
    the last tenth of each document, and returns 0."""
    train = [document for document in documents if zlib.crc32(document) % 10 != 9]
    val = [document for document in documents if zlib.crc32(document) % 10 == 9]
    if 0.02 <= sum(map(len, val)) / sum(map(len, documents)) <= 0.3:
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
