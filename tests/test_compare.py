import glob
import math
import os
from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomized, settings

import compare
from data import CLS, EOT, MASK, MODE_R, MODE_S, SENTINEL, SEP, generator, read_documents, split_documents, to_bytes
from objectives import OBJECTIVES


def ids(*shape, seed=0):
    return torch.randint(1, 256, shape, generator=generator(f"ids {seed}"))


def run(*words):  # compare.py on the text of the folder -> metrics of all that was measured so far
    flags = ["--data", "text.txt", "--out_dir", "out", "--max_iters", "2"]
    compare.main([*flags, *TINY, *words])
    return [r["metrics"] for r in compare.read_results("out/results.jsonl")]


def only_run(word=""):  # -> checkpoint of the one run with that word in its folder's name
    [folder] = [os.path.join("out/runs", name) for name in os.listdir("out/runs") if word in name]
    return compare.load_checkpoint(folder) | {"folder": folder}


# ---- its own job

def job(what, name, answer, text):  # -> what a model with those answers reaches, what the rule does
    hp = settings(name, 64)
    entry = OBJECTIVES[name] | {"n": OBJECTIVES[name]["window"](64, hp), "answer": answer}
    with torch.no_grad():
        return what(*compare.build(hp), entry, hp, text)


def sentences():
    return compare.from_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)


def test_marks_are_right_where_the_letter_was_replaced():
    windows = sentences().long().unfold(0, 64, 1)[:45]          # all that there are

    def replaced(model, heads, x):
        off = windows != x[:, None]                             # (N, 45, 64)
        return off[torch.arange(len(x)), off.sum(2).argmin(1)].float()
    right, rule = job(compare.typos, "electra", replaced, sentences())
    assert right == 1 and rule > 0.5
    assert job(compare.typos, "electra", lambda *args: -replaced(*args), sentences())[0] < 0.05


def test_recall_is_1_for_who_knows_the_passage_and_chance_for_who_does_not(monkeypatch):
    monkeypatch.setattr(compare, "windows", lambda text, n, count, key: torch.arange(256)[:, None].expand(-1, n))
    known = job(compare.recalls, "contrastive", lambda m, h, x: F.one_hot(x[:, 0], 256).float(), None)
    assert known == (1, 1), "here the bytes alone tell"
    blind = job(compare.recalls, "contrastive", lambda m, h, x: torch.ones(len(x), 2), None)
    assert blind[0] == pytest.approx(1 / 256)


@pytest.mark.parametrize("a, b, want", [("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("ab", "ba", 2)])
def test_the_edit_distance_is_levenshteins(a, b, want):
    assert compare.edit_distance(a.encode(), b.encode()) == compare.edit_distance(b.encode(), a.encode()) == want


def test_a_repair_that_copies_leaves_1(monkeypatch):
    monkeypatch.setattr(compare.sample, "generate", lambda model, row, *rest, **how: iter(row[0, :-1]))
    assert job(compare.repairs, "bart", None, sentences()) == (pytest.approx(1), 1)


def test_a_hole_left_empty_costs_1_and_one_filled_right_0(monkeypatch):
    row = [*b"abcdefghijklmnopqrstuvwxyz" * 9][:160]
    monkeypatch.setattr(compare, "windows", lambda *args: torch.tensor([row] * compare.ROWS))
    hp = settings("span", 256)
    for written, want in (([], 1), (row[72:88], 0), (row[72:80], 0.5), ([1] * 32, 2)):
        monkeypatch.setattr(compare.sample, "infill", lambda *args, w=written, **how: ([w], True))
        assert compare.holes(randomized(), {}, OBJECTIVES["span"], hp, None) == (want, 1)
    assert compare.holes(randomized(), {}, OBJECTIVES["span"], settings("span", 127), None) is None


def test_every_mode_with_a_job_has_its_row(text, capsys, monkeypatch):
    monkeypatch.setattr(compare, "ROWS", 4)
    monkeypatch.setattr(compare, "EVAL_ROWS", 4)
    metrics = run("--objectives", "span,electra,bart,nsp,contrastive,rotation", "--block_size", "128", "--n_layer", "1")
    out = capsys.readouterr().out
    assert [m["job"] for m in metrics] == [compare.JOBS[mode][0] for mode in
                                           ("infill", "mark", "repair", "follow", "search", "seam")]
    for name, m in zip(("span", "electra"), metrics):
        assert f"| {name} | {m['job']} | {m['job_done']:.3f} | {m['job_untrained']:.3f} | " in out
    assert any(m["job_done"] != m["job_untrained"] for m in metrics)
    assert [m["job_trivial"] for m in (metrics[3], metrics[5])] == [1 / 2, 1 / 128], "chance"
    assert 0.2 < metrics[3]["job_untrained"] < 0.8 and metrics[5]["job_untrained"] < 0.1
    assert not {"infill_4", "left_only", "replaced", "pass_bytes"} & set(metrics[4]), "contrastive has no way"


# ---- cells

def test_cells_are_trained_once_and_reported(text, capsys, monkeypatch):
    monkeypatch.setattr(compare, "ROWS", 8)
    words = ["--objectives", "clm,mtp,mdlm", "--block_size", "128"]
    run(*words)
    first = capsys.readouterr().out
    assert "| clm † |" in first and "| mdlm |" in first and os.path.exists("out/compare.md")
    assert only_run("clm")["config"]["block_size"] == 128, "other flags are those of training"
    run(*words)
    again = capsys.readouterr().out
    assert again.count("finished before") == 3 and first.split("\n\n")[-1] == again.split("\n\n")[-1]
    clm, mtp, mdlm, one, other = run("--objectives", "clm", "--seeds", "1,2")
    assert "±" in capsys.readouterr().out
    assert one["loss"] != other["loss"], "another seed, another run"
    for m in (clm, mtp, mdlm):
        assert 7 < m["bpb"] < 10 and m["tflop"] > 0 and m["raw_mb"] > 0 and 0 < m["replaced"] < 1
        assert all(7 < m[f"infill_{n}"] < 10 for n in (4, 16))
    assert [m["left_only"] for m in (clm, mtp, mdlm)] == [True, True, False]
    assert clm["pass_bytes"] == 1 <= mtp["pass_bytes"] and 88 / 64 <= mdlm["pass_bytes"] < 2
    with open(text, "ab") as f:
        f.write(b"# more\n")
    run("--objectives", "clm")
    assert "finished before" not in capsys.readouterr().out, "other text in the same file is another cell"
    assert len(os.listdir("out/runs")) == 6, "and another run"


def test_a_sweep_has_a_row_for_each_value_in_which_a_plus_is_a_comma(text, capsys):
    run("--sweep", "bart_noise=mask,mask+permute")
    out = capsys.readouterr().out
    assert "| mask |" in out and "| mask+permute |" in out and os.path.exists("out/sweep-bart_noise-bart.md")
    assert only_run("permute")["config"]["bart_noise"] == "mask,permute"


def test_quick_is_100_steps():
    flags = {flag: spec[0] for flag, spec in compare.FLAGS.items()} | dict(quick=True, objectives="clm")
    assert [cell["max_iters"] for cell in compare.cells(Namespace(**flags), [])] == [100]


def test_replay_is_measured_on_both_corpora(text, capsys):
    with open("new.txt", "wb") as f:
        f.write(b"int main() { return 0; }\n" * 400)
    plain, mixed = run("--new_data", "new.txt", "--sweep", "replay=0,.25")
    out = capsys.readouterr().out
    assert "old corpus" in out and "| .25 |" in out
    assert plain["old_before"] == mixed["old_before"] != plain["old"]
    assert plain["new"] < plain["old_before"], "two steps more, on a text of one line"
    before = only_run("clm-2")["folder"]
    for share, data in (("0", ["new.txt:1"]), (".25", ["new.txt:0.75", "text.txt:0.25"])):
        config = only_run(f"replay={share}-")["config"]
        assert config["init_from"] == before and config["data"] == data


def test_what_diverges_stops_nothing_else(text, capsys, monkeypatch):
    def infinite(*args):
        return {"nll": OBJECTIVES["clm"]["loss"](*args)["nll"] * math.inf}
    monkeypatch.setitem(OBJECTIVES["mlm"], "loss", infinite)
    run("--objectives", "mlm,clm")
    out = capsys.readouterr().out
    for word in ("mlm seed 1: diverged", "| mlm |  |", "| 1 diverged |", "| clm |"):
        assert word in out, word
    run("--objectives", "mlm,clm")
    assert capsys.readouterr().out.count("finished before") == 2
    alone = ["--data", text, "--objectives", "mlm", "--max_iters", "2", "--out_dir", "alone", *TINY]
    assert compare.main(alone) == 1
    assert "all diverged" in capsys.readouterr().out


@pytest.mark.parametrize("saved", [True, False])
def test_what_was_killed_goes_on_or_before_its_first_checkpoint_begins_anew(saved, text):
    run("--objectives", "clm")
    paths = [os.path.join(only_run()["folder"], name) for name in ("ckpt.pt", "best.pt", "metrics.jsonl")]
    if saved:                                   # after the first of two steps
        with open(paths[2], "rb") as f:
            state = {"step": 1, "metrics_bytes": sum(map(len, f.readlines()[:3]))}
        torch.save(torch.load(paths[0], weights_only=True) | state, paths[0])
    for path in ["out/results.jsonl", *([] if saved else paths)]:
        os.remove(path)
    assert len(run("--objectives", "clm")) == 1 and only_run()["step"] == 2


def test_a_line_cut_by_a_kill_harms_nothing(tmp_path):
    path = str(tmp_path / "results.jsonl")
    compare.add_result(path, {"a": 1})
    with open(path, "a") as f:
        f.write('{"b": ')
    compare.add_result(path, {"c": 3})
    assert compare.read_results(path) == [{"a": 1}, {"c": 3}]


@pytest.mark.parametrize("flags, hint", [
    (["--sweep", "seed=1,2"], "no such setting"), (["--sweep", "mask_rate"], "as in mask_rate"),
    (["--sweep", "mask_rate=2"], "--mask_rate"), (["--sweep", "replay=x"], "shares"),
    (["--objectives", "mlm", "--sweep", "replay=0"], "clm"), (["--objectives", "mml"], "clm,"),
    (["--seeds", "one"], "numbers"), (["--seed", "7"], "itself"), (["--data", "short.txt"], "4096"),
    (["--out_dir", "text.txt"], "a file"), (["--objectives", "clm", "--tau", ".1"], "--tau"),
    (["--data", "corpus", "--out_dir", "corpus/out"], "inside the corpus")])
def test_bad_flags_are_one_line_before_anything_runs(flags, hint, text, capsys):
    os.makedirs("corpus")
    for path, n in (("short.txt", 500), ("corpus/a.txt", 9000)):
        with open(path, "wb") as f:
            f.write(b"words " * n)
    with pytest.raises(SystemExit) as e:
        compare.main([*flags, *([] if "--data" in flags else ["--data", text])])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
    assert not os.path.exists("out") and not os.path.exists("corpus/out")


# ---- tables

def test_differences_are_paired_by_seed():
    rows = {"a": {1: {"bpb": 2.0}, 2: {"bpb": 3.0}, 3: {"bpb": 9.0}},
            "b": {1: {"bpb": 2.1}, 2: {"bpb": 3.3}, 4: {"bpb": 0.0}}}
    out = compare.tables(rows, {"five raw bytes": {"classes": 0.5}})
    assert "| b | +0.200 ± 0.100 | 1 2 |" in out, ".1 and .3, whose standard deviation is .141"
    assert "With 2 seeds one of 12.7 standard errors is clear" in out
    assert "| a | 4.667 ± 3.786 |" in out and "| five raw bytes |  | 0.500 |  |" in out
    assert "paired" not in compare.tables({"a": {1: {"bpb": 2.0}}, "b": {1: {"bpb": 2.1}}}, {})


def test_a_bound_is_not_subtracted_from_what_is_exact():
    exact = {1: {"bpb": 2.0}, 2: {"bpb": 3.0}}
    bound = {1: {"bpb": 2.5, "bound": True}, 2: {"bpb": 2.6, "bound": True}}
    out = compare.tables({"a": exact, "b": bound}, {})
    assert "| b | <= 2.550" in out and "| b |  | 1 2 |" in out


def test_rows_are_named_by_value_and_those_with_the_left_side_alone_are_marked():
    def result(value, left_only):
        return {"cell": dict(objective="fim", value=value, seed=0),
                "metrics": dict(infill_4=1.0, left_only=left_only)}
    results = [result("0", True), result(".5", False)]
    rows = compare.collect(results, lambda cell: True, [".5", "0"])
    assert [*rows] == [".5", "0"]
    out = compare.tables(rows, {})
    assert "| .5 | 1.00 | 0 |" in out and "| 0 † | 1.00 | 0 |" in out and "† has the left side alone" in out


# ---- infilling

@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_model_sees_the_byte_that_it_fills(name):
    """Nor those after it in the middle; each sees the left side, and both where it can."""
    net, hp, x, a, m = randomized().requires_grad_(False), settings(name, 64), ids(2, 20), 8, 4
    base = compare.infill_logits(net, OBJECTIVES[name], hp, x, a, m)
    assert (base is None) == (name in ("electra", "contrastive", "rotation"))
    if base is None:
        return
    assert base.shape == (2, m, 512)

    def changed(i):  # which of the m positions' logits move when byte i of the row does
        other = x.clone()
        other[:, i] = 1 + other[:, i] % 255
        moved = compare.infill_logits(net, OBJECTIVES[name], hp, other, a, m) - base
        return (moved.abs().amax((0, 2)) > 1e-6).tolist()
    for i in range(m):
        assert changed(a + i) == [j > i for j in range(m)]
    assert all(changed(a - 1)) and changed(a + m) == [name not in ("clm", "mtp", "prefix")] * m


def test_holes_are_filled_at_their_positions():
    net, hp, x, span = randomized(), settings("span", 64), ids(1, 20), OBJECTIVES["span"]
    asked, P = span["ask"]([x[0, :8].tolist(), x[0, 12:].tolist()], 4, hp)
    row, prefix = torch.tensor([asked + x[0, 8:11].tolist()]), torch.tensor([P])
    want = net.logits(net(row, prefix, at=span["positions"](row, prefix)))[:, -4:]
    torch.testing.assert_close(compare.infill_logits(net, span, hp, x, 8, 4), want, atol=1e-4, rtol=1e-4)


X = ids(1, 6)
LEFT, (Y, _), RIGHT = X[0, :2].tolist(), X[0, 2:4].tolist(), X[0, 4:].tolist()


def asked(name, **changes):  # -> row of the last pass, its mask or P, what stands where each byte is read
    seen = []

    class Net:
        def __call__(self, row, mask, doc=None, at=None):
            seen.append((row[0].tolist(), mask if isinstance(mask, str) else int(mask[0])))
            return F.one_hot(row, 512).float()

        def logits(self, h):
            return h
    logits = compare.infill_logits(Net(), OBJECTIVES[name], settings(name, 64, **changes), X, 2, 2)
    return None if logits is None else (*seen[-1], logits.argmax(-1)[0].tolist())


def test_the_formats_are_those_of_training():
    left = ([*LEFT, Y], "causal", [LEFT[-1], Y])
    masked = ([*LEFT, Y, MASK, *RIGHT], "bidirectional", [MASK, MASK])
    spans = [*LEFT, SENTINEL, *RIGHT, SENTINEL + 1, SEP, SENTINEL, Y]
    want = {"clm": left, "prefix": (left[0], 2, left[2]), "mlm": masked, "nsp": ([CLS, *masked[0], SEP], *masked[1:]),
            "hybrid": ([EOT, *masked[0]], "bidirectional", [LEFT[-1], Y]), "ul2": ([MODE_R, *spans], 8, [SENTINEL, Y]),
            "bart": ([*LEFT, MASK, *RIGHT, SEP, *LEFT, Y], 6, [LEFT[-1], Y])}
    assert {name: asked(name) for name in want} == want
    assert asked("ul2", ul2_weights="S:1")[:2] == ([MODE_S, *LEFT, SEP, Y], 4)
    assert asked("bart", bart_noise="mask")[:2] == ([*LEFT, MASK, MASK, *RIGHT, SEP, *LEFT, Y], 7)
    assert asked("bart", bart_noise="delete,rotate") is None, "it knows no holes"


# ---- the other yardsticks

@pytest.mark.parametrize("name", ["clm", "mlm", "electra"])
def test_replaced_bytes_are_found_by_a_model_that_knows_the_text(name):
    text = torch.arange(97, 123).repeat(40).byte()

    class Knows:  # the letter after the one on the left; what it sees it repeats
        def __call__(self, row, mask, doc=None, at=None):
            after = (row - 96) % 26 + 97
            return after if mask == "causal" else torch.where(row == MASK, after.roll(1, 1), row)

        def logits(self, row):
            return F.one_hot(row, 512).float() * 9

    def answer(model, heads, z):
        return ((z - z.roll(1, 1)) % 26 != 1).float()
    score = compare.corruption(Knows(), {}, OBJECTIVES[name] | {"answer": answer}, settings(name, 64), text)
    assert 0.8 < score["replaced"] < 1, "a letter after a replaced one is a surprise too"


def test_states_are_read_under_the_objectives_own_mask():
    net, x, T = randomized().requires_grad_(False), ids(3, 24), 12
    other = x.clone()
    other[:, 8] = 1 + other[:, 8] % 255
    for name, first in (("clm", 8), ("mlm", 0)):                # in the first of two blocks alone
        a, b = (compare.states(net, OBJECTIVES[name], settings(name, T), z) for z in (x, other))
        assert a.shape == (2, 3, 24, 16)
        assert (a - b)[1].abs().amax((0, 2)).gt(0).tolist() == [first <= i < T for i in range(24)]


def test_what_the_probe_scores_no_model_was_trained_on(monkeypatch):
    modules = glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py"))
    some = read_documents(sorted(modules, key=os.path.getsize)[:90])                # the shortest
    monkeypatch.setattr(compare, "read_stdlib", lambda: some)
    data = compare.probe_data(256)
    train_text, held_out = (to_bytes(t) for t in split_documents([*some.values()]))
    for i in range(0, len(data["x"]), 17):
        window = bytes(data["x"][i].tolist())
        assert window in (held_out if data["split"][i] == 2 else train_text)
    scored = (data["split"][data["rows"]] == 2).sum() / (256 * (data["split"] == 2).sum())
    assert set(data["split"].tolist()) == {0, 1, 2} and 0.38 < scored < 0.42
    assert (data["rows"].diff() >= 0).all(), "understanding takes them in this order"


def test_every_byte_of_a_program_has_its_class():
    def classes(text):
        return "".join(" kxscno"[c] for c in compare.byte_classes(text).tolist())
    assert classes(b"if x1 == 'a': # b\n") == "kk xx oo ssso ccc "
    text = 'def é(x):  # a "comment"\n    return x + 1.5 if x else """two\nlines"""\n'.encode()
    found = classes(text)
    assert len(found) == len(text) and found.startswith("kkk xxoxoo  ") and "nnn" in found
    assert found.count("s") == len('"""two\nlines"""')
    assert compare.byte_classes(b"def (") is None and compare.byte_classes(b"\xff") is None


def test_a_probe_finds_what_is_there_and_no_more():
    g = generator("probe")
    x, noise = torch.randn(900, 8, generator=g), torch.randn(900, 8, generator=g)
    y, split = x[:, :3].argmax(1), torch.arange(900) % 3
    assert compare.probe(torch.stack((noise, x)), y, split, 3) > 0.85, "the layer is chosen where it shows"
    assert compare.probe(noise[None], y, split, 3) < 0.45
    assert compare.balanced(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1])) == 0.5
