import array
import json
import os
import random
import re
import sys
import threading
import zlib
from pathlib import Path

import pytest
import torch

import data
from data import make_rng, open_corpus, read_windows, sample_windows


def corpus_of(*texts, weights=None):
    weights = weights or [1 / len(texts)] * len(texts)
    return [dict(name=str(i), weight=w, train=data.from_bytes(t), val=data.from_bytes(t))
            for i, (t, w) in enumerate(zip(texts, weights))]


def test_ids_do_not_change_because_checkpoints_rely_on_them():
    words = "EOT", "PAD", "MASK", "CLS", "SEP", "PRE", "SUF", "MID", "MODE_R", "MODE_S", "MODE_X"
    assert [getattr(data, word) for word in words] == [0, *range(256, 266)]
    assert (data.SENTINEL, data.N_SENTINELS, data.VOCAB_SIZE) == (272, 240, 512)


# ---- sources
@pytest.mark.parametrize("mapped_bytes", [1, 1 << 26])          # files are mapped, or read
def test_the_last_tenth_of_a_file_or_of_each_of_few_documents_is_validation(mapped_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAPPED_BYTES", mapped_bytes)
    every_byte = (bytes(range(256)) + b"x" * 15_000) * 4
    binary = tmp_path / (os.fsdecode(b"b\xff") if sys.platform == "linux" else "b")           # a name that is not UTF-8
    binary.write_bytes(every_byte)
    (tmp_path / "a").write_text("a" * 45 + "A" * 5)
    (tmp_path / "c").write_text("c" * 36 + "C" * 4)
    [s] = open_corpus([str(binary)])
    assert data.to_bytes(torch.cat((s["train"], s["val"]))) == every_byte
    assert (len(s["val"]), s["size"]) == (6103, 61024)
    [s] = open_corpus([str(tmp_path)])
    assert data.to_bytes(s["train"]) == b"a" * 45 + b"\0" + b"c" * 36 + b"\0"
    assert data.to_bytes(s["val"]) == b"AAAAA\0CCCC\0" and s["size"] == 83 + 11


def test_a_folder_keeps_each_text_once_and_holds_out_documents_by_their_checksum(tmp_path, capsys):
    for folder in (".git", "run/sub", "b"):
        (tmp_path / folder).mkdir(parents=True)
    for i in range(120):
        (tmp_path / f"b/doc{i:03d}.txt").write_text(f"document {i}")
    for name in (".git/x", "run/x", "run/sub/x", "run/ckpt.pt", ".hidden"):
        (tmp_path / name).write_text("not read")
    (tmp_path / "b/empty").touch()
    (tmp_path / "b/zz_copy.txt").write_text("document 3")
    (tmp_path / "binary.bin").write_bytes(b"a\0b")
    [s] = open_corpus([str(tmp_path)])
    assert capsys.readouterr().out.endswith(
        ': 14 of 120 documents held out; 3 files or lines skipped: empty, not text, duplicate, or without '
        'a "text"\n')
    held_out = [i for i in range(120) if zlib.crc32(b"document %d" % i) % 10 == 9]
    assert data.to_bytes(s["val"]) == b"".join(b"document %d\0" % i for i in held_out)
    assert data.to_bytes(s["train"]) == b"".join(b"document %d\0" % i for i in range(120) if i not in held_out)


@pytest.mark.parametrize("n_train, n_held_out, whole", [
    (98, 2, True), (70, 30, True), (99, 1, False), (69, 31, False), (6, 0, False), (0, 3, False), (89, 10, False)])
def test_if_whole_documents_are_too_few_or_too_many_bytes_last_tenths_are_held_out(n_train, n_held_out, whole):
    texts = [b"%04d" % i * 100 for i in range(99)]
    trained_on = next(text for text in texts if zlib.crc32(text) % 10 != 9)
    held_out = next(text for text in texts if zlib.crc32(text) % 10 == 9)
    documents = [trained_on] * n_train + [held_out] * n_held_out
    train, val, n = data.divide_documents(documents)
    assert n == (n_held_out if whole else 0)
    want = documents[n_train:] if whole else [text[360:] for text in documents]
    assert data.to_bytes(val) == b"".join(text + b"\0" for text in want)
    assert len(train) == sum(map(len, documents)) - sum(map(len, want)) + (n_train if whole else len(documents))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "a.json"])
@pytest.mark.parametrize("where", ["file", "folder"])
def test_the_documents_of_a_jsonl_file_are_its_texts(where, name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(data, "MIN_DOCUMENTS", 20)
    texts = [f"document {i}, é" for i in range(20)]
    texts[9] += "!" * 20                        # now the checksums of these two end in 9
    texts[19] += "!" * 5
    good = [json.dumps({"id": i, "text": text}).encode() for i, text in enumerate(texts)]
    good[0] = b"\xef\xbb\xbf" + good[0]                            # a byte order mark, as Windows writes
    good[5] = json.dumps({"text": "docu\0ment 5, é\0"}).encode()
    good[6] = b'{"text": "half a pair: \\ud83d"}'
    texts[6] = "half a pair: ?"
    bad = [b"", b"text", b'{"text": "cut', b'["text"]', b'"text"', b"null", b"3", b'{"text": 3}', b'{"text": null}',
           b'{"text": ""}', b'{"txt": "a"}', b'{"text": "\xff"}', b"[" * 100_000, b"1" * 5000, good[7]]
    (tmp_path / name).write_bytes(b"\n".join(good[:9] + bad + good[9:]))
    [s] = open_corpus([str(tmp_path / name if where == "file" else tmp_path)])
    assert f": 2 of 20 documents held out; {len(bad)} files or lines skipped: " in capsys.readouterr().out
    assert data.to_bytes(s["val"]).decode() == f"{texts[9]}\0{texts[19]}\0"
    assert data.to_bytes(s["train"]).decode() == "".join(f"{t}\0" for i, t in enumerate(texts) if i not in (9, 19))
    assert not data.has_json_lines("b.json", b'{\n "name": "a text of its own"}')


def test_in_a_folder_files_that_are_no_text_are_skipped(tmp_path, refuses):
    (tmp_path / "a.txt").write_bytes("text".encode("utf-16"))
    refuses("iconv -f utf-16 -t utf-8", open_corpus, [str(tmp_path)])
    for i, contents in enumerate(BINARY):
        (tmp_path / str(i)).write_bytes(contents)
    (tmp_path / "b.txt").write_text("one")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "code.json").write_text('{"name": "code"}')
    (tmp_path / "lines.json").write_text('\n \n{"text": "three"}\n')
    (tmp_path / "linked").symlink_to(tmp_path.parent, target_is_directory=True)
    documents, n_skipped = data.read_folder(str(tmp_path))
    texts = {"b.txt": b"one", "c.jsonl:2": b"two", "code.json": b'{"name": "code"}', "lines.json:3": b"three"}
    assert documents == {str(tmp_path / name): content for name, content in texts.items()}
    assert n_skipped == len(BINARY) + 4, "a.txt, a duplicate and two blank lines"


UTF16 = "utf-16", "utf-16-le", "utf-16-be"
SENTENCES = {"English": "It was the best of times. ", "Chinese": "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。"}
BINARY = [random.Random(0).randbytes(5000),                    # compressed data looks like this
          array.array("H", [i % 50257 for i in range(0, 900_000, 997)]).tobytes(), b"\x7fELF\2\1\1" + b"\0" * 300]
REFUSED = [                                     # name, contents, part of the message
    *(("a", contents, "is not text") for contents in BINARY),
    ("a.txt", ("жук" * 100).encode("utf-32"), "iconv -f utf-16 -t utf-8"), ("a.txt", b"", "is empty"),
    ("a.jsonl", b'{"messages": [{"content": "one"}]}\n', '{"messages"')]


@pytest.mark.parametrize("mapped_bytes", [1, 1 << 26])
@pytest.mark.parametrize("name, content, hint", REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_is_no_text_is_refused(name, content, hint, mapped_bytes, tmp_path, monkeypatch, refuses):
    monkeypatch.setattr(data, "MAPPED_BYTES", mapped_bytes)
    (tmp_path / name).write_bytes(content)
    refuses(hint, open_corpus, [str(tmp_path / name)])


@pytest.mark.parametrize("language", SENTENCES)
def test_utf16_is_refused_and_every_other_encoding_of_a_text_is_read(language):
    text = SENTENCES[language] * (100_000 // len(SENTENCES[language]))
    for encoding in UTF16:
        assert not data.is_text(text.encode(encoding)), encoding
    for encoding in ("utf-8", "utf-8-sig", "gb18030", "big5hkscs", "shift_jis", "euc_jp", "iso2022_jp"):
        assert data.is_text(text.encode(encoding, "replace")), encoding
    assert data.is_text(b"\x1b[1mbold\x1b[0m n\bname\f\tx\r\n" * 99), "terminals, man pages, forms"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("name, content", [("pipe", b"a" * 100_000), ("a.jsonl", b'{"text": "abc"}\n'),
                                           ("a.json", b'{"text": "abc"}\n'), ("pipe", b"")])
def test_a_pipe_is_read_to_its_end(name, content, text, refuses):
    os.mkfifo(name)
    writer = threading.Thread(target=Path(name).write_bytes, args=(content,), daemon=True)
    writer.start()                              # waits until the pipe is opened
    if not content:
        refuses("is empty", open_corpus, [name])
    else:
        [s] = open_corpus([name])
        assert data.to_bytes(torch.cat((s["train"], s["val"]))) == (b"ab\0c\0" if "json" in name else content)
    writer.join()


def test_the_page_shows_how_to_convert_other_formats(text, tmp_path):
    page = Path(data.__file__).with_name("docs").joinpath("EXTENDING.md").read_text("utf-8")
    code = re.search(r"</a>Converting data.*?```python\n(.*?)```", page, re.S)[1]
    (tmp_path / "articles.csv").write_text('title,body\n1,"a\n""b"""\n2,é\n', "utf-8")
    exec(code, {})
    assert (tmp_path / "articles.txt").read_bytes() == 'a\n"b"\0é\0'.encode()


def test_the_standard_library_is_real_text_without_tests_of_which_every_tenth_file_is_held_out():
    documents = data.read_stdlib()
    assert sum(map(len, documents.values())) > 4_000_000
    assert any(path.endswith("argparse.py") for path in documents)
    assert not any("site-packages" in path or f"{os.sep}test{os.sep}" in path for path in documents)
    train, val = data.read_source("stdlib")
    texts = [*documents.values()]
    held_out = texts[9::10]
    del texts[9::10]
    assert [data.to_bytes(half).split(b"\0") for half in (train, val)] == [[*texts, b""], [*held_out, b""]]


def test_weights_follow_a_colon_unless_the_path_exists_and_without_weights_sizes_count(text, tmp_path, refuses):
    for name, size in {"a.txt": 100, "b:2": 300, "c.txt": 600}.items():
        (tmp_path / name).write_text("t" * size)
    for specs, weights in (
            (["a.txt:3", "b:2:1", "c.txt:100e-2"], {"a.txt": 0.6, "b:2": 0.2, "c.txt": 0.2}), (["b:2"], {"b:2": 1.0}),
            (["a.txt", "b:2", "c.txt"], {"a.txt": 0.1, "b:2": 0.3, "c.txt": 0.6})):
        assert {s["name"]: s["weight"] for s in open_corpus(specs)} == pytest.approx(weights)
    refuses("must be between 1e-9 and 1e9", open_corpus, ["a.txt:0"])
    refuses("two sources are the same text", open_corpus, ["a.txt", "./a.txt"])
    refuses("Try one for each", open_corpus, ["a.txt", "c.txt:.98"])


def test_the_checksum_reads_every_byte_or_an_even_part_of_a_large_corpus(monkeypatch):
    def is_noticed(i):  # does the checksum of 5,000 bytes depend on byte i?
        a = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=make_rng("crc"))
        b = a.clone()
        b[i] ^= 1
        return data.checksum(a) != data.checksum(b)
    assert all(map(is_noticed, (0, 1, 4999)))
    monkeypatch.setattr(data, "CRC_PIECE", 1)
    assert [i for i in range(16) if is_noticed(i)] == [0, 4, 8, 12]


# ---- windows
def test_read_windows_equals_slicing():
    texts = [bytes(torch.randint(1, 256, (n,), generator=make_rng("t")).tolist()) for n in (40, 90)]
    corpus = corpus_of(*texts)
    source, offset = sample_windows(corpus, "train", 7, 32, make_rng("windows"))
    x = read_windows(corpus, "train", source, offset, 7)
    assert x.dtype == torch.long and x.shape == (32, 7) and offset.shape == (32,)
    assert 0 < source.sum() < 32
    for row, s, o in zip(x, source.tolist(), offset.tolist()):
        assert bytes(row.tolist()) == texts[s][o:o + 7]


def test_windows_are_stratified_over_all_offsets_in_random_order():
    def offsets(key, n):
        return sample_windows(corpus_of(b"x" * 1007), "train", n, 8, make_rng(key))[1].tolist()
    parts = [o // 125 for o in offsets("1,7", 8)]
    assert sorted(parts) == list(range(8)) != parts
    assert {o for i in range(50) for o in offsets(f"{i}", 1000)} == set(range(8)), "wrong range of offsets"


def test_every_batch_has_the_share_of_each_source_and_offsets_cover_the_whole_source():
    """A common mistake is to reuse the number that selected the source (here .95 to 1) for the offset."""
    corpus = corpus_of(b"x" * 500, b"y" * 1009, weights=[0.95, 0.05])
    batches = [sample_windows(corpus, "train", 10, 8, make_rng(f"{i}")) for i in range(2000)]
    counts = torch.stack([source.sum() for source, _ in batches])
    assert counts.max() == 1                                        # the expected number is .4
    assert abs(float(counts.float().mean()) - 0.4) < 5 * (0.4 * 0.6 / 2000) ** 0.5
    assert {int(o) // 125 for source, offset in batches for o in offset[source == 1]} == set(range(8))


def test_a_source_of_exactly_one_window_is_large_enough(refuses):
    data.check_sizes(corpus_of(b"0123456789"), 10, 9)
    refuses("Try more text", data.check_sizes, corpus_of(b"0123456789"), 11, 10)
