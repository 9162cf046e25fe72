import os

import pytest
import torch

import data
from data import decode, encode, make_rng, open_corpus, read_windows, sample_windows


def corpus_of(*texts, weights=None):
    weights = weights or [1 / len(texts)] * len(texts)
    return [dict(name=str(i), weight=w, train=data.from_bytes(t), val=data.from_bytes(t), size=2 * len(t))
            for i, (t, w) in enumerate(zip(texts, weights))]


# ---- vocabulary

def test_the_vocabulary_is_what_checkpoints_rely_on():
    words = "EOT", "PAD", "MASK", "CLS", "SEP", "PRE", "SUF", "MID", "MODE_R", "MODE_S", "MODE_X"
    assert [getattr(data, word) for word in words] == [0, *range(256, 266)]
    assert (data.SENTINEL, data.N_SENTINELS, data.VOCAB_SIZE) == (272, 240, 512)


def test_every_byte_string_survives_encode_and_decode_never_fails():
    assert encode("é<MASK>") == [0xC3, 0xA9, *b"<MASK>"]            # nothing in a text is special
    assert encode(b"\xff\x00") == [255, 0]
    assert encode(os.fsdecode(b"a\xffb")) == [97, 255, 98]      # what a shell hands over, whatever its bytes
    assert encode("\ud800") == [*b"?"]                              # what no UTF-8 can say
    assert decode([0xC3, 0xA9]) == "é"
    assert decode([65, 0xC3, 66]) == "A\ufffdB"                     # half a character
    assert decode([0xC3, data.MASK, 0xA9, data.SENTINEL]) == "\ufffd<MASK>\ufffd<extra_id_0>"


def test_every_special_id_has_a_name_and_every_id_one_character():
    assert set(data.ID_NAMES) == {0, *range(256, 266), *range(272, 512)}
    assert [decode([i]) for i in (data.MASK, 266, 511)] == ["<MASK>", "<266>", "<extra_id_239>"]
    shown = {i: data.to_symbol(i) for i in [-100, *range(512)]}
    assert all(len(c) == 1 and c.isprintable() for c in shown.values())
    assert bytes(ord(shown[i]) for i in range(32, 127)) == bytes(range(32, 127))
    special = [shown[i] for i in (-100, 0, 9, 10, 11, *range(256, 266), *range(272, 292))]
    assert len(set(special)) == len(special), "no two look alike"
    assert not any(c.isascii() for c in special)


def test_an_end_belongs_to_its_own_document():
    assert data.document_ids(torch.tensor([[5, 0, 6, 6, 0, 0, 7]])).tolist() == [[0, 0, 1, 1, 1, 2, 3]]


# ---- sources

def test_a_file_is_mapped_and_its_last_tenth_is_validation(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(256)) * 10)    # NULs included: a file named by the user is data
    [s] = open_corpus([str(path)])
    assert len(s["train"]) == 2304 and len(s["val"]) == 256 and s["size"] == 2560
    assert data.to_bytes(torch.cat((s["train"], s["val"]))) == path.read_bytes()


def test_a_folder_keeps_text_once_and_holds_out_every_tenth_document(tmp_path):
    for i in range(20):
        (tmp_path / f"doc{i:02d}.txt").write_text(f"document {i}")
    (tmp_path / "zz_copy.txt").write_text("document 3")
    (tmp_path / "binary.bin").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".hidden").write_text("hidden")
    for hidden in (".git", "run", "out_dir"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "x.txt").write_text(f"inside {hidden}")
    (tmp_path / "run" / "ckpt.pt").write_text("a run is no text")
    [s] = open_corpus([str(tmp_path)], out_dir=str(tmp_path / "out_dir"))
    assert s["notes"] == [f"{tmp_path}: 20 files read, skipped 1 with a NUL byte (binary), 1 empty, 1 duplicates, "
                          "2 hidden, 2 folders of runs"]
    assert data.to_bytes(s["val"]) == b"document 9\0document 19\0"
    kept = [f"document {i}\0".encode() for i in range(20) if i not in (9, 19)]
    assert data.to_bytes(s["train"]) == b"".join(kept)


def test_a_folder_of_few_documents_is_split_like_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 50)
    (tmp_path / "b.txt").write_text("b" * 48)
    [s] = open_corpus([str(tmp_path)])
    assert data.to_bytes(torch.cat((s["train"], s["val"]))) == b"a" * 50 + b"\0" + b"b" * 48 + b"\0"
    assert len(s["val"]) == 10


@pytest.mark.parametrize("text, hint", [
    ("plain text, 日本 ".encode() * 90_000, None), (b"the last character is cut: \xe6", None),
    ("\xe9t\xe9".encode("latin-1"), "UTF-8"), ("text ".encode("utf-16-le") * 9, "UTF-16"),
    (bytes(range(128, 256)), "UTF-8"), (b"ab\0abc\0abcd\0", None)])
def test_bytes_that_are_no_utf8_are_noticed(text, hint):
    found = data.text_warnings(text[:data.TEXT_BYTES])
    assert len(found) == (hint is not None) and all(hint in line for line in found)


def test_the_standard_library_is_real_text_without_tests():
    [s] = open_corpus(["stdlib"])
    assert s["size"] > 4_000_000
    assert b"class ArgumentParser" in data.to_bytes(s["train"]) + data.to_bytes(s["val"])
    assert 0.02 < len(s["val"]) / s["size"] < 0.25


def test_weights_follow_a_colon_unless_the_path_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b:2", "c.txt"):
        (tmp_path / name).write_text("text" * 10)
    corpus = open_corpus(["a.txt:3", "b:2", "c.txt:1e0"])
    assert [(s["name"], round(s["weight"], 6)) for s in corpus] == [("a.txt", 0.6), ("b:2", 0.2), ("c.txt", 0.2)]


def test_the_fingerprint_notices_a_changed_byte_and_samples_large_corpora(monkeypatch):
    a = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=make_rng("crc"))
    b = a.clone()
    b[-1] ^= 1
    assert data.checksum(a) != data.checksum(b)
    monkeypatch.setattr(data, "CRC_BYTES", 2048)
    assert data.checksum(a) != data.checksum(b)


# ---- windows

def test_read_windows_equals_slicing():
    texts = [bytes(torch.randint(1, 256, (n,), generator=make_rng("t")).tolist()) for n in (40, 90)]
    corpus = corpus_of(*texts)
    source, offset = sample_windows(corpus, "train", 7, 32, make_rng("windows"))
    x = read_windows(corpus, "train", source, offset, 7)
    assert x.dtype == torch.long and x.shape == (32, 7) and offset.shape == (32, 1)
    assert set(source.tolist()) == {0, 1}
    for row, s, [o] in zip(x, source.tolist(), offset.tolist()):
        assert bytes(row.tolist()) == texts[s][o:o + 7]


def test_every_offset_can_be_sampled_and_none_beyond_the_end():
    corpus = corpus_of(b"abcdefgh")
    seen = torch.cat([sample_windows(corpus, "train", 6, 4, make_rng(f"{i}"))[1] for i in range(50)])
    assert set(seen.flatten().tolist()) == {0, 1, 2}
    assert sample_windows(corpus, "train", 8, 4, make_rng("x"))[1].max() == 0


def test_rows_are_stratified_over_the_corpus():
    _, offset = sample_windows(corpus_of(b"x" * 1009), "train", 10, 8, make_rng("s"))
    assert sorted((offset[:, 0] // 125).tolist()) == list(range(8)) != (offset[:, 0] // 125).tolist()


def test_a_source_of_small_weight_is_read_everywhere():
    """A common mistake is to place a window by the number that chose its source, here .9 .. 1."""
    corpus, seen = corpus_of(b"x" * 500, b"y" * 1009, weights=[0.9, 0.1]), set()
    for i in range(200):
        source, offset = sample_windows(corpus, "train", 10, 8, make_rng(f"{i}"))
        seen |= set((offset[source == 1] // 125).flatten().tolist())
    assert seen == set(range(8))


def test_sources_have_their_shares_in_every_batch():
    corpus = corpus_of(b"a" * 50, b"b" * 50, weights=[0.95, 0.05])
    sources = torch.stack([sample_windows(corpus, "train", 4, 8, make_rng(f"{i}"))[0] for i in range(2000)])
    counts = sources.sum(1)
    assert counts.max() == 1                                        # .4 rows of 8: never two
    assert abs(float(counts.float().mean()) - 0.4) < 5 * (0.4 * 0.6 / 2000) ** 0.5


def test_rows_that_want_a_single_document_get_one_where_a_candidate_has_it():
    def windows(text, whole):  # -> windows (B, n), offsets, of the same random numbers
        source, offset = sample_windows(corpus_of(text), "train", 20, 64, make_rng("w"), whole)
        return read_windows(corpus_of(text), "train", source, offset, 20), offset
    ends, wants = b"\0".join([b"x" * 60] * 50), torch.tensor([True, False, False, True])
    (plain, one), (whole, several), (mixed, offset) = (windows(ends, w) for w in (False, True, wants))
    broken = [int((x == 0).any(1).sum()) for x in (plain, whole)]
    assert broken[0] > 5 * max(1, broken[1])                        # a third of windows against (1/3)^4
    untouched = ~(plain == 0).any(1)
    assert torch.equal(plain[untouched], whole[untouched])
    assert several.shape == (64, data.N_CANDIDATES) and torch.equal(several[:, :1], one)
    rows = wants.repeat(16)                                         # over the micro-batches of a step
    assert torch.equal(mixed[rows], whole[rows])
    assert torch.equal(mixed[~rows], plain[~rows])
    assert (offset[~rows] == one[~rows]).all(), "one candidate, whatever it holds"
    nowhere = bytes(range(10)) * 99                                 # no candidate is whole: the first it is
    assert torch.equal(windows(nowhere, False)[0], windows(nowhere, True)[0])


def test_windows_depend_on_seed_and_step_alone():
    def at(key):
        return sample_windows(corpus_of(b"abc" * 500), "train", 9, 8, make_rng(key))[1]
    assert torch.equal(at("1,7,windows"), at("1,7,windows"))
    assert not torch.equal(at("1,7,windows"), at("2,7,windows"))    # seed << 32 | step would make these equal
    assert not torch.equal(at("1,7,windows"), at("1,8,windows"))


def test_a_source_of_exactly_one_window_is_large_enough(capsys):
    data.check_sizes(corpus_of(b"0123456789"), 10, 9)
    with pytest.raises(SystemExit):
        data.check_sizes(corpus_of(b"0123456789"), 11, 10)
    message = capsys.readouterr().err
    assert "10 bytes" in message
    assert "more text" in message
    [source] = corpus_of(b"0123456789")
    with pytest.raises(SystemExit):
        data.check_sizes([source | {"train": source["train"][:5]}], 10, 9)          # cut by --train_bytes
    assert "a larger --train_bytes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        data.check_sizes([source | {"train": source["train"][:5]}], 11, 10)         # its validation split is short, too
    assert "more text" in capsys.readouterr().err


def test_standard_input_is_read_once(capsys):
    with pytest.raises(SystemExit):
        open_corpus(["-", "-"])
    assert "can be read once" in capsys.readouterr().err
