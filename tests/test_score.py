"""Every way to compute the bits of a text equals a slow reference; and the program that prints them."""
import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import randomized, settings
from test_sample import FRAMED, IN_PLACE, Stub, T, ids

import sample
import test_sample
from data import EOT, MASK
from experiments import score
from objectives import OBJECTIVES, Fill


# ---- bits of a text
@pytest.mark.parametrize("stride", [1, 5, T])
@pytest.mark.parametrize("n", [1, 2, T, T + 1, 3 * T + 5])
def test_a_score_is_the_sum_over_bytes(n, stride):
    """The bytes alone share the probability, also across the end of a document. With stride T the windows are disjoint,
    each with one byte of context."""
    net = randomized().requires_grad_(False)
    x = ids(n)[0]
    x[4::5] = EOT
    bits = 8.0
    for start in range(0, n - 1, stride):
        a = max(0, start + stride - T)
        end = min(start + stride, n - 1)
        row = x[None, a:end]
        logp = net.logits(net(row, 0))[0, :, :256].log_softmax(-1)
        bits -= sum(float(logp[i - a, x[i + 1]]) for i in range(start, end)) / math.log(2)
    assert score.score_exact(net, x.byte(), T, stride) == pytest.approx(bits, rel=1e-5)


@pytest.mark.parametrize("use", [IN_PLACE, Fill((EOT,), shift=1), FRAMED], ids=["in place", "shifted", "framed"])
@pytest.mark.parametrize("n", [1, 2, T, 2 * T + 5])
def test_a_score_by_filling_is_the_chain_rule(n, use):
    """Each byte is predicted from the bytes before it in its window; it and all bytes after it are MASKs."""
    net = randomized().requires_grad_(False)
    text = ids(n)[0]
    bits = 8.0
    for i in range(1, n):
        end = min(1 + (i - 1) // (T // 2) * (T // 2) + T // 2, n)   # of the window
        start = max(0, end - T)
        row = torch.tensor([[*text[start:i].tolist(), *[MASK] * (end - i)]])
        logits = sample.fill_logits(net, row, use)[0, i - start, :256]
        bits -= float(logits.double().log_softmax(-1)[text[i]]) / math.log(2)
    assert score.score_by_filling(net, text.byte(), T, use) == pytest.approx(bits)


class Informed(Stub):  # byte 65 gets more likely with the share of the row that is not masked, and to the right
    def __call__(self, ids, *args, **kwargs):
        return ((ids != MASK).float().mean(1, keepdim=True) * torch.arange(ids.size(1)))[..., None]


@pytest.mark.parametrize("n", [16, 13, 5])
def test_the_bound_of_a_text_is_on_average_the_exact_one_and_scatters_by_its_standard_error(n):
    """Exact bound of a window of L bytes: the mean over l = 1 .. L of L / l times the mean nats of all sets of l masked
    bytes."""
    T = 8
    hp = settings("mdlm", T)
    model = Informed(lambda h: F.one_hot(torch.tensor(65), 512) * h)
    text = torch.tensor([65, 65, 65, 66] * 4)[:n]
    exact = 0.0
    for x in text.split(T):
        L = len(x)
        masked = torch.tensor([[i >> j & 1 for j in range(L)] for i in range(1, 1 << L)]).bool()   # (2^L - 1, L)
        logits = model.logits(model(x.where(~masked, MASK), T))[..., :256]
        nats = -(logits.log_softmax(-1)[:, range(len(x)), x] * masked).sum(1)
        exact += sum(float(nats[masked.sum(1) == k].mean()) / k for k in range(1, L + 1)) / math.log(2)
    estimates = [score.score_bound(model, OBJECTIVES["mdlm"], text.byte(), hp, seed) for seed in range(80)]
    bits, errors = torch.tensor(estimates).T
    assert abs(bits.mean() - exact) < 4 * bits.std() / 80 ** 0.5
    assert 0.8 < bits.std() / errors.mean() < 1.3


# ---- minimal pairs
@pytest.mark.parametrize("is_causal", [True, False])
def test_batches_do_not_change_a_score(is_causal, monkeypatch):
    monkeypatch.setattr(score.sample, "MAX_ROWS", 3)
    net = randomized().requires_grad_(False)

    def slow_score(text):  # with a pass for each byte
        logp = 0.0
        for i, byte in enumerate(text):
            row = [EOT, *text[:i]] if is_causal else [*text[:i], MASK, *text[i + 1:]]
            logits = net.logits(net(torch.tensor([row]), 0 if is_causal else len(row)))[0, i, :256].double()
            if not is_causal:                   # pseudo-log-likelihoods are of the bytes that occur in a text
                logits[EOT] = -torch.inf
            logp += float(logits.log_softmax(-1)[byte])
        return logp
    score_batch = score.exact_scores if is_causal else lambda net, x: score.pseudo_scores(net, x, Fill())
    texts = [bytes(ids(n, seed=seed)[0].tolist()) for n in (1, 2, 7, T) for seed in range(4)]
    scores = score.sample.map_texts(lambda x: score_batch(net, x).tolist(), texts, "cpu")
    assert scores == pytest.approx({text: slow_score(text) for text in texts}, rel=1e-5)


def blimp(*pairs):  # (UID, better text, worse text) each -> text of a .jsonl file
    return "\n".join(json.dumps(dict(zip(("UID", "sentence_good", "sentence_bad"), pair))) for pair in pairs)


@pytest.mark.parametrize("name", ["clm", "mdlm", "mlm"])
def test_shares_and_errors(name, runs, capsys, monkeypatch):
    monkeypatch.setattr(score, "exact_scores", lambda model, x: x[:, 0].double())
    monkeypatch.setattr(score, "pseudo_scores", lambda model, x, use: x[:, 0].double())
    monkeypatch.setattr(score, "score_bound", lambda model, objective, text, hp, seed: (-float(text[0]), 0.0))
    pairs = [("a", "y", "x"), ("a", "x", "y"), ("b", "y", "xx"), ("a", "x", "xx")]
    Path("blimp.jsonl").write_text(blimp(*pairs), "utf-8")
    out = output(capsys, name, "--pairs", "blimp.jsonl", file="").out
    assert re.findall(r"(\d) pairs  (\S.*?)  +(.+)", out) == [
        ("3", "0.500 ± 0.236", "a"), ("1", "1.000", "b"), ("4", "0.625 ± 0.207", "all pairs")]


@pytest.mark.parametrize("name, content, hint", [
    ("clm", b"a\tb\nc\n", "line 2"), ("clm", b"a\t" + b"b" * 20 + b"\0", "NUL"),
    ("clm", b"a\t" + b"b" * 33, "longer than 32"), ("nsp", b"a\t" + b"b" * 31, "longer than 30"),
    ("clm", "a\tb".encode("utf-16"), "--pairs bad.txt: is not text")])
def test_bad_pairs_are_refused(name, content, hint, runs, refuses):
    Path("bad.txt").write_bytes(content)
    refuses(hint, score.main, ["--out_dir", f"out/{name}", "--pairs", "bad.txt"])


def test_pairs_are_read_and_a_byte_order_mark_is_not_a_part_of_the_first_one(tmp_path):
    pairs = score.read_pairs(str(Path(__file__).with_name("pairs.jsonl")))
    assert [uid for uid, *_ in pairs] == ["agreement"] * 20 + ["word_order"] * 20 + ["syntax"] * 20
    for name, pair in (("a.txt", "x\ty"), ("a.jsonl", blimp(("u", "x", "y")))):
        (tmp_path / name).write_text(pair, "utf-8-sig")
        assert score.read_pairs(str(tmp_path / name))[0][1:] == (b"x", b"y")


# ---- the program
place = test_sample.place                       # fixtures: runs of every objective, and of two mixtures
runs = test_sample.runs
MIX = "bart_.5+mlm_.5"
BOTH = "clm_.5+mlm_.5"


def output(capsys, run, *flags, file="book.txt"):
    capsys.readouterr()
    assert score.main(["--out_dir", f"out/{run}", "--file", file, *flags]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("name", [name for name, o in OBJECTIVES.items() if score.has_probability(o)])
def test_bits_per_byte_and_shares_of_pairs_are_printed_for_every_objective(name, runs, capsys, monkeypatch):
    monkeypatch.setattr(score, "FILLED_BYTES", 100)
    objective = OBJECTIVES[name]
    fills = "fill" in objective.uses
    out, err = output(capsys, name)
    assert 2 < float(re.search(r"([\d.]+) bits per byte", out)[1]) < 9.5
    assert "640 bytes" in out and "lzma" in out
    assert ("left to right, windows of 32, stride 16" in out) == (objective.bpb in ("loss", "causal"))
    assert ("left to right by filling MASKs, the first 100 bytes, windows of " in out) == fills
    assert (f"{name}'s upper bound" in out) == (objective.bpb == "bound")
    assert err == f"--- {Path('out') / name / 'ckpt.pt'}: {name}, step 2 of 2\n"
    Path("pairs.txt").write_bytes(b"a b\ta b\nx = 1\tx 1 =\nof\tfo\n")
    out = output(capsys, name, "--pairs", "pairs.txt", file="").out
    assert ("exact log-probability" in out) == (objective.bpb in ("loss", "causal"))
    assert (f"{name}'s bound, estimated in 16 passes" in out) == (objective.bpb == "bound")
    assert ("pseudo-log-likelihood" in out) == (objective.bpb is None)
    assert re.search(r" 3 pairs  [01]\.[1-9]?\d\d.*  all pairs$", out), "a tie, so more than 0"


def test_the_program_reads_in_float32_with_half_a_window_of_context_and_prints_bits_and_nats(runs, capsys, monkeypatch):
    seen = []
    load_latest = score.load_latest
    monkeypatch.setattr(score, "load_latest", lambda *args: seen.append(args[2]) or load_latest(*args))
    monkeypatch.setattr(score, "score_exact", lambda model, data, *sizes: seen.append(sizes) or 640 * 1.5)
    assert "1.5000 bits per byte (1.0397 nats)" in output(capsys, "clm").out and seen == ["float32", (32, 16)]


def test_a_mixture_is_scored_by_its_first_member_with_a_probability(runs, capsys):
    for run, flags, member in ((MIX, [], "mlm"), (BOTH, [], "clm"), (BOTH, ["--objective", "mlm"], "mlm")):
        assert output(capsys, run, *flags).err.endswith(f"step 2 of 2\n--- used as {member}\n")


@pytest.mark.parametrize("run, flags, hint", [
    ("bart", ["book.txt"], "clm, mlm, prefix, fim"), ("clm", ["nowhere"], "--file nowhere: cannot"),
    ("clm", ["book.txt", "--pairs", "x"], "--file: give"), ("clm", ["utf16.txt"], "utf16.txt: is not text")])
def test_bad_input_is_refused_in_one_line(run, flags, hint, runs, refuses):
    out, _ = refuses(hint, score.main, ["--out_dir", f"out/{run}", "--file", *flags])
    assert not out
