"""The table of written text: what is measured, and that each way to write is the objective's own."""
import pytest
import torch
from conftest import TINY, randomized, settings

import train
from data import EOT, MASK, from_bytes, make_rng
from experiments import evaluate, writing
from objectives import OBJECTIVES, Fill, find_use

SHORT = ["--block_size", "80", "--max_iters", "1", "--eval_interval", "1"]


def windows(N=3, n=76):
    return torch.randint(1, 256, (N, n), generator=make_rng("windows"))


def write(name, way, model, x, **changes):
    flags = writing.parse(["--judge", "a", "--runs", "a", "--steps", "3"])
    return writing.write(model, OBJECTIVES[name], settings(name, 80, **changes), way, x, flags)


def test_each_objective_writes_in_its_own_ways():
    ways = {name: writing.list_orders(objective, settings(name, 80)) for name, objective in OBJECTIVES.items()}
    for name in ("clm", "prefix", "mtp", "fim", "ul2"):
        assert ways[name] == ["left to right"], name
    assert ways["hybrid"] == ["left to right", *ways["mlm"]] and "left" in ways["mlm"] and "revise" in ways["mlm"]
    assert "ancestral" in ways["mdlm"] and "analytic" in ways["sedd"]
    for name in ("span", "bart", "electra", "contrastive", "rotation"):
        assert ways[name] == [], name
    assert writing.list_orders(OBJECTIVES["fim"], settings("fim", 80, fim_rate=1.0)) == [], "never saw a plain row"


@pytest.mark.parametrize("name, way", [("clm", "left to right"), ("prefix", "left to right"), ("ul2", "left to right"),
                                       ("mlm", "left"), ("mlm", "revise"), ("nsp", "confident"), ("mdlm", "ancestral"),
                                       ("hybrid", "left to right"), ("hybrid", "left")])
def test_prompts_stay_and_everything_else_is_written(name, way):
    x = windows()
    written = write(name, way, randomized(), x)
    assert written.shape == x.shape and (written[:, :32] == x[:, :32]).all()
    assert (written < 256).all()
    assert (written[:, 32:] != x[:, 32:]).float().mean() > 0.9
    other = x.clone()
    other[:, 32:] = 7
    assert torch.equal(write(name, way, randomized(), other), written), "nothing but the prompt is read"


def test_who_was_not_trained_on_rows_of_masks_fills_16_at_a_time(monkeypatch):
    seen = []
    orders = set()

    def fill(model, ids, **how):
        seen.append((int((ids == MASK).sum(1).max()), ids.size(1)))
        orders.add(how["order"])
        return ids.where(ids != MASK, 65)
    monkeypatch.setattr(writing.sample, "fill", fill)
    write("mlm", "revise", None, windows(n=70))
    assert seen == [(16, 48), (16, 64), (6, 70)]
    seen.clear()
    write("mdlm", "ancestral", None, windows(n=70))
    assert seen == [(38, 70)] and orders == {"revise", "ancestral"}


def test_rows_that_ended_are_filled_with_eot(monkeypatch):
    monkeypatch.setattr(writing.sample, "generate", lambda model, row, *args, **how: iter([torch.full((3,), EOT)]))
    assert (write("clm", "left to right", None, windows())[:, 32:] == EOT).all()


def test_copied_pieces_are_counted():
    text = bytes(range(1, 201))
    # a copy, another, white space alone, a piece that is too short
    row = torch.tensor([*text[5:53], *([3] * 48), *([32] * 48), *text[:20]])
    assert writing.copied_share(row[None], text + b" " * 48) == 0.5


def test_held_out_text_and_runs_have_a_row_each(text, capsys, monkeypatch):
    for name, objective in (("clm", "clm"), ("mlm", "mlm"), ("span", "span"), ("both", "clm,mdlm")):
        train.main(["--objective", objective, "--data", text, "--out_dir", name, *TINY, *SHORT], with_sample=False)
    capsys.readouterr()
    assert writing.main(["--judge", "clm", "--runs", "span", "mlm", "clm", "both", "--windows", "4"]) == 0
    out = capsys.readouterr()
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in out.out.splitlines() if line.startswith("| ")]
    assert rows[1:] == [["held-out text", ""], ["mlm (mlm)", "confident"], ["mlm (mlm)", "left"],
                        ["mlm (mlm)", "revise"], ["clm (clm)", "left to right"], ["clm (both)", "left to right"],
                        *(["mdlm (both)", order] for order in find_use(OBJECTIVES["mdlm"], Fill).orders)]
    assert "span writes no text" in out.err
    [judge], _ = writing.load("clm")
    x = evaluate.windows(from_bytes(b"import os\n" * 500), 76, 4, "any")
    monkeypatch.setattr(writing, "COPIED_LENGTH", 16)
    tokenizes, distinct, lines, copied, space, bits = map(float, writing.measure(x, judge, b"import os\n" * 20))
    assert tokenizes == 1 and 0 < distinct < 0.1 and 12 <= lines <= 16 and copied == 1 and 7 < bits < 9
    assert 0.15 < space < 0.25                  # 2 of 10 bytes


@pytest.mark.parametrize("flags, hint", [
    (["--judge", "clm"], "--runs"), (["--runs", "clm"], "--judge"),
    (["--judge", "mlm", "--runs", "clm"], "--judge mlm"),
    (["--judge", "clm", "--runs", "nowhere"], "nowhere"), (["--judge", "clm", "--runs", "small"], "--block_size"),
    (["--judge", "clm", "--runs", "other"], "other text")])
def test_bad_flags_are_one_line(flags, hint, text, capsys):
    with open("other.txt", "wb") as f:
        f.write(b"other text\n" * 900)
    for name, out_dir, size, data in (("clm", "clm", "80", text), ("mlm", "mlm", "80", text),
                                      ("clm", "small", "32", text), ("clm", "other", "80", "other.txt")):
        train.main(["--objective", name, "--data", data, "--out_dir", out_dir, *TINY, *SHORT, "--block_size", size],
                   with_sample=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        writing.main(flags)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
