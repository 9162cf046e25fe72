import dataclasses
import glob
import lzma
import math
import os

import pytest
import torch
import torch.nn.functional as F
from conftest import randomized, settings

import run
from data import CLS, EOT, MASK, MODE_R, MODE_S, MODE_X, SENTINEL, SEP, document_ids, from_bytes, make_rng
from data import read_documents, split_documents, to_bytes
from experiments import compare, evaluate
from objectives import OBJECTIVES, Continue, Fill, Infill, Mark, Repair, Search, find_use, trained_use


def ids(*shape, seed=0):
    return torch.randint(1, 256, shape, generator=make_rng(f"ids {seed}"))


def with_use(name, use):  # -> the objective with that use alone
    return dataclasses.replace(OBJECTIVES[name], uses=(use,))


def sentences():
    return from_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)


def score_and_baseline(evaluate_task, objective, text, **changes):
    hp = settings(objective.name, 64, **changes)
    with torch.no_grad():
        figures = evaluate_task(run.build(hp), objective, hp, text)
    return figures["score"], figures["baseline"]


# ---- tasks

def test_a_mark_is_right_where_the_letter_was_replaced():
    windows = sentences().long().unfold(0, 64, 1)[:45]          # all that there are

    def replaced(model, x):
        off = windows != x[:, None]                             # (N, 45, 64)
        return off[torch.arange(len(x)), off.sum(2).argmin(1)].float()

    def opposite(model, x):
        return -replaced(model, x)
    right, baseline = score_and_baseline(evaluate.eval_typos, with_use("electra", Mark(replaced)), sentences())
    assert right == 1
    assert baseline > 0.95                      # of the two pairs that no other text has it takes the byte between
    wrong, _ = score_and_baseline(evaluate.eval_typos, with_use("electra", Mark(opposite)), sentences())
    assert wrong < 0.05


def test_recall_is_1_if_the_passage_is_recognized_and_chance_if_not(monkeypatch):
    monkeypatch.setattr(evaluate, "windows", lambda text, n, count, key: torch.arange(256)[:, None].expand(-1, n))

    def recognize(model, x):
        return F.one_hot(x[:, 0], 256).float()

    def constant(model, x):
        return torch.ones(len(x), 2)
    known = score_and_baseline(evaluate.eval_retrieval, with_use("contrastive", Search(recognize)), None)
    assert known == (1, 1), "here the bytes alone suffice"
    score, _ = score_and_baseline(evaluate.eval_retrieval, with_use("contrastive", Search(constant)), None)
    assert score == pytest.approx(1 / 256)


@pytest.mark.parametrize("a, b, want", [("", "abc", 3), ("abc", "abc", 0), ("kitten", "sitting", 3), ("ab", "ba", 2)])
def test_edit_distance_is_levenshteins(a, b, want):
    assert evaluate.edit_distance(a.encode(), b.encode()) == want
    assert evaluate.edit_distance(b.encode(), a.encode()) == want


def test_a_repair_that_copies_leaves_1(monkeypatch):
    def generate(model, row, *rest, positions, **how):
        assert how == {"temperature": 0}, "as sample.py repairs"
        return iter(row[0, :-1])
    monkeypatch.setattr(evaluate.sample, "generate", generate)
    assert score_and_baseline(evaluate.eval_repairs, OBJECTIVES["bart"], sentences()) == (pytest.approx(1), 1)


def test_a_repair_in_place_is_measured_against_the_window(monkeypatch):
    def corrupt(x, g, hp):
        return dict(inp=x.masked_fill(torch.arange(x.size(1)) < 2, 1), tgt=x, prefix=x.size(1))
    objective = dataclasses.replace(OBJECTIVES["mlm"], corrupt=corrupt, uses=(Repair(in_place=True),))
    monkeypatch.setattr(evaluate.sample, "repair", lambda model, objective, noisy, *rest, **how: [2, *noisy[1:]])
    assert score_and_baseline(evaluate.eval_repairs, objective, sentences()) == (1, 1), "both bytes are still wrong"


def test_text_without_noise_has_no_repair_figure():
    hp = settings("bart", 64, bart_noise="permute")
    assert evaluate.eval_repairs(randomized(), OBJECTIVES["bart"], hp, from_bytes(b"word " * 400)) == {}


def test_a_hole_counts_if_it_is_restored_after_trimming(monkeypatch):
    rows = [[*b"abcdefghijklmnopqrstuvwxyz" * 9][:160]] * 96 + [[32] * 160] * 32
    monkeypatch.setattr(evaluate, "windows", lambda *args: torch.tensor(rows))

    def infill(model, objective, hp, ids, P, holes, most, *rest, **how):            # blanks end one too late
        assert most in (5 * 4, 5 * 16)
        ended = (ids[0] == 32) == (most == 5 * 4)
        assert how["temperature"] == 0, "as sample.py fills them"
        return [[32] * 5 if ids[0] == 32 else [*b"abcdx"]], ended
    monkeypatch.setattr(evaluate.sample, "infill", infill)
    monkeypatch.setattr(evaluate.sample, "trim_to_suffix",
                        lambda m, o, hp, left, middle, right: middle[:4 + (left[0] == 32)])
    found = evaluate.eval_infill_exact_match(randomized(), OBJECTIVES["span"], settings("span", 256), None)
    assert found == {"score": 0.75, "baseline": 0.25, "ends": 0.75}
    assert evaluate.eval_infill_exact_match(randomized(), OBJECTIVES["span"], settings("span", 127), None) == {}


def test_the_second_half_is_predicted_from_the_first(monkeypatch):
    """A model to which all bytes are alike needs log2(255) bits; the baseline is lzma's."""
    text = sentences()
    score, baseline = score_and_baseline(evaluate.eval_second_half, OBJECTIVES["clm"], text)
    assert score == pytest.approx(math.log2(255), abs=1e-4)
    assert baseline == 8 * len(lzma.compress(bytes(text))) / len(text)
    seen = []
    monkeypatch.setattr(evaluate, "left_logits", lambda m, o, hp, x, a, n: seen.append((x.shape, a, n)))
    assert evaluate.eval_second_half(randomized(), OBJECTIVES["prefix"], settings("prefix", 64), text) == {}
    assert seen == [((4 * evaluate.ROWS, 60), 30, 30)]


@pytest.mark.parametrize("name, chance", [("nsp", 1 / 2), ("rotation", 1 / 64)])
def test_an_untrained_model_answers_512_rows_by_chance(name, chance, monkeypatch):
    """Its heads start at zero, so that all answers of rotation are alike."""
    n_rows = []

    def draw_batch(objective, corpus, split, B, key, hp):
        n_rows.append(B)
        return real(objective, corpus, split, B, key, hp)
    real = evaluate.train.draw_batch
    monkeypatch.setattr(evaluate.train, "draw_batch", draw_batch)
    score, baseline = score_and_baseline(evaluate.eval_accuracy, OBJECTIVES[name], sentences())
    assert sum(n_rows) == 512
    assert baseline == chance
    assert abs(score - chance) < 0.1


def test_lines_are_weighed_by_their_bytes_and_repeats_are_not_distinct():
    rows = torch.tensor([[*b"cut\nx = 1\n\ny = (2\nz = 3\nit's\nx = 1\ncut"]])
    share, distinct, n_lines = evaluate.line_figures(rows)
    assert share == 15 / 25, "x = 1, z = 3, x = 1 tokenize; y = (2 and it's do not"
    assert distinct == 4 / 5
    assert evaluate.line_figures(torch.tensor([[*b"no whole line"]])) == (0, 0, 0)
    long_good_line = torch.tensor([[*b"\nfirst = second + third\nit's\n"]])
    assert evaluate.line_figures(long_good_line)[0] > 0.8, "by lines it would be half"


def test_a_model_that_writes_one_letter_a_line_is_seen_through(monkeypatch):
    with open(evaluate.__file__, "rb") as f:
        text = from_bytes(f.read())

    def fill(model, gaps, *args, **how):
        line = torch.tensor([*b"a\n"]).repeat(gaps.size(1))[:gaps.size(1)]
        return torch.where(gaps == MASK, line, gaps)
    monkeypatch.setattr(evaluate.sample, "fill", fill)
    found = evaluate.eval_tokenizable_lines(None, OBJECTIVES["mdlm"], settings("mdlm", 256), text)
    assert found["score"] > 0.99 and found["distinct"] < 0.05
    assert 0.5 < found["held_out"] < 1 and found["held_out_distinct"] > 0.5, "what a text reaches stands beside it"


def test_lines_drawn_byte_by_byte_are_worse_than_lines_of_a_text(monkeypatch):
    with open(evaluate.__file__, "rb") as f:
        text = from_bytes(f.read())
    monkeypatch.setattr(evaluate.sample, "fill", lambda *args, **how: evaluate.windows(text, 256, 128, "lines"))
    found = evaluate.eval_tokenizable_lines(None, OBJECTIVES["mdlm"], settings("mdlm", 256), text)
    assert found["score"] > found["baseline"] + 0.2
    assert found["score"] == found["held_out"]
    lines = evaluate.eval_tokenizable_lines
    assert lines(None, OBJECTIVES["mdlm"], settings("mdlm", 64), text) == {}, "rows are too short"
    assert lines(None, OBJECTIVES["mlm"], settings("mlm", 256), text) == {}, "not trained at any rate"


# ---- bits per byte of a middle

@pytest.mark.parametrize("predict", [evaluate.infill_logits, evaluate.left_logits])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_model_sees_the_byte_that_it_fills(name, predict):
    """Nor those after it in the middle; each sees the left side, and the right one where it is given."""
    net, hp, x, a, m = randomized().requires_grad_(False), settings(name, 64), ids(2, 20), 8, 4
    objective = OBJECTIVES[name]
    base = predict(net, objective, hp, x, a, m)
    can_fill = trained_use(objective, Fill, hp) or trained_use(objective, Infill, hp)
    both_sides = predict is evaluate.infill_logits
    assert (base is not None) == bool(can_fill if both_sides else trained_use(objective, Continue, hp))
    if base is None:
        return
    assert base.shape == (2, m, 512)

    def changed(i):  # which of the m positions' logits move when byte i of the row does
        other = x.clone()
        other[:, i] = 1 + other[:, i] % 255
        moved = predict(net, objective, hp, other, a, m) - base
        return (moved.abs().amax((0, 2)) > 1e-6).tolist()
    for i in range(m):
        assert changed(a + i) == [j > i for j in range(m)]
    assert all(changed(a - 1)) and changed(a + m) == [both_sides] * m


def test_holes_are_filled_at_their_positions():
    net, hp, x, span = randomized(), settings("span", 64), ids(1, 20), OBJECTIVES["span"]
    prompt, P = find_use(span, Infill).prompt([x[0, :8].tolist(), x[0, 12:].tolist()], 4, hp)
    row, prefix = torch.tensor([prompt + x[0, 8:11].tolist()]), torch.tensor([P])
    want = net.logits(net(row, prefix, positions=span.positions(row, prefix, hp)))[:, -4:]
    torch.testing.assert_close(evaluate.infill_logits(net, span, hp, x, 8, 4), want, atol=1e-4, rtol=1e-4)


X = ids(1, 6)
LEFT, (Y, _), RIGHT = X[0, :2].tolist(), X[0, 2:4].tolist(), X[0, 4:].tolist()


class Recorder:
    """A model whose logits point at the byte that it reads; keeps what it was called with."""

    def __init__(self):
        self.calls = []                         # (ids of the first row, its prefix, its document ids)

    def __call__(self, row, prefix=0, doc=None, positions=None):
        P = prefix if isinstance(prefix, int) else int(prefix[0])
        self.calls.append((row[0].tolist(), P, None if doc is None else doc[0].tolist()))
        return F.one_hot(row, 512).float()

    def logits(self, h):
        return h


def asked(name, predict=evaluate.infill_logits, **changes):  # -> ids of the last pass, its prefix, where bytes are read
    net = Recorder()
    logits = predict(net, OBJECTIVES[name], settings(name, 64, **changes), X, 2, 2)
    return None if logits is None else (*net.calls[-1][:2], logits.argmax(-1)[0].tolist())


def test_rows_are_laid_out_as_in_training():
    masked = [*LEFT, Y, MASK, *RIGHT]
    spans = [*LEFT, SENTINEL, *RIGHT, SENTINEL + 1, SEP, SENTINEL, Y]
    want = {"mlm": (masked, 6, [MASK, MASK]), "nsp": ([CLS, *masked, SEP], 8, [MASK, MASK]),
            "hybrid": ([EOT, *masked], 7, [LEFT[-1], Y]), "ul2": ([MODE_R, *spans], 8, [SENTINEL, Y]),
            "bart": ([*LEFT, MASK, *RIGHT, SEP, *LEFT, Y], 6, [LEFT[-1], Y])}
    assert {name: asked(name) for name in want} == want
    assert asked("clm", evaluate.left_logits) == ([*LEFT, Y], 0, [LEFT[-1], Y])
    assert asked("prefix", evaluate.left_logits) == ([*LEFT, Y], 2, [LEFT[-1], Y])
    assert asked("ul2", evaluate.left_logits)[:2] == ([MODE_S, *LEFT, SEP, Y], 4)
    assert asked("bart", bart_noise="mask")[:2] == ([*LEFT, MASK, MASK, *RIGHT, SEP, *LEFT, Y], 7)
    assert asked("bart", bart_noise="delete,rotate") is None, "it was not trained on holes"


def test_the_end_of_a_text_does_not_compete_with_its_bytes():
    """Objectives that end a hole with EOT would pay for it, those that end it with a sentinel would not."""
    logits = torch.zeros(2, 3, 512)
    x = ids(2, 3)
    plain = evaluate.bits_per_byte(logits, x)
    assert plain == pytest.approx(math.log2(255), abs=1e-5)
    logits[..., EOT] = 9.0
    logits[..., 256:] = 9.0
    assert evaluate.bits_per_byte(logits, x) == pytest.approx(plain, abs=1e-5)
    logits.scatter_(-1, x[..., None], 5.0)
    with_eot = x.clone()
    with_eot[0, 0] = EOT
    assert evaluate.bits_per_byte(logits, with_eot) == pytest.approx(evaluate.bits_per_byte(logits, x), abs=1e-5)


def test_the_infilled_bytes_are_in_the_middle_of_the_window(monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate, "infill_logits", lambda m, o, hp, x, a, n: seen.append((x.size(1), a, n)))
    monkeypatch.setattr(evaluate, "left_logits", lambda *args: None)
    assert evaluate.eval_infilling(None, OBJECTIVES["mlm"], settings("mlm", 256), sentences()) == {}
    assert seen == [(120, 58, 4), (120, 52, 16), (120, 28, 64)], "as many bytes left as right of it"


def test_holes_of_every_length_have_4096_bytes_which_weigh_alike(monkeypatch):
    """Of holes of 4 bytes a model knows those of the first 64 windows."""
    n_bytes = dict.fromkeys(evaluate.HOLE_LENGTHS, 0)

    def logits_of(m, o, hp, x, a, n):
        known = n_bytes[n] == 0
        n_bytes[n] += x[:, a:a + n].numel()
        return F.one_hot(x[:, a:a + n], 256).float() * (100.0 if known else 0.0)
    monkeypatch.setattr(evaluate, "infill_logits", logits_of)
    found = evaluate.eval_infilling(randomized(), OBJECTIVES["mlm"], settings("mlm", 256), sentences())
    assert set(n_bytes.values()) == {4096}
    assert found == {"infill_4": pytest.approx(15 / 16 * math.log2(255)), "infill_64": pytest.approx(0, abs=1e-6),
                     "infill_16": pytest.approx(3 / 4 * math.log2(255))}


# ---- document masks

def test_evaluations_attend_within_a_document_where_training_did():
    text = from_bytes(b"a\0b\0" * 2000)         # every window holds ends of documents
    for name, evaluation in (("clm", evaluate.eval_infilling), ("prefix", evaluate.eval_infilling),
                            ("mlm", evaluate.eval_infilling), ("hybrid", evaluate.eval_infilling),
                            ("clm", evaluate.eval_corruption), ("mlm", evaluate.eval_corruption),
                            ("clm", evaluate.eval_second_half)):
        for doc_mask in (True, False):
            net = Recorder()
            evaluation(net, OBJECTIVES[name], settings(name, 64, doc_mask=doc_mask), text)
            assert net.calls
            for row, _, doc in net.calls:
                want = document_ids(torch.tensor([row]))[0].tolist() if doc_mask else None
                assert doc == want, (name, evaluation)


@pytest.mark.parametrize("doc_mask", [True, False])
def test_lines_are_written_within_a_document_where_training_did_so(doc_mask, monkeypatch):
    seen = []

    def fill(model, gaps, gens, use, doc_mask=False, **how):
        seen.append(doc_mask)
        return gaps.masked_fill(gaps == MASK, 97)
    monkeypatch.setattr(evaluate.sample, "fill", fill)
    evaluate.eval_tokenizable_lines(None, OBJECTIVES["mdlm"], settings("mdlm", 128, doc_mask=doc_mask), sentences())
    assert seen == [doc_mask]


@pytest.mark.parametrize("doc_mask", [True, False])
def test_drafts_are_written_within_a_document_where_training_did_so(doc_mask, monkeypatch):
    seen = []

    def speculate(*args, doc_mask=False, **how):
        seen.append(doc_mask)
        args[6].append((0, 0))
        return [97]
    monkeypatch.setattr(evaluate.sample, "speculate", speculate)
    evaluate.eval_drafts(None, OBJECTIVES["mtp"], settings("mtp", 256, doc_mask=doc_mask), sentences())
    assert set(seen) == {doc_mask}


# ---- replaced bytes

@pytest.mark.parametrize("name", ["clm", "mlm", "electra"])
def test_replaced_bytes_are_found_by_a_model_that_knows_the_text(name):
    text = torch.arange(97, 123).repeat(40).byte()

    class Knows:  # predicts the letter after the one on the left; what it sees it repeats
        def __call__(self, row, prefix, doc=None, positions=None):
            after = (row - 96) % 26 + 97
            return after if prefix == 0 else torch.where(row == MASK, after.roll(1, 1), row)

        def logits(self, row):
            return F.one_hot(row, 512).float() * 9

    def predict(model, x):
        return ((x - x.roll(1, 1)) % 26 != 1).float()
    objective = OBJECTIVES[name]
    if find_use(objective, Mark):
        objective = with_use(name, Mark(predict))
    score = evaluate.eval_corruption(Knows(), objective, settings(name, 64), text)
    assert 0.8 < score["replaced_auc"] < 1, "a letter after a replaced one is a surprise too"


def test_a_tenth_of_the_bytes_is_replaced_by_bytes_as_frequent_as_the_texts(monkeypatch):
    clean = torch.full((64, 62), ord("c"))
    seen = []

    def predict(model, x):
        seen.append(x)
        return x.float()
    monkeypatch.setattr(evaluate, "windows", lambda *args: clean)
    objective = with_use("electra", Mark(predict))
    evaluate.eval_corruption(None, objective, settings("electra", 64), from_bytes(b"aaab" * 100))
    [x] = seen
    replaced = x[x != clean]
    assert set(replaced.tolist()) == {ord("a"), ord("b")}
    assert abs(len(replaced) / x.numel() - 0.1) < 0.02
    assert abs(float((replaced == ord("a")).float().mean()) - 0.75) < 0.08


def test_a_byte_replaced_by_itself_is_not_replaced(monkeypatch):
    """Half of the drawn bytes equal what they would replace: who knows the text finds all others, and no more."""
    clean = torch.randint(97, 99, (64, 62), generator=make_rng("two letters"))
    monkeypatch.setattr(evaluate, "windows", lambda *args: clean)
    objective = with_use("electra", Mark(lambda model, x: (x != clean).float()))
    text = clean.flatten().byte()
    found = evaluate.eval_corruption(None, objective, settings("electra", 64), text)
    assert found == {"replaced_auc": 1.0}


# ---- the probe

def test_states_are_read_under_the_objectives_own_mask():
    net, x, T = randomized().requires_grad_(False), ids(3, 24), 12
    other = x.clone()
    other[:, 8] = 1 + other[:, 8] % 255
    for name, first in (("clm", 8), ("mlm", 0)):                # in the first of two blocks alone
        a, b = (evaluate.layer_states(net, OBJECTIVES[name], settings(name, T), z) for z in (x, other))
        assert a.shape == (2, 3, 24, 16)
        assert (a - b)[1].abs().amax((0, 2)).gt(0).tolist() == [first <= i < T for i in range(24)]


def test_what_the_probe_scores_no_model_was_trained_on(monkeypatch):
    modules = glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py"))
    some, _ = read_documents(sorted(modules, key=os.path.getsize)[:90])                # the shortest
    monkeypatch.setattr(evaluate, "read_stdlib", lambda: some)
    data = evaluate.probe_data(256)
    train_text, held_out = (to_bytes(t) for t in split_documents([*some.values()]))
    for i in range(0, len(data.x), 17):
        window = bytes(data.x[i].tolist())
        assert window in (held_out if data.part[i] == evaluate.PROBE_TEST else train_text)
    scored = data.chosen[data.part == evaluate.PROBE_TEST].float().mean()
    assert set(data.part.tolist()) == {0, 1, 2} and 0.38 < scored < 0.42


def test_the_probe_takes_evenly_spaced_windows_of_every_document(monkeypatch):
    n = 8
    documents = {str(i): b"".join(b"%02d%02d = 1\n" % (i, line) for line in range(12)) for i in range(20)}
    documents["5"] = b"x = 1\n" * 2             # 12 bytes: one window
    documents["7"] = b"x = 1\n"                 # too short
    documents["8"] = b"def (" * 9               # not Python
    documents = {key: text.replace(b"0", b"1") for key, text in documents.items()}  # 01 is no number
    monkeypatch.setattr(evaluate, "read_stdlib", lambda: documents)
    data = evaluate.probe_data(n)
    want = []
    for i, text in enumerate(documents.values()):
        most = 9 if i % 10 == 9 else 3
        starts = {5: [0], 7: [], 8: []}.get(i, [(len(text) - n) * k // (most - 1) for k in range(most)])
        part = 2 if i % 10 == 9 else int(i % 5 == 0)
        want += [(part, text[a:a + n]) for a in starts]
    assert [(part, bytes(x)) for part, x in zip(data.part.tolist(), data.x.tolist())] == want


def test_every_byte_of_a_program_has_its_class():
    def classes(text):
        return "".join(" kxscno"[c] for c in evaluate.byte_classes(text).tolist())
    assert classes(b"if x1 == 'a': # b\n") == "kk xx oo ssso ccc "
    text = b'def e(x):  # a "comment"\n    return x + 1.5 if x else """two\nlines"""\n'
    found = classes(text)
    assert len(found) == len(text) and found.startswith("kkk xoxoo  ") and "nnn" in found
    assert found.count("s") == len('"""two\nlines"""')
    assert evaluate.byte_classes(b"def (") is None and evaluate.byte_classes(b"\xff") is None


def test_a_probe_finds_what_is_there_and_no_more():
    g = make_rng("probe")
    x, noise = torch.randn(900, 8, generator=g), torch.randn(900, 8, generator=g)
    y, part = x[:, :3].argmax(1), torch.arange(900) % 3
    found = evaluate.probe_accuracy(torch.stack((noise, x)), y, part, 3)
    assert found > 0.85, "the layer is chosen in which it shows"
    assert evaluate.probe_accuracy(noise[None], y, part, 3) < 0.45
    assert evaluate.balanced_accuracy(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1])) == 0.5


def test_a_hole_is_also_asked_for_in_the_wrong_mode(monkeypatch):
    ul2 = OBJECTIVES["ul2"]
    hp = settings("ul2", 256)
    assert evaluate.reads_mode(ul2, hp)
    for name, more in (("span", {}), ("clm", {}), ("fim", {}), ("bart", {}), ("bart", dict(bart_noise="mask"))):
        assert not evaluate.reads_mode(OBJECTIVES[name], settings(name, 256, **more)), name
    modes = []

    def record(model, objective, hp, prompts, P, middle):
        modes.append((middle.size(1), prompts[0][0]))
        return torch.zeros(*middle.shape, 256)
    monkeypatch.setattr(evaluate, "target_logits", record)
    found = evaluate.eval_infilling(None, ul2, hp, sentences())
    short, long = MODE_R, MODE_X
    assert [mode for m, mode in modes if m == 4] == [MODE_S] * 16 + [short] * 16 + [long] * 16
    assert [mode for m, mode in modes if m == 64] == [MODE_S, long, short]
    assert {"infill_4_as_64", "infill_64_as_4"} <= set(found) and "infill_16_as_4" not in found


# ---- the probe of packages

def test_passages_are_evenly_spaced_windows_of_the_packages_with_the_most_files(monkeypatch):
    top = evaluate.sysconfig.get_paths()["stdlib"]
    documents = {}
    for package, n_files in (("small", 1), ("large", 7), ("medium", 4)):
        for i in range(n_files):
            documents[os.path.join(top, package, f"{i}.py")] = b"%c%d" % (package[0].encode(), i) * 20     # 40 bytes
    documents[os.path.join(top, "large", "short.py")] = b"short"
    for i in range(9):
        documents[os.path.join(top, "encodings", f"{i}.py")] = b"a table, left out" * 3
    documents[os.path.join(top, "module.py")] = b"in no package" * 9
    monkeypatch.setattr(evaluate, "read_stdlib", lambda: documents)
    monkeypatch.setattr(evaluate, "N_PACKAGES", 2)
    data = evaluate.passage_data(8)
    assert len(data.x) == 11 * 5                # 40 // 8 windows of each file
    first = [bytes(x.tolist())[:2] for x in data.x[::5]]
    assert first == [b"l%d" % i for i in range(7)] + [b"m%d" % i for i in range(4)]
    assert data.package[::5].tolist() == [0] * 7 + [1] * 4
    assert data.part[::5].tolist() == [0, 1, 2, 0, 1, 2, 0, 0, 1, 2, 0]
    found = evaluate.eval_passages(evaluate.histogram_features, data)
    assert found == {"passages": 1.0}, "the first letter tells"


def test_the_rows_of_the_probes_without_training(monkeypatch):
    some = {os.path.join(evaluate.sysconfig.get_paths()["stdlib"], path): text for path, text in
            ((f"{package}/{i}.py", b"%c%d = 1\n" % (package[0].encode(), i) * 60)
             for package in ("large", "medium") for i in range(10))}
    monkeypatch.setattr(evaluate, "read_stdlib", lambda: some)
    monkeypatch.setattr(evaluate, "N_PACKAGES", 2)
    data = compare.EvalData([], None, evaluate.probe_data(256), evaluate.passage_data(256))
    rows = compare.probe_references(settings("span", 96, dtype="bfloat16"), data)
    assert [set(row["-"]) for row in rows.values()] == [{"probe", "passages"}, {"probe"}, {"passages"}]
    assert rows["histogram of bytes"]["-"]["passages"] == 1 and rows["five raw bytes"]["-"]["probe"] > 0.9


def test_every_use_with_a_mode_has_a_task():
    first_uses = {type(objective.uses[0]) for objective in OBJECTIVES.values()}
    assert first_uses <= set(evaluate.TASKS)
    assert find_use(OBJECTIVES["mdlm"], Fill).trained_at_any_rate, "the task of the first use must be measurable"


def test_a_layer_is_fit_chosen_and_scored_on_different_bytes():
    g = make_rng("layers")
    y, part = torch.arange(900) % 2, torch.arange(900) // 2 % 3
    noise = torch.randn(900, 1, generator=g)
    shows = (2.0 * y - 1)[:, None] + 0.1 * noise

    def layer(*signs):  # how it shows the class in PROBE_TRAIN, PROBE_VAL and PROBE_TEST; 0: not at all
        sign = torch.tensor(signs)[part][:, None]
        return torch.where(sign == 0, noise, sign * shows)
    layers = torch.stack((layer(1.0, 1.0, 0.0), layer(1.0, 0.0, 1.0)))
    assert evaluate.probe_accuracy(layers, y, part, 2) < 0.7, "not chosen on PROBE_TEST"
    assert evaluate.probe_accuracy(layer(-1.0, 9.0, 1.0)[None], y, part, 2) < 0.1, "not fit on PROBE_VAL"


def test_a_rare_class_weighs_as_much_as_a_frequent_one():
    g = make_rng("rare")
    y = (torch.arange(2000) % 20 == 0).long()
    x = 1.5 * y[:, None] + torch.randn(2000, 1, generator=g)
    guess = evaluate.fit_classifier(x, y, 2)(x)
    assert evaluate.balanced_accuracy(guess, y) > 0.7


def test_windows_lie_in_one_document_where_they_can():
    text = from_bytes((b"x" * 200 + b"\0") * 50)
    assert (evaluate.windows(text, 64, 64, "documents") != EOT).all(1).float().mean() > 0.9
