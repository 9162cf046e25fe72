import csv
import dataclasses
import json
import math
import os

import pytest
import torch
from conftest import TINY

from experiments import compare, evaluate
from experiments.flags import parse_with_train_flags
from objectives import OBJECTIVES


def run(*words):  # compare on the text of the folder, two steps for every cell
    return compare.main(["--data", "text.txt", "--out_dir", "out", "--budgets", "2", *TINY, *words])


def all_runs():  # -> {folder: settings}, oldest first
    folders = sorted((os.path.join("out/runs", name) for name in os.listdir("out/runs")), key=os.path.getmtime)
    return {folder: compare.load_checkpoint(folder)["config"] for folder in folders}


def load_metrics(folder):
    with open(os.path.join(folder, "measured.json")) as f:
        return json.load(f)["metrics"]


def measured(name):  # -> metrics of the one run of that objective
    [folder] = [folder for folder, config in all_runs().items() if config["objective"] == name]
    return load_metrics(folder)


def replaced_objective(monkeypatch, name, **changes):
    monkeypatch.setitem(OBJECTIVES, name, dataclasses.replace(OBJECTIVES[name], **changes))


# ---- cells

def test_cells_are_trained_once_and_reported(text, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "ROWS", 8)
    words = ["--objectives", "clm,mtp,mdlm", "--block_size", "128"]
    run(*words)
    first = capsys.readouterr().out
    assert "| clm |" in first and "| mdlm |" in first and os.path.exists("out/compare.md")
    clm = measured("clm")
    mtp = measured("mtp")
    mdlm = measured("mdlm")
    for m in (clm, mtp, mdlm):
        assert m["tflop"] > 0 and m["targets_per_row"] > 0 and 0 < m["replaced_auc"] < 1
    assert 7 < clm["left_to_right"] < 10 and 7 < mdlm["bound"] < 10
    assert "left_to_right" not in mdlm, "a bound has a column of its own"
    assert all(7 < clm[f"left_{n}"] < 10 and 7 < mdlm[f"infill_{n}"] < 10 for n in (4, 16))
    assert "infill_4" not in clm and "left_4" not in mdlm
    assert "bytes_per_pass" not in clm and mtp["bytes_per_pass"] >= 1
    [config] = [config for config in all_runs().values() if config["objective"] == "clm"]
    assert config["block_size"] == 128, "other flags are those of training"

    monkeypatch.setattr(compare.train, "main", None)
    monkeypatch.setattr(compare, "measure", None)
    run(*words)
    assert first == capsys.readouterr().out, "what is finished is neither trained nor measured again"


def test_a_run_measured_by_other_evaluations_is_measured_again(text):
    run("--objectives", "clm")
    [folder] = all_runs()
    before = load_metrics(folder)
    with open(os.path.join(folder, "measured.json"), "w") as f:
        json.dump({"loss": 1.0, "bpb": 0.5}, f)
    run("--objectives", "clm")
    assert len(all_runs()) == 1
    assert load_metrics(folder) == before


def test_a_cell_prints_no_sample_and_no_hint_that_would_break_the_comparison(text, capsys):
    """A cell that was resumed to more steps than its budget could not be compared."""
    run("--objectives", "clm")
    [folder] = all_runs()
    with open(os.path.join(folder, "log.txt"), encoding="utf-8") as f:
        log = f.read()
    said = capsys.readouterr()
    assert "validation on" in log
    for word in ("--resume", "compressors", "the model's continuation", "more samples"):
        assert word not in log + said.out + said.err, word


def test_a_cell_that_was_trained_further_by_hand_is_named(text, capsys):
    run("--objectives", "clm")
    [folder] = all_runs()
    compare.train.main(["--resume", "--out_dir", folder, "--max_iters", "3"], with_sample=False)
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        run("--objectives", "clm")
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and folder in err and "moving it" in err
    assert "--max_iters" not in err, "which compare does not have"


def test_measuring_prints_a_line_for_each_evaluation_where_there_is_no_terminal(text, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "ROWS", 2)
    run("--objectives", "clm", "--block_size", "128")
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("measured ")]
    assert [line.split(" in ")[0] for line in lines] == [
        "measured infilling", "measured replaced bytes", "measured drafts", "measured task"]
    assert "measured infilling" not in said.out, "the result is on standard output, progress is not"


def test_every_kind_of_task_has_its_row(text, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "ROWS", 4)
    monkeypatch.setattr(evaluate, "EVAL_ROWS", 4)
    names = "prefix", "mdlm", "span", "electra", "bart", "nsp", "contrastive", "rotation"
    run("--objectives", ",".join(names), "--block_size", "128", "--n_layer", "1")
    out = capsys.readouterr().out
    metrics = {name: measured(name) for name in names}
    for name in names:
        m = metrics[name]
        assert m["task_heading"] == evaluate.TASKS[type(OBJECTIVES[name].uses[0])].heading
        figures = f"{m['task']:.3f} | {m['task_baseline']:.3f}"
        assert f"| {name} | {m['task_heading']} | {figures} | " in out
    assert [metrics[name]["task_baseline"] for name in ("nsp", "rotation")] == [1 / 2, 1 / 128], "chance"
    assert not {"infill_4", "left_4", "replaced_auc", "bytes_per_pass"} & set(metrics["contrastive"])
    assert {"held_out", "distinct"} <= set(metrics["mdlm"]) and "| held-out text | distinct lines |" in out


def test_seeds_budgets_texts_and_defaults_are_runs_of_their_own(text, capsys, monkeypatch):
    run("--objectives", "clm", "--seeds", "1,2", "--budgets", "2,1")
    out = capsys.readouterr().out
    assert "±" in out and "[4/4] clm, 1 steps, seed 2: loss" in out and "After 1 2 steps" in out
    losses = {compare.logged_metrics(folder)["loss"] for folder in all_runs()}
    assert len(losses) == len(all_runs()) == 4
    with open(text, "ab") as f:
        f.write(b"# more\n")
    run("--objectives", "clm")
    assert len(all_runs()) == 5, "other text in the same file is another cell"
    replaced_objective(monkeypatch, "clm", flag_defaults={"warmup_iters": 1})
    run("--objectives", "clm")
    flag = dataclasses.replace(OBJECTIVES["mlm"].flags["mask_rate"], default=0.2)
    monkeypatch.setitem(OBJECTIVES["mlm"].flags, "mask_rate", flag)
    run("--objectives", "clm")
    assert len(all_runs()) == 6, "other defaults, too, but not another objective's"


def test_run_names_are_a_checksum_of_layout_corpora_and_settings():
    hp = compare.get_config(["--objective", "clm", *TINY, "--max_iters", "7", "--seed", "3"])
    name = compare.run_name(hp, [1, 2])
    settings = {k: v for k, v in vars(hp).items() if k in compare.flag_specs()}
    for other in OBJECTIVES.values():
        settings = {k: v for k, v in settings.items() if k not in other.flags}
    del settings["device"]
    tag = compare.zlib.crc32(json.dumps([compare.VERSION, [1, 2], settings], sort_keys=True).encode())
    assert name == f"clm-7-seed3-{tag:08x}"
    hp.device = "cuda"
    assert compare.run_name(hp, [1, 2]) == name, "the same run, resumed on another device"
    assert compare.run_name(hp, [1, 3]) != name


def test_a_sweep_has_a_row_for_each_value_in_which_a_plus_is_a_comma(text, capsys):
    run("--sweep", "bart_noise=mask,mask+permute")
    out = capsys.readouterr().out
    assert "| mask |" in out and "| mask+permute |" in out and os.path.exists("out/sweep-bart_noise-bart.md")
    assert {config["bart_noise"] for config in all_runs().values()} == {"mask", "mask,permute"}
    with open("out/sweep-bart_noise-bart.csv") as f:
        assert f.readline() == "bart_noise,steps,seed,metric,value\n"


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
    new = load_metrics(new)
    mix = load_metrics(mix)
    assert new["old_before"] == mix["old_before"] != new["old"]
    assert new["new"] < new["old_before"], "two steps more, on a text of one line"
    run("--new_data", "new.txt", "--sweep", "replay=scratch")
    scratch, config = list(all_runs().items())[-1]
    assert config["data"] == ["new.txt:1"] and config["init_from"] == ""
    scratch = load_metrics(scratch)
    assert "old_before" not in scratch and scratch["new"] > new["new"], "half as many steps"


def test_runs_start_from_another_objectives_weights(text, capsys):
    run("--objectives", "mlm", "--sweep", "start=none,clm", "--first_steps", "3")
    out = capsys.readouterr().out
    assert "| none |" in out and "| clm |" in out and os.path.exists("out/sweep-start-mlm.md")
    (_, none), (donor, first), (_, second) = all_runs().items()
    assert (first["objective"], first["max_iters"]) == ("clm", 3)
    assert [none["objective"], second["objective"]] == ["mlm", "mlm"]
    assert [none["init_from"], second["init_from"]] == ["", donor] and second["max_iters"] == 2


def test_a_run_that_diverges_does_not_stop_the_others(text, capsys, monkeypatch):
    token_loss = OBJECTIVES["clm"].loss

    def infinite(*args):
        return {"nll": token_loss(*args)["nll"] * math.inf}
    replaced_objective(monkeypatch, "mlm", loss=infinite)
    assert run("--objectives", "mlm,clm") == 0
    out = capsys.readouterr().out
    for word in ("mlm, 2 steps, seed 1: diverged", "| mlm |  |", "| 1 diverged |", "| clm |"):
        assert word in out, word
    assert run("--objectives", "mlm") == 1


@pytest.mark.parametrize("saved", [True, False])
def test_a_killed_run_is_resumed_or_begins_again_if_it_had_no_checkpoint(saved, text):
    run("--objectives", "clm")
    [folder] = all_runs()
    paths = [os.path.join(folder, name) for name in ("ckpt.pt", "best.pt", "metrics.jsonl")]
    if saved:                                   # after the first of two steps
        with open(paths[2], "rb") as f:
            state = {"step": 1, "metrics_bytes": sum(map(len, f.readlines()[:3]))}
        torch.save(torch.load(paths[0], weights_only=True) | state, paths[0])
    os.remove(os.path.join(folder, "measured.json"))
    if not saved:
        for path in paths:
            os.remove(path)
    run("--objectives", "clm")
    assert measured("clm") and compare.load_checkpoint(folder)["step"] == 2


@pytest.mark.parametrize("flags, hint", [
    (["--sweep", "seed=1,2"], "wants a setting"), (["--sweep", "mask_rate"], "as in mask_rate"),
    (["--sweep", "mask_rate=2"], "--mask_rate"), (["--sweep", "replay=x"], "shares"),
    (["--sweep", "start=none,clam"], "start=clam"),
    (["--objectives", "mlm", "--sweep", "replay=0"], "clm"), (["--objectives", "mml"], "clm,"),
    (["--seeds", "one"], "--seeds one"), (["--seeds", "1,-2"], "--seeds 1,-2"), (["--seed", "7"], "itself"),
    (["--budgets", "1e3"], "--budgets 1e3"), (["--budgets", "a"], "--budgets a"),
    (["--budgets", "0"], "--budgets 0"), (["--budgets", "2,"], "--budgets 2,"),
    (["--data", "short.txt"], "4096"), (["--data", "-"], "--data -"),
    (["--out_dir", "text.txt"], "--out_dir text.txt"), (["--data", "corpus", "--out_dir", "corpus/out"], "inside"),
    (["--objectives", "clm", "--sweep", "block_size=64,200000"], "200000"),
    (["--sweep", "mask_rate=.1", "--mask_rate", ".2"], "what --sweep sets"),
    (["--budget", "2"], "--budgets"), (["--n_layr", "2"], "--n_layer"),
    (["--objectives", "clm", "--tau", ".1"], "Try it with contrastive"), (["--max_passes", "2"], "itself"),
    (["--objectives", "clm", "--sweep", "max_passes=1,2"], "wants a setting"),
    (["--objectives", "clm", "--out_dir", "text.txt/out"], "cannot be written to")])
def test_bad_flags_are_one_line_before_anything_runs(flags, hint, text, capsys):
    os.makedirs("corpus")
    for path, n in (("short.txt", 500), ("corpus/a.txt", 9000)):
        with open(path, "wb") as f:
            f.write(b"words " * n)
    if "--data" not in flags:
        flags = [*flags, "--data", text]
    with pytest.raises(SystemExit) as e:
        compare.main(flags)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
    assert "--max_iters" not in err, "the flag that the user gave is the one to blame"
    assert not os.path.exists("out")


# ---- tables

def test_differences_are_paired_by_seed():
    rows = {"a": {1: {"left_to_right": 2.0}, 2: {"left_to_right": 3.0}, 3: {"left_to_right": 9.0}},
            "b": {1: {"left_to_right": 2.1}, 2: {"left_to_right": 3.3}, 3: {}, 4: {"left_to_right": 0.0}}}
    out = compare.tables(rows | {"five raw bytes": {"-": {"probe": 0.5}}})
    assert "| b | +0.200 ± 0.100 | 1 2 |" in out, ".1 and .3, whose standard deviation is .141"
    assert "With 2 seeds a single difference" in out and "from 12.7 standard errors on" in out
    assert "| a | 4.667 ± 3.786 |" in out and "| five raw bytes |  | 0.500 | - |" in out
    assert "paired" not in compare.tables({"a": {1: {"left_to_right": 2.0}}, "b": {1: {"left_to_right": 2.1}}})


def test_a_task_has_only_the_columns_that_some_row_fills():
    figures = {"task_heading": "holes (blanks)", "task": 0.5, "task_baseline": 0.25}
    out = compare.task_table({"a": {1: figures | {"ends": 1.0}, 2: {}}, "b": {1: figures}, "c": {1: {"loss": 1.0}}})
    assert out.splitlines() == [
        "|  | its task (baseline) | model | baseline | ends by itself |", "|---|---|---|---|---|",
        "| a | holes (blanks) | 0.500 | 0.250 | 1.000 |", "| b | holes (blanks) | 0.500 | 0.250 |  |"]
    assert compare.task_table({"c": {1: {"loss": 1.0}}}) == ""


CURVES = {n: {"clm": {1: {"left_to_right": 1 + 1 / n, "left_4": 3.0}, 2: {}}, "mlm": {1: {"infill_4": 2.0, "task": n}},
              "fim": {1: {"left_to_right": 3.0}, 2: {"left_to_right": 4.0}} if n == 10 else {1: {}}}
          for n in (100, 10)}


def test_the_tables_are_of_the_largest_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "draw_picture", lambda budgets, path: path)
    compare.write_report(str(tmp_path / "compare"), CURVES, "", {})
    text = (tmp_path / "compare.md").read_text()
    assert "| clm | 1.010 |" in text.partition("After")[0] and "1.100" not in text.partition("After")[0]


def test_the_trends_have_a_value_for_each_budget():
    assert compare.budget_table(CURVES).splitlines()[2:] == [
        "|  | left to right | left 4 | infill 4 | its task, as above |", "|---|---|---|---|---|",
        "| clm | 1.100 1.010 | 3.00 3.00 |  |  |", "| mlm |  |  | 2.00 2.00 | 10.000 100.000 |",
        "| fim | 3.500 - |  |  |  |"]
    assert compare.budget_table({10: CURVES[10]}) == ""


def test_the_curves_have_a_line_for_each_number_behind_the_tables(tmp_path):
    path = tmp_path / "curves.csv"
    compare.write_curves(CURVES, path, "objective")
    with open(path, newline="") as f:
        head, *lines = csv.reader(f)
    assert head == ["objective", "steps", "seed", "metric", "value"]
    assert lines == [
        ["clm", "10", "1", "left_to_right", "1.1"], ["clm", "10", "1", "left_4", "3"],
        ["clm", "100", "1", "left_to_right", "1.01"], ["clm", "100", "1", "left_4", "3"],
        ["mlm", "10", "1", "infill_4", "2"], ["mlm", "10", "1", "task", "10"],
        ["mlm", "100", "1", "infill_4", "2"], ["mlm", "100", "1", "task", "100"],
        ["fim", "10", "1", "left_to_right", "3"], ["fim", "10", "2", "left_to_right", "4"]]


def test_the_curves_lie_beside_the_table(text):
    run("--objectives", "clm", "--budgets", "1,2")
    with open("out/curves.csv", newline="") as f:
        lines = list(csv.DictReader(f))
    values = {int(line["steps"]): float(line["value"]) for line in lines if line["metric"] == "left_to_right"}
    assert values.keys() == {1, 2} and values[1] > values[2]


# ---- the picture

def test_no_two_of_fifteen_rows_have_the_same_color():
    twenty = [(i, 0, 0) for i in range(20)]     # as matplotlib's tab20
    looks = compare.line_styles(15, twenty)
    assert len({look["color"] for look in looks}) == 15
    more = compare.line_styles(60, twenty)
    assert len({(look["color"], look["marker"]) for look in more}) == 60


def test_the_picture_has_a_curve_over_the_budgets(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    path = str(tmp_path / "compare.png")
    worse = CURVES | {1000: {"mlm": {1: {"infill_4": 18.2}}}}   # than no model: not drawn
    assert compare.draw_picture(worse, path) == path and os.path.getsize(path) > 5000
    bpb, infill, names = pyplot.gcf().axes[:3]
    assert [axis.get_title() for axis in (bpb, infill)] == [
        "left to right (less is better)", "infill 4 (less is better; dashed: left 4)"]
    drawn = [(line.get_linestyle(), line.get_xydata().tolist()) for axis in (bpb, infill) for line in axis.lines]
    assert drawn == [("-", [[10, 1.1], [100, 1.01]]), ("-", [[10, 3.5]]), ("--", [[10, 3.0], [100, 3.0]]),
                     ("-", [[10, 2.0], [100, 2.0]])]
    assert [text.get_text() for text in names.get_legend().get_texts()] == ["clm", "mlm", "fim"]
    assert "nothing to draw" in compare.draw_picture({10: {"mlm": {1: {}}}}, path)


def test_flags_of_train_that_are_switched_off_are_known():
    flags, rest = parse_with_train_flags("x", "", compare.FLAGS, compare.RESERVED, ["--no-compile"])
    assert rest == ["--no-compile"]
