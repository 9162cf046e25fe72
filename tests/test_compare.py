import glob
import json
import lzma
import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomized, settings

import compare
from data import CLS, EOT, MASK, MODE_R, MODE_S, SENTINEL, SEP, generator, read_documents, split_documents, to_bytes
from objectives import OBJECTIVES


def ids(*shape, seed=0):
    return torch.randint(1, 256, shape, generator=generator(f"ids {seed}"))


def run(*words):  # compare.py on the text of the folder, two steps for every cell
    return compare.main(["--data", "text.txt", "--out_dir", "out", "--budgets", "2", *TINY, *words])


def all_runs():  # -> {folder: settings}, oldest first
    folders = sorted((os.path.join("out/runs", name) for name in os.listdir("out/runs")), key=os.path.getmtime)
    return {folder: compare.load_checkpoint(folder)["config"] for folder in folders}


def measured(name):  # -> figures of the one run of that objective
    [folder] = [folder for folder, config in all_runs().items() if config["objective"] == name]
    with open(os.path.join(folder, "measured.json")) as f:
        return json.load(f)


# ---- its own job

def job(what, name, answer, text):  # -> what a model with those answers reaches, and the rule
    hp = settings(name, 64)
    entry = OBJECTIVES[name] | {"n": OBJECTIVES[name]["window"](64, hp), "answer": answer}
    with torch.no_grad():
        found = what(compare.build(hp), entry, hp, text)
        return found["done"], found["rule"]


def sentences():
    return compare.from_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)


def test_marks_are_right_where_the_letter_was_replaced():
    windows = sentences().long().unfold(0, 64, 1)[:45]          # all that there are

    def replaced(model, x):
        off = windows != x[:, None]                             # (N, 45, 64)
        return off[torch.arange(len(x)), off.sum(2).argmin(1)].float()
    right, rule = job(compare.typos, "electra", replaced, sentences())
    assert right == 1 and rule > 0.95           # of the two pairs that no other text has it takes the byte between
    assert job(compare.typos, "electra", lambda *args: -replaced(*args), sentences())[0] < 0.05


def test_recall_is_1_for_who_knows_the_passage_and_chance_for_who_does_not(monkeypatch):
    monkeypatch.setattr(compare, "windows", lambda text, n, count, key: torch.arange(256)[:, None].expand(-1, n))
    known = job(compare.recalls, "contrastive", lambda m, x: F.one_hot(x[:, 0], 256).float(), None)
    assert known == (1, 1), "here the bytes alone tell"
    blind = job(compare.recalls, "contrastive", lambda m, x: torch.ones(len(x), 2), None)
    assert blind[0] == pytest.approx(1 / 256)


@pytest.mark.parametrize("a, b, want", [("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("ab", "ba", 2)])
def test_the_edit_distance_is_levenshteins(a, b, want):
    assert compare.edit_distance(a.encode(), b.encode()) == compare.edit_distance(b.encode(), a.encode()) == want


def test_a_repair_that_copies_leaves_1(monkeypatch):
    monkeypatch.setattr(compare.sample, "generate", lambda model, row, *rest, positions, **how: iter(row[0, :-1]))
    assert job(compare.repairs, "bart", None, sentences()) == (pytest.approx(1), 1)


def test_a_hole_is_restored_or_not_and_ends_and_is_cut(monkeypatch):
    rows = [[*b"abcdefghijklmnopqrstuvwxyz" * 9][:160]] * 96 + [[32] * 160] * 32
    monkeypatch.setattr(compare, "windows", lambda *args: torch.tensor(rows))

    def answer(model, entry, ids, P, holes, most, *rest, **how):                # blanks end one too late
        whole = (ids[0] == 32) == (most == 5 * 4)
        assert how["temperature"] == 0, "as sample.py fills them"
        return [[32] * 5 if ids[0] == 32 else [*b"abcdx"]], whole
    monkeypatch.setattr(compare.sample, "infill", answer)
    monkeypatch.setattr(compare.sample, "join", lambda m, e, hp, left, middle, right: middle[:4 + (left[0] == 32)])
    found = compare.holes(randomized(), OBJECTIVES["span"], settings("span", 256), None)
    assert found == {"done": 0.75, "rule": 0.25, "ended": 0.75}
    assert compare.holes(randomized(), OBJECTIVES["span"], settings("span", 127), None) == {}


def test_the_second_half_is_read_after_the_first(monkeypatch):
    """A model for which every byte is like any other needs 8 bits; the rule is lzma's."""
    text = sentences()
    assert job(compare.halves, "clm", None, text) == (pytest.approx(8), 8 * len(lzma.compress(bytes(text))) / len(text))
    seen = []
    monkeypatch.setattr(compare, "left_logits", lambda m, e, hp, x, a, n: seen.append((x.shape, a, n)))
    hp = settings("prefix", 64)
    assert compare.halves(randomized(), OBJECTIVES["prefix"], hp, text) == {}
    assert seen == [((4 * compare.ROWS, 60), 30, 30)]


def test_lines_are_python_or_not():
    rows = torch.tensor([[*b"cut\nx = 1\n\ny = (2\nz = 3\nit's\ncut"]])
    assert compare.well_formed(rows) == 1 / 2
    assert compare.well_formed(torch.tensor([[*b"no whole line"]])) == 0


def test_lines_drawn_byte_by_byte_are_worse_than_lines_of_a_text(monkeypatch):
    with open(compare.__file__, "rb") as f:
        text = compare.from_bytes(f.read())
    mdlm, hp = OBJECTIVES["mdlm"], settings("mdlm", 128)
    monkeypatch.setattr(compare.sample, "fill", lambda *args, **how: compare.windows(text, 128, 32, "lines"))
    found = compare.lines(None, mdlm, hp, text)
    assert found["done"] > found["rule"] + 0.2
    assert compare.lines(None, mdlm, settings("mdlm", 64), text) == {}


def test_what_needs_no_repair_is_none(monkeypatch):
    entry = OBJECTIVES["bart"] | {"n": 31}
    hp = settings("bart", 64, bart_noise="permute")
    assert compare.repairs(randomized(), entry, hp, compare.from_bytes(b"word " * 400)) == {}


def test_every_mode_with_a_job_has_its_row(text, capsys, monkeypatch):
    monkeypatch.setattr(compare, "ROWS", 4)
    monkeypatch.setattr(compare, "EVAL_ROWS", 4)
    names = {"prefix": "continue", "mdlm": "fill", "span": "infill", "electra": "mark", "bart": "repair",
             "nsp": "follow", "contrastive": "search", "rotation": "seam"}
    run("--objectives", ",".join(names), "--block_size", "128", "--n_layer", "1")
    out, metrics = capsys.readouterr().out, {name: measured(name) for name in names}
    for name, mode in names.items():
        m = metrics[name]
        assert m["job"] == compare.JOBS[mode][0]
        assert f"| {name} | {m['job']} | {m['done']:.3f} | {m['untrained']:.3f} | {m['rule']:.3f} | " in out
    assert any(m["done"] != m["untrained"] for m in metrics.values())
    assert [metrics[name]["rule"] for name in ("nsp", "rotation")] == [1 / 2, 1 / 128], "chance"
    assert 0.2 < metrics["nsp"]["untrained"] < 0.8 and metrics["rotation"]["untrained"] < 0.1
    assert not {"infill_4", "left_4", "replaced", "pass_bytes"} & set(metrics["contrastive"]), "it has no way"


# ---- cells

def test_cells_are_trained_once_and_reported(text, capsys, monkeypatch):
    monkeypatch.setattr(compare, "ROWS", 8)
    words = ["--objectives", "clm,mtp,mdlm", "--block_size", "128"]
    run(*words)
    first = capsys.readouterr().out
    assert "| clm |" in first and "| mdlm |" in first and os.path.exists("out/compare.md")
    clm, mtp, mdlm = (measured(name) for name in ("clm", "mtp", "mdlm"))
    for m in (clm, mtp, mdlm):
        assert m["tflop"] > 0 and m["targets"] > 0 and 0 < m["replaced"] < 1
    assert 7 < clm["bpb"] < 10 and 7 < mdlm["bound"] < 10 and "bpb" not in mdlm, "a bound has a column of its own"
    assert all(7 < clm[f"left_{n}"] < 10 and 7 < mdlm[f"infill_{n}"] < 10 for n in (4, 16))
    assert "infill_4" not in clm and "left_4" not in mdlm
    assert "pass_bytes" not in clm and mtp["pass_bytes"] >= 1
    [config] = [config for config in all_runs().values() if config["objective"] == "clm"]
    assert config["block_size"] == 128, "other flags are those of training"

    monkeypatch.setattr(compare.train, "main", None)
    monkeypatch.setattr(compare, "measure", None)
    run(*words)
    assert first == capsys.readouterr().out, "what is finished is neither trained nor measured again"


def test_seeds_budgets_texts_and_defaults_are_runs_of_their_own(text, capsys, monkeypatch):
    run("--objectives", "clm", "--seeds", "1,2", "--budgets", "2,1")
    out = capsys.readouterr().out
    assert "±" in out and "[4/4] clm, 1 steps, seed 2: loss" in out and "After 1 2 steps" in out
    losses = {compare.logged(folder)["loss"] for folder in all_runs()}
    assert len(losses) == len(all_runs()) == 4
    with open(text, "ab") as f:
        f.write(b"# more\n")
    run("--objectives", "clm")
    assert len(all_runs()) == 5, "other text in the same file is another cell"
    monkeypatch.setitem(compare.OBJECTIVES["clm"], "defaults", {"warmup_iters": 1})
    run("--objectives", "clm")
    monkeypatch.setitem(compare.OBJECTIVES["mlm"]["settings"], "mask_rate", (0.2, "", 0.0, 1.0))
    run("--objectives", "clm")
    assert len(all_runs()) == 6, "other defaults, too, but not another objective's"


CURVES = {n: {"clm": {1: {"bpb": 1 + 1 / n, "left_4": 3.0}, 2: {}}, "mlm": {1: {"infill_4": 2.0, "done": n}},
              "fim": {1: {"bpb": 3.0}, 2: {"bpb": 4.0}} if n == 10 else {1: {}}} for n in (100, 10)}


def test_the_trends_have_a_value_for_each_budget():
    assert compare.trends(CURVES).splitlines()[2:] == [
        "|  | left to right | 4 bytes from the left | infill 4 | its job, as above |", "|---|---|---|---|---|",
        "| clm | 1.100 1.010 | 3.00 3.00 |  |  |", "| mlm |  |  | 2.00 2.00 | 10.000 100.000 |",
        "| fim | 3.500 - |  |  |  |"]
    assert compare.trends({10: CURVES[10]}) == ""


def test_the_picture_has_a_curve_over_the_budgets(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: None)
    path = str(tmp_path / "compare.png")
    worse = CURVES | {1000: {"mlm": {1: {"infill_4": 18.2}}}}   # than no model: not drawn
    assert compare.picture(worse, path) == path and os.path.getsize(path) > 5000
    bpb, infill, names = plt.gcf().axes[:3]
    assert [axis.get_title() for axis in (bpb, infill)] == [
        "left to right (less is better)", "infill 4 (less is better; dashed: 4 bytes from the left)"]
    drawn = [(line.get_linestyle(), line.get_xydata().tolist()) for axis in (bpb, infill) for line in axis.lines]
    assert drawn == [("-", [[10, 1.1], [100, 1.01]]), ("-", [[10, 3.5]]), ("--", [[10, 3.0], [100, 3.0]]),
                     ("-", [[10, 2.0], [100, 2.0]])]
    assert [text.get_text() for text in names.get_legend().get_texts()] == ["clm", "mlm", "fim"]
    assert "nothing to draw" in compare.picture({10: {"mlm": {1: {}}}}, path)


def test_a_sweep_has_a_row_for_each_value_in_which_a_plus_is_a_comma(text, capsys):
    run("--sweep", "bart_noise=mask,mask+permute")
    out = capsys.readouterr().out
    assert "| mask |" in out and "| mask+permute |" in out and os.path.exists("out/sweep-bart_noise-bart.md")
    assert {config["bart_noise"] for config in all_runs().values()} == {"mask", "mask,permute"}


def test_replay_is_measured_on_both_corpora(text, capsys):
    with open("new.txt", "wb") as f:
        f.write(b"int main() { return 0; }\n" * 400)
    run("--new_data", "new.txt", "--sweep", "replay=0,.25")
    out = capsys.readouterr().out
    assert "old corpus" in out and "| .25 |" in out
    (before, first), (new, plain), (mix, mixed) = all_runs().items()
    assert first["data"] == ["text.txt"] and first["init_from"] == ""
    assert plain["init_from"] == mixed["init_from"] == before
    assert [plain["data"], mixed["data"]] == [["new.txt:1"], ["new.txt:0.75", "text.txt:0.25"]]
    with open(os.path.join(new, "measured.json")) as f, open(os.path.join(mix, "measured.json")) as g:
        new, mix = json.load(f), json.load(g)
    assert new["before"] == mix["before"] != new["old"]
    assert new["new"] < new["before"], "two steps more, on a text of one line"


def test_what_diverges_stops_nothing_else(text, capsys, monkeypatch):
    def infinite(*args):
        return {"nll": OBJECTIVES["clm"]["loss"](*args)["nll"] * math.inf}
    monkeypatch.setitem(OBJECTIVES["mlm"], "loss", infinite)
    assert run("--objectives", "mlm,clm") == 0
    out = capsys.readouterr().out
    for word in ("mlm, 2 steps, seed 1: diverged", "| mlm |  |", "| 1 diverged |", "| clm |"):
        assert word in out, word
    assert run("--objectives", "mlm") == 1


@pytest.mark.parametrize("saved", [True, False])
def test_what_was_killed_goes_on_or_before_its_first_checkpoint_begins_anew(saved, text):
    run("--objectives", "clm")
    [folder] = all_runs()
    paths = [os.path.join(folder, name) for name in ("ckpt.pt", "best.pt", "metrics.jsonl")]
    if saved:                                   # after the first of two steps
        with open(paths[2], "rb") as f:
            state = {"step": 1, "metrics_bytes": sum(map(len, f.readlines()[:3]))}
        torch.save(torch.load(paths[0], weights_only=True) | state, paths[0])
    for path in [os.path.join(folder, "measured.json"), *([] if saved else paths)]:
        os.remove(path)
    run("--objectives", "clm")
    assert measured("clm") and compare.load_checkpoint(folder)["step"] == 2


@pytest.mark.parametrize("flags, hint", [
    (["--sweep", "seed=1,2"], "wants a setting"), (["--sweep", "mask_rate"], "as in mask_rate"),
    (["--sweep", "mask_rate=2"], "--mask_rate"), (["--sweep", "replay=x"], "shares"),
    (["--objectives", "mlm", "--sweep", "replay=0"], "clm"), (["--objectives", "mml"], "clm,"),
    (["--seeds", "one"], "--seed"), (["--budgets", "1e3"], "--max_iters"), (["--seed", "7"], "itself"),
    (["--data", "short.txt"], "4096"), (["--data", "-"], "--data -"),
    (["--out_dir", "text.txt"], "--out_dir text.txt"), (["--data", "corpus", "--out_dir", "corpus/out"], "inside"),
    (["--objectives", "clm", "--sweep", "block_size=64,200000"], "200000"),
    (["--sweep", "mask_rate=.1", "--mask_rate", ".2"], "what --sweep sets"),
    (["--budget", "2"], "--budgets"), (["--n_layr", "2"], "--n_layer"),
    (["--objectives", "clm", "--tau", ".1"], "--tau")])
def test_bad_flags_are_one_line_before_anything_runs(flags, hint, text, capsys):
    os.makedirs("corpus")
    for path, n in (("short.txt", 500), ("corpus/a.txt", 9000)):
        with open(path, "wb") as f:
            f.write(b"words " * n)
    with pytest.raises(SystemExit) as e:
        compare.main([*flags, *([] if "--data" in flags else ["--data", text])])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
    assert not os.path.exists("out")


# ---- tables

def test_differences_are_paired_by_seed():
    rows = {"a": {1: {"bpb": 2.0}, 2: {"bpb": 3.0}, 3: {"bpb": 9.0}},
            "b": {1: {"bpb": 2.1}, 2: {"bpb": 3.3}, 3: {}, 4: {"bpb": 0.0}}}
    out = compare.tables(rows | {"five raw bytes": {"-": {"classes": 0.5}}})
    assert "| b | +0.200 ± 0.100 | 1 2 |" in out, ".1 and .3, whose standard deviation is .141"
    assert "With 2 seeds one of 12.7 standard errors is clear" in out
    assert "| a | 4.667 ± 3.786 |" in out and "| five raw bytes |  | 0.500 | - |" in out
    assert "paired" not in compare.tables({"a": {1: {"bpb": 2.0}}, "b": {1: {"bpb": 2.1}}})


# ---- infilling

@pytest.mark.parametrize("ask", [compare.infill_logits, compare.left_logits])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_model_sees_the_byte_that_it_fills(name, ask):
    """Nor those after it in the middle; each sees the left side, and the right one where it is given."""
    net, hp, x, a, m = randomized().requires_grad_(False), settings(name, 64), ids(2, 20), 8, 4
    base = ask(net, OBJECTIVES[name], hp, x, a, m)
    entry = OBJECTIVES[name]
    fills = entry["fills"](hp) or entry["ask"](([1], [1]), 1, hp)
    assert (base is not None) == bool(fills if ask is compare.infill_logits else entry["continues"](hp))
    if base is None:
        return
    assert base.shape == (2, m, 512)

    def changed(i):  # which of the m positions' logits move when byte i of the row does
        other = x.clone()
        other[:, i] = 1 + other[:, i] % 255
        moved = ask(net, OBJECTIVES[name], hp, other, a, m) - base
        return (moved.abs().amax((0, 2)) > 1e-6).tolist()
    for i in range(m):
        assert changed(a + i) == [j > i for j in range(m)]
    assert all(changed(a - 1)) and changed(a + m) == [ask is compare.infill_logits] * m


def test_holes_are_filled_at_their_positions():
    net, hp, x, span = randomized(), settings("span", 64), ids(1, 20), OBJECTIVES["span"]
    asked, P = span["ask"]([x[0, :8].tolist(), x[0, 12:].tolist()], 4, hp)
    row, prefix = torch.tensor([asked + x[0, 8:11].tolist()]), torch.tensor([P])
    want = net.logits(net(row, prefix, at=span["positions"](row, prefix)))[:, -4:]
    torch.testing.assert_close(compare.infill_logits(net, span, hp, x, 8, 4), want, atol=1e-4, rtol=1e-4)


X = ids(1, 6)
LEFT, (Y, _), RIGHT = X[0, :2].tolist(), X[0, 2:4].tolist(), X[0, 4:].tolist()


def asked(name, ask=compare.infill_logits, **changes):  # -> row of the last pass, its mask or P, where bytes are read
    seen = []

    class Net:
        def __call__(self, row, mask, doc=None, at=None):
            seen.append((row[0].tolist(), mask if isinstance(mask, str) else int(mask[0])))
            return F.one_hot(row, 512).float()

        def logits(self, h):
            return h
    logits = ask(Net(), OBJECTIVES[name], settings(name, 64, **changes), X, 2, 2)
    return None if logits is None else (*seen[-1], logits.argmax(-1)[0].tolist())


def test_the_formats_are_those_of_training():
    left = ([*LEFT, Y], "causal", [LEFT[-1], Y])
    masked = ([*LEFT, Y, MASK, *RIGHT], "bidirectional", [MASK, MASK])
    spans = [*LEFT, SENTINEL, *RIGHT, SENTINEL + 1, SEP, SENTINEL, Y]
    want = {"mlm": masked, "nsp": ([CLS, *masked[0], SEP], *masked[1:]),
            "hybrid": ([EOT, *masked[0]], "bidirectional", [LEFT[-1], Y]), "ul2": ([MODE_R, *spans], 8, [SENTINEL, Y]),
            "bart": ([*LEFT, MASK, *RIGHT, SEP, *LEFT, Y], 6, [LEFT[-1], Y])}
    assert {name: asked(name) for name in want} == want
    assert asked("clm", compare.left_logits) == left
    assert asked("prefix", compare.left_logits) == (left[0], 2, left[2])
    assert asked("ul2", compare.left_logits)[:2] == ([MODE_S, *LEFT, SEP, Y], 4)
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

    def answer(model, z):
        return ((z - z.roll(1, 1)) % 26 != 1).float()
    score = compare.corruption(Knows(), OBJECTIVES[name] | {"answer": answer}, settings(name, 64), text)
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
    scored = data["chosen"][data["split"] == 2].float().mean()
    assert set(data["split"].tolist()) == {0, 1, 2} and 0.38 < scored < 0.42


def test_every_byte_of_a_program_has_its_class():
    def classes(text):
        return "".join(" kxscno"[c] for c in compare.byte_classes(text).tolist())
    assert classes(b"if x1 == 'a': # b\n") == "kk xx oo ssso ccc "
    text = b'def e(x):  # a "comment"\n    return x + 1.5 if x else """two\nlines"""\n'
    found = classes(text)
    assert len(found) == len(text) and found.startswith("kkk xoxoo  ") and "nnn" in found
    assert found.count("s") == len('"""two\nlines"""')
    assert compare.byte_classes(b"def (") is None and compare.byte_classes(b"\xff") is None


def test_a_probe_finds_what_is_there_and_no_more():
    g = generator("probe")
    x, noise = torch.randn(900, 8, generator=g), torch.randn(900, 8, generator=g)
    y, split = x[:, :3].argmax(1), torch.arange(900) % 3
    assert compare.probe(torch.stack((noise, x)), y, split, 3) > 0.85, "the layer is chosen where it shows"
    assert compare.probe(noise[None], y, split, 3) < 0.45
    assert compare.balanced(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1])) == 0.5
