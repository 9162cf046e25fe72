"""Canaries: how many copies stand where, and what a model that knows them by heart is credited with."""
import os

import pytest
import torch
from conftest import TINY, randomized, settings

from data import make_rng
from experiments import memorize
from objectives import OBJECTIVES

FLAGS = [*TINY, "--block_size", "80", "--data", "text.txt", "--max_iters", "20", "--canaries", "3"]


def test_canaries_are_whole_lines_of_the_first_part_of_the_text():
    canaries = memorize.draw_canaries(2, make_rng("canaries"))
    text = b"".join(b"line %d\n" % i for i in range(1000))
    planted = memorize.plant(text, canaries, 5, make_rng("places"))
    lines = planted.split(b"\n")
    for canary in canaries.tolist():
        places = [i for i, line in enumerate(lines) if line == bytes(canary)]
        assert len(places) == 5 and max(places) < 820
    assert [line for line in lines if len(line) != 64] == text.split(b"\n"), "the text itself stays as it is"


def test_a_model_that_knows_the_letters_recites_them(monkeypatch):
    hp = settings("clm", 80)
    canaries = memorize.draw_canaries(4, make_rng("canaries"))
    bits, share, recited = memorize.measure(randomized(), OBJECTIVES["clm"], hp, canaries)
    assert bits > 4 and share < 0.2 and recited == 0

    def knows(model, objective, hp, x, a, m):   # all but one letter of the first canary
        assert (x[:, 0] == ord("\n")).all() and (a, m) == (17, 48)
        x = x.clone()
        x[0, -1] = ord("!")
        return torch.nn.functional.one_hot(x[:, a:], 512) * 100.0
    monkeypatch.setattr(memorize.evaluate, "left_logits", knows)
    bits, share, recited = memorize.measure(None, None, hp, canaries)
    assert share == pytest.approx(1 - 1 / (4 * 48)) and recited == 3


def test_what_was_read_often_is_known_better(text, capsys):
    words = ["--times", "0,20", "--out_dir", "out", "--learning_rate", ".02", "--max_iters", "150"]
    assert memorize.main([*FLAGS, *words]) == 0
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    never, often = rows[1:]
    copies = round(20 * (os.path.getsize(text) * 9 // 10) / (150 * 4 * 81))         # in 150 steps of 4 rows of 81 bytes
    assert (never[:2], never[4], often[1]) == (["0.0", "0"], "0", str(copies))
    assert float(never[2]) > 5 > float(often[2]), "letters of which nothing is known cost more than 4.7 bits"
    assert 15 < float(often[0]) <= 20


@pytest.mark.parametrize("words, hint", [
    (["--objective", "mlm"], "continue"), (["--block_size", "64"], "too short"), (["--times", "1,x"], "--times 1,4"),
    (["--max_iters", "0"], "--max_iters 1000"), (["--init_from", "out/clm"], "by this program"),
    (["--out_dir", "taken"], "another folder")])
def test_bad_flags_are_one_line(words, hint, text, capsys):
    os.makedirs("taken")
    with open("taken/text.bin", "wb") as f:
        f.write(b"of another run")
    with pytest.raises(SystemExit) as e:
        memorize.main([*FLAGS, *words])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
    with open("taken/text.bin", "rb") as f:
        assert f.read() == b"of another run"
