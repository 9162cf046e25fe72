import argparse
import csv
import dataclasses
import json
import math
import os
import re
import statistics
from pathlib import Path

import pytest
import torch
from conftest import TINY, tiny

from data import make_rng
from experiments import common, compare, evaluate
from objectives import OBJECTIVES
from run import load_checkpoint


CODE = common.read_code()


@pytest.fixture(autouse=True)
def read_code_once(monkeypatch):  # to save time
    monkeypatch.setattr(compare, "read_code", lambda: CODE)


def run(*words):  # compares on the text of the folder, with runs of two steps
    return compare.main(tiny("--data", "text.txt", "--out_dir", "out", "--budgets", "2", *words))


def all_runs():  # -> {folder: settings}, oldest first
    folders = sorted((os.path.join("out/runs", name) for name in os.listdir("out/runs")), key=os.path.getmtime)
    return {folder: load_checkpoint(folder)["config"] for folder in folders}


def load_metrics(folder, file="measured.json"):
    return common.read_json(os.path.join(folder, file))["metrics"]


# ---- cells
def test_each_run_is_trained_and_measured_once(text, capsys, monkeypatch):
    """In rows of 128 positions, which have all figures. With --tasks_only few of them are measured."""
    monkeypatch.setattr(evaluate, "ROWS", 4)
    monkeypatch.setattr(evaluate, "MIDDLE_BYTES", 128)
    names = "mtp", "mdlm", "span", "rotation"
    size = ["--block_size", "128", "--n_layer", "1"]
    words = ["--objectives", ",".join(names), *size]
    run("--objectives", "mtp", *size, "--tasks_only")
    [folder] = all_runs()
    few = load_metrics(folder, "measured_tasks.json")
    assert {"loss", "task"} <= few.keys() and not {"left_4", "replaced_auc"} & few.keys()
    capsys.readouterr()
    assert run(*words) == 0
    out = capsys.readouterr().out
    metrics = {config["objective"]: load_metrics(folder) for folder, config in all_runs().items()}
    for name in names:
        assert f"{name}: own task: {metrics[name]['task_heading']}\n" in out
        assert f"| {metrics[name]['task']:.3f} | 1 |" in out
    assert re.findall(r"\[2/4\] mdlm, 2 steps, seed 1: (\w+)", out) == ["training", "measuring", "validation"]
    assert "| mtp (left side) | " in out and "| mdlm | <= 7." in out and out.count(" min left\n") == 3
    assert "- mdlm: attn_scale 2.0, early_mask_rate 0.4, uniform_from 0.7\n" in out
    assert {next(iter(objective.uses)) for objective in OBJECTIVES.values()} <= set(evaluate.TASKS)
    assert {"left_4", "left_16", "replaced_auc", "tflop"} <= metrics["mtp"].keys()
    assert metrics["mtp"]["task"] == few["task"]
    assert {"typos_first", "typos_corrected", "typos_damaged", "replaced_left"} <= set(metrics["mdlm"])
    assert {"infill_4", "infill_16", "distinct"} <= set(metrics["mdlm"]) and "infill_4" not in metrics["mtp"]
    bits = metrics["mtp"]["left_to_right"], *(metrics["mdlm"][m] for m in ("bound", "left_by_filling"))
    assert 7 < min(bits) and max(bits) < 9
    monkeypatch.setattr(compare.train, "main", None)
    monkeypatch.setattr(evaluate, "measure", lambda *args: {"task": 0.5})
    run(*words)
    again = capsys.readouterr().out
    assert ": measuring" not in again and again.endswith(out[out.index("\n\n"):]), "a run was measured again"


def test_another_seed_budget_text_or_default_is_another_run(text, capsys, monkeypatch):
    """The time is estimated early."""
    run("--objectives", "clm", "--seeds", "1,2", "--budgets", "2,1", "--warmup_iters", "7")
    out = capsys.readouterr().out
    assert "[4/4] clm, 1 steps, seed 2: validation loss" in out and "After 1 steps" in out
    assert out.count("4 runs, about 1 min") == 1 and out.index("4 runs, about") < out.index("measuring")
    assert len({load_metrics(folder)["loss"] for folder in all_runs()}) == len(all_runs()) == 4
    Path(text).write_bytes(Path(text).read_bytes() + b"# more\n")
    run("--objectives", "clm")
    assert len(all_runs()) == 5, "the text of the file has changed"
    monkeypatch.setitem(OBJECTIVES, "clm", dataclasses.replace(OBJECTIVES["clm"], flag_defaults={"warmup_iters": 1}))
    flag = dataclasses.replace(OBJECTIVES["mlm"].flags["mask_rate"], default=0.2)
    monkeypatch.setitem(OBJECTIVES["mlm"].flags, "mask_rate", flag)
    run("--objectives", "clm")
    assert len(all_runs()) == 6, "a default of clm has changed; one of mlm does not matter"


def test_replay_measures_both_corpora_before_and_after(text, tmp_path, capsys):
    (tmp_path / "new.txt").write_text("int main() { return 0; }\n" * 400)
    run("--new_data", "new.txt", "--sweep", "replay=0,.25,scratch")
    assert "| replay=.25 |" in capsys.readouterr().out and os.path.exists("out/sweep-replay-clm.md")
    before, *others = all_runs()
    assert [[config["init_from"], *config["data"]] for config in all_runs().values()] == [
        ["", "text.txt"], [before, "new.txt:1"], [before, "new.txt:0.75", "text.txt:0.25"], ["", "new.txt:1"]]
    new, mix, scratch = map(load_metrics, others)
    assert new["old_before"] == mix["old_before"] != new["old"] and "old_before" not in scratch
    assert new["new"] < new["old_before"] and new["new"] < scratch["new"], "a run from scratch has half as many steps"


def test_a_run_starts_from_the_weights_of_another_objective(text, capsys, monkeypatch):
    i = TINY.index("--n_head")
    monkeypatch.setattr("conftest.TINY", TINY[:i] + TINY[i + 2:])
    run("--objectives", "mlm", "--sweep", "start=none,bart", "--first_steps", "3")
    out = capsys.readouterr().out
    assert "| start=none |" in out and "- start=none: n_head 2\n- start=bart: n_head 4\n" in out
    (_, none), (donor, first), (_, second) = all_runs().items()
    assert (first["objective"], first["max_iters"], first["data"]) == ("bart", 3, ["text.txt"])
    changed = {name for name in none if none[name] != second[name]} - {"out_dir"}
    assert changed == {"init_from", "init_step", "n_head"} and second["init_from"] == donor


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
    lines = Path(folder, "metrics.jsonl").read_bytes().splitlines(keepends=True)
    state = {"step": 1, "metrics_bytes": sum(map(len, lines[:3]))}
    torch.save(torch.load(f"{folder}/ckpt.pt", weights_only=True) | state, f"{folder}/ckpt.pt")
    os.remove(f"{folder}/measured.json")
    run("--objectives", "clm")
    assert list(all_runs()) == [folder] and load_checkpoint(folder)["step"] == 2


def edit_code(monkeypatch, file, old, new):  # as if this file of the repository had been edited
    source = (common.ROOT / file).read_text("utf-8")
    assert old in source
    monkeypatch.setattr(compare, "read_code", lambda: CODE | {file: common.read_statements(source.replace(old, new))})


def test_runs_and_figures_belong_to_the_code_that_made_them(text, capsys, refuses, monkeypatch):
    run("--objectives", "mlm")
    [folder] = all_runs()
    train = compare.train.main
    monkeypatch.setattr(compare.train, "main", None)
    edit_code(monkeypatch, "objectives.py", "shift = torch.randint(0", "shift = torch.randint(1")
    run("--objectives", "mlm")
    assert capsys.readouterr().out.count(": measuring") == 1
    monkeypatch.setattr(evaluate, "measure", lambda *args: {"task": 0.5})
    edit_code(monkeypatch, "experiments/score.py", "bits = 8.0", "bits = 9.0")
    run("--objectives", "mlm")
    assert load_metrics(folder)["task"] == 0.5, "not measured by the new evaluations"
    edit_code(monkeypatch, "objectives.py", "round(hp.mask_rate * T)", "round(hp.mask_rate * T) + 1")       # of mlm
    monkeypatch.setattr(compare.train, "main", train)
    refuses(f"{folder}: is older than objectives.py", run, "--objectives", "clm,mlm")
    refuses("Try another --out_dir, such as out-2", run, "--objectives", "mlm", "--sweep", "start=none")
    assert len(all_runs()) == 1, "clm was trained before the refusal"


def test_figures_outlive_the_weights(text, capsys, monkeypatch):
    run("--objectives", "mlm", "--sweep", "start=none,clm")
    capsys.readouterr()
    with monkeypatch.context() as m:
        m.setattr(compare.train, "main", None)
        for folder in all_runs():
            os.remove(f"{folder}/ckpt.pt")
            run("--objectives", "mlm", "--sweep", "start=none,clm")                 # best.pt is left
            os.remove(f"{folder}/best.pt")
        run("--objectives", "mlm", "--sweep", "start=none,clm", "--tasks_only")
        assert "measuring" not in capsys.readouterr().out
        edit_code(m, "experiments/score.py", "bits = 8.0", "bits = 9.0")
        run("--objectives", "mlm", "--sweep", "start=none,clm")
        assert capsys.readouterr().out.count("nats, measured by older code, since the weights are deleted\n") == 2
    run("--objectives", "clm")


def test_a_mixture_is_one_row_and_each_figure_is_of_its_first_member_that_has_it(text, capsys):
    name = "mlm:0.5+clm:0.5"
    run("--objectives", f"{name},clm", "--budgets", "4", "--tasks_only")
    assert f"| {name} (left side) |" not in capsys.readouterr().out
    mixture = next(folder for folder, config in all_runs().items() if config["objective"] == name.replace("+", ","))
    assert os.path.basename(mixture).startswith("mlm_0.5+clm_0.5-4-seed1-")
    records = map(json.loads, Path(mixture, "metrics.jsonl").read_text().splitlines())
    mlm, clm = (record for record in records if record.get("split") == "val" and record["step"] == 4)
    metrics = load_metrics(mixture, "measured_tasks.json")
    assert metrics["loss"] == mlm["loss"] and metrics["left_to_right"] == clm["bpb"] and "bound" not in metrics
    assert "second half" in metrics["task_heading"], "rows of 32 have no task of mlm"
    parts = [evaluate.count_flops(argparse.Namespace(**load_checkpoint(mixture)["config"] | {"objective": each}))
             for each in ("mlm", "clm")]
    assert metrics["tflop"] == pytest.approx(sum(parts) / 2 * 4 / 1e12)


def test_the_time_is_estimated_once_from_an_early_record_of_a_run(capsys):
    estimate = compare.make_estimator([argparse.Namespace(hp=argparse.Namespace(max_iters=100))] * 3)
    for step, seconds in (0, 1.0), (0, 1.0), (10, 4.3), (20, 99.0):                 # the first run has a single record
        estimate({"split": "train", "step": step, "seconds": seconds})
    assert capsys.readouterr().out == "3 runs, about 2 min, and the time to measure them\n", "300 steps of .39 s"


def plan(*words):  # -> cells
    return compare.plan_cells(*compare.parse_with_train_flags("", "", compare.FLAGS, set(), words))


def test_a_flag_goes_to_the_objectives_that_have_it(text):
    words = ["--objectives", "clm,mlm,mdlm", "--mask_rate", ".4", "--uniform_from", "1", "--data", text]
    for more, interval in ([], 200), (["--eval_interval", "7"], 7):
        cells = plan(*words, *more)
        assert [(cell.hp.mask_rate, cell.hp.uniform_from) for cell in cells[:3]] == [(0.3, 0.7), (0.4, 0.7), (0.3, 1)]
        assert cells[0].hp.eval_interval == interval, "not a fifth of the run"


def test_values_of_a_sweep_are_rows():
    """A switch has the values True and False. A + in a value stands for a comma."""
    cells = plan("--objectives", "clm", "--sweep", "doc_mask=True,False")
    assert [(cell.row, cell.hp.doc_mask) for cell in cells] == [("doc_mask=True", True), ("doc_mask=False", False)]
    cells = plan("--sweep", "bart_noise=mask,mask+permute")
    assert [cell.hp.bart_noise for cell in cells] == ["mask", "mask,permute"]
    assert [cell.row for cell in cells] == ["bart_noise=mask", "bart_noise=mask,permute"]
    assert {(cell.table, cell.hp.objective) for cell in cells} == {("sweep-bart_noise-bart", "bart")}


@pytest.mark.parametrize("flags, hint", [
    ("--sweep seed=1,2", "is not a setting"), ("--sweep mask_rate", "Try mask_rate"),
    ("--sweep mask_rate=2", "--mask_rate"), ("--sweep replay=x", "shares"), ("--sweep start=none,clam", "Try clm"),
    ("--objectives mlm --sweep replay=0", "clm"), ("--objectives mml", "Try mlm"), ("--seeds one", "--seed"),
    ("--seed 7", "itself"), ("--budgets 1e3", "--max_iters"), ("--data . --out_dir out", "inside"),
    ("--objectives clm --sweep block_size=64,200000", "200000"),
    ("--data short.txt --objectives clm --block_size 32", "50 bytes to validate on"),
    ("--first_steps 7", "--sweep start"), ("--out_dir text.txt/out", "text.txt/out: cannot be written"),
    ("--budget 2", "--budget"), ("--objectives clm --tau .1", "Try it with contrastive"),
    ("--sweep tau=.1 --objectives clm", "Try it with contrastive"),
    ("--objectives clm:0.5,mlm:0.5", "Try clm:0.5+mlm:0.5"), ("--sweep doc_mask=1 --objectives clm", "True,False")])
def test_bad_flags_are_refused_before_anything_runs(flags, hint, text, refuses):
    Path("short.txt").write_text("x" * 500)
    data = [] if "--data" in flags else ["--data", text]
    refuses(hint, compare.main, [*data, *flags.split()])
    assert not os.path.exists("out")


# ---- tables and the picture
def summarized(rows):  # as run_cell returns the metrics of runs
    return {name: {seed: run and run | evaluate.summarize(run) for seed, run in seeds.items()}
            for name, seeds in rows.items()}


def test_a_star_marks_what_is_worse_than_the_best_by_more_than_chance():
    """Pairs runs of the same seed: b's differences from a are .19, .21 and .2, c's -.2, .4 and .1."""
    assert not compare.find_worse({"a": {1: 1.0, 2: 1.0, 3: 4.0}, "b": {1: 1.5, 2: 1.51}}, False), "a is better"
    assert not compare.find_worse({"a": {1: 1.0, 2: 1.0}, "b": {1: 1.1, 2: 1.3}}, False), "two seeds are few"
    assert compare.find_worse({"a": {1: 1.0, 2: 1.0}, "b": {1: 1.1, 2: 1.1}, "c": {"-": 1.2}}, True) == {"a"}
    rows = {"a": {1: {"left_to_right": 2.0}, 2: {"left_to_right": 3.0}, 3: {"left_to_right": 9.0}, 4: {}},
            "b": {1: {"left_to_right": 2.19}, 2: {"left_to_right": 3.21}, 3: {"left_to_right": 9.2}},
            "c": {1: {"left_to_right": 1.8}, 2: {"left_to_right": 3.4}, 3: {"left_to_right": 9.1, "probe": 0.5}}}
    out = compare.tables(summarized(rows), {"five raw bytes": {"-": {"probe": 0.5}}})
    assert "|  | left to right | seeds |" in out and "| a | 4.667 ± 3.786 | 1 2 3 4 diverged |" in out
    assert "| b | 4.867 ± 3.787* | 1 2 3 |" in out and "| c | 4.767 ± 3.837 | 1 2 3 |" in out
    assert "| five raw bytes | 0.500 | - |" in out and "Try --seeds" not in out


def test_headings_name_the_unit_and_columns_that_do_not_fit_are_named():
    out = compare.tables({"nsp_weight=0": {1: {"loss": 2.0, "left_4": 3.0, "left_16": 3.0, "tflop": 1.0}}}, {})
    assert "| own loss (nats) | from the left: 4 (bits/byte) | from the left: 16 (bits/byte) | training: w" in out
    assert out.count("\n- from the left: ") == 1 and "Try --seeds" in out, "not one line for columns of a kind"
    assert "| <= 2.000 |" in compare.tables({"mdlm": {1: {"bound": 3.0, "old": 2.0}}}, {})
    assert all(metric.meaning for metric in compare.METRICS.values() if compare.heading_of(metric) in out)
    second = compare.tables({"clm": {1: dict.fromkeys(compare.METRICS, 1.0)}}, {}).partition("The rest:\n")[2]
    assert second.splitlines()[1].count("|") == 9 and " own task's baseline |" in second.splitlines()[1]
    assert "\ncurves.csv also has typos_corrected, typos_first, " in second and "tflop, seconds.\n" in second


CURVES = {n: {"clm": {1: {"left_to_right": 1 + 1 / n, "left_4": 3.0}, 2: {}}, "mlm": {1: {"infill_4": 2.0, "task": n}},
              "fim": {1: {"left_to_right": 3.0}, 2: {"left_to_right": 4.0}} if n == 10 else {1: {}}}
          for n in (100, 10)}


def test_the_tables_show_the_largest_budget_and_then_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "draw_panels", lambda panels, path: path)
    budgets = {n: summarized(rows) for n, rows in CURVES.items()}
    compare.write_report(str(tmp_path / "compare"), budgets, argparse.Namespace(sweep="", baseline=""), {})
    first, _, others = (tmp_path / "compare.md").read_text().partition("After 10 steps")
    assert "| clm (left side) | 1.010 | 3.00 |" in first and "1.100" not in first
    assert others.splitlines()[4:6] == ["| clm (left side) | 1.100 | 3.00 |  | 1 2 diverged |",
                                        "| mlm |  | 2.00 | 10.000 | 1 |"]
    head, *lines = csv.reader((tmp_path / "curves.csv").read_text().splitlines())
    assert head == ["objective", "steps", "seed", "metric", "value"] and len(lines) == 10
    assert ["clm", "10", "1", "left_to_right", "1.1"] in lines


@pytest.mark.parametrize("n_rows, error", [(6, 0.15), (17, 0.5)])
def test_chance_gives_as_many_stars_as_the_note_says(n_rows, error):
    """Also because it makes one of the rows the best."""
    found = []
    for values in torch.randn(1800 // n_rows, n_rows, 3, generator=make_rng("equal rows")).tolist():
        rows = {name: dict(enumerate(by_seed)) for name, by_seed in enumerate(values)}
        found.append(len(compare.find_worse(rows, False)))
    assert statistics.fmean(found) == pytest.approx(compare.stars_by_chance(n_rows, 3), abs=error)


def test_differences_are_paired_by_seed(monkeypatch):
    rows = summarized({"a": {1: {"left_to_right": 1.0}, 2: {"left_to_right": 2.0}, 3: {"left_to_right": 9.0}},
                       "b": {1: {"left_to_right": 1.1}, 2: {"left_to_right": 2.3}, 3: {}},
                       "c": {1: {"bound": 1.0, "left_4": 2.0}, 2: {"bound": 2.0, "left_4": 2.0}},
                       "d": {1: {"left_to_right": 1.0, "left_4": 1.0}, 2: {"left_to_right": 2.0, "left_4": 1.0}}})
    lines = compare.difference_lines(rows, "")
    assert lines[0] == ("", "left to right", "hole of 4 bytes") and len(lines) == 7, "every two of four rows"
    assert lines[1] == ("b - a", "+0.200 ± 1.270", ""), "12.7 times the standard error of .1"
    assert ("d - c", "", "-1.00 ± 0.00") in lines, "a bound is not compared"
    assert [line[0] for line in compare.difference_lines(rows, "b")[1:]] == ["a - b", "c - b", "d - b"]
    assert not compare.difference_lines(rows | {"e": {}}, ""), "more than four rows"
    assert "| b - a | +0.200" in compare.tables(rows, {}) and "Differences" not in compare.tables({"a": rows["a"]}, {})


def test_shares_of_minimal_pairs_and_their_errors():
    rows = {"a": {1: {"points": [1, 1, 1, 0], "score": "exact"}, 2: {"points": [1, 1, 1, 0], "score": "exact"}},
            "b": {1: {"points": [1, 0, 1, 0], "score": "bound"}, 2: {"points": [1, 0, 0, 0], "score": "bound"}},
            "c": {1: {"loss": 1.0}}}
    # shares of b .5 and .25; its pairs 1, 0, .5, 0; differences from a 0, 1, .5, 0
    error = (0.171875 / 4 + 0.03125 / 2) ** 0.5
    assert compare.pairs_lines(rows)[1:] == [
        ["a", "0.750 ± 0.217", "", "exact", "1 2"],
        ["b", f"0.375 ± {error:.3f}", f"0.375 ± {error:.3f}", "bound", "1 2"]]


def test_pairs_are_scored_once_for_a_file_and_its_code(text, capsys, refuses, monkeypatch):
    pairs = "a b\ta b\nx = 1\tx 1 =\n"
    Path("pairs.txt").write_text(pairs)
    scored = []
    score_pairs = compare.score_pairs
    monkeypatch.setattr(compare, "score_pairs", lambda *args, **how: scored.append(args) or score_pairs(*args, **how))
    words = ["--objectives", "clm,nsp,rotation", "--pairs", "pairs.txt"]
    run(*words)
    out = capsys.readouterr().out
    assert len(scored) == 2 and "| pseudo-log-likelihood | 1 |" in out and "--pairs FILE" not in out
    assert len(re.findall(",pairs,0.|,pairs,1", Path("out/curves.csv").read_text())) == 2
    run(*words)
    assert len(scored) == 2 and ": measuring" not in capsys.readouterr().out
    Path("pairs.txt").write_text(pairs + "yes\tno\n")
    run(*words)
    assert len(scored) == 4 and ": measuring" not in capsys.readouterr().out
    Path("pairs.txt").write_text(pairs + "a\t" + "b" * 31)
    refuses("longer than 30", run, "--objectives", "clm,mlm,nsp", "--pairs", "pairs.txt")
    assert len(os.listdir("out/runs")) == 3, "mlm was trained before the refusal"
    run("--objectives", "clm")
    assert capsys.readouterr().out.endswith("--pairs FILE, such as --pairs docs/pairs-novel.jsonl\n")


# ---- the picture
def test_the_picture_shows_every_seed_over_the_budgets_or_the_rows(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib.figure")
    saved = []
    monkeypatch.setattr(matplotlib.Figure, "savefig", lambda figure, path, **how: saved.append(figure))
    budgets = {n: summarized(rows) for n, rows in CURVES.items()}
    metrics = {"bits": compare.SUMMARY["bits"], "hole_4": compare.SUMMARY["hole_4"], "probe": compare.METRICS["probe"]}
    compare.draw_panels([compare.make_panel(*item, budgets) for item in metrics.items()], "compare.png")
    bits, hole = saved[0].axes
    assert bits.get_title() == "left to right (less is better)" and bits.get_ylabel() == "bits/byte"
    assert bits.get_xlabel() == "steps" and [text.get_text() for text in bits.get_xticklabels()] == ["10", "100"]
    assert [line.get_xydata().tolist() for line in bits.lines] == [[[0, 1.1], [1, 1.01]], [[0, 3.5]]]
    dots = [dots.get_offsets().tolist() for dots in bits.collections]
    assert dots == [[[0, 1.1], [1, 1.01]], [[0, 3.0], [0, 4.0]]], "not a dot for each seed"
    assert [text.get_text() for text in saved[0].legends[0].get_texts()] == ["clm", "clm (left side)", "mlm"]
    assert [line.get_linestyle() for line in hole.lines] == ["--", "-"]
    one = compare.make_panel("bits", compare.SUMMARY["bits"], {10: budgets[10]})
    assert one.xs == ["clm", "fim"] and one.lines == {"clm": {"clm": [1.1]}, "fim": {"fim": [3.0, 4.0]}}
    assert compare.draw_panels([one._replace(lines={})], "x.png").startswith("no picture")
