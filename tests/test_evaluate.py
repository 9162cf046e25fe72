"""Each evaluation gives the right figure in a case made by hand. Also the table of written text."""
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import WRITE_HOLES, randomized, settings

import data
import sample
from data import EOT, MASK, from_bytes, make_rng, open_corpus, to_bytes
from experiments import evaluate
from objectives import OBJECTIVES, Search

SENTENCES = from_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
CLEAN = SENTENCES[:128].tolist()


def ids(*shape):
    return torch.randint(1, 256, shape, generator=make_rng("ids"))


@torch.no_grad()
def measure(evaluation, name, T=64, text=SENTENCES, use=None, **changes):
    """Evaluates a random model. use (mode, function) replaces the objective's uses."""
    hp = settings(name, T, **changes)
    objective = OBJECTIVES[name]
    if use:
        objective = dataclasses.replace(objective, uses=dict([use]))
    model = randomized()
    model.heads.update(objective.heads(model.config, hp))
    return evaluation(model.eval(), objective, hp, text)


# ---- bits per byte of a middle
@pytest.mark.parametrize("mode", ["continue", "fill", "infill"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_byte_of_a_middle_is_predicted_from_the_sides_and_the_middle_before_it(name, mode):
    """Otherwise the bits would not add up to those of the middle. The right side is not read by mode continue."""
    use = OBJECTIVES[name].uses.get(mode)
    if mode == "infill" and use and not use.prompt:
        return                                  # fills MASKs
    objective = dataclasses.replace(OBJECTIVES[name], uses={mode: use})
    net, x, a, m = randomized().requires_grad_(False), ids(2, 20), 8, 4

    def predict(x, objective=objective):
        logits_of = evaluate.left_logits if mode == "continue" else evaluate.infill_logits
        return logits_of(net, objective, settings(name, 64), x, a, m)

    def changed(i):  # -> [bool]: do the logits of each byte of the middle change if byte i of the row does?
        other = x.clone()
        other[:, i] = 1 + other[:, i] % 255
        return ((predict(other) - predict(x)).abs().amax((0, 2)) > 1e-6).tolist()
    n = m + (mode == "infill")                  # the end is predicted, too
    for i in range(m if use else 0):
        assert changed(a + i) == [j > i for j in range(n)]
        assert all(changed(a - 1)) and changed(a + m) == [mode != "continue"] * n
    if use and objective.numbering and mode == "infill":
        assert not torch.allclose(predict(x), predict(x, dataclasses.replace(objective, numbering=None)))


def test_bits_of_bytes_do_not_depend_on_how_a_hole_ends():
    """Otherwise objectives that end a hole with EOT, which is a byte, would need more bits than others."""
    logits, x = torch.zeros(2, 3, 512), ids(2, 3)
    logits[..., EOT] = 9.0
    logits[..., 256:] = 9.0
    logits[0].scatter_(-1, x[0, :, None], 99.0)
    assert evaluate.bits_per_byte(logits, x) == pytest.approx(math.log2(255) / 2, abs=1e-5)
    x[0] = EOT
    assert evaluate.bits_per_byte(logits, x) == pytest.approx(math.log2(255), abs=1e-5), "a NUL does not count"


@pytest.mark.parametrize("name", WRITE_HOLES)
def test_bits_with_the_end_are_those_of_all_that_infilling_writes(name):
    net, x, a, m = randomized().requires_grad_(False), ids(1, 20), 8, 4
    objective = OBJECTIVES[name]
    hp = settings(name, 64)
    use = objective.uses["infill"]
    row, P = use.prompt([x[0, :a].tolist(), x[0, a + m:].tolist()], m, hp)
    bits = 0.0
    for right in [*([i] for i in x[0, a:a + m].tolist()), [*{use.stop_ids[0], EOT}]]:
        now = torch.tensor([row])
        at = objective.numbering(now, torch.tensor([P]), hp) if objective.numbering else None
        bits -= math.log2(net.logits(net(now, P, positions=at))[0, -1].softmax(0)[right].sum())
        row = row + right
    logits = evaluate.infill_logits(net, objective, hp, x, a, m)
    assert evaluate.ended_bits(logits, x[:, a:a + m], use.stop_ids[0]) == pytest.approx(bits / m, rel=1e-4)


# ---- replaced bytes
@pytest.mark.parametrize("name", ["clm", "mlm"])
def test_replaced_bytes_are_found_by_a_model_that_knows_the_text(name):
    class Knows:  # knows that each letter follows the one on the left; repeats a byte that it sees
        def __call__(self, row, prefix):
            after = (row - 96) % 26 + 97
            return after if prefix == 0 else torch.where(row == MASK, after.roll(1, 1), row)

        def logits(self, row):
            return F.one_hot(row, 512).float()
    text = torch.arange(97, 123).repeat(40).byte()
    found = evaluate.eval_corruption(Knows(), OBJECTIVES[name], settings(name, 64), text)
    assert 0.8 < found["replaced_auc"] < 1, "a letter after a replaced one is a surprise, too"


def test_a_tenth_of_the_bytes_is_replaced_by_bytes_as_frequent_as_in_the_text(monkeypatch):
    monkeypatch.setattr(evaluate, "windows", lambda *args: torch.full((64, 62), ord("b")))
    seen = []
    use = "mark", lambda model, x: seen.append(x) or (x != ord("b")).float()
    found = measure(evaluate.eval_corruption, "electra", text=from_bytes(b"aabc" * 100), use=use)
    assert found == {"replaced_auc": 1.0}, "a byte that is replaced by itself is not replaced"
    share = [float((seen[0] == ord(letter)).float().mean()) for letter in "ac"]
    assert share == [pytest.approx(0.05, abs=0.01), pytest.approx(0.025, abs=0.01)]


def test_auc_is_the_share_of_pairs_in_the_right_order():
    scores = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.9])
    assert evaluate.auc(scores, torch.tensor([0, 0, 1, 1, 0])) == 3.5 / 6, "a tie counts half"
    assert evaluate.auc(scores, torch.zeros(5)) == 0.5, "one class is missing"


# ---- tasks
def test_a_typo_is_found_by_a_model_that_knows_the_text():
    windows = SENTENCES.long().unfold(0, 64, 1)[:45]            # all windows of this text

    def differs(model, x):  # -> (N, 64): from the window that differs in the fewest bytes
        differences = windows != x[:, None]                     # (N, 45, 64)
        return differences[torch.arange(len(x)), differences.sum(2).argmin(1)].float()
    found = measure(evaluate.eval_typos, "electra", use=("mark", differs))
    assert found["task"] == 1 and found["task_baseline"] > 0.95         # few typos form a pair that the text has


@pytest.mark.parametrize("shift, recall", [(0, 1), (1, 0)])
def test_retrieval_counts_the_halves_whose_nearest_is_their_own(shift, recall, monkeypatch):
    x = torch.arange(256)[:, None].expand(-1, 32)
    monkeypatch.setattr(evaluate, "windows", lambda *args: torch.cat((x, (x + shift) % 256), dim=1))
    search = Search(lambda model, x: F.one_hot(x[:, 0], 256).float(), piece_bytes=None)
    found = measure(evaluate.eval_retrieval, "contrastive", use=("search", search))
    assert found == {"task": recall, "task_baseline": recall}


def test_edit_distance_is_levenshteins():
    for a, b, want in ((b"", b"abc", 3), (b"abc", b"abc", 0), (b"kitten", b"sitting", 3), (b"ab", b"ba", 2)):
        assert evaluate.edit_distance(a, b) == evaluate.edit_distance(b, a) == want


@pytest.mark.parametrize("name, evaluation, T, metric", [
    ("bart", "eval_repairs", 64, "task"), ("bart", "eval_replaced", 256, "replaced_left"),
    ("mlm", "eval_replaced", 256, "replaced_left")])
@pytest.mark.parametrize("is_repaired, left", [(False, 1.0), (True, 0.0)])
def test_copying_repairs_nothing_and_the_clean_text_everything(
        name, evaluation, T, metric, is_repaired, left, monkeypatch):
    def repair(model, objective, noisy, *args, **how):
        assert 0 < sum(byte != ord("a") for byte in noisy) < 20
        return [ord("a")] * len(noisy) if is_repaired else [i for i in noisy if i != EOT]

    def suggest_edits(model, use, row, T, error_rate):
        assert error_rate == 0.05
        return [sample.Edit(0, len(row), repair(model, None, row), 1.0)]
    monkeypatch.setattr(evaluate.sample, "repair", repair)
    monkeypatch.setattr(evaluate.sample, "suggest_edits", suggest_edits)
    text = b"a" * 999 if is_repaired else 9 * (b"a" * 99 + b"\0")
    found = measure(getattr(evaluate, evaluation), name, T, text=from_bytes(text), bart_noise="replace")
    assert found[metric] == left and found.get("task_baseline", 1) == 1


@pytest.mark.parametrize("edits, restored, clean_edits", [
    (lambda row: [sample.Edit(0, len(row), CLEAN, 1.0)], 1.0, 1 / 128), (lambda row: [], 0.0, 0.0),
    (lambda row: [sample.Edit(0, 0, [], 1.0)] * 2 if len(row) == 128 else [sample.Edit(0, len(row), CLEAN, 1.0)], 0.5,
     2 / 128)])
def test_a_typo_counts_if_the_whole_window_is_restored(edits, restored, clean_edits, monkeypatch):
    """The last row: of the four kinds of typos, two change the length of the text."""
    monkeypatch.setattr(evaluate, "windows", lambda *args: torch.tensor([CLEAN] * 4))
    monkeypatch.setattr(evaluate.sample, "suggest_edits", lambda model, use, row, T, error_rate: edits(row))
    found = measure(evaluate.eval_corrections, "mlm", 128)
    assert found["typos_restored"] == restored and found["clean_edits"] == clean_edits
    assert {name for name in found if name.startswith("restored_")} == {
        "restored_replaced", "restored_missing", "restored_extra", "restored_swapped"}


def test_a_hole_counts_if_it_is_restored_after_trimming(monkeypatch):
    rows = torch.tensor([[*b"abcdefghijklmnopqrstuvwxyz" * 9][:160]] * 96 + [[32] * 160] * 32)

    def infill(model, objective, hp, ids, P, holes, most, *rest, temperature):      # writes one byte too many
        assert most == 20 and temperature == 0, "as sample.py fills them"
        return ([[32] * 5], True) if ids[0] == 32 else ([[*rows[0, 78:82].tolist(), 0]], False)
    monkeypatch.setattr(evaluate, "windows", lambda *args: rows)
    monkeypatch.setattr(evaluate.sample, "infill", infill)
    monkeypatch.setattr(evaluate.sample, "trim_to_suffix", lambda *args: args[4][:4 + (args[3][0] == 32)])
    found = measure(evaluate.eval_infill_exact_match, "span", 256)
    assert found == {"task": 0.75, "task_baseline": 0.25, "ends": 0.25}


@pytest.mark.parametrize("name, T", [("mlm", 256), ("ul2", 512), ("xlnet", 256), ("xlnet", 512)])
def test_holes_of_all_objectives_are_in_texts_of_the_same_length(name, T, monkeypatch):
    def middle_logits(predict, model, objective, hp, x, a, m):
        assert x.size(1) == 120
        return x[:, :m]
    monkeypatch.setattr(evaluate, "middle_logits", middle_logits)
    monkeypatch.setattr(evaluate, "bits_per_byte", lambda logits, ids: 0.0)
    assert "infill_64" in measure(evaluate.eval_infilling, name, T)


@pytest.mark.parametrize("name, chance", [("nsp", 1 / 2), ("rotation", 1 / 32)])
def test_a_random_model_has_the_accuracy_of_chance(name, chance):
    found = measure(evaluate.eval_accuracy, name, 32)
    assert found["task_baseline"] == chance and abs(found["task"] - chance) < 0.1
    assert measure(evaluate.eval_accuracy, "clm", 32, use=("follow", None)) == {}, "has no figure named accuracy"


def test_lines_count_by_their_bytes_and_repeated_lines_are_not_distinct(monkeypatch):
    rows = torch.tensor([[*b"cut\nx = 1\n\ny = (2\nz = 3\nit's\nw = 4)\na $ b\nx = 1\ncut"]])
    assert evaluate.line_figures(rows) == (15 / 36, 6 / 7, 7), "only x = 1, z = 3, x = 1 tokenize"
    monkeypatch.setattr(evaluate, "write", lambda m, o, hp, order, x, g: (
        torch.tensor([*b"$\n" * 16, *b"a\n" * 64]).repeat(len(x), 1)))
    found = measure(evaluate.eval_tokenizable_lines, "mdlm", 160)
    assert found["task"] == 1 and found["distinct"] < 0.05, "one letter a line"
    assert measure(evaluate.eval_tokenizable_lines, "mlm", 160) == {}, "not trained on rows of MASKs"


def test_bits_of_a_second_half_and_by_filling_are_per_byte(monkeypatch):
    monkeypatch.setattr(evaluate, "middle_logits",
                        lambda predict, model, objective, hp, x, a, m: F.one_hot(x[:, a:a + m], 512) * 99.0)
    monkeypatch.setattr(evaluate, "score_by_filling", lambda model, row, n, fill: 8 + 2.0 * 63)
    found = measure(evaluate.eval_second_half, "clm")
    size = min(len(module.compress(to_bytes(SENTENCES))) for module in (evaluate.bz2, evaluate.lzma))
    assert found == {"task": pytest.approx(0, abs=1e-5), "task_baseline": 8 * size / len(SENTENCES)}
    assert measure(evaluate.eval_filling_in_order, "mlm") == {"left_by_filling": 2.0}


# ---- probes
def test_states_are_read_under_the_objectives_own_mask():
    net, x, T = randomized().requires_grad_(False), ids(3, 24), 12
    other = x.clone()
    other[:, 8] = 1 + other[:, 8] % 255
    for name, first in (("clm", 8), ("mlm", 0), ("hybrid", 0)):  # byte 8 is read only in the first of two rows
        a, b = (evaluate.layer_states(net, OBJECTIVES[name], settings(name, T), z) for z in (x, other))
        assert (a - b)[1].abs().amax((0, 2)).gt(0).tolist() == [first <= i < T for i in range(24)]


def test_the_probe_of_bytes_is_scored_on_held_out_documents(monkeypatch):
    documents = {str(i): b"".join(b"name%d_%d = %d\n" % (i, k, 7 * k) for k in range(60)) for i in range(30)}
    documents |= {"3": b"def (" * 99, "4": b"x = 1\n"}          # not Python; too short
    for module in (data, evaluate):
        monkeypatch.setattr(module, "read_stdlib", lambda: documents)
    probe = evaluate.byte_probe(64)
    [source] = open_corpus(["stdlib"])
    for row, part in zip(probe.x, probe.part[:, 0]):
        assert bytes(row.tolist()) in to_bytes(source["val" if part == evaluate.PROBE_TEST else "train"])
    assert [int((probe.part[:, 0] == part).sum()) for part in range(3)] == [3 * 19, 3 * 6, 9 * 3]


def test_bytes_have_the_class_of_their_token():
    def classes(text):
        return "".join(" kxscno"[c] for c in evaluate.byte_classes(text).tolist())
    assert classes(b"if x1 == 'a': # b\n") == "kk xx oo ssso ccc "
    assert classes(b'def e(x):\n  return 1.5, """two\nlines"""\n') == "kkk xoxoo   kkkkkk nnno sssssssssssssss "
    assert evaluate.byte_classes(b"def (") is None and evaluate.byte_classes(b"\xff") is None


def test_a_layer_is_fitted_chosen_and_scored_on_different_bytes_and_rare_classes_count_as_much():
    y, part = torch.arange(900) % 2, torch.arange(900) // 2 % 3
    noise = torch.randn(900, 1, generator=make_rng("layers"))

    def layer(*signs):  # shows the class with this sign in PROBE_TRAIN, PROBE_VAL, PROBE_TEST; 0: not at all
        sign = torch.tensor(signs)[part][:, None]
        return torch.where(sign == 0, noise, sign * ((2.0 * y - 1)[:, None] + 0.1 * noise))
    assert evaluate.probe_accuracy(torch.stack((noise, layer(1.0, 1.0, 1.0))), y, part) > 0.95
    both = torch.stack((layer(1.0, 1.0, 0.0), layer(1.0, 0.0, 1.0)))
    assert evaluate.probe_accuracy(both, y, part) < 0.7, "the layer was chosen on PROBE_TEST"
    assert evaluate.probe_accuracy(layer(-1.0, 9.0, 1.0)[None], y, part) < 0.1, "the layer was fitted on PROBE_VAL"
    rare = (torch.arange(900) // 6 % 15 == 0).long()
    assert evaluate.probe_accuracy((2 * rare[:, None] + noise)[None], rare, part) > 0.75


# ---- written text
@pytest.mark.parametrize("name, order", [("clm", "left to right"), ("ul2", "left to right"), ("mdlm", "ancestral")])
def test_writing_keeps_the_prompt_and_reads_nothing_else(name, order):
    x = ids(3, 76)
    args = randomized(), OBJECTIVES[name], settings(name, 80), order
    written = evaluate.write(*args, x, make_rng("a"), steps=3)
    assert written.shape == x.shape and (written[:, :32] == x[:, :32]).all() and (written < 256).all()
    again = evaluate.write(*args, F.pad(x[:, :32], (0, 44), value=7), make_rng("a"), steps=3)
    assert torch.equal(written, again), "bytes after the prompt are read"
