"""Canaries: how many copies stand where, how often they are read, and what a model that knows them is credited with."""
import math
import os

import pytest
import torch
from conftest import TINY, randomized, settings

from data import make_rng, sample_windows, split_file
from experiments import memorize
from objectives import OBJECTIVES

SIZES = [*TINY, "--block_size", "128"]
FLAGS = [*SIZES, "--data", "text.txt", "--max_iters", "150", "--canaries", "3", "--learning_rate", ".02"]


def texts():  # -> the text files of the runs
    return [os.path.join("out", name) for name in os.listdir("out") if name.startswith("text-")]


def table(capsys):  # -> the rows without the head, lists of cells
    out = capsys.readouterr().out
    return [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")][1:]


def test_canaries_are_whole_lines_of_the_first_part_of_the_text():
    canaries = memorize.draw_canaries(2, make_rng("canaries"))
    text = b"".join(b"line %d\n" % i for i in range(1000))
    planted = memorize.plant(text, canaries, 5, make_rng("places"))
    lines = planted.split(b"\n")
    for canary in canaries.tolist():
        places = [i for i, line in enumerate(lines) if line == bytes(canary)]
        assert len(places) == 5 and max(places) < 820
    assert [line for line in lines if len(line) != 64] == text.split(b"\n"), "the text itself stays as it is"
    assert memorize.plant(b"no line", canaries, 1, make_rng("places")).endswith(b"\nno line")


def test_a_line_is_read_where_a_window_holds_it_and_the_newline_before_it():
    hp = settings("clm", 128, max_iters=3000, batch_size=4)
    n, text_bytes = 129, 20000
    corpus = [dict(weight=1.0, train=torch.zeros(text_bytes, dtype=torch.uint8))]
    start = 7000                                # of the newline, which 64 letters follow
    read = 0
    for step in range(hp.max_iters):
        _, offset = sample_windows(corpus, "train", n, 4, make_rng(f"{step}"))
        read += int(((offset <= start) & (start + 65 <= offset + n)).sum())
    assert read == pytest.approx(memorize.reads_per_copy(text_bytes, n, hp), rel=0.1)


def test_copies_are_so_many_that_the_longer_text_is_read_that_often():
    hp = settings("clm", 128, max_iters=1000, batch_size=4)
    copies = memorize.count_copies([0, 4, 16], 5, 100_000, 129, hp)
    longer = 100_000 + 5 * 65 * sum(copies)
    reads = [number * memorize.reads_per_copy(longer, 129, hp) for number in copies]
    assert reads[0] == 0 and reads[1] == pytest.approx(4, rel=0.3) and reads[2] == pytest.approx(16, rel=0.1)


def test_a_model_that_knows_the_letters_recites_them(monkeypatch):
    hp = settings("clm", 128)
    canaries = memorize.draw_canaries(70, make_rng("canaries"))
    bits, share, recited = memorize.measure(randomized(), OBJECTIVES["clm"], hp, canaries)
    assert bits > 4 and share < 0.2 and recited == 0

    def knows(model, objective, hp, x, a, m):   # all but the last letter of a batch's first canary
        assert (x[:, 0] == ord("\n")).all() and (a, m) == (17, 48)
        x = x.clone()
        x[0, -1] = ord("!")
        return torch.nn.functional.one_hot(x[:, a:], 512) * 100.0
    monkeypatch.setattr(memorize.evaluate, "left_logits", knows)
    bits, share, recited = memorize.measure(None, None, hp, canaries)
    assert share == pytest.approx(1 - 2 / (70 * 48)) and recited == 68
    assert bits == pytest.approx(100 / math.log(2) * 2 / (70 * 48), rel=1e-3)


def test_what_was_read_often_is_known_better_and_nothing_is_trained_twice(text, capsys, monkeypatch):
    words = ["--times", "0,3,12,3", "--out_dir", "out"]
    assert memorize.main([*FLAGS, *words]) == 0
    first = table(capsys)
    [path] = texts()
    with open(path, "rb") as f:
        written = f.read()
    held_out = bytes(split_file(torch.frombuffer(bytearray(written), dtype=torch.uint8))[1].tolist())
    assert len(first) == 3
    for row, reads in zip(first, (0, 3, 12)):
        for canary in memorize.draw_canaries(3, make_rng(f"1,{reads},canaries")).tolist():
            assert written.split(b"\n").count(bytes(canary)) == int(row[1]) and bytes(canary) not in held_out
        assert float(row[0]) == pytest.approx(reads, abs=0.3)
    never, _, often = first
    assert float(never[2]) > 5 > float(often[2]), "letters of which nothing is known cost more than 4.7 bits"
    assert float(never[3]) < float(often[3]) and never[4] == "0"

    monkeypatch.setattr("experiments.compare.train.main", None)                     # would be called
    assert memorize.main([*FLAGS, *words]) == 0
    assert table(capsys) == first
    monkeypatch.setattr("experiments.compare.train.main", lambda *args, **kwargs: 1)
    assert memorize.main([*FLAGS, *words, "--seed", "2"]) == 1, "a run that diverged"
    assert len(texts()) == 2


@pytest.mark.parametrize("words, hint", [
    (["--objective", "mlm"], "by this program"), (["--block_size", "64"], "too short"),
    (["--times", "1,x"], "--times 1,4"), (["--times", "4", "--canaries", "1000"], "% of the text"),
    (["--times", "1", "--max_iters", "9999"], "every line"), (["--max_iters", "0"], "--max_iters 1000"),
    (["--init_from", "out/clm"], "by this program"), (["--data", "-"], "anew"),
    (["--data", "short.txt"], "short.txt"), (["--out_dir", "text.txt"], "is a file")])
def test_bad_flags_are_one_line(words, hint, text, capsys):
    with open("short.txt", "w") as f:
        f.write("a")
    with pytest.raises(SystemExit) as e:
        memorize.main([*FLAGS, "--out_dir", "out", *words])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
