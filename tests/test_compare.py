"""Runs are trained and measured once; the report says what it compares, and what has changed since."""
import argparse
import csv
import dataclasses
import json
import math
import os
import re
import signal
from pathlib import Path

import pytest
from conftest import tiny
from test_train import on_posix, on_step

from experiments import common, compare, evaluate
from objectives import OBJECTIVES
from run import load_checkpoint


def run(*words):  # compares on the text of the folder, with runs of two steps
    return compare.main(tiny("--data", "text.txt", "--out_dir", "out", "--budgets", "2", *words))


def all_runs():  # -> {folder: settings}, oldest first
    folders = sorted((os.path.join("out/runs", name) for name in os.listdir("out/runs")), key=os.path.getmtime)
    return {folder: load_checkpoint(folder)["config"] for folder in folders}


def rows_of_csv(path="out/compare.csv"):  # -> [(row, steps, seed)] of all figures
    return [tuple(line[:3]) for line in [*csv.reader(Path(path).read_text().splitlines())][1:]]


def load_metrics(folder, file="figures.json"):
    return common.read_json(os.path.join(folder, file))


# ---- runs
def test_each_run_is_trained_and_measured_once(text, capsys, monkeypatch):
    """In rows of 128 positions, which have all figures; with --tasks_only few. An objective without a use has a row."""
    monkeypatch.setitem(OBJECTIVES, "rotation", dataclasses.replace(OBJECTIVES["rotation"], uses={}))
    monkeypatch.setattr(evaluate, "ROWS", 4)
    monkeypatch.setattr(evaluate, "MIDDLE_BYTES", 128)
    names = "mtp", "mdlm", "span", "rotation"
    size = ["--block_size", "128", "--n_layer", "1"]
    words = ["--objectives", ",".join(names), *size]
    run("--objectives", "mtp", *size, "--tasks_only")
    [folder] = all_runs()
    few = load_metrics(folder, "tasks.json")
    assert {"loss", "task"} <= few.keys() and not {"left_4", "replaced_auc"} & few.keys()
    capsys.readouterr()
    assert run(*words) == 0
    out = capsys.readouterr().out
    metrics = {config["objective"]: load_metrics(folder) for folder, config in all_runs().items()}
    assert re.search(r"^\| rotation \| .* \| 1 \|$", out, re.MULTILINE) and "loss" in metrics["rotation"]
    for name in names[:3]:
        assert f"| {metrics[name]['task']:.3f} ({metrics[name]['task_baseline']:.3f}) |" in out
    assert {use for objective in OBJECTIVES.values() for use in [*objective.uses][:1]} <= set(evaluate.TASKS)
    assert {"left_4", "left_16", "replaced_auc", "tflop"} <= metrics["mtp"].keys()
    assert metrics["mtp"]["task"] == few["task"]
    assert {"typos_restored", "restored_swapped", "clean_edits", "replaced_left"} <= set(metrics["mdlm"])
    assert {"infill_4", "infill_16", "distinct"} <= set(metrics["mdlm"]) and "infill_4" not in metrics["mtp"]
    bits = metrics["mtp"]["left_to_right"], *(metrics["mdlm"][m] for m in ("bound", "left_by_filling"))
    assert 7 < min(bits) and max(bits) < 9
    monkeypatch.setattr(compare.train, "main", None)
    monkeypatch.setattr(evaluate, "measure", None)
    run(*words)
    again = capsys.readouterr().out
    assert ": measuring" not in again and again.endswith(out[out.index("\n\n"):]), "a run was measured again"


def test_another_seed_budget_text_or_default_is_another_run(text, capsys, monkeypatch):
    run("--objectives", "clm", "--seeds", "1,2", "--budgets", "2,1", "--warmup_iters", "7")
    out = capsys.readouterr().out
    assert "[4/4] clm, 1 steps, seed 2: validation loss" in out and "After 1 steps" in out
    assert len({load_metrics(folder)["loss"] for folder in all_runs()}) == len(all_runs()) == 4
    Path(text).write_bytes(Path(text).read_bytes() + b"# more\n")
    run("--objectives", "clm")
    assert len(all_runs()) == 5, "the text of the file has changed"
    assert len(set(rows_of_csv())) == 1, "a run with other settings or another text is in the table"
    monkeypatch.setitem(OBJECTIVES, "clm", dataclasses.replace(OBJECTIVES["clm"], flag_defaults={"warmup_iters": 1}))
    flag = dataclasses.replace(OBJECTIVES["mlm"].flags["mask_rate"], default=0.2)
    monkeypatch.setitem(OBJECTIVES["mlm"].flags, "mask_rate", flag)
    run("--objectives", "clm")
    assert len(all_runs()) == 6, "a default of clm has changed; one of mlm does not matter"


def test_runs_start_from_the_weights_of_another_run(text, capsys):
    compare.train.main(tiny("--data", text, "--objective", "bart", "--max_iters", "1", "--out_dir", "first"), False)
    run("--objectives", "clm,mlm", "--sweep", "init_from=first")
    assert "| clm init_from=first | " in capsys.readouterr().out
    assert all(config["init_from"] == "first" and config["init_step"] == 1 for config in all_runs().values())
    compare.train.main(tiny("--data", text, "--max_iters", "0", "--out_dir", "other"), False)
    os.replace("other/ckpt.pt", "first/ckpt.pt")
    run("--objectives", "clm", "--init_from", "first")
    assert len(all_runs()) == 3, "other weights are another run, although the folder has the same name"


def test_a_run_that_diverges_does_not_stop_the_others(text, capsys, monkeypatch):
    def infinite(model, batch, hp):
        return model(batch["inp"]).sum() * math.inf, {}
    monkeypatch.setitem(OBJECTIVES, "mlm", dataclasses.replace(OBJECTIVES["mlm"], loss=infinite))
    assert run("--objectives", "mlm,clm") == 0
    out = capsys.readouterr().out
    assert "mlm, 2 steps, seed 1: diverged" in out and "| mlm |  |" in out and "| 1 diverged |" in out
    assert run("--objectives", "mlm") == 1


@on_posix
def test_a_stopped_run_is_not_measured_and_is_resumed(text, monkeypatch):
    words = "--objectives", "clm", "--dtype", "auto", "--tasks_only"
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        on_step(1, lambda: os.kill(os.getpid(), signal.SIGTERM), patch)
        run(*words)
    [folder] = all_runs()
    assert load_checkpoint(folder)["step"] == 1 and not load_metrics(folder, "tasks.json")
    run(*words)
    for file in ("ckpt.pt", "tasks.json"):      # as if it was killed between its first best.pt and its first ckpt.pt
        os.remove(os.path.join(folder, file))
    run(*words)
    assert list(all_runs()) == [folder] and load_checkpoint(folder)["step"] == 2


def test_the_report_lists_the_runs_of_earlier_commands_with_the_same_settings(text, capsys):
    run("--objectives", "clm,nsp", "--seeds", "2")
    run("--objectives", "nsp", "--sweep", "nsp_weight=.5,1")
    assert {row for row, *_ in rows_of_csv("out/sweep-nsp_weight.csv")} == {"nsp nsp_weight=0.5", "nsp nsp_weight=1.0"}
    run("--objectives", "clm", "--n_layer", "1")
    assert set(rows_of_csv()) == {("clm", "2", "1")}
    assert "diverged" not in capsys.readouterr().out, "a run with other settings is in the table"
    run("--objectives", "rotation", "--budgets", "2,1", "--baseline", "clm")
    out = capsys.readouterr().out
    nsp = {("nsp", "2", "1"), ("nsp", "2", "2")}                # seed 1 is of the sweep: a weight of 1 is the default
    assert set(rows_of_csv()) == {("clm", "2", "2"), ("rotation", "2", "1"), ("rotation", "1", "1")} | nsp
    assert re.findall(r"^\| (\w+) \|", out, re.MULTILINE) == ["rotation", "clm", "nsp", "rotation"]
    run("--objectives", "nsp", "--sweep", "nsp_weight=1,1.0,2")
    assert {row[-3:] for row, *_ in rows_of_csv("out/sweep-nsp_weight.csv")} == {"0.5", "1.0", "2.0"}


# ---- changed files
def edit(monkeypatch, file):  # as if this file of the repository had another content
    checksums = common.checksums
    monkeypatch.setattr(compare, "checksums", lambda files: {name: crc + (name == file)
                                                             for name, crc in checksums(files).items()})
    monkeypatch.setattr(compare, "MEASURING", {name: crc + (name == file) for name, crc in compare.MEASURING.items()})


def test_runs_whose_files_have_changed_are_named_and_used(text, capsys, monkeypatch):
    run("--objectives", "mlm", "--tasks_only")
    [folder] = all_runs()
    assert "older files" not in capsys.readouterr().out
    with monkeypatch.context() as m:
        m.setattr(compare.train, "main", None)
        edit(m, "objectives.py")
        run("--objectives", "mlm", "--tasks_only")
        out = capsys.readouterr().out
        assert out.endswith(f"- before objectives.py changed: {os.path.basename(folder)}\n")
        assert out.endswith(Path("out/compare.md").read_text()) and ": measuring" not in out


@pytest.mark.parametrize("file", ["sample.py", *(f"experiments/{name}.py" for name in ("bench", "evaluate", "score"))])
def test_figures_are_measured_again_if_the_files_that_measure_have_changed(file, text, capsys, monkeypatch):
    run("--objectives", "mlm", "--tasks_only")
    [folder] = all_runs()
    monkeypatch.setattr(compare.train, "main", None)
    monkeypatch.setattr(evaluate, "measure", lambda *args: {"task": 0.5})
    edit(monkeypatch, file)
    run("--objectives", "mlm", "--tasks_only")
    assert load_metrics(folder, "tasks.json")["task"] == 0.5 and "older files" not in capsys.readouterr().out


# ---- flags
def plan(*words):  # -> runs
    return compare.plan_runs(*compare.parse_with_train_flags("", "", compare.FLAGS, set(), words), crc=0)


def test_a_flag_goes_to_the_objectives_that_have_it():
    words = ["--objectives", "clm,mlm,mdlm", "--mask_rate", ".4", "--uniform_from", "1"]
    assert [(each.hp.mask_rate, each.hp.uniform_from) for each in plan(*words)] == [(0.3, 0.7), (0.4, 0.7), (0.3, 1)]


def test_values_of_a_sweep_are_rows():
    """A switch has the values True and False. A + in a value stands for a comma. What is given twice counts once."""
    assert len(plan("--objectives", "clm,mlm,clm", "--seeds", "1,1", "--budgets", "2,02")) == 2
    assert [each.row for each in plan("--objectives", "mlm", "--sweep", "mask_rate=.2,0.2")] == ["mlm mask_rate=0.2"]
    runs = plan("--objectives", "clm,mlm", "--sweep", "doc_mask=True,False")
    assert [(each.row, each.hp.doc_mask) for each in runs[:2]] == [("clm doc_mask=True", True),
                                                                   ("clm doc_mask=False", False)]
    runs = plan("--objectives", "bart", "--sweep", "bart_noise=mask,mask+permute")
    assert [each.hp.bart_noise for each in runs] == ["mask", "mask,permute"]
    assert compare.to_value("init_from", "out/clm+mlm") == "out/clm+mlm", "a path"


def test_files_of_a_forks_objective_count_as_training_files(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "clm", dataclasses.replace(OBJECTIVES["clm"], loss=tiny))
    assert tiny.__code__.co_filename in common.training_files("clm") > common.training_files("mlm")


@pytest.mark.parametrize("flags, hint", [
    ("--sweep seed=1,2", "be swept"), ("--sweep eval_interval=1", "be swept"), ("--sweep mask_rate=2", "--mask_rate"),
    ("--objectives mml", "Try mlm"), ("--data . --out_dir out", "inside"), ("--seed 7", "itself"),
    ("--objectives clm --sweep block_size=64,200000", "200000"), ("--init_from nowhere", "nowhere"),
    ("--objectives clm --tau .1", "Try it with contrastive"), ("--baseline clmm", "Try one of clm, mlm"),
    ("--objectives clm:0.5,mlm:0.5", "Try clm:0.5+mlm:0.5")])
def test_bad_flags_are_refused_before_anything_runs(flags, hint, text, refuses):
    data = [] if "--data" in flags else ["--data", text]
    refuses(hint, compare.main, [*data, *flags.split()])
    assert not os.path.exists("out")


# ---- tables
def test_a_mixture_is_one_row_and_each_figure_is_of_its_first_member_that_has_it(text):
    name = "mlm:0.5+clm:0.5"
    run("--objectives", f"{name},clm", "--budgets", "4", "--tasks_only")
    mixture = next(folder for folder, config in all_runs().items() if config["objective"] == name.replace("+", ","))
    assert os.path.basename(mixture).startswith("mlm_0.5+clm_0.5-4-seed1-")
    records = map(json.loads, Path(mixture, "metrics.jsonl").read_text().splitlines())
    mlm, clm = (record for record in records if record.get("split") == "val" and record["step"] == 4)
    metrics = load_metrics(mixture, "tasks.json")
    assert metrics["loss"] == mlm["loss"] and metrics["left_to_right"] == clm["bpb"] and "bound" not in metrics
    assert "second half" in metrics["task_heading"], "rows of 32 have no task of mlm"
    parts = [evaluate.count_flops(argparse.Namespace(**load_checkpoint(mixture)["config"] | {"objective": each}))
             for each in ("mlm", "clm")]
    assert metrics["tflop"] == pytest.approx(sum(parts) / 2 * 4 / 1e12)


def test_tables_show_means_and_standard_errors_and_what_diverged():
    rows = {"clm": {3: {"left_to_right": 3.0}, 1: {"left_to_right": 1.0, "left_4": 3.0}, 2: {"left_to_right": 2.0}},
            "mdlm": {1: {"bound": 3.0, "task": 0.5, "task_heading": "share", "task_baseline": 0.25}, 2: {}}}
    out = compare.report({100: rows}, "clm", {"clm", "mdlm"})
    assert "| clm | 2.000 ± 0.577 | left: 3.00 |  | 1 2 3 |" in out
    assert "| mdlm | <= 3.000 |  | 0.500 (0.250) | 1 2 diverged |" in out


def test_differences_are_paired_by_seed():
    """12.71 times the standard error of .1. A bound is not subtracted from bits, nor a task from another one."""
    rows = {"b": {1: {"left_to_right": 1.0}, 2: {"left_to_right": 2.0}, 3: {"left_to_right": 9.0}},
            "a": {1: {"left_to_right": 1.1}, 2: {"left_to_right": 2.3}, 3: {}},
            "c": {1: {"bound": 1.0, "left_4": 2.0}, 2: {"bound": 2.0, "left_4": 2.0}}}
    assert compare.difference_table(rows, "b").splitlines() == [
        "|  | left to right |", "|---|---|", "| a - b | +0.200 ± 1.271 |"]
    for none in {"b": rows["b"]}, {"b": {1: rows["b"][1]}}, {"c": rows["c"]}:
        assert compare.difference_table(none, "b") == ""
    for task, side, cells in ("x", "left_4", "+0.00 | +1.000"), ("y", "left_4", "+0.00"), ("x", "infill_4", "+1.000"):
        rows = {name: {seed: {"task": value, hole: 1.0, "task_heading": heading} for seed in (1, 2)}
                for name, value, hole, heading in (("a", 2.0, "left_4", "x"), ("b", 3.0, side, task))}
        assert compare.difference_table(rows, "a").splitlines()[2:] == [f"| b - a | {cells} |"]


def test_shares_of_minimal_pairs_and_their_errors():
    rows = {"a": {1: {"points": [1, 1, 1, 0], "score": "exact"}, 2: {"points": [1, 1, 1, 0], "score": "exact"}},
            "b": {1: {"points": [1, 0, 1, 0], "score": "bound"}, 2: {"points": [1, 0, 0, 0], "score": "bound"}},
            "c": {1: {"loss": 1.0}}}
    # shares of b .5 and .25; its pairs 1, 0, .5, 0; differences from a 0, -1, -.5, 0
    error = (0.171875 / 4 + 0.03125 / 2) ** 0.5
    assert compare.pairs_table(rows, "a").splitlines()[2:] == [
        "| a | 0.750 ± 0.217 |  | exact | 1 2 |",
        f"| b | 0.375 ± {error:.3f} | -0.375 ± {error:.3f} | bound | 1 2 |"]


def test_pairs_are_scored_once_for_a_file(text, capsys, monkeypatch):
    pairs = "a b\ta b\nx = 1\tx 1 =\n"
    Path("pairs.txt").write_text(pairs)
    scored = []
    score_pairs = compare.score_pairs
    monkeypatch.setattr(compare, "score_pairs", lambda *args, **how: scored.append(args) or score_pairs(*args, **how))
    words = ["--objectives", "clm,nsp,rotation", "--pairs", "pairs.txt"]
    run(*words)
    assert len(scored) == 2 and "| pseudo-log-likelihood | 1 |" in capsys.readouterr().out
    assert len(re.findall(",pairs,0.|,pairs,1", Path("out/compare.csv").read_text())) == 2
    run(*words)
    assert len(scored) == 2 and ": measuring" not in capsys.readouterr().out
    Path("pairs.txt").write_text(pairs + "yes\tno\n")
    run(*words)
    assert len(scored) == 4 and ": measuring figures" not in capsys.readouterr().out
