import dataclasses
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import NEEDS_CUDA, WRITE_HOLES, tiny, chi2, randomize, randomized, settings

import objectives
import sample
import train
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PRE, SENTINEL, SEP, SUF, make_rng
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Fill
from run import load_checkpoint, load_run, run_program

T = 12
GREEDY = dict(temperature=0)
FOUR = torch.tensor([0.5, 0.25, 0.15, 0.1])     # a distribution of 4 bytes
IN_PLACE = Fill()
FRAMED = Fill((CLS, MODE_S), (SEP,), shift=1)


def ids(n, N=1, seed=0):
    return torch.randint(1, 256, (N, n), generator=make_rng(f"prompt {seed}"))


def rng(seed=1):
    return make_rng(f"sample {seed}")


def generated(*args, **kwargs):  # what generate yields, as one tensor (N, written)
    return torch.stack(list(sample.generate(*args, **kwargs)), dim=1)


class Stub:
    """A model without weights, whose states are its ids, and whose logits are what it is given."""
    embed = torch.nn.Embedding(512, 4)
    config = ModelConfig(1, 1, 4)
    dtype = torch.float32

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, ids, prefix=0, cache=None, positions=None, mask=None):
        if cache is not None:
            cache.length += ids.size(1)
        return ids


def certain(ids):  # ids (...) -> logits (..., V) that give each of them all the probability
    return F.one_hot(ids, 512) * 100.0


def scripted(*rows):  # -> a model that writes these ids, one list for each position
    script = iter(rows)
    return Stub(lambda h: certain(torch.tensor(next(script))))


def four(p):  # probabilities (..., 4) of bytes 65 to 68 -> logits (..., V)
    return F.pad(p.log(), (65, 443), value=-1e9)


# ---- sampling a byte
@pytest.mark.parametrize("how, allowed", [
    *((dict(temperature=temperature), 4) for temperature in (1.0, 0.2, 3.0)),
    (dict(temperature=1e-310), 1), (dict(temperature=0), 1), (dict(top_k=2), 2), (dict(top_k=1), 1),
    (dict(top_k=5000), 4), (dict(top_p=0.6), 2), (dict(top_p=0.0), 1), (dict(top_p=1.0), 4),
    (dict(top_k=2, top_p=0.6), 2)])             # after top_k, the first byte would have .67 and would be enough
def test_the_distribution_is_that_of_the_logits_over_the_temperature_whose_tail_is_cut(how, allowed):
    p = sample.distribution(four(FOUR).expand(3, -1), **how)
    kept = FOUR[:allowed].double() ** (1 / max(0.1, how.get("temperature", 1.0)))
    expected = F.pad(kept / kept.sum(), (65, 191 - allowed))
    torch.testing.assert_close(p, expected.expand(3, -1), atol=1e-6, rtol=1e-6)
    assert float(p[0].sum()) == pytest.approx(1, abs=1e-12)
    halves = torch.full((512,), -1e9).index_fill(0, torch.tensor([65, 66]), 0.0)    # 1/2 is exact in binary
    assert (sample.distribution(halves, top_p=0.5) > 0).sum() == 1


def test_samples_follow_the_probabilities_also_in_the_tail_and_no_special_id_is_ever_sampled():
    likely_id = four(FOUR).index_fill(0, torch.tensor([300]), 9.0)
    sampled = sample.sample_from(sample.distribution(likely_id).expand(4000, -1), rng())
    assert chi2(torch.bincount(sampled, minlength=69)[65:69], FOUR) < 25            # 3 degrees of freedom
    p = sample.distribution(four(torch.tensor([1.0, 0, 0, 1e-12])))
    ends = torch.tensor([0, 1 - 1e-13], dtype=torch.double)
    assert sample.inverse_cdf(p.expand(2, -1), ends).tolist() == [65, 68]


# ---- continuing
def without_cache(net, x, n, prefix=0):  # what generate writes, by a whole pass for each byte
    out = x
    start = max(0, x.size(1) - T)
    g = rng()
    ended = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(n):
        if out.size(1) - start > T:
            if prefix:
                break
            start = out.size(1) - T // 2
        h = net(out[:, start:], prefix)
        byte = sample.sample_from(sample.distribution(net.logits(h[:, -1])), g).masked_fill(ended, EOT)
        ended |= byte == EOT
        out = torch.cat((out, byte[:, None]), dim=1)
    return out[:, x.size(1):]


@pytest.mark.parametrize("n, prefix", [(1, 0), (T, 0), (T + 1, 0), (3 * T, 0), (1, 1), (T, T), (7, 3)])
def test_the_cache_changes_nothing(n, prefix):
    """Before and after the cache is full. With a prefix the text ends when it is full."""
    net = randomized(seed=1).requires_grad_(False)              # whose texts are longer than 30 bytes
    x = ids(n, 2)
    out = generated(net, x, 30, T, rng(), prefix)
    assert torch.equal(out, without_cache(net, x, 30, prefix))
    assert out.shape == (2, T - n + 1 if prefix else 30)
    assert prefix != 3 or not torch.equal(out, without_cache(net, x, T - n + 1))


def test_generate_returns_when_every_row_has_ended():
    assert generated(scripted([EOT, 66], [65, EOT]), ids(3, 2), 9, T, rng()).tolist() == [[EOT, EOT], [66, EOT]]


# ---- speculation
def model_and_draft(n, seed=0):  # of random weights: few drafts are accepted
    hp = settings("mtp", T, mtp_heads=n)
    net = randomized(n_head=2, seed=seed)       # with 4 heads, none would be
    for name, head in OBJECTIVES["mtp"].heads(net.config, hp).items():
        net.heads[name] = randomize(head, seed)
    return net.requires_grad_(False).eval(), OBJECTIVES["mtp"].uses["continue"].drafter(hp)


def drafted(net, draft, prompt, n, T, g, *args, **how):  # prompt (1, n) -> the ids that generate_drafted yields
    return [*sample.generate_drafted(net, draft, prompt[0].tolist(), n, T, g, *args, **how)]


@pytest.mark.parametrize("how", [{}, dict(temperature=0.7, top_k=3)])
def test_speculation_samples_from_the_model_s_own_distribution(how):
    """Whatever the heads predict. Neighbouring bytes are independent, as the model says."""
    net = Stub(lambda h: four(FOUR).expand(len(h), -1))
    heads = four(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.1, 0, 0], [0.3, 0.3, 0.3, 0.1]]))
    stats = []
    text = drafted(net, lambda model, h: heads.expand(len(h), -1, -1), ids(1), 2000, T, rng(), stats, **how)
    pairs = torch.zeros(4, 4)
    for a, b in itertools.pairwise(text):
        pairs[a - 65, b - 65] += 1
    p = sample.distribution(four(FOUR), **how)[65:69]
    assert len(text) == 2000 and chi2(pairs.sum(1), p) < 25     # 3 degrees of freedom
    assert chi2(pairs.flatten(), (p[:, None] * p).flatten()) < 50                   # 15
    n_drafted, n_kept = map(sum, zip(*stats))
    assert {n for n, _ in stats} == {0, 1, 2, 3} and 0.2 < n_kept / n_drafted < 0.8


@pytest.mark.parametrize("n", [2, 7, T + 1])
def test_speculation_at_temperature_0_is_plain_decoding(n):
    passes = 0
    written = 0
    for length in (1, 4, T - 1, T, T + 1, 2 * T):
        net, draft = model_and_draft(n, length)
        x = ids(length)
        stats = []
        text = drafted(net, draft, x, 25, T, rng(), stats, **GREEDY)
        assert text == generated(net, x, 25, T, rng(), **GREEDY)[0].tolist()
        passes += len(stats)
        written += len(text)
    assert passes < written


def test_speculation_keeps_a_perfect_draft_and_stops_at_the_end_of_the_document():
    """The model counts up to EOT. Its three heads are all right, and a pass writes four bytes; or the last head is
    wrong, and a pass writes three."""
    counting = Stub(lambda h: certain((h + 1) % 256))
    for ahead, passes in (([2, 3, 4], 11), ([2, 3, 9], 15)):
        def draft(model, h):                    # states of a Stub are ids
            return certain((h.long().view(len(h), -1)[:, :1] + torch.tensor(ahead)) % 256)
        stats = []
        assert drafted(counting, draft, ids(1) * 0 + 215, 99, 99, rng(), stats, **GREEDY) == [*range(216, 256), EOT]
        assert len(stats) == passes
    for n in range(8):                          # no more than max_new_tokens
        assert len(drafted(counting, draft, ids(1) * 0 + 65, n, 99, rng(), [], **GREEDY)) == n


NEEDS_COMPILER = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")]
COMPILED = [pytest.param("inductor", "cpu", marks=NEEDS_COMPILER), pytest.param("inductor", "cuda", marks=NEEDS_CUDA)]


@pytest.mark.parametrize("backend, device", [("eager", "cpu"), *COMPILED])
def test_compiled_steps_write_the_same_text_and_are_compiled_once(backend, device, monkeypatch):
    """For texts that are longer than the cache. The backend eager traces a step as a whole, but does not compile it."""
    torch._dynamo.reset()
    net, draft = model_and_draft(4)
    x = ids(4, 2)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    texts = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for where, compiled in (("cpu", False), (device, False), (device, True)):           # on CUDA always captured
            texts.append([generated(net.to(where), x.to(where), 30, T, rng(), compile=compiled).tolist(),
                          drafted(net, draft, x[:1], 40, T, rng(), [], compile=compiled)])
    assert texts[0] == texts[1] == texts[2]


# ---- filling masked bytes
@pytest.mark.parametrize("steps", [1, 5, 0])
def test_a_diffusion_sampler_reproduces_the_distribution_of_a_perfect_denoiser(steps):
    """The denoiser knows the distribution of each byte. A pass fills 1 / passes_left of the MASKs, the last one all."""
    N, n = 10, 100
    most = steps or 64
    oracle = Stub(lambda ids: four(FOUR).expand(*ids.shape, -1))
    x = torch.full((N, n), MASK)
    states = [x, *sample.unmask(oracle, x, rng(), IN_PLACE, steps, "ancestral")]
    for before, after in itertools.pairwise(states):
        assert torch.equal(after[before != MASK], before[before != MASK]), "a byte was changed again"
    assert len(states) <= most + 1
    counts = torch.bincount(states[-1].flatten(), minlength=MASK + 1)
    assert counts[65:69].sum() == N * n and chi2(counts[65:69], FOUR) < 25
    for i in range(min(3, len(states) - 1)):    # the share that each of the first passes unmasks
        left = states[i] == MASK
        rate = 1 / (most - i)
        share = float((states[i + 1][left] != MASK).float().mean())
        assert abs(share - rate) < 5 * (rate / int(left.sum())) ** 0.5


def test_a_pass_that_fills_nothing_does_not_ask_the_model_again(monkeypatch):
    """The predictions would be the same. A model that is asked in every pass writes the same text."""
    net = randomized().requires_grad_(False)
    x = ids(T, 2)
    x[:, [2, 6, 9]] = MASK
    asked = []

    def fill_logits(model, ids, use):
        asked.append(ids)
        return objectives.fill_logits(model, ids, use)
    monkeypatch.setattr(sample, "fill_logits", fill_logits)
    states = [x, *sample.unmask(net, x, rng(), IN_PLACE, order="ancestral")]
    assert len(asked) <= 1 + 6 < len(states) - 1, "one pass, and one after each change"
    g = rng()
    for before, after, passes_left in zip(states, states[1:], range(64, 0, -1)):
        logits = objectives.fill_logits(net, before, IN_PLACE)
        sampled = sample.sample_from(sample.distribution(sample.without_eot(logits)), g)
        chosen = sample.choose_masks("ancestral", before == MASK, logits, sampled, passes_left, g)
        assert torch.equal(after, torch.where((before == MASK) & chosen, sampled, before))


@pytest.mark.parametrize("use", [IN_PLACE, Fill((EOT,), shift=1), FRAMED], ids=["in place", "shifted", "framed"])
@pytest.mark.parametrize("steps", [0, 2, 5])
def test_order_confident_fills_the_most_certain_bytes_first_and_order_left_the_leftmost(use, steps):
    before, after, shift = list(use.left_ids), list(use.right_ids), use.shift
    net = randomized().requires_grad_(False)
    x = ids(T, 2)
    x[0, [2, 6, 9]] = MASK
    x[1, 7] = MASK

    def best(row):  # -> probability and byte of each position
        row = torch.tensor([[*before, *row.tolist(), *after]])
        logits = net.logits(net(row, row.size(1)))[0, len(before) - shift:, :256]
        p, byte = logits.softmax(-1)[:, 1:].max(-1)             # a hole gets no EOT
        return p, byte + 1
    for order, priority in (("confident", lambda p, i: p[i]), ("left", lambda p, i: -i)):
        expected = x.clone()
        for row, passes_left in itertools.product(expected, range(steps or 3, 0, -1)):
            p, byte = best(row)
            holes = (row == MASK).nonzero().flatten().tolist()
            holes.sort(key=lambda i: -priority(p, i))
            chosen = holes[:math.ceil(len(holes) / passes_left)]
            row[chosen] = byte[chosen]
        [*_, state] = sample.unmask(net, x, rng(), use, steps, order, **GREEDY)
        assert torch.equal(state, expected)


@pytest.mark.parametrize("order", ["left", "confident", "ancestral"])
def test_a_hole_gets_no_eot_however_likely_it_is(order):
    """Only a text that is continued may get it."""
    net = Stub(lambda ids: four(FOUR).expand(*ids.shape, -1).index_fill(-1, torch.tensor(EOT), 9.0))
    x = torch.full((3, T), MASK)
    for may_end in (False, True):
        [*_, state] = sample.unmask(net, x, rng(), IN_PLACE, order=order, may_end=may_end)
        assert ((state == EOT).any() == may_end) and (state < 256).all()


def test_order_confident_ranks_by_the_probability_of_the_sampled_byte_and_is_not_for_text_from_nothing():
    """Byte A is 65 with probability .6, else 66; byte B is 65 with .55, else 66. So A is written first if it is 65."""
    p = torch.tensor([[0.6, 0.4, 0, 0], [0.55, 0.45, 0, 0]])
    x = torch.full((20_000, 2), MASK)
    net = Stub(lambda ids: four(p).expand(len(ids), -1, -1))
    first = next(sample.unmask(net, x, rng(), IN_PLACE, order="confident"))
    assert torch.equal(*sample.unmask(net, x - MASK, rng(), IN_PLACE), x - MASK), "a text without MASKs is yielded once"
    written = first[first != MASK]
    is_a = first[:, 1] == MASK
    assert len(written) == len(x)
    assert abs(float(is_a.float().mean()) - 0.6) < 0.02
    assert (written[is_a] == 65).all() and abs(float((written[~is_a] == 66).float().mean()) - 0.45) < 0.03
    for objective in OBJECTIVES.values():
        uses = [objective.uses[mode] for mode in ("fill", "write") if mode in objective.uses]
        assert {use.order for use in uses} <= {"ancestral" if "write" in objective.uses else "confident"}


@pytest.mark.parametrize("n", [4, T - 2])
def test_blocks_are_written_as_without_a_cache(n):
    """Also when the window restarts with its last half, and for prompts that end inside a block."""
    net = randomized().requires_grad_(False)
    for length in (1, 4, 7, T, 2 * T + 3):
        x = expected = ids(length)[0].tolist()
        start = 0
        for _ in range(20):
            while (len(expected) - start) // n * n + n > T:
                start = len(expected) - T // 2
            row = torch.tensor([expected[start:]])
            row = F.pad(row, (0, n - row.size(1) % n), value=MASK)
            block = torch.arange(row.size(1)) // n
            logits = net.logits(net(row, mask=(block <= block[:, None])[None]))[0, :, :256]
            expected = [*expected, int(logits[len(expected) - start].argmax())]
        written = sample.generate_blocks(net, x, 20, T, n, rng(), order="left", **GREEDY)
        assert [*x, *written] == expected[:expected.index(EOT) + 1 if EOT in expected else None]


def test_a_long_text_is_filled_window_by_window():
    """Windows of 9 bytes: a quarter lies before the first MASK, and the last quarter is dropped, except at the end of
    the text."""
    net = randomized().requires_grad_(False)
    x = ids(40)
    holes = [0, 13, 14, 18, 20, 39]
    x[0, holes] = MASK
    expected = x.clone()
    for a, kept in ((0, 7), (11, 7), (16, 7), (31, 9)):
        [*_, filled] = sample.unmask(net, expected[:, a:a + 9], rng(), FRAMED, **GREEDY)
        expected[:, a:a + kept] = filled[:, :kept]
    states = [*sample.unmask_long(net, x, T, rng(), FRAMED, **GREEDY)]
    assert torch.equal(states[-1], expected)
    counts = [int((state == MASK).sum()) for state in states]
    assert counts == sorted(counts, reverse=True) and (counts[0], counts[-1], len(counts)) == (5, 0, 7)


# ---- correcting
@pytest.mark.parametrize("rate", [1e-6, 0.01, 0.5])
def test_corrections_follow_from_the_probabilities_by_bayes_rule(rate):
    """Of printable ASCII by printable ASCII, whatever the model says: so no character breaks, and line ends stay."""
    x = torch.arange(256).repeat(4)
    logp = (torch.randn(len(x), 255, generator=make_rng("logits"), dtype=torch.double) * 6).log_softmax(-1)
    odds, other, gain = sample.find_corrections(logp, x, rate)
    is_better = gain > 0
    for i, byte in enumerate(x.tolist()):
        if not 32 <= byte < 127:
            assert odds[i] < 0 and not is_better[i]
            continue
        p = logp[i].exp().tolist()
        joint = {y: p[y - 1] * (1 - rate if y == byte else rate / 254) for y in range(1, 256)}
        want = math.log(sum(joint[y] for y in joint if y != byte)) - math.log(joint[byte])
        assert float(odds[i]) == pytest.approx(want, rel=1e-6, abs=1e-6)
        best = max(range(32, 127), key=joint.get)
        assert (int(other[i]) if is_better[i] else byte) == best and int(other[i]) != byte
        assert float(gain[i]) == pytest.approx(math.log(joint[int(other[i])] / joint[byte]), rel=1e-6, abs=1e-6)
    assert is_better.any() and (odds[is_better] > 0).all() and 32 <= other.min() and other.max() < 127


@pytest.mark.parametrize("n", [1, 31, 32, 33, 200])
@pytest.mark.parametrize("passes", [2, 4, 99])
def test_each_byte_is_predicted_once_without_itself(n, passes, monkeypatch):
    """By a model that knows a text of which byte i is i + 1. A long text is read in pieces of at most 32 bytes."""
    text = torch.arange(1, n + 1)

    def fill_logits(model, rows, use):  # sure of the right byte at a MASK, of the byte 255 elsewhere
        is_mask = rows == MASK
        window = rows.masked_fill(is_mask, 0).amax(0)           # each byte is seen in another pass
        assert rows.size(1) <= 32
        return F.one_hot(torch.where(is_mask, window if len(rows) > 1 else text, 255), 512) * 40.0
    monkeypatch.setattr(sample, "fill_logits", fill_logits)
    monkeypatch.setattr(sample, "find_corrections", lambda logp, ids, rate: (logp.argmax(1) + 1, ids, ids))
    model = mock.Mock(embed=mock.Mock(weight=text))
    predicted, ids, _ = sample.correct(model, text.tolist(), 32, Fill(), passes, 0.01)
    assert torch.equal(ids, text) and torch.equal(predicted[:-1], text[:-1])


def known_text(monkeypatch, text):  # a model that is sure of this text, wherever it reads a part of it
    def masked_log_probs(model, ids, use, passes):
        return (F.one_hot(torch.tensor([*text]) - 1, 255) * 30.0).double().log_softmax(-1)
    monkeypatch.setattr(sample, "masked_log_probs", masked_log_probs)


def test_wrong_bytes_are_marked_and_corrected(runs, capsys, monkeypatch):
    known_text(monkeypatch, b"def f():\n    return x")
    wrong = "def f():\n    retuen x"
    out = stdout(capsys, "mlm", "--prompt", wrong)
    assert re.fullmatch("def f\\(\\):\n    retu«e»n x\n2:9: retu«e»n -> return, replaced, .* times as likely\n", out)
    known_text(monkeypatch, wrong.encode())
    assert stdout(capsys, "mlm", "--prompt", wrong) == wrong + "\n", "a text of which the model is sure"


# ---- a trained model
LEARNED = ("A single man in possession of a good fortune must be in want of a wife, however little known his "
           "views may be.\n")


@pytest.fixture(scope="module")
def learned(tmp_path_factory):  # a model that knows a text by heart, by train.main and best.pt
    """The text is repeated, so the held-out tenth is known, too. It is longer than the block of 32 positions, so the
    windows of all uses move over it."""
    folder = tmp_path_factory.mktemp("learned")
    (folder / "text.txt").write_text(LEARNED * 20)
    flags = ["--data", str(folder / "text.txt"), "--out_dir", str(folder / "a"), "--objective", "hybrid",
             "--hybrid_ratio", "0.5", "--n_layer", "1", "--n_embd", "64", "--batch_size", "16",
             "--learning_rate", "0.02", "--ngram_drop", "0", "--max_iters", "250", "--eval_interval", "250",
             "--log_interval", "250"]
    assert train.main(tiny(*flags), with_sample=False) == 0
    return load_run(str(folder / "a"), "cpu", "float32")


def test_a_trained_model_continues_fills_and_corrects_its_text_exactly(learned):
    twice = LEARNED * 2
    assert sample.ask(learned, prompt=LEARNED[:20], temperature=0, max_new_tokens=len(twice) - 20) == twice
    for start in range(0, len(LEARNED), 11):
        part = twice[start:start + 31]
        n = 1 + start % 3
        one = f"{part[:9]}[MASK:{n}]{part[9 + n:]}"
        two = f"{part[:6]}[MASK]{part[7:20]}[MASK:2]{part[22:]}"
        assert sample.ask(learned, prompt=one) == sample.ask(learned, prompt=two) == part
        assert sample.ask(learned, prompt=f"{part[:15]}<extra_id_0>{part[15 + n:]}", max_new_tokens=5) == part
    long = f"{LEARNED[:30]}[MASK:2]{LEARNED[32:70]}[MASK:3]{LEARNED[73:]}"
    assert sample.ask(learned, prompt=long) == LEARNED
    assert sample.ask(learned, prompt=LEARNED, fix=True) == LEARNED, "a right letter was changed"
    for i in range(3, len(LEARNED) - 5, 13):
        wrong = LEARNED[:i] + "q" + LEARNED[i + 1:]
        assert sample.ask(learned, prompt=wrong, fix=True, error_rate=0.01) == LEARNED


# ---- correcting by edits
def slow_edits(model, ids, T, error_rate):
    """find_edits without a cache: reads the context anew for each candidate."""
    lookahead = min(sample.LOOKAHEAD, T // 4)
    cost = math.log(4 * (1 - error_rate) / error_rate)
    start = 0                                   # of the context in the corrected text, as in Cache.first_unread
    has_read = False

    def nats(context, text):  # of the text after the context
        logp = model.logits(model(torch.tensor([context + text]), 0))[0, :, :256].log_softmax(-1)
        return -sum(float(logp[len(context) + i - 1, byte]) for i, byte in enumerate(text))

    def best_at(i, text):  # -> how much the best edit saves, kind, place, new bytes
        nonlocal start, has_read
        n = len(text) + lookahead + 1
        if n - start > T:
            start = n - (T // 2 if has_read else T)
        has_read = True
        context = text[start:]
        p = model.logits(model(torch.tensor([context]), 0))[0, -1]
        first, *rest = ids[i:i + lookahead]
        edits = [(cost + math.log(95), "extra", [], rest)]
        if rest and 32 <= rest[0] < 127:
            edits.append((cost, "swapped", [rest[0], first], rest[1:]))
        for likely in (32 + p[32:127].topk(sample.LIKELY_BYTES).indices).tolist():
            edits.append((cost + math.log(95), "replaced", [likely], rest))
            edits.append((cost, "missing", [likely], [first, *rest]))
        kept = nats(context, [first, *rest])
        return max((kept - error - nats(context, new + after), kind, i, new) for error, kind, new, after in edits)
    alone = [nats([EOT] + ids[i // T * T:i], [byte]) for i, byte in enumerate(ids)]
    text = [EOT]
    edits = []
    i = 0
    while i < len(ids):
        found = []                              # the edits at this place and the next two, while they get better
        j = i
        while j < len(ids) and (not found or j <= found[-1][2] + 2):
            if sum(alone[j:j + sample.SURPRISE_BYTES]) > cost and 32 <= ids[j] < 127:
                edit = best_at(j, text + ids[i:j])
                if edit[0] > 0 and (not found or edit[0] > found[-1][0]):
                    found.append(edit)
            if not found:
                break
            j += 1
        if not found:
            text.append(ids[i])
            i += 1
            continue
        saved, kind, place, new = found[-1]
        text += ids[i:place] + new
        i = place + {"extra": 1, "replaced": 1, "swapped": 2, "missing": 0}[kind]
        edits.append((place, new, kind, saved))
    return edits


@pytest.mark.parametrize("seed", range(2))
def test_edits_equal_those_without_a_cache(seed):
    """By a random model, which many bytes surprise, in a text of several windows. Neither line ends nor parts of
    characters are changed."""
    net = randomized(seed=seed, dtype=torch.double).double().requires_grad_(False)
    text = [*"some words, x=\n(3) and more café words. ".encode() * 3]
    found = sample.find_edits(net, text, 64, 0.3)
    want = slow_edits(net, text, 64, 0.3)
    assert [edit[:3] for edit in want] == [(e.start, e.new, sample.KINDS[e.stop - e.start, len(e.new)]) for e in found]
    assert [edit[3] for edit in want] == pytest.approx([e.log_odds for e in found], abs=1e-4)
    assert len({kind for _, _, kind, _ in want}) > 1
    kept = lambda ids: [i for i in ids if not 32 <= i < 127]
    assert kept(sample.apply_edits(text, found)) == kept(text)


@pytest.mark.parametrize("wrong, listed", [
    ("A single mqn in", "1:11: m«q»n -> man, replaced, "), ("A single amn in", "1:10: «am»n -> man, swapped, "),
    ("A single mn in", "1:11: mn -> man, missing, "), ("A single manz in", "1:13: man«z» -> man, extra, ")])
def test_a_typo_of_each_kind_is_listed_with_its_place_and_corrected(wrong, listed, learned, capsys):
    text = LEARNED + wrong + LEARNED[15:]
    assert sample.ask(learned, prompt=text, fix=True, error_rate=0.01) == LEARNED * 2
    out = sample.ask(learned, prompt=text, correct=True, error_rate=0.01)
    assert out.startswith("2" + listed[1:]) and out.count("\n") == 0 and "as likely" in out
    assert "1 places look wrong" in capsys.readouterr().err


def run_as_program(*flags):
    with pytest.raises(SystemExit) as e:
        run_program(lambda: sample.main([*flags]))
    assert not e.value.code


def test_a_file_is_corrected_into_a_file(runs, capfdbinary, monkeypatch):
    """All other bytes stay as they are, line ends and bytes that are not UTF-8 included, whatever encoding and line
    ends standard output has."""
    monkeypatch.setattr(sys, "stdout", open(1, "w", encoding="latin-1", newline="\r\n", closefd=False))
    clean = b"ok\r\n\xff\xc3\xaf return\n"
    known_text(monkeypatch, clean)
    Path("wrong.txt").write_bytes(clean.replace(b"return", b"retuen"))
    for name in ("mlm", "mdlm", "sedd", "nsp", "xlnet"):
        run_as_program("--out_dir", f"out/{name}", "--prompt", "FILE:wrong.txt", "--fix")
        out, err = capfdbinary.readouterr()
        assert out == clean and b"1 corrections in 15 bytes" in err


def test_a_pipe_gets_all_bytes_of_a_text_and_a_str_has_them_replaced(runs, capfdbinary, monkeypatch):
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))
    run_as_program("--out_dir", "out/mlm", "--prompt", "FILE:latin1.txt")
    assert b"fl\xe4che" in capfdbinary.readouterr().out
    run_as_program("--out_dir", "out/clm", "--prompt", "FILE:latin1.txt")
    assert capfdbinary.readouterr().out.startswith(b"fl\xe4che")
    assert "fl\ufffdche" in sample.ask(sample.load_run("out/mlm", "cpu"), prompt="FILE:latin1.txt", correct=True)


def test_without_standard_error_a_file_gets_only_the_text(runs, capfdbinary, monkeypatch):
    """The shell has closed it (2>&-): then Python has None, and print(file=None) prints to standard output."""
    known_text(monkeypatch, b"fl\xe4che")
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))
    monkeypatch.setattr(sys, "stderr", None)
    run_as_program("--out_dir", "out/mlm", "--prompt", "FILE:latin1.txt", "--fix")
    monkeypatch.undo()
    assert capfdbinary.readouterr().out == b"fl\xe4che"


# ---- infilling holes of unknown length
LONG_SCRIPT = [70] * 4 + [SENTINEL + 1] + [71] * 20


@pytest.mark.parametrize("script, pieces, most, block, holes, ended", [
    ([70, SENTINEL + 1, 71, 72, SENTINEL + 2, SENTINEL + 3], [[65], [66], [], []], 50, 99, [[70], [71, 72], []], True),
    ([70, EOT, SENTINEL + 2], [[65], [66], []], 50, 99, [[70], []], True),          # EOT ends a span, too
    # the source and the first sentinel take 8 of 16 positions, and the next sentinel takes one, but is no new byte
    (LONG_SCRIPT, [[65], [66], [67]], 50, 16, [[70] * 4, [71] * 3], False),
    (LONG_SCRIPT, [[65], [66], [67]], 9, 99, [[70] * 4, [71] * 5], False),
    (LONG_SCRIPT, [[65], [66], [67]], 4, 99, [[70] * 4, []], False)])
def test_spans_are_split_at_sentinels_and_end_with_the_block_or_at_max_new_tokens(script, pieces, most, block, holes,
                                                                                  ended):
    span = OBJECTIVES["span"]
    source, prefix = span.uses["infill"].prompt(pieces, 4, None)
    model = scripted(*([i] for i in script))
    found = sample.infill(model, span, settings("span", block), source, prefix, len(pieces) - 1, most, rng())
    assert found == (holes, ended)


@pytest.mark.parametrize("name", WRITE_HOLES)
def test_a_hole_ends_as_soon_as_its_end_is_likely_and_no_sooner(name):
    """For any sampled bytes, with the objective's position numbers. EOT also counts as an end, and is never sampled."""
    net = randomized().requires_grad_(False)
    objective = OBJECTIVES[name]
    hp = settings(name, 64)
    use = objective.uses["infill"]
    end = use.stop_ids[0]
    net.head.weight[0, [end, EOT]] *= 6         # likely here and there
    lengths = set()
    for seed in range(15):
        for how in ({}, GREEDY):
            asked, P = use.prompt([ids(3, seed=seed)[0].tolist(), [*b"ghi"]], 4, hp)
            [written], ended = sample.infill(net, objective, hp, asked, P, 1, 9, rng(seed), **how)
            row = torch.tensor([asked + written])
            prefix = torch.tensor([P])
            at = objective.numbering(row, prefix, hp) if objective.numbering else None
            logits = net.logits(net(row, prefix, positions=at))[0, len(asked) - 1:]
            likely = logits.softmax(-1)[:, list({end, EOT})].sum(-1) >= sample.END_THRESHOLD
            assert likely[:len(written) + ended].tolist() == [False] * len(written) + [True] * ended
            assert not how or written == logits[:len(written), 1:256].argmax(-1).add(1).tolist()
            lengths.add(len(written))
    assert len(lengths) > 2, "all holes are equally long"


@pytest.mark.parametrize("n_left, n_right", [(0, 40), (5, 9), (300, 9), (300, 40)])
def test_cuts_of_a_middle_are_compared_byte_by_byte(n_left, n_right):
    """The middle ends at the first cut after which the first 16 bytes of the suffix are at least a tenth as likely as
    after the best cut."""
    net = randomized().requires_grad_(False)
    hp = settings("fim", 32)
    found = set()
    for seed in range(5):
        left, middle, right = (ids(n, seed=f"{seed}{n}")[0].tolist() for n in (n_left, 11, n_right))
        some = right[:16]
        nats = []
        for k in range(12):
            context = [EOT] + (left + middle[:k])[-(32 - len(some)):]
            logp = net.logits(net(torch.tensor([context + some])))[0, :, :256].log_softmax(-1)
            nats.append(-sum(float(logp[len(context) - 1 + i, byte]) for i, byte in enumerate(some)))
        cut = next(k for k in range(12) if nats[k] < min(nats) + math.log(10))
        assert sample.trim_to_suffix(net, OBJECTIVES["fim"], hp, left, middle, right) == middle[:cut]
        found.add(cut)
        # without a suffix, or by a model that does not code text from left to right, nothing is trimmed
        for name, suffix in (("fim", []), ("span", right), ("ul2", right)):
            assert sample.trim_to_suffix(net, OBJECTIVES[name], hp, left, middle, suffix) == middle
    assert len(found) > 1


@pytest.mark.parametrize("n_left, n_right", [(0, 30), (9, 0), (9, 3), (9, 30)])
def test_of_all_lengths_of_a_hole_the_most_likely_is_taken(n_left, n_right):
    """The answer and the first 16 bytes after it are read from left to right. EOT follows a hole at the end."""
    net = randomized().requires_grad_(False)
    net.head.weight *= 9                        # bytes differ widely in their nats, so that no length is always best
    hybrid = OBJECTIVES["hybrid"]
    lengths = set()
    for seed in range(12):
        left, right = (ids(n, seed=f"{seed}{n}")[0].tolist() for n in (n_left, n_right))
        after = right or [EOT]
        answers = {}                            # {log-probability: answer}
        for n in range(3):
            row = torch.tensor([left + [MASK] * n + after])
            *_, row = sample.unmask(net, row, rng(), hybrid.uses["fill"], **GREEDY)
            answer = row[0, n_left:n_left + n].tolist()
            text = [EOT, *left, *answer, *after[:16]]
            logp = net.logits(net(torch.tensor([text])))[0, :, :256].log_softmax(-1)
            answers[sum(float(logp[i - 1, text[i]]) for i in range(n_left + 1, len(text)))] = answer
        best = answers[max(answers)]
        found = sample.infill_from_left(net, hybrid, settings("hybrid", 99), [left, right], 4, 2, rng(), **GREEDY)
        assert found == ([best], True)
        lengths.add(len(best))
    assert 0 in lengths and len(lengths) > 1


def test_holes_are_filled_from_the_left_and_read_what_is_near(runs, capsys, monkeypatch):
    asked = []

    def fill(model, objective, hp, before, after, longest, g, temperature):
        asked.append((bytes(before), bytes(after), longest, temperature))
        return [*b"XYZ"[:len(asked)]]
    monkeypatch.setattr(sample, "fill_any_length", fill)
    block = load_checkpoint("out/hybrid")["config"]["block_size"]
    longest = min(16, block // 3)
    room = block - 8 - longest
    found = output(capsys, "hybrid", "--prompt", f"{'l' * 99}<extra_id_0><extra_id_1>mm<extra_id_7>")       # two holes
    assert found.out == f"{'l' * 99}XmmXY\n" and found.err.count("reads only up to 14 bytes around each hole") == 1
    assert asked == [(b"l" * (room - 2), b"mm", longest, 0.0), (b"l" * (room - 3) + b"Xmm", b"", longest, 0.0)]
    found = output(capsys, "hybrid", "--prefix", "<extra_id_0>a", "--max_new_tokens", "3", "--num_samples", "2")
    assert "XYZaXYZ\n" in found.out
    assert asked[2:4] == [(b"", b"a", 3, 0.8), (b"XYZa", b"", 3, 0.8)]
    asked.clear()
    output(capsys, "hybrid", "--prefix", "a", "--suffix", "b" * 99)
    assert asked.pop() == (b"a", b"b" * (room - 1), longest, 0.0), "a short side leaves its space to the other"
    assert "<mask> is read as text" in output(capsys, "hybrid", "--prefix", "a" * 99, "--suffix", "<mask>" * 9).err
    assert asked == [(b"a" * (room - room // 2), (b"<mask>" * 9)[:room // 2], longest, 0.0)]


# ---- repairing
@pytest.mark.parametrize("text, pieces", [
    (b"", []), (b"abcdefgh", [b"abcdefgh"]), (b"abcdefghi", [b"abcde", b"fghi"]), (b"ab cd efgh", [b"ab cd ", b"efgh"]),
    (b"a bcdefghijk", [b"a bcde", b"fghijk"]), ([*b"ab de ", MASK, *b" fgh"], [[*b"ab de ", MASK, *b" "], b"fgh"])])
def test_a_long_text_is_cut_into_equal_parts_after_spaces_but_not_right_before_a_hole(text, pieces):
    assert [*sample.cut_after_spaces([*text], 8)] == [[*piece] for piece in pieces]


@pytest.mark.parametrize("noise, n, sources", [("infill", 32, [32]), ("infill", 33, [17, 16]),
                                               ("insert,permute", 54, [54]), ("insert,permute", 55, [28, 27])])
def test_a_text_is_repaired_in_pieces_none_longer_than_in_training(noise, n, sources, monkeypatch):
    hp = settings("bart", 128, bart_noise=noise)
    asked = []

    def generate(model, ids, limit, T, g, prefix, stop_id, get_positions, **how):
        assert ids[0, -1] == SEP and EOT not in ids and prefix == ids.size(1) and stop_id is None
        assert limit == OBJECTIVES["bart"].n_bytes(128, hp) + 1 >= prefix, "a copy has no space"
        assert get_positions(ids)[0].tolist() == [*range(prefix - 1), -1]
        asked.append(prefix - 1)
        yield from ids[0, :-1]                  # a copy
        yield torch.tensor(EOT)
    monkeypatch.setattr(sample, "generate", generate)
    text = [*b"x" * n]
    assert [*sample.repair(None, OBJECTIVES["bart"], text, hp, rng())] == text
    assert asked == sources
    assert [*sample.repair(None, OBJECTIVES["bart"], [97, EOT, 98], hp, rng())] == [97, 98], "a NUL would end the copy"
    assert [*sample.repair(None, OBJECTIVES["bart"], [EOT] * 40, hp, rng())] == [], "writes from nothing"


# ---- the command
RAW = "a\x1b[31mb\x07c\x08d\r"                  # with control characters
LONG = "x" * 99
HOLE = "a<extra_id_0>b"
SIDES = ["--prefix", "a", "--suffix", "b"]
FILES = {"book.txt": b"import argparse\n" * 40, "lines.txt": b"a\n\nccc\nbb\n",
         "holes.txt": b"\xffa[MASK]\n", "equal.txt": b"bb\na\nbb\nccc\nbb\n",
         "utf16.txt": "a text".encode("utf-16"), "latin1.txt": b"fl\xe4che",
         "long.txt": b"aaaa bb cc\nxx ccc aaaaaa\n"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):  # a folder with a run of every objective, and of two mixtures
    path = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for name, content in FILES.items():
            (path / name).write_bytes(content)
        for name in [*OBJECTIVES, "clm:.5,mlm:.5", "bart:.5,mlm:.5"]:
            flags = tiny("--data", shutil.__file__, "--max_iters", "2", "--n_layer", "1", "--objective", name)
            assert train.main(flags, with_sample=False) == 0
    return path


@pytest.fixture
def runs(place, monkeypatch):
    monkeypatch.chdir(place)


def output(capsys, run, *flags):  # -> what sample.py prints: standard output, standard error
    capsys.readouterr()
    assert not sample.main(["--out_dir", f"out/{run}", *flags, "--dtype", "float32"])
    return capsys.readouterr()


def stdout(capsys, run, *flags):
    return output(capsys, run, *flags).out


def replace_prediction(monkeypatch, name, predict):
    [(mode, use), *_] = OBJECTIVES[name].uses.items()
    use = dataclasses.replace(use, embed=predict) if mode == "search" else predict
    monkeypatch.setitem(OBJECTIVES, name, dataclasses.replace(OBJECTIVES[name], uses={mode: use}))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_a_text_every_objective_demonstrates_itself(name, runs, capsys):
    mode = next(iter(OBJECTIVES[name].uses))
    flags = ["--max_new_tokens", "20"] if mode in ("continue", "continue_blocks", "infill") else []
    for text in (RAW * 9, RAW[:10]):
        ckpt = load_checkpoint(f"out/{name}") | {"held_out": torch.tensor([*text.encode()], dtype=torch.uint8)}
        os.makedirs("out/raw", exist_ok=True)
        torch.save(ckpt, "out/raw/ckpt.pt")
        out = stdout(capsys, "raw", *flags)
        assert out.startswith(f"held-out text:\n{text[:16]}\n")
        _, heading, answer = out.partition("--- the model's answer:\n")
        assert heading and (answer.strip() or mode == "repair")                     # an untrained model may end at once
    assert out == stdout(capsys, "raw", *flags), "the same seed gave another text"
    if mode == "search":                        # the searched text does not contain the query
        texts, _ = sample.demonstration("search", torch.arange(1, 100), 32)
        assert bytes(texts["query"]) + texts["corpus"] == bytes(range(1, 100)) and len(texts["query"]) == 8


INPUTS = {
    "clm": [[LONG, "--max_new_tokens", "40"], [os.fsdecode(b"\xff\x80"), "--max_new_tokens", "9"]],
    "mtp": [["", "--max_new_tokens", "40"], ["x", "--max_new_tokens", "0"]],
    "prefix": [[LONG], ["x", "--max_new_tokens", "0"]],
    "bd3lm": [["", "--max_new_tokens", "40"], [LONG], ["x", "--steps", "1", "--order", "ancestral"]],
    "mdlm": [["[MASK:90]", "--order", "confident"], [LONG], ["é\0"], ["x", "--max_new_tokens", "0"]],
    "xlnet": [["[MASK:9]", "--steps", "2"], [LONG]],
    "mlm": [[LONG + "[MASK:3]" + LONG + "[MASK]"], ["é[MASK]<M\udcff"]],
    "span": [["<extra_id_0>", "--num_samples", "2"], [HOLE + LONG]],
    "ul2": [[""], [LONG], SIDES, [HOLE, "--max_new_tokens", "40"]],
    "fim": [["--prefix", LONG, "--suffix", LONG], ["--prefix", "", "--suffix", ""]],
    "bart": [[LONG], ["[MASK]"]], "electra": [[LONG]], "nsp": [["--prefix", LONG, "--suffix", LONG]],
    "contrastive": [["--query", LONG, "--corpus", "lines.txt"]], "rotation": [[LONG]],
}


@pytest.mark.parametrize("name, flags", [(n, f) for n, each in INPUTS.items() for f in each],
                         ids=lambda v: v if isinstance(v, str) else " ".join(v)[:30])
def test_every_mode_takes_any_input(name, flags, runs, capsys):
    """It prints the whole input. If a prompt does not fit the block, the model reads a part, and a note says so."""
    flags = flags if flags[0].startswith("--") else ["--prompt", *flags]
    out, err = output(capsys, name, *flags)
    text = dict(zip(flags[::2], flags[1::2]))
    text = text.get("--prompt", text.get("--prefix", "") + "<extra_id_0>" + text.get("--suffix", ""))
    if next(iter(OBJECTIVES[name].uses)) in ("continue", "fill", "infill"):
        pieces = re.split(r"\[MASK.*?\]|<extra_id_.>|\0", os.fsencode(text).decode(errors="replace"))
        assert re.search(".*".join(map(re.escape, pieces)), out, re.DOTALL)
        assert ("of 99 bytes of the prompt" in err) == (text == LONG and name != "clm")


@pytest.mark.parametrize("name, flags, others", [
    ("clm", [], ["--num_samples", "2"]), ("mtp", [], ["--num_samples", "2"]), ("clm", [], ["--compile"]),
    ("mtp", [], ["--compile"]), ("mtp", ["--temperature", "0"], ["--temperature", "0", "--no-speculate"])])
def test_other_ways_to_the_same_text_print_the_same_text(name, flags, others, runs, capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda step, **how: compiled.append(step) or step)
    common = ["--prompt", "import ", "--max_new_tokens", "50"]
    one = output(capsys, name, *common, *flags)
    two = output(capsys, name, *common, *others)
    assert two.out.count(one.out.strip()) == 1, "the second of two samples equals the first, or the first differs"
    assert ("--- sample 2" in two.out) == ("--num_samples" in others)
    assert ("bytes per forward pass" in two.err) == (name == "mtp" and "--no-speculate" not in others)
    assert len(compiled) == ("--compile" in others)


@pytest.mark.parametrize("name, flags, expected", [
    ("mlm", ["a[MASK]"], (0, 0, 1)), ("mlm", ["a[MASK]", "--num_samples", "2"], (0.8, 0, 1)),
    ("mdlm", ["a"], (1, 0, 0.8)), ("clm", ["a"], (0.8, 0, 1)),
    ("bart", ["a", "--temperature", "0.3", "--top_k", "5", "--top_p", "0.5"], (0.3, 5, 0.5))])
def test_holes_and_repairs_take_the_most_likely_byte_by_default(name, flags, expected, runs, capsys, monkeypatch):
    seen = set()

    def spy(logits, temperature, top_k=0, top_p=1):
        seen.add((temperature, top_k, top_p))
        return certain(torch.full(logits.shape[:-1], 65))
    monkeypatch.setattr(sample, "distribution", spy)
    stdout(capsys, name, "--prompt", *flags)
    assert seen == {expected}


@pytest.mark.parametrize("name, prompt, order", [("mlm", "[MASK:3]", "left"), ("bd3lm", "a", "confident")])
def test_order_and_passes_reach_the_sampler(name, prompt, order, runs, capsys, monkeypatch):
    asked = set()

    def unmask(model, ids, g, use, steps, order, **how):
        asked.add((steps, order))
        yield ids.where(ids != MASK, 65)
    monkeypatch.setattr(sample, "unmask", unmask)
    stdout(capsys, name, "--prompt", prompt, "--steps", "3", "--order", order)
    assert asked == {(3, order)}


# ---- what the model is given
@pytest.fixture
def given(runs, monkeypatch):  # [(ids, prefix)] of each pass
    seen = []
    forward = Transformer.forward

    def spy(self, x, prefix=0, **kwargs):
        seen.append((x.tolist(), prefix))
        return forward(self, x, prefix, **kwargs)
    monkeypatch.setattr(Transformer, "forward", spy)
    return seen


ALL = 99                                        # of the row: bidirectional
HOLE_IDS = [97, SENTINEL, 98, SENTINEL + 1, SEP, SENTINEL]
GIVEN = [                                       # in a block of 32
    ("clm", ["--prompt", "abc"], [*b"abc"], 0), ("clm", ["--prompt", ""], [EOT], 0),
    ("prefix", ["--prompt", "abc"], [*b"abc"], ALL), ("prefix", ["--prompt", "a" + LONG], [*b"x" * 16], ALL),
    ("ul2", ["--prompt", "<extra_id_0>", "--max_new_tokens", "17"], [MODE_X, SENTINEL, SEP, SENTINEL], 3),
    ("ul2", ["--prompt", HOLE, "--max_new_tokens", "16"], [MODE_R, *HOLE_IDS], 6),
    # if a text does not end in a hole, one more sentinel follows, so that the last answer ends with a sentinel
    ("span", ["--prompt", HOLE], HOLE_IDS, 5),
    ("fim", SIDES, [PRE, SUF, 98, MID, 97], 0),
    # of long sides, only the bytes nearest to the hole are read
    ("fim", ["--prefix", LONG + "123", "--suffix", "456" + LONG], [PRE, SUF, *b"456xxxx", MID, *b"xxxx123"], 0),
    ("bart", ["--prompt", "ab[MASK]"], [97, 98, MASK, SEP], ALL),
    # 14 bytes of each text: the end of a long first text, and the start of a long second one without its first 8 bytes,
    # as in training
    ("nsp", ["--prefix", LONG + "123", "--suffix", "z" * 14], [CLS, *b"xxxxxxxxxxx123", SEP, *b"z" * 14, SEP], ALL),
    ("nsp", ["--prefix", "a", "--suffix", "12345678" + LONG], [CLS, 97, SEP, *b"x" * 14, SEP], ALL),
    # a quarter of the block lies before a hole, and more if the text ends soon after it
    ("mlm", ["--prompt", LONG + "[MASK]" + "y" * 99], [*b"x" * 8, MASK, *b"y" * 23], ALL),
    ("hybrid", ["--prompt", LONG + "[MASK]"], [EOT, *b"x" * 30, MASK], ALL),
    ("mdlm", ["--prompt", "abc", "--max_new_tokens", "2"], [*b"abc", MASK, MASK], ALL),
    ("nsp", ["--prefix", "FILE:holes.txt", "--suffix", "b"], [CLS, *FILES["holes.txt"], SEP, 98, SEP], ALL),
    ("clm_.5+mlm_.5", ["--prompt", "a[MASK]", "--objective", "clm"], [*b"a[MASK]"], 0),
]


@pytest.mark.parametrize("run, flags, row, prefix", GIVEN, ids=lambda v: v if isinstance(v, str) else "")
def test_a_text_is_laid_out_as_in_training(run, flags, row, prefix, given, capsys):
    stdout(capsys, run, *flags)
    assert given[0] == ([row], min(prefix, len(row)))


def test_bytes_are_printed_as_they_come_and_characters_once_they_are_complete(capsys):
    printed = []

    def steps():
        for i in (0xa9, 66, 0xff, EOT):
            yield i
            printed.append(capsys.readouterr().out)

    for text in sample.stream([65, 0xc3], steps()):
        sample.show(text)
    assert printed == ["Aé", "B", "\ufffd", ""]
    assert capsys.readouterr().out == "\n"


def test_ask_returns_a_list_of_samples_and_refuses_what_the_program_refuses(runs, refuses, capsys):
    loaded = load_run("out/clm", "cpu", "float32")
    first, second = sample.ask(loaded, prompt="a", num_samples=2, max_new_tokens=9)
    assert sample.ask(load_run("out/mlm", "cpu"), prompt="a\n", fix=True) == "a\n", "the text's own line end"
    assert sample.ask(loaded) and capsys.readouterr().out.startswith("held-out text:\n")
    seeds = [sample.ask(loaded, prompt="a", max_new_tokens=9, **how) for how in ({}, {"seed": 1}, {"seed": 2})]
    assert first == seeds[0] == seeds[1] != seeds[2] and first != second
    for flags, hint in ((dict(temperature=-1), "-1.0 is not between"), (dict(steps=2), "--steps"),
                        (dict(prompt="\ud83d"), "half of a character")):
        refuses(hint, lambda flags=flags: sample.ask(loaded, **{"prompt": "a"} | flags))
    with pytest.raises(TypeError):              # not the text "None"
        sample.ask(loaded, prompt=None)


@pytest.mark.parametrize("name, prompt", [("clm", RAW), ("mlm", RAW + "[MASK]"), ("fim", RAW + "<extra_id_0>")])
def test_a_terminal_gets_no_control_character_and_sees_what_is_new(name, prompt, runs, capsys, monkeypatch):
    assert RAW in stdout(capsys, name, "--prompt", prompt)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = stdout(capsys, name, "--prompt", prompt)
    assert r"a\x1b[31mb\x07c\x08d" in out and r"\x0d" not in out
    plain = re.sub(r"\x1b\[[07]m", "", out)     # without what highlights new parts
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", plain) and (plain != out) == (name != "clm")


def test_every_mode_prints_what_the_model_found(runs, capsys, monkeypatch):
    """A rotated text starts at its seam. The nearest lines come first. Suspicious characters are marked as a
    whole, and their words are listed with line and column."""
    replace_prediction(monkeypatch, "rotation", lambda model, x: (x == ord("f")) * 9.0)
    assert "\nfabcde\n" in "\n" + stdout(capsys, "rotation", "--prompt", "defabc")
    replace_prediction(monkeypatch, "electra", lambda model, x: (x > 127) * 4.0 - 2 if x.size(1) <= 32 else None)
    times = ", 7.4 times as likely\n"
    out = stdout(capsys, "electra", "--prompt", "one\nnaïve café" + "x" * 9)
    assert out == f"one\nna«ï»ve caf«é»{'x' * 9}\n2:3: na«ï»ve{times}2:10: caf«é»{'x' * 9}{times}"
    out = stdout(capsys, "electra", "--prompt", "fine\n" * 9 + "naïve café")        # read in pieces that fit a block
    assert out == f"10:3: na«ï»ve{times}10:10: caf«é»{times}"
    replace_prediction(monkeypatch, "contrastive",
                       lambda model, x: F.normalize(torch.tensor([x.size(1), 6.0]), dim=0).expand(len(x), 2))
    out = stdout(capsys, "contrastive", "--query", "aa", "--corpus", "equal.txt")
    assert re.findall(r"line (\d:\n.*)", out) == ["1:\nbb", "4:\nccc", "2:\na"], "equal lines are one result"
    out = stdout(capsys, "contrastive", "--query", "bb cc", "--corpus", "long.txt")                 # in pieces of 8
    assert re.findall(r"similarity (.{5}), line (\d)", out) == [("1.000", "1"), ("0.996", "2")]
    # two pieces of 7 and 5 bytes, of which the second has an equal piece in both lines
    out = stdout(capsys, "contrastive", "--query", "bb ccc dd ee", "--corpus", "long.txt")
    near = (math.cos(math.atan(5 / 6) - math.atan(7 / 6)) + 1) / 2
    assert f"similarity {near:.3f}, line 1" in out and f"similarity {(1 + 0.996) / 2:.3f}, line 2" in out
    replace_prediction(monkeypatch, "nsp", lambda *args: torch.tensor(-2.0))
    assert f"follows the first with probability {1 / (1 + math.exp(2)):.3f}" in stdout(capsys, "nsp", *SIDES)


def test_a_continued_text_ends_at_the_first_eot_and_a_hole_has_none(runs, capsys, monkeypatch):
    """Of a model that writes in any order. What follows EOT is not printed. A line on standard error marks where the
    model's text begins."""
    content = torch.tensor([*b"..aa", EOT, *b"b" * 27])
    monkeypatch.setattr(sample, "fill_logits", lambda model, ids, *args: certain(content[:ids.size(1)])[None])
    able = [name for name, objective in OBJECTIVES.items() if "write" in objective.uses]
    assert able
    for name in able:
        out, err = output(capsys, name, "--prompt", "é", "--max_new_tokens", "9")
        assert out == "éaa\n" and err.endswith("\n--- the model continues:\n")
        out = stdout(capsys, name, "--prompt", "..[MASK:6]", "--temperature", "0")
        assert out == "..aa\x01bbb\n", "of the other bytes the first is taken: all are equally likely"


@pytest.mark.parametrize("run, word", [
    ("clm", "[MASK:3]"), ("mlm", "<extra_id_0>"), ("mlm", "[mask]"), ("ul2", "<extra-id-0>")])
def test_what_looks_like_a_hole_but_is_read_as_text_is_noted(run, word, runs, capsys, refuses):
    """The note says how holes are written. Beside a hole that is filled, such a word is refused."""
    err = output(capsys, run, "--prompt", word).err
    assert f"{word} is read as text when {run} is used" in err
    assert "Holes are written [MASK], [MASK:4] or <extra_id_0>" in err
    if run != "clm":
        hole = "<extra_id_0>" if run == "ul2" else "[MASK]"
        refuses(f"{word} is read as text", sample.main, ["--out_dir", f"out/{run}", "--prompt", word + hole])
        assert "is read as text" not in output(capsys, run, "--prompt", "a" + hole).err


def test_every_use_can_be_asked_for(runs, capsys):
    """The texts that are given and the markers in them choose the use, whichever use comes first."""
    for name, flags, mode in (
            ("nsp", ["--prompt", "a[MASK]b"], "fill"), ("nsp", SIDES, "follow"), ("fim", SIDES, "infill"),
            ("bart", ["--prompt", "[MASK]"], "repair"), ("ul2", ["--prompt", "a[MASK]"], "continue"),
            ("hybrid", ["--prompt", HOLE], "infill"), ("bd3lm,clm", ["--prompt", "a"], "continue_blocks"),
            ("mlm,clm", ["--prompt", "a"], "continue"), ("mlm", ["--prompt", "a"], "correct"), ("mlm", [], "fill"),
            ("mdlm", ["--prompt", "a"], "write"), ("hybrid", ["--prompt", "a", "--fix", ""], "correct"),
            ("clm,nsp", SIDES, "follow")):
        texts = dict(zip((flag[2:] for flag in flags[::2]), map(os.fsencode, flags[1::2])))
        objective, chosen = sample.choose_use(settings(name, T), "", {*texts}, texts.get("prompt", b""))
        assert chosen == mode and mode in objective.uses, (name, flags)
    assert "█" not in stdout(capsys, "nsp", "--prompt", "a[MASK]b")


def test_a_terminal_without_colors_gets_plain_marks(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for term, shown in (("xterm", "\033[7mq\033[0m"), ("dumb", "«q»")):
        monkeypatch.setenv("TERM", term)
        sample.show(f"{sample.WRONG[0]}q{sample.WRONG[1]}\a\udcff")
        assert capsys.readouterr().out == shown + "\\x07\ufffd"


def test_the_table_of_defaults_in_the_help_is_true():
    table = sample.__doc__.partition("defaults:")[2].partition("The temperature 0")[0]
    listed = set()
    for line in table.splitlines()[1:]:
        columns, _, names = line.rpartition("  ")
        mode, temperature, *rest = columns.split()
        for name in names.split(", "):
            use = OBJECTIVES[name].uses[mode]
            sampling = sample.MODES[mode].sampling
            assert float(temperature) == sampling["temperature"]
            assert ("top_p" in sampling) == (rest[0] == f"{sampling.get('top_p')}")
            assert "order" not in sample.MODES[mode].flags or use.order in rest
            listed.add((mode, name))
    assert listed == {(mode, name) for name, objective in OBJECTIVES.items() for mode in objective.uses
                      if sample.MODES[mode].sampling}, "add it to the table at the top of sample.py"


# ---- what is refused
BAD = [
    ("clm", ["--objective", "mlm"], "no use for it in this run, which was trained as clm"),
    ("clm", ["--temperature", "nan"], "nan"),
    ("contrastive", ["--prompt", "a"], "only to continue a prompt or write in blocks or"),
    ("contrastive", ["--query", "a"], "--corpus: is missing or empty. Try the name of a file"),
    ("nsp", ["--prompt", "[MASK]", "--prefix", "x"], "--prefix: has no effect when nsp is used to fill [MASK]s"),
    ("fim", ["--prompt", HOLE, "--prefix", "b"], "without them"), ("span", ["--prompt", "a"], "has no hole"),
    ("clm", ["--prompt", "FILE:."], "--prompt ."), ("mlm", ["--fix"], "--prompt: is missing"),
    ("mlm", ["--prompt", "FILE:utf16.txt", "--fix"], "is not text"),
    ("mlm", ["--prompt", "a", "--steps", "1"], "--steps: has no effect when mlm is used to correct a text"),
]


@pytest.mark.parametrize("run, flags, hint", BAD, ids=[" ".join(flags)[:30] for _, flags, _ in BAD])
def test_bad_input_is_refused_in_one_line(run, flags, hint, runs, refuses):
    out, _ = refuses(hint, sample.main, ["--out_dir", f"out/{run}", *flags])
    assert not out


def test_a_closed_pipe_ends_the_program_without_a_traceback(runs):
    command = f"{sys.executable} {sample.__file__} --out_dir out/clm --prompt a | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout == "a" and done.stderr == "--- out/clm/best.pt: clm, step 2 of 2\n\n--- the model continues:\n"
