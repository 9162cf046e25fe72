import csv
import dataclasses
import json
import math
import os

import pytest
import torch
from conftest import tiny

from experiments import compare, evaluate
from objectives import OBJECTIVES


def run(*words):  # compares on the text of the folder, with runs of two steps
    return compare.main(tiny("--data", "text.txt", "--out_dir", "out", "--budgets", "2", *words))


def all_runs():  # -> {folder: settings}, oldest first
    folders = sorted((os.path.join("out/runs", name) for name in os.listdir("out/runs")), key=os.path.getmtime)
    return {folder: compare.load_checkpoint(folder)["config"] for folder in folders}


def load_metrics(folder, name="measured"):
    with open(f"{folder}/{name}.json") as f:
        return json.load(f)["metrics"]


# ---- cells
def test_each_run_is_trained_and_measured_once(text, capsys, monkeypatch):
    """The first table has the metrics of an objective, the second its own task beside a baseline. After --tasks_only,
    the other metrics can still be measured."""
    monkeypatch.setattr(evaluate, "ROWS", 4)
    monkeypatch.setattr(evaluate, "MIDDLE_BYTES", 128)
    names = "mtp", "mdlm", "span", "rotation"
    words = ["--objectives", ",".join(names), "--block_size", "128", "--n_layer", "1"]
    run(*words, "--tasks_only")
    monkeypatch.setattr(compare.train, "main", None)
    capsys.readouterr()
    assert run(*words) == 0
    out = capsys.readouterr().out
    metrics = {config["objective"]: load_metrics(folder) for folder, config in all_runs().items()}
    for folder, config in all_runs().items():
        few = load_metrics(folder, "measured_tasks")
        assert {"loss", "task"} <= set(few) and not {"left_4", "replaced_auc"} & set(few)
        assert few["task"] == metrics[config["objective"]]["task"]
    for name in names:
        heading, _ = evaluate.TASKS[OBJECTIVES[name].uses[0].mode]
        assert f"| {name} | {heading} | {metrics[name]['task']:.3f} | {metrics[name]['task_baseline']:.3f} | " in out
    assert {objective.uses[0].mode for objective in OBJECTIVES.values()} <= set(evaluate.TASKS)
    assert {"left_4", "left_16", "replaced_auc", "tflop"} <= set(metrics["mtp"])
    assert {"typos_first", "typos_corrected", "typos_damaged", "replaced_left"} <= set(metrics["mdlm"])
    assert {"infill_4", "infill_16", "distinct"} <= set(metrics["mdlm"]) and "infill_4" not in metrics["mtp"]
    bits = metrics["mtp"]["left_to_right"], *(metrics["mdlm"][m] for m in ("bound", "left_by_filling", "bound_there"))
    assert 7 < min(bits) and max(bits) < 9
    monkeypatch.setattr(compare, "measure", lambda *args: {"task": 0.5})
    run(*words)
    assert out == capsys.readouterr().out, "a finished run was trained or measured again"
    monkeypatch.setattr(compare, "EVAL_VERSION", 99)
    run(*words)
    assert {load_metrics(folder)["task"] for folder in all_runs()} == {0.5}, "not measured by the new evaluations"


def test_another_seed_budget_text_or_default_is_another_run(text, capsys, monkeypatch):
    run("--objectives", "clm", "--seeds", "1,2", "--budgets", "2,1")
    out = capsys.readouterr().out
    assert "[4/4] clm, 1 steps, seed 2: loss" in out and "After 1 2 steps" in out
    assert len({compare.logged_metrics(folder)["loss"] for folder in all_runs()}) == len(all_runs()) == 4
    with open(text, "ab") as f:
        f.write(b"# more\n")
    run("--objectives", "clm")
    assert len(all_runs()) == 5, "the text of the file has changed"
    monkeypatch.setitem(OBJECTIVES, "clm", dataclasses.replace(OBJECTIVES["clm"], flag_defaults={"warmup_iters": 1}))
    flag = dataclasses.replace(OBJECTIVES["mlm"].flags["mask_rate"], default=0.2)
    monkeypatch.setitem(OBJECTIVES["mlm"].flags, "mask_rate", flag)
    run("--objectives", "clm")
    assert len(all_runs()) == 6, "a default of clm has changed; one of mlm does not matter"


def test_a_sweep_has_a_row_for_each_value_and_a_plus_stands_for_a_comma(text, capsys):
    run("--sweep", "bart_noise=mask,mask+permute")
    out = capsys.readouterr().out
    assert "| bart_noise=mask |" in out and "| bart_noise=mask,permute |" in out
    assert os.path.exists("out/sweep-bart_noise-bart.md")
    assert {config["bart_noise"] for config in all_runs().values()} == {"mask", "mask,permute"}


def test_replay_measures_both_corpora_before_and_after(text, tmp_path, capsys):
    (tmp_path / "new.txt").write_text("int main() { return 0; }\n" * 400)
    run("--new_data", "new.txt", "--sweep", "replay=0,.25,scratch")
    assert "| replay=.25 |" in capsys.readouterr().out
    before, *others = all_runs()
    assert [[config["init_from"], *config["data"]] for config in all_runs().values()] == [
        ["", "text.txt"], [before, "new.txt:1"], [before, "new.txt:0.75", "text.txt:0.25"], ["", "new.txt:1"]]
    new, mix, scratch = map(load_metrics, others)
    assert new["old_before"] == mix["old_before"] != new["old"] and "old_before" not in scratch
    assert new["new"] < new["old_before"] and new["new"] < scratch["new"], "a run from scratch has half as many steps"


def test_a_run_starts_from_the_weights_of_another_objective(text, capsys):
    run("--objectives", "mlm", "--sweep", "start=none,bart", "--first_steps", "3")
    assert "| start=none |" in capsys.readouterr().out
    (_, none), (donor, first), (_, second) = all_runs().items()
    assert (first["objective"], first["max_iters"], first["data"]) == ("bart", 3, ["text.txt"])
    changed = {name for name in none if none[name] != second[name]} - {"out_dir"}
    assert changed == {"init_from", "init_step"} and second["init_from"] == donor


def test_a_run_that_diverges_does_not_stop_the_others(text, capsys, monkeypatch):
    def infinite(model, batch, hp):
        return model(batch["inp"]).sum() * math.inf, {}
    monkeypatch.setitem(OBJECTIVES, "mlm", dataclasses.replace(OBJECTIVES["mlm"], loss=infinite))
    assert run("--objectives", "mlm,clm") == 0
    out = capsys.readouterr().out
    assert "mlm, 2 steps, seed 1: diverged" in out and "| mlm |  |" in out and "| 1 diverged |" in out
    assert run("--objectives", "mlm") == 1


def test_a_killed_run_is_resumed(text):
    run("--objectives", "clm")                  # then pretend that it was killed after the first of two steps
    [folder] = all_runs()
    with open(f"{folder}/metrics.jsonl", "rb") as f:
        state = {"step": 1, "metrics_bytes": sum(map(len, f.readlines()[:3]))}
    torch.save(torch.load(f"{folder}/ckpt.pt", weights_only=True) | state, f"{folder}/ckpt.pt")
    run("--objectives", "clm")
    assert list(all_runs()) == [folder] and compare.load_checkpoint(folder)["step"] == 2


@pytest.mark.parametrize("flags, hint", [
    ("--sweep seed=1,2", "is not a setting"), ("--sweep mask_rate", "Try mask_rate"),
    ("--sweep mask_rate=2", "--mask_rate"), ("--sweep replay=x", "shares"), ("--sweep start=none,clam", "Try clm"),
    ("--objectives mlm --sweep replay=0", "clm"), ("--objectives mml", "Try mlm"), ("--seeds one", "--seed"),
    ("--seed 7", "itself"), ("--budgets 1e3", "--max_iters"), ("--data . --out_dir out", "inside"),
    ("--objectives clm --sweep block_size=64,200000", "200000"),
    ("--budget 2", "--budget"), ("--objectives clm --tau .1", "Try it with contrastive"),
    ("--sweep tau=.1 --objectives clm", "Try it with contrastive")])
def test_bad_flags_are_refused_before_anything_runs(flags, hint, text, refuses):
    data = [] if "--data" in flags else ["--data", text]
    refuses(hint, compare.main, [*data, *flags.split()])
    assert not os.path.exists("out")


# ---- tables and the picture
def test_differences_are_paired_by_seed_and_empty_columns_are_left_out():
    task = {"task_heading": "holes (blanks)", "task": 0.5, "task_baseline": 0.25}
    rows = {"a": {1: {"left_to_right": 2.0}, 2: {"left_to_right": 3.0} | task, 3: {"left_to_right": 9.0}},
            "b": {1: {"left_to_right": 2.1} | task, 2: {"left_to_right": 3.3}, 3: {}, 4: {"left_to_right": 0.0}}}
    out = compare.tables(rows | {"five raw bytes": {"-": {"probe": 0.5}}})
    assert "| b | +0.200 ± 0.100 | 1 2 |" in out, "the differences are .1 and .3; their standard deviation is .141"
    assert "With 2 seeds, a difference" in out and "exceeds 12.7 standard errors" in out
    assert "| a | 4.667 ± 3.786 |" in out and "| five raw bytes |  | 0.500 | - |" in out
    assert "|  | its task (baseline) | model | baseline |\n|---|---|---|---|\n| a | holes (blanks) | 0.500 |" in out
    assert "paired" not in compare.tables({"a": {1: {"left_to_right": 2.0}}, "b": {1: {"left_to_right": 2.1}}})
    # a loss in nats beside bits per byte would be read as bits, if the heading did not name the unit
    out = compare.tables({"nsp_weight=0": {1: {"loss": 2.0, "left_4": 3.0, "probe": 0.5, "tflop": 1.0}}})
    assert "|  | own loss (nats) | left 4 (bits/byte) | probe of byte classes (balanced accuracy) | training (" in out


CURVES = {n: {"clm": {1: {"left_to_right": 1 + 1 / n, "left_4": 3.0}, 2: {}}, "mlm": {1: {"infill_4": 2.0, "task": n}},
              "fim": {1: {"left_to_right": 3.0}, 2: {"left_to_right": 4.0}} if n == 10 else {1: {}}}
          for n in (100, 10)}


def test_the_first_table_shows_the_largest_budget_and_the_last_one_all(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "draw_picture", lambda budgets, path, xlabel: path)
    compare.write_report(str(tmp_path / "compare"), CURVES, "", {})
    table, _, trends = (tmp_path / "compare.md").read_text().partition("After 10 100 steps")
    assert "| clm | 1.010 |" in table and "1.100" not in table
    assert trends.splitlines()[4:] == [
        "| clm | 1.100 1.010 | 3.00 3.00 |  |  |", "| mlm |  |  | 2.00 2.00 | 10.000 100.000 |",
        "| fim | 3.500 - |  |  |  |"]
    with open(tmp_path / "curves.csv", newline="") as f:
        head, *lines = csv.reader(f)
    assert head == ["objective", "steps", "seed", "metric", "value"] and len(lines) == 10
    assert lines[0] == ["clm", "10", "1", "left_to_right", "1.1"]


def test_the_picture_has_a_line_over_the_budgets_without_values_far_above_the_median(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    saved = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, path, **how: saved.append(figure))
    compare.draw_picture(CURVES | {1000: {"mlm": {1: {"infill_4": 18.2}}}}, "compare.png")
    bits, left, infill = saved[0].axes
    assert infill.get_title() == "infill 4 (less is better)" and infill.get_ylabel() == "bits/byte"
    drawn = [[line.get_xydata().tolist() for line in axis.lines] for axis in (bits, left, infill)]
    assert drawn == [[[[10, 1.1], [100, 1.01]]], [[[10, 3.0], [100, 3.0]]], [[[10, 2.0], [100, 2.0]]]]
    assert [[text.get_text() for text in axis.texts] for axis in (bits, left, infill)] == [["clm"], ["clm"], ["mlm"]]


def test_a_sweep_over_numbers_is_drawn_over_them():
    rows = {"mask_rate=.4": {1: {"probe": 0.4}}, "mask_rate=.1": {1: {"probe": 0.1}}}
    points = compare.over_values({5: rows}, "mask_rate")
    assert points == {0.1: {"mask_rate": rows["mask_rate=.1"]}, 0.4: {"mask_rate": rows["mask_rate=.4"]}}
    for other in ({5: rows, 6: rows}, {5: rows | {"mask_rate=0": {}}}, {5: rows | {"mask_rate=x": {}}}):
        assert compare.over_values(other, "mask_rate") is other
