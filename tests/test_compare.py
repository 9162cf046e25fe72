import argparse
import json
import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomized

import compare
from data import CLS, EOT, MASK, MID, MODE_R, PRE, SENTINEL, SEP, SUF, generator, read_stdlib, split_documents, to_bytes
from objectives import OBJECTIVES

def hp_of(name, T=64, **more):                 # as much of a run's settings as the yardsticks read
    return argparse.Namespace(objective=name, block_size=T, bart_noise="infill,permute", **more)


SMALL = [x for x in TINY if x not in ("--device", "cpu", "--dtype", "float32")]


def ids(*shape, seed=0):
    return torch.randint(1, 256, shape, generator=generator(f"ids {seed}"))


def test_two_cells_are_trained_once_and_reported(text, capsys, monkeypatch):
    monkeypatch.setattr(compare, "ROWS", 8)
    args = ["--data", text, "--objectives", "clm,mtp", "--max_iters", "2", "--out_dir", "out", *SMALL, "--block_size", "160"]
    compare.main(args)
    first = capsys.readouterr().out
    assert "| clm |" in first and "| mtp |" in first and "| held-out text |" in first and os.path.exists("out/compare.md")
    compare.main(args)
    again = capsys.readouterr().out
    assert again.count("finished before") == 2 and first.split("\n\n")[-1] == again.split("\n\n")[-1]
    compare.main([*args[:-2], "--block_size", "160", "--seeds", "1,2"])
    assert "±" in capsys.readouterr().out
    with open("out/results.jsonl") as f:
        metrics = [json.loads(line)["metrics"] for line in f]
    assert metrics[0]["loss"] != metrics[2]["loss"], "another seed, another run"
    assert len(metrics) == 4 and all(8 < m["bpb"] < 10 and m["tflop"] > 0 and m["raw_mb"] > 0 and 0 <= m["recall_1"] <= m["recall_10"] <= 1 for m in metrics)


def test_a_line_cut_by_a_kill_harms_nothing(tmp_path):
    path = str(tmp_path / "results.jsonl")
    compare.add_result(path, {"a": 1})
    with open(path, "a") as f:
        f.write('{"b": ')
    compare.add_result(path, {"c": 3})
    assert compare.read_results(path) == [{"a": 1}, {"c": 3}]


def test_a_half_is_found_by_its_own_other_half_alone():
    text = torch.randint(1, 256, (9000,), generator=generator("halves"), dtype=torch.uint8)
    class Net:                                  # states in which a byte is itself, or nothing
        def __init__(self, blind):
            self.blind = blind
        def __call__(self, x, mask):
            return torch.ones(*x.shape, 4) if self.blind else F.one_hot(x, 256).float()
    assert compare.retrieval(Net(True), hp_of("mlm", 256), text) == {"recall_1": 0.0, "recall_10": 0.0}
    repeated = text[:128].repeat(64)
    assert compare.retrieval(Net(False), hp_of("mlm", 256), repeated)["recall_1"] < 0.1 > compare.retrieval(Net(False), hp_of("mlm", 256), text)["recall_1"]


def test_what_the_probe_scores_no_model_was_trained_on():
    data = compare.probe_data(256)
    train_text, held_out = (to_bytes(t) for t in split_documents([*read_stdlib().values()]))
    for i in range(0, len(data["x"]), 97):
        window = bytes(data["x"][i].tolist())
        assert window in (held_out if data["split"][i] == 2 else train_text)
    scored = (data["split"][data["rows"]] == 2).sum() / (256 * (data["split"] == 2).sum())
    assert set(data["split"].tolist()) == {0, 1, 2} and 0.38 < scored < 0.42
    assert (data["rows"].diff() >= 0).all(), "understanding takes them in this order"


def test_a_sweep_has_a_row_for_each_value(text, capsys):
    compare.main(["--data", text, "--sweep", "mask_rate=.1,.4", "--max_iters", "2", "--out_dir", "out", *SMALL])
    out = capsys.readouterr().out
    assert "| .1 |" in out and "| .4 |" in out and os.path.exists("out/sweep-mask_rate-mlm.md")


def test_replay_is_measured_on_both_corpora(text, capsys):
    with open("new.txt", "wb") as f:
        f.write(b"int main() { return 0; }\n" * 400)
    compare.main(["--data", text, "--new_data", "new.txt", "--sweep", "replay=0,.25", "--max_iters", "2", "--out_dir", "out", *SMALL])
    out = capsys.readouterr().out
    assert "old corpus" in out and "| .25 |" in out


def test_half_of_the_steps_may_be_another_objectives(text, capsys):
    compare.main(["--data", text, "--sweep", "init=none,mlm", "--max_iters", "5", "--out_dir", "out", *SMALL])
    out = capsys.readouterr().out
    assert "| none |" in out and "| mlm |" in out
    runs = {name.split("-")[0] + "-" + name.split("-")[1]: compare.train.load_checkpoint(os.path.join("out/runs", name)) for name in os.listdir("out/runs")}
    assert {name: ckpt["step"] for name, ckpt in runs.items()} == {"contrastive-init=none": 5, "contrastive-init=mlm": 3, "mlm-2": 2}
    assert runs["contrastive-init=mlm"]["config"]["init_from"].startswith("out/runs/mlm-2-seed1")
    assert runs["contrastive-init=mlm"]["config"]["seed"] != runs["mlm-2"]["config"]["seed"], "the same seed is the same windows again"
    with open("out/results.jsonl") as f:
        none, mlm = (json.loads(line)["metrics"] for line in f)
    assert mlm["raw_mb"] == pytest.approx(none["raw_mb"])


def test_a_plus_in_a_value_is_a_comma(text, capsys):
    compare.main(["--data", text, "--sweep", "bart_noise=mask,mask+permute", "--max_iters", "1", "--out_dir", "out", *SMALL])
    assert "| mask+permute |" in capsys.readouterr().out
    [run] = [name for name in os.listdir("out/runs") if "permute" in name]
    assert compare.train.load_checkpoint(os.path.join("out/runs", run))["config"]["bart_noise"] == "mask,permute"


def test_what_diverges_stops_nothing_else(text, capsys, monkeypatch):
    monkeypatch.setitem(compare.OBJECTIVES["mlm"], "loss", lambda *args: {"nll": (compare.OBJECTIVES["clm"]["loss"](*args)["nll"][0] * math.inf, 1, 1.0)})
    compare.main(["--data", text, "--objectives", "mlm,clm", "--max_iters", "2", "--out_dir", "out", *SMALL])
    out = capsys.readouterr().out
    assert "mlm seed 1: diverged" in out and "| clm |" in out and "| mlm |  |" in out and "| 1 diverged |" in out
    assert compare.main(["--data", text, "--objectives", "mlm", "--max_iters", "2", "--out_dir", "out2", *SMALL]) == 1
    assert "all diverged" in capsys.readouterr().out
    compare.main(["--data", text, "--objectives", "mlm,clm", "--max_iters", "2", "--out_dir", "out", *SMALL])
    assert capsys.readouterr().out.count("finished before") == 2


def test_other_text_in_the_same_file_is_another_cell(text, capsys):
    args = ["--data", text, "--objectives", "clm", "--max_iters", "1", "--out_dir", "out", *SMALL]
    compare.main(args)
    with open(text, "ab") as f:
        f.write(b"# more\n")
    compare.main(args)
    assert "finished before" not in capsys.readouterr().out


def test_differences_are_paired_by_seed():
    rows = {"a": {1: {"bpb": 2.0}, 2: {"bpb": 3.0}, 3: {"bpb": 9.0}}, "b": {1: {"bpb": 2.1}, 2: {"bpb": 3.3}, 4: {"bpb": 0.0}}}
    out = compare.tables(rows, {"text": {"gen_bpb": 2.0}})
    assert "| b | +0.200 ± 0.100 | 1 2 |" in out, "differences .1 and .3: mean .2, standard deviation .141, of the mean .1"
    assert "| a | 4.667 ± 3.786 |" in out and "| text |  | 2.00 |" in out
    assert "paired" not in compare.tables({"a": {1: {"bpb": 2.0}}, "b": {1: {"bpb": 2.1}}}, {})
    bound = {1: {"bpb": 2.5, "bound": True}, 2: {"bpb": 2.6, "bound": True}}
    out = compare.tables({"a": rows["a"], "b": bound}, {})
    assert "| b | <= 2.550" in out and "| b |  | 1 2 |" in out, "a bound is not subtracted from what is exact"
    cells = [{"cell": dict(objective="clm", value=v, seed=0), "metrics": {"bpb": 1.0}} for v in (".9", ".5")]
    assert [*compare.collect(cells, lambda cell: True, [".5", ".9"])] == [".5", ".9"]
    assert "| .5 | 1.000 | 0 |" in compare.tables(compare.collect(cells, lambda cell: True, [".5"]), {})


def test_a_model_is_not_asked_in_a_way_it_never_learned():
    hp = hp_of("fim", fim_rate=0.0, fim_spm_rate=0.5, hybrid_ratio=0.0, ul2_weights="S:1")
    ways = {}
    for name in ("fim", "hybrid", "ul2", "mlm"):
        hp.objective = name
        ways[name] = compare.asked_as(hp)
    assert ways == {"fim": "clm", "hybrid": "clm", "ul2": "prefix", "mlm": "mlm"}


def test_settings_of_an_objective_and_folders_inside_the_corpus(text, capsys):
    assert compare.main(["--data", text, "--objectives", "mtp", "--max_iters", "1", "--out_dir", "out", *SMALL, "--mtp_heads", "2"]) == 0
    os.makedirs("corpus")
    with open("corpus/a.txt", "wb") as f:
        f.write(b"words and words\n" * 9000)
    with pytest.raises(SystemExit):
        compare.main(["--data", "corpus", "--objectives", "clm", "--max_iters", "1", "--out_dir", "corpus/out", *SMALL])
    assert "inside the corpus" in capsys.readouterr().err
    with pytest.raises(SystemExit):             # before anything runs
        compare.main(["--data", text, "--sweep", "init=none,mlm", "--max_iters", "4", "--out_dir", "o", *SMALL, "--tau", ".1"])
    assert "--tau" in capsys.readouterr().err and not os.path.exists("o")


def test_what_was_killed_before_its_first_checkpoint_begins_anew(text):
    args = ["--data", text, "--objectives", "clm", "--max_iters", "2", "--out_dir", "out", *SMALL]
    compare.main(args)
    [folder] = [os.path.join("out/runs", name) for name in os.listdir("out/runs")]
    os.remove(os.path.join(folder, "ckpt.pt"))
    os.remove("out/results.jsonl")
    assert compare.main(args) == 0 and compare.train.load_checkpoint(folder)["step"] == 2


@pytest.mark.parametrize("flags, hint", [(["--sweep", "nothing=1"], "no such setting"), (["--sweep", "mask_rate"], "as in mask_rate"),
                                         (["--objectives", "mml"], "clm,"), (["--seeds", "one"], "numbers"),
                                         (["--sweep", "mask_rate=2"], "--mask_rate"),
                                         (["--sweep", "replay=x"], "shares"), (["--sweep", "init=nothing"], "no objective"), (["--seed", "7"], "itself"),
                                         (["--objectives", "mlm", "--sweep", "replay=0"], "clm"), (["--sweep", "replay=0", "--new_data", "no"], "no such"),
                                         (["--data", "short.txt"], "4096"), (["--max_iters", "0"], "--max_iters"), (["--out_dir", "text.txt"], "a file"),
                                          (["--n_layr", "2"], "--n_layer")])
def test_bad_flags_are_one_line(flags, hint, text, capsys):
    with open("short.txt", "wb") as f:
        f.write(b"words " * 500)
    with pytest.raises(SystemExit) as e:
        compare.main([*flags, *([] if "--data" in flags else ["--data", text])])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err and not os.path.exists("out")


# ---- the yardsticks

@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_model_sees_the_byte_that_it_fills(name):
    """And each byte may use the left side; the right one where the objective reads both."""
    net, x, a, m, hp = randomized(), ids(2, 20), 8, 4, hp_of(name)
    base = compare.infill_logits(net, hp, x, a, m)
    if base is None:                            # no format for it, as of a fork's objective that has none yet
        assert name not in compare.LEFT | compare.MASKED | {"fim", "span", "ul2", "bart"}
        return
    def changed(i):                             # which of the m positions' logits move when byte i of the row does
        other = x.clone()
        other[:, i] = 1 + other[:, i] % 255
        return ((compare.infill_logits(net, hp, other, a, m) - base).abs().amax((0, 2)) > 1e-6).tolist()
    assert base.shape == (2, m, 512)
    for i in range(m):                          # byte a + i is seen by what comes behind it in the middle alone
        assert changed(a + i) == [j > i for j in range(m)]
    assert all(changed(a - 1)) and any(changed(a + m)) == (name not in ("clm", "mtp", "prefix"))


def test_the_formats_are_those_of_training(monkeypatch):
    seen, x = [], ids(1, 6)
    left, right, y = x[0, :2].tolist(), x[0, 4:].tolist(), x[0, 2:4].tolist()
    class Net:
        def __call__(self, row, mask):
            seen.append((row[0].tolist(), mask if isinstance(mask, str) else int(mask[0])))
            return F.one_hot(row, 512).float()
        def logits(self, h):
            return h
    show = lambda name: (seen.clear(), compare.infill_logits(Net(), hp_of(name), x, 2, 2), seen[0])[-1]
    assert show("fim") == ([PRE, SUF, *right, MID, *left, y[0]], "causal")
    assert show("ul2") == ([MODE_R, *left, SENTINEL, *right, SENTINEL + 1, SEP, SENTINEL, y[0]], 8)
    assert show("nsp") == ([CLS, *left, MASK, MASK, *right, SEP], "bidirectional")
    for name in ("mlm", "mdlm", "hybrid", "nsp", "clm", "span", "bart", "fim", "ul2", "prefix", "mtp"):
        got = compare.infill_logits(Net(), hp_of(name), x, 2, 2).argmax(-1)[0].tolist()            # what stands where byte i is read
        before = {"clm": left[-1], "mtp": left[-1], "prefix": left[-1], "fim": left[-1], "bart": left[-1], "span": SENTINEL, "ul2": SENTINEL}
        assert got == ([MASK, MASK] if name in ("mlm", "mdlm", "nsp") else [left[-1], y[0]] if name == "hybrid" else [before[name], y[0]]), name
    assert show("span") == ([*left, SENTINEL, *right, SENTINEL + 1, SEP, SENTINEL, y[0]], 7)
    assert show("bart") == ([*left, MASK, *right, SEP, *left, y[0]], 6)
    assert show("prefix") == ([*left, y[0]], 2) and show("clm") == ([*left, y[0]], "causal")
    assert show("hybrid") == ([EOT, *left, MASK, MASK, *right], "bidirectional")
    bart = hp_of("bart")
    for noise, hole in (("mask", [MASK, MASK]), ("permute,infill", [MASK])):
        bart.bart_noise = noise
        compare.infill_logits(Net(), bart, x, 2, 2)
        assert seen[-1] == ([*left, *hole, *right, SEP, *left, y[0]], 5 + len(hole))
    bart.bart_noise = "delete,rotate"
    assert compare.infill_logits(Net(), bart, x, 2, 2) is None, "it knows no holes"
    compare.infill_logits(Net(), hp_of("mlm"), x, 2, 2)
    assert seen[-1] == ([*left, y[0], MASK, *right], "bidirectional")


def test_every_byte_of_a_program_has_its_class():
    text = 'def é(x):  # a "comment"\n    return x + 1.5 if x else """two\nlines"""\n'.encode()
    classes = "".join(" kxscno"[c] for c in compare.byte_classes(text).tolist())
    plain = "".join(" kxscno"[c] for c in compare.byte_classes(b"if x1 == 'a': # b\n").tolist())
    assert plain == "kk xx oo ssso ccc "
    assert len(classes) == len(text) and classes.startswith("kkk xxoxoo  ") and classes.count("s") == len('"""two\nlines"""') and "nnn" in classes
    assert compare.byte_classes(b"def (") is None and compare.byte_classes(b"\xff") is None


def test_a_probe_finds_what_is_there_and_no_more():
    g = generator("probe")
    x, noise = torch.randn(900, 8, generator=g), torch.randn(900, 8, generator=g)
    y, split = x[:, :3].argmax(1), torch.arange(900) % 3
    assert compare.probe(torch.stack((noise, x)), y, split, 3) > 0.85, "the layer is chosen where it shows"
    assert compare.probe(noise[None], y, split, 3) < 0.45
    assert compare.balanced(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1])) == 0.5


def test_the_count_model_is_witten_and_bells():
    text = b"abracadabra, abracadabra! " * 3
    model = compare.CountModel(compare.from_bytes(text))
    def p(context, byte):                       # in plain words
        out = 1 / 256
        for k in range(compare.ORDER + 1):
            c = context[len(context) - k:]
            behind = [text[i + k] for i in range(len(text) - k) if text[i:i + k] == c]
            if behind:
                out = (behind.count(byte) + len(set(behind)) * out) / (len(behind) + len(set(behind)))
        return out
    for sample in (b"abracadabra", b"cadabra!?xyz abrac"):
        want = -sum(math.log2(p(sample[i - 5:i], sample[i])) for i in range(5, len(sample)))
        assert model.bits(compare.from_bytes(sample)) == pytest.approx(want, rel=1e-9)
    assert sum(p(b"cadab", b) for b in range(256)) == pytest.approx(1.0)


def test_replaced_bytes_are_found_by_a_model_that_knows_the_text():
    text = torch.arange(97, 123).repeat(40).byte()
    class Knows:                                # the next letter after the one that it sees
        def __call__(self, row, mask):
            return row
        def logits(self, row):
            return F.one_hot((row - 96) % 26 + 97, 512).float() * 9
    score = compare.corruption(Knows(), {}, hp_of("clm"), text)["replaced"]
    assert 0.8 < score < 1                      # a letter behind a replaced one is a surprise too


def test_generation_is_described_by_three_figures():
    counts = compare.CountModel(compare.from_bytes(b"import os\n" * 50))
    good = compare.text_figures([b"import os\nimport os\nimport os\n"] * 2, counts)
    bad = compare.text_figures([bytes(range(33, 120)) + b"\n$ ?\n"], counts)
    assert good["gen_bpb"] < 0.5 < 4 < bad["gen_bpb"] and good["gen_lines"] == 1 > bad["gen_lines"] and good["gen_distinct"] < bad["gen_distinct"]
