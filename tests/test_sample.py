import io
import math
import os
import re
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomize, randomized, settings

import sample
import train
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, PRE, SENTINEL, SEP, SUF, document_ids, generator
from model import Sizes, Transformer
from objectives import OBJECTIVES, USUAL, embed, mtp_ahead, seq2seq
from run import build, get_config, load_checkpoint, load_run

T = 12
GREEDY = dict(temperature=0)
IN_PLACE, SHIFTED, FRAMED = ([], [], 0), ([EOT], [], 1), ([CLS, MODE_S], [SEP], 1)  # what an entry's fills returns


def ids(n, N=1, seed=0):
    return torch.randint(1, 256, (N, n), generator=generator(f"prompt {seed}"))


def gens(N=1, seed=1):
    return sample.sample_generators(seed, N)


def text_of(*args, **kwargs):  # generate as one tensor (N, written)
    return torch.stack(list(sample.generate(*args, **kwargs)), 1)


def bits_of(net, row, targets, mask="causal"):  # ids (T,), {position: byte} -> bits
    logp = net.logits(net(row[None], mask))[0].detach().log_softmax(-1)
    return -sum(float(logp[i, byte]) for i, byte in targets.items()) / math.log(2)


def chi2(seen, p):  # counts, probabilities of the same shape -> of the cells where some are expected
    want = p * seen.sum()
    assert seen[want < 1e-6].sum() == 0, "what cannot be was drawn"
    return float(((seen - want) ** 2 / want.clamp(min=1e-9))[want > 1].sum())


# ---- drawing a byte

def test_temperature_0_is_the_most_likely_byte_and_never_a_special_id():
    logits = torch.zeros(1, 512)
    logits[0, 300], logits[0, 65] = 9, 5
    assert sample.pick(logits, gens(), temperature=0).tolist() == [65]
    assert max(int(sample.pick(logits, [generator(f"{i}")])) for i in range(200)) < 256


FOUR = torch.tensor([0.5, 0.25, 0.15, 0.1])


def test_draws_follow_the_probabilities():
    logits = torch.full((512,), -50.0)
    logits[100:104] = FOUR.log()
    g = generator("draws")
    drawn = torch.cat([sample.pick(logits.expand(1, 50, -1), [g]).flatten() for _ in range(80)])
    assert chi2(torch.bincount(drawn, minlength=104)[100:104], FOUR) < 25           # 3 degrees of freedom


@pytest.mark.parametrize("how, allowed", [
    (dict(top_k=2), 2), (dict(top_k=1), 1), (dict(top_k=5000), 4),
    (dict(top_p=0.6), 2), (dict(top_p=0.5), 1), (dict(top_p=0.0), 1),
    (dict(top_k=2, top_p=0.6), 2),              # of the two alone the first would hold .67
    (dict(top_k=3, top_p=0.6), 2), (dict(temperature=1e-310), 1)])
def test_top_k_and_top_p_cut_the_tail(how, allowed):
    logits = torch.full((1, 512), -1e9)
    logits[0, 100:104] = FOUR.log()
    drawn = {int(sample.pick(logits, [generator(f"{i}")], **how)) for i in range(100)}
    assert drawn == set(range(100, 100 + allowed))


# ---- continuing

def uncached(net, x, n, prefix=0, **how):  # what generate writes, by a whole pass for each byte
    out, start, draws = x, max(0, x.size(1) - T), gens(len(x))
    ended = torch.zeros(len(x), dtype=torch.bool)
    for _ in range(n):
        if out.size(1) - start > T:
            if prefix:
                break
            start = out.size(1) - T // 2
        mask = torch.full((len(x),), prefix) if prefix else "causal"
        byte = sample.pick(net.logits(net(out[:, start:], mask)[:, -1]), draws, **how).masked_fill(ended, EOT)
        ended |= byte == EOT
        out = torch.cat((out, byte[:, None]), 1)
    return out[:, x.size(1):]


@pytest.mark.parametrize("n", [1, 5, T - 1, T, T + 1, 3 * T])
@pytest.mark.parametrize("how", [GREEDY, dict(temperature=1.0)], ids=["greedy", "drawn"])
def test_the_cache_changes_nothing_before_and_after_the_block_is_full(n, how):
    net, x = randomized().requires_grad_(False), ids(n, 2)
    out = text_of(net, x, 30, T, gens(2), **how)
    assert torch.equal(out, uncached(net, x, 30, **how))
    assert out.shape == (2, 30)


@pytest.mark.parametrize("n, prefix", [(1, 1), (4, 4), (T, T), (7, 3)])
def test_the_cache_changes_nothing_for_a_prefix_which_ends_with_the_block(n, prefix):
    net, x = randomized().requires_grad_(False), ids(n, 2)
    out = text_of(net, x, 30, T, gens(2), prefix)
    assert torch.equal(out, uncached(net, x, 30, prefix))
    assert out.shape == (2, T - n + 1)


def test_a_full_context_is_cut_to_its_last_half():
    net, x = randomized().requires_grad_(False), ids(T)
    out = text_of(net, x, 2, T, gens(), **GREEDY)
    row = torch.cat((x, out), 1)
    argmax = lambda context: int(net.logits(net(context, "causal")[:, -1])[0, :256].argmax())
    assert out[0].tolist() == [argmax(row[:, :T]), argmax(row[:, 1 + T // 2:T + 1])]


def test_the_prompt_of_a_prefix_model_is_read_both_ways():
    net, x = randomized().requires_grad_(False), ids(6)
    logits = lambda mask: net.logits(net(x, mask)[:, -1])[0, :256]
    both_ways = logits(torch.tensor([6]))
    assert int(text_of(net, x, 1, T, gens(), 6, **GREEDY)) == int(both_ways.argmax())
    assert (both_ways - logits("causal")).abs().max() > 1e-3


def test_row_i_of_a_batch_is_the_single_run_of_its_seed():
    net, x = randomized(), ids(5)
    batch = text_of(net, x.expand(3, -1), 20, T, gens(3, seed=7))
    for i in range(3):
        assert torch.equal(text_of(net, x, 20, T, [gens(3, seed=7)[i]])[0], batch[i])
    assert len({tuple(row.tolist()) for row in batch}) == 3


def test_a_row_that_ended_stays_ended():
    net, firsts = randomized(), iter([EOT] + [65] * 9)          # the first row ends at once, the second never
    net.logits = lambda h: F.one_hot(torch.tensor([next(firsts), 66]), 512) * 100.0
    assert text_of(net, ids(3, 2), 4, T, gens(2)).tolist() == [[EOT] * 4, [66] * 4]
    net.logits = lambda h: F.one_hot(torch.full(h.shape[:-1], EOT), 512) * 100.0
    assert text_of(net, ids(3, 2), 9, T, gens(2)).tolist() == [[EOT], [EOT]]


# ---- speculation

def drafting(n, seed=0):  # a model and far states that agree often enough for drafts to be kept now and then
    net = randomized(seed=seed).requires_grad_(False)
    heads = OBJECTIVES["mtp"]["heads"](net.sizes, settings("mtp", T, mtp_heads=n))
    heads = {name: randomize(head, seed).requires_grad_(False) for name, head in heads.items()}
    return net, lambda h: mtp_ahead(heads, h)


P = torch.tensor([[.7, .1, .1, .1], [0, .1, .2, .7], [.25, .25, .25, .25], [0, .5, .5, 0]]).double()
FAR = {
    "far off": torch.tensor([[.04, .06, .1, .8], [.7, .2, .05, .05], [.1, .84, .05, .01]]).double(),
    "alike": P[:3],
    "sure": torch.eye(4)[[1, 3, 0]].double(),
    "in reverse": P[:3].flip(0),
}


@pytest.mark.parametrize("q", FAR)
@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_what_is_kept_and_drawn_anew_is_distributed_as_if_without_drafts(n, q):
    """By verify alone, also for drafts that were cut to fewer than there are distributions."""
    g, seen = generator("verify"), torch.zeros(n + 1, 4)
    for _ in range(900):
        drafts = sample.invert(FAR[q], torch.rand(3, generator=g, dtype=torch.double)).tolist()[:n]
        for i, byte in enumerate(sample.verify(P[:n + 1], FAR[q], drafts, g)):
            seen[i, byte] += 1
    assert seen[0].sum() == 900
    for counts, p in zip(seen, P):              # an id after others is there where those were kept
        assert chi2(counts, p) < 25             # 3 degrees of freedom


@pytest.mark.parametrize("n", [5, T - 2], ids=["cut by the budget", "cut by the block"])
@pytest.mark.parametrize("how", [dict(temperature=1.0), dict(temperature=0.7, top_k=3)], ids=["plain", "top 3"])
def test_speculation_draws_from_the_plain_distribution(n, how):
    """Pairs of bytes after one prompt, of 4 bytes. The second is drafted, by the first of three far heads
    that differ strongly; budget or block leave no room for the other drafts."""
    net, x = randomized().requires_grad_(False), ids(n)
    far = torch.randn(3, net.sizes.n_embd, generator=generator("far")) * 20
    logits, only = net.logits, torch.full((512,), -1e9).index_fill(0, torch.arange(65, 69), 0)
    net.logits = lambda h: logits(h) / 8 + only
    after = lambda row: sample.distribution(net.logits(net(row, "causal")[:, -1]), **how)[0, 65:69]
    joint = torch.stack([after(torch.cat((x, torch.tensor([[65 + i]])), 1)) for i in range(4)]) * after(x)[:, None]
    seen, tally, budget = torch.zeros(4, 4), [], 3 if n == 5 else 9
    for s in range(1200):
        written = sample.speculate(net, lambda h: far.expand(len(h), -1, -1), x[0].tolist(), budget, T,
                                   generator(f"{s}"), tally, **how)
        first, second = next(written), next(written)
        seen[first - 65, second - 65] += 1
    assert chi2(seen, joint) < 50               # 15 degrees of freedom at most
    assert {drafted for drafted, _ in tally} == {0, 1}
    assert 0 < sum(kept for _, kept in tally) < 1200, "some are kept, some are not"


@pytest.mark.parametrize("n", [2, 4, 7])
def test_speculation_at_temperature_0_is_plain_decoding(n):
    """For prompts of all lengths, past the end of the block."""
    passes = written = 0
    for seed in range(60):
        net, ahead = drafting(n, seed % 5)
        x, tally = ids(1 + seed % (2 * T), seed=seed), []
        plain = [int(b) for b in sample.generate(net, x, 25, T, gens(), **GREEDY)]
        assert list(sample.speculate(net, ahead, x[0].tolist(), 25, T, generator("s"), tally, **GREEDY)) == plain
        assert all(0 <= kept <= drafted <= n - 1 for drafted, kept in tally)
        passes, written = passes + len(tally), written + len(plain)
    assert passes < written <= n * passes


def test_speculation_keeps_a_perfect_draft():
    """Every head says the same byte for ever: all drafts are kept, n bytes a pass after the first."""
    net, ahead = drafting(4)
    net.logits = lambda h: F.one_hot(torch.full(h.shape[:-1], 65), 512) * 100.0
    tally = []
    assert list(sample.speculate(net, ahead, [66], 41, 99, generator("s"), tally, **GREEDY)) == [65] * 41
    assert len(tally) == 11


def test_speculation_without_rejection_would_be_noticed(monkeypatch):
    (net, ahead), x = drafting(4), ids(5)
    plain = [int(b) for b in sample.generate(net, x, 25, T, gens(), **GREEDY)]
    monkeypatch.setattr(sample, "verify", lambda p, q, drafts, g: [*drafts, int(p[-1].argmax())])
    assert list(sample.speculate(net, ahead, x[0].tolist(), 25, T, generator("s"), **GREEDY)) != plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n", [2, 4, 7, T + 1], ids=lambda n: f"{n} heads")
def test_a_fast_step_over_a_static_cache_speculates_alike(n, temperature, monkeypatch, capsys):
    """The step that is compiled, here as it stands: the same texts, past the end of the block, for prompts of
    any length, and for more heads than two passes or even one have room for."""
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    net, ahead = drafting(n)
    step = sample.fast_step(net, 1, T, ahead, n)
    assert (step is None) == (n > T)
    for seed in range(8):
        x = ids(1 + 3 * seed, seed=seed)[0].tolist()
        write = lambda step: list(sample.speculate(net, ahead, x, 40, T, generator(f"{seed}"), step=step,
                                                   temperature=temperature))
        fast = write(step)
        assert fast == write(None)
        assert len(fast) == 40 or fast[-1] == EOT
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("n", [1, 5, 3 * T])
def test_a_fast_step_over_a_static_cache_continues_alike(n, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    net, x = randomized().requires_grad_(False), ids(n, 2)
    step = sample.fast_step(net, 2, T)
    for _ in range(2):                          # a step serves one text after another
        assert torch.equal(text_of(net, x, 30, T, gens(2), step=step), uncached(net, x, 30))


def check_fast_steps(device):  # texts with them and without, of generate and of speculate
    net, x = randomized().requires_grad_(False).to(device), ids(5, 2).to(device)
    step = sample.fast_step(net, 2, T)
    assert step is not None
    assert torch.equal(text_of(net, x, 30, T, gens(2), step=step), text_of(net, x, 30, T, gens(2)))
    for n in (4, 7):                            # 7: two passes would not fit the block
        net, far = drafting(n)[0].to(device), torch.randn(n - 1, 16, generator=generator("far")).to(device)
        ahead = lambda h: h[..., None, :] + far
        step = sample.fast_step(net, 1, T, ahead, n)
        assert step is not None
        write = lambda step: list(sample.speculate(net, ahead, [65, 66], 40, T, generator("s"), step=step, **GREEDY))
        assert write(step) == write(None)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler")
def test_a_compiled_step_changes_nothing():
    check_fast_steps("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_captured_step_changes_nothing():
    check_fast_steps("cuda")


# ---- filling

class Oracle:
    """A denoiser that knows the distribution: each byte by itself, 4 values."""
    passes = 0

    def __call__(self, ids, mask, doc):
        self.passes += 1
        return ids

    def logits(self, ids):
        out = torch.full((*ids.shape, 512), -1e9)
        out[..., 65:69] = FOUR.log()
        return out


@pytest.mark.parametrize("steps", [1, 5, 0])
def test_the_ancestral_sampler_reproduces_its_oracle(steps):
    oracle, N, n, most = Oracle(), 300, 20, steps or 64
    x = torch.full((N, n), MASK)
    x[:, 3] = 90
    states = [x, *sample.unmask(oracle, x, gens(N), IN_PLACE, steps, "ancestral")]
    for before, after in zip(states, states[1:]):
        assert torch.equal(after[before != MASK], before[before != MASK]), "a byte was changed again"
    assert oracle.passes <= most
    counts = torch.bincount(states[-1][x == MASK], minlength=MASK + 1)
    assert counts[65:69].sum() == N * (n - 1)
    assert chi2(counts[65:69], FOUR) < 25
    if steps != 1:                              # (t - s) / t unmasks an equal share a pass
        first = float((states[1] != states[0]).float().mean()) * n / (n - 1)
        assert abs(first - 1 / most) < 5 * (1 / most / N / n) ** 0.5


class Pair:
    """A denoiser that knows a joint distribution of two bytes: equal with probability .8, else each other
    pair alike."""
    joint = torch.full((4, 4), 0.2 / 12).fill_diagonal_(0.2)

    def __call__(self, ids, mask, doc):
        return ids

    def logits(self, ids):                      # each byte given the other, where that one is known
        other = ids.flip(1)
        given = (self.joint / self.joint.sum(1, keepdim=True))[(other - 65).clamp(0, 3)]
        rows = torch.where((other == MASK)[..., None], self.joint.sum(0), given)
        return F.pad(rows.log(), (65, 443), value=-1e9)


@pytest.mark.parametrize("steps, equal", [(64, 0.8), (1, 0.25)])
def test_the_ancestral_sampler_reproduces_a_joint_distribution(steps, equal):
    """In many passes, of which few unmask both bytes at once; in one pass both are drawn as if alone."""
    N = 2000
    out = sample.fill(Pair(), torch.full((N, 2), MASK), gens(N, seed=2), IN_PLACE, steps, "ancestral") - 65
    both = equal + (0.25 - equal) / steps       # the chance of a pass in common is 1 / steps
    counts = torch.bincount(out[:, 0] * 4 + out[:, 1], minlength=16).view(4, 4)
    assert chi2(counts, torch.full((4, 4), (1 - both) / 12).fill_diagonal_(both / 4)) < 45


@pytest.mark.parametrize("frame", [IN_PLACE, SHIFTED, FRAMED], ids=["in place", "shifted", "framed"])
def test_a_masked_byte_is_read_where_its_objective_puts_it(frame):
    (before, after, shift), net, x = frame, randomized().requires_grad_(False), ids(T)
    x[0, [0, 5]] = MASK
    row = torch.tensor([[*before, *x[0].tolist(), *after]])
    logits = net.logits(net(row, "bidirectional"))[0, len(before) - shift:][:T]
    assert torch.equal(sample.fill_logits(net, x, frame)[0], logits)
    out = sample.fill(net, x, gens(), frame, steps=1, **GREEDY)
    assert out[0, [0, 5]].tolist() == logits[[0, 5], :256].argmax(-1).tolist()


@pytest.mark.parametrize("order", ["confident", "left", "ancestral"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_filling_leaves_no_mask_and_touches_nothing_else(order, steps):
    net, x = randomized(), ids(T, 3)
    x[0, 2:5], x[1, 7], x[2, :] = MASK, MASK, MASK
    out = sample.fill(net, x, gens(3), IN_PLACE, steps, order)
    assert (out[x == MASK] < 256).all()
    assert torch.equal(out[x != MASK], x[x != MASK])


def test_confident_fills_the_surest_byte_first_and_left_the_first():
    net, x, holes = randomized().requires_grad_(False), ids(T), [2, 6, 9]
    x[0, holes] = MASK
    best = lambda x: net.logits(net(x, "bidirectional"))[0, :, :256].softmax(-1).max(-1)
    fill = lambda **how: sample.fill(net, x, gens(), IN_PLACE, **GREEDY, **how)[0].tolist()
    assert [fill(steps=1)[i] for i in holes] == best(x).indices[holes].tolist()
    for order, urgency in (("confident", lambda p, i: p[i]), ("left", lambda p, i: -i)):
        want = x.clone()
        while (want == MASK).any():
            p, byte = best(want)
            at = max((i for i in holes if want[0, i] == MASK), key=lambda i: urgency(p, i))
            want[0, at] = byte[at]
        assert fill(order=order) == want[0].tolist()


def test_only_the_marker_is_special():
    split = sample.split_holes
    assert split(b"a[MASK]b[MASK:3]", sample.MASKS) == [[97], 1, [98], 3, []]
    assert split(b"<MASK> [MASK:x] [mask]", sample.MASKS) == [list(b"<MASK> [MASK:x] [mask]")]
    assert split(b"<extra_id_7>b<extra_id_>[MASK]", sample.HOLES) == [[], 1, list(b"b<extra_id_>[MASK]")]


# ---- writing what belongs in holes

def scripted(*script):  # a model that writes these ids
    script = list(script)

    class Writes:
        embed, sizes, dtype = torch.nn.Embedding(512, 4), Sizes(1, 1, 4), torch.float32

        def __call__(self, ids, mask, cache):
            cache.move(ids.size(1))
            return ids

        def logits(self, ids):
            return F.one_hot(torch.tensor([script.pop(0)]), 512) * 100.0
    return Writes()


def infill(script, pieces, most, block):  # span's answers -> bytes of each hole, whether all ended
    span = OBJECTIVES["span"]
    source, prefix = span["ask"](pieces, 4, None)
    return sample.infill(scripted(*script), span, source, prefix, len(pieces) - 1, most, block, gens())


def test_spans_are_split_at_their_sentinels():
    spans, whole = infill([70, SENTINEL + 1, 71, 72, SENTINEL + 2, SENTINEL + 3], [[65], [66], [], []], 50, 99)
    assert spans == [[70], [71, 72], []]
    assert whole


@pytest.mark.parametrize("written", range(1, 12))
def test_holes_end_with_the_block_whatever_was_written(written):
    """8 of 16 positions are the source's and the first sentinel's, and the last id needs none."""
    spans, whole = infill([70] * written + [SENTINEL + 1] + [71] * 20, [[65], [66], [67]], 50, 16)
    assert spans == [[70] * min(written, 9), [71] * max(0, 8 - written)]
    assert not whole


@pytest.mark.parametrize("most", [0, 1, 4, 9])
def test_holes_end_with_the_budget(most):
    spans, whole = infill([70] * 3 + [SENTINEL + 1] + [71] * 20, [[65], [66], [67]], most, 99)
    assert spans == [[70] * min(most, 3), [71] * max(0, most - 3)]
    assert not whole


# ---- scoring

@pytest.mark.parametrize("stride", [1, 5, T - 1, T])
@pytest.mark.parametrize("n", [1, 2, T, T + 1, 3 * T + 5])
def test_a_score_adds_up_byte_by_byte(n, stride):
    net, x = randomized(), ids(n)[0]
    bits = 8.0
    for at in range(0, n - 1, stride):
        a, end = max(0, at + stride - T), min(at + stride, n - 1)
        bits += bits_of(net, x[a:end], {i - a: x[i + 1] for i in range(at, end)})
    assert sample.score(net, x.byte(), T, stride) == pytest.approx(bits, rel=1e-5)


def test_disjoint_windows_start_cold_and_overlapping_ones_do_not():
    net, x = randomized(), ids(4 * T + 1)[0]
    cold = 8 + sum(bits_of(net, x[a:a + T], dict(enumerate(x[a + 1:a + T + 1]))) for a in range(0, 4 * T, T))
    assert sample.score(net, x.byte(), T, T) == pytest.approx(cold, rel=1e-5)
    assert sample.score(net, x.byte(), T, T // 2) != pytest.approx(cold, rel=1e-3)


@pytest.mark.parametrize("frame", [IN_PLACE, SHIFTED, FRAMED], ids=["in place", "shifted", "framed"])
def test_a_pseudo_score_masks_one_byte_at_a_time(frame):
    (before, after, shift), net, x = frame, randomized(), ids(T + 3)[0]
    bits = 0.0
    for window in x.split(T - len(before) - len(after)):
        for i, byte in enumerate(window):
            row = torch.tensor([*before, *window.tolist(), *after])
            row[len(before) + i] = MASK
            bits += bits_of(net, row, {len(before) + i - shift: byte}, "bidirectional")
    assert sample.score_pseudo(net, x.byte(), T, frame) == pytest.approx(bits, rel=1e-5)


def bound(net, data, block=32, seed=1, doc_mask=False):
    return sample.score_bound(net, OBJECTIVES["mdlm"], data, settings("mdlm", block, doc_mask=doc_mask), seed)


def test_the_bound_of_an_untrained_model_is_8_bits_a_byte():
    bits, error = bound(build(get_config([*TINY]))[0], ids(70)[0].byte())
    assert bits / 70 == pytest.approx(8.0, abs=1e-5)
    assert error < 1e-3


def test_the_standard_error_of_a_bound_is_what_its_estimates_scatter():
    net, x = randomized().requires_grad_(False), ids(3 * 32)[0].byte()
    bits, errors = torch.tensor([bound(net, x, seed=seed) for seed in range(200)]).T
    assert 0.8 < bits.std() / errors.mean() < 1.3


def test_scores_keep_documents_apart_where_training_did():
    net, text, seen = randomized(), ids(20)[0].byte(), []
    text[9] = EOT

    class Spy:
        embed, logits = net.embed, net.logits

        def __call__(self, x, mask, doc=None):
            seen.append(doc is not None and torch.equal(doc, document_ids(x)))
            return net(x, mask, doc)
    for keep in (True, False):
        seen.clear()
        assert sample.score(Spy(), text, 32, 32, keep) > 0
        assert sample.score_pseudo(Spy(), text, 32, SHIFTED, keep) > 0
        assert bound(Spy(), text, doc_mask=keep)[0] > 0
        assert seen == [keep] * 3


def test_a_score_keeps_to_documents_as_training_did():
    """Of two documents that fill a window the second is scored as if it stood alone, after the NUL that it
    follows."""
    net, x = randomized(), ids(T, seed=3)[0]
    a, b, end = x[:6], x[6:], torch.tensor([EOT])
    first, text = torch.cat((a, end)), torch.cat((a, end, b)).byte()
    apart = 8 + bits_of(net, first, dict(enumerate([*first[1:], b[0]])))
    apart += bits_of(net, b[:-1], dict(enumerate(b[1:])))
    assert sample.score(net, text, 2 * T, 2 * T, True) == pytest.approx(apart, rel=1e-4)
    assert sample.score(net, text, 2 * T, 2 * T) != pytest.approx(apart, rel=1e-4)


def test_a_long_text_is_embedded_by_the_mean_of_its_blocks():
    net, x = randomized().requires_grad_(False), ids(2 * T + 3)[0]
    parts = [embed(net, {}, p[None])[0] * len(p) for p in x.split(T)]
    got = sample.embeddings(net, {}, OBJECTIVES["contrastive"], [[5], x.tolist(), []], T)
    torch.testing.assert_close(got[1], F.normalize(sum(parts), dim=0), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got[0], embed(net, {}, torch.tensor([[5]]))[0])
    assert got.norm(dim=1).tolist() == pytest.approx([1, 1, 1])


# ---- the command

FILES = {"blank.txt": b"\n\n", "void.txt": b"", "short.txt": b"import argparse\n" * 40, "lines.txt": b"a\n\nccc\nbb\n"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):  # a folder with a run of every objective
    path, here = tmp_path_factory.mktemp("runs"), os.getcwd()
    os.chdir(path)
    shutil.copy(shutil.__file__, "text.txt")
    for name, content in FILES.items():
        with open(name, "wb") as f:
            f.write(content)
    more = [["clm:.5,mlm:.5"], ["fim", "--fim_spm_rate", "0", "--out_dir", "out/psm"],
            ["mtp:.5,electra:.5", "--mtp_heads", "1", "--out_dir", "out/mixed"]]
    for objective in [*([name] for name in OBJECTIVES), *more]:
        assert train.main([*TINY, "--data", "text.txt", "--max_iters", "2", "--objective", *objective]) == 0
    os.chdir(here)
    return path


@pytest.fixture
def runs(place, monkeypatch):
    monkeypatch.chdir(place)


def say(capsys, run, *flags):  # what sample.py prints of a run
    capsys.readouterr()
    assert not sample.main(["--out_dir", f"out/{run}", *flags, "--dtype", "float32"])
    return capsys.readouterr().out


def refuse(capsys, *flags):  # the one line with which sample.py refuses
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        sample.main([*flags])
    out, err = capsys.readouterr()
    assert e.value.code == 2
    assert err.count("\n") == 1
    assert not out
    return err


def altered(run, path, **config):  # a checkpoint at that path, of other settings -> its name for say
    ckpt = load_checkpoint(f"out/{run}")
    os.makedirs(f"out/{path}", exist_ok=True)
    torch.save(ckpt | {"config": ckpt["config"] | config}, f"out/{path}/ckpt.pt")
    return path


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_run_shows_itself(name, runs, capsys):
    out = say(capsys, name)
    assert "---" in out
    assert len(out) > 60
    assert out == say(capsys, name), "the same seed, the same text"


def test_without_a_folder_the_newest_run_is_used(runs, capsys):
    os.utime("out/mlm/ckpt.pt")
    sample.main([])
    assert "masked" in capsys.readouterr().out
    os.utime("out/rotation/ckpt.pt")
    sample.main([])
    assert "rolled back" in capsys.readouterr().out


def test_help_shows_every_objective_and_flag(capsys):
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    out = capsys.readouterr().out
    flags = [f"--{flag}" for flags in sample.FLAGS.values() for flag in flags]
    assert [word for word in [*OBJECTIVES, *flags] if word not in out] == []


LONG, SIDES = "x" * 99, ["--prefix", "a", "--suffix", "b"]
INPUTS = {
    "mtp": [["for"], ["", "--num_samples", "2"], [LONG, "--temperature", "0"], ["x", "--max_new_tokens", "0"]],
    "hybrid": [["a[MASK:3]"], ["a plain prompt"], ["[MASK]" + LONG, "--order", "left"]],
    "mdlm": [[""], ["import "], ["a[MASK:9]b", "--steps", "3"], ["[MASK:90]", "--order", "confident"],
             ["[MASK:4]", "--show"], [LONG], ["\u00e9\0"]],
    "mlm": [["[MASK]"], ["a[MASK:4]b"], [LONG + "[MASK:3]" + LONG + "[MASK]"], ["[MASK:90]", "--steps", "1"],
            ["\u00e9[MASK]\udcff"], ["a__b[MASK]"]],
    "span": [["a<extra_id_0>b<extra_id_1>"], ["<extra_id_0>", "--num_samples", "2"], ["a<extra_id_0>" + LONG]],
    "ul2": [["a<extra_id_0>b"], ["go on"], [""], [LONG], SIDES],
    "fim": [SIDES, ["--prefix", LONG, "--suffix", LONG], ["a<extra_id_0>b"], ["--suffix", "b"],
            ["--prefix", "", "--suffix", ""], [LONG + "<extra_id_0>b"], ["go on"]],
    "bart": [["a noizy tex"], [LONG], ["a[MASK]b"], [""], [LONG, "--max_new_tokens", "20"]],
    "electra": [["some text"], [LONG], ["\udcff"]],
    "nsp": [SIDES, ["--prefix", LONG, "--suffix", LONG]],
    "contrastive": [["--query", "a"], ["--query", "a", "--corpus", "lines.txt"], ["a text"],
                    ["--corpus", "text.txt"], ["--query", LONG]],
    "rotation": [["b a"], [LONG]],
}


@pytest.mark.parametrize("name, flags", [(n, f) for n, each in INPUTS.items() for f in each],
                         ids=lambda v: v if isinstance(v, str) else " ".join(v)[:30])
def test_every_mode_takes_any_input(name, flags, runs, capsys):
    flags = flags if flags[0].startswith("--") else ["--prompt", *flags]
    out = say(capsys, name, *flags)
    assert not re.search("<MASK>|\\[MASK|<PRE>|<SEP>|<extra_id", out)
    if flags[0] == "--prompt" and name not in ("electra", "contrastive"):           # the text around holes stays whole
        around = re.split(r"\[MASK.*?\]|<extra_id_.>", os.fsencode(flags[1]).decode(errors="replace").replace("\0", ""))
        assert name in ("bart", "rotation") or re.search(".*".join(map(re.escape, around)), out, re.DOTALL)
    if "--suffix" in flags and name == "fim":
        assert out.rstrip().split("\n---")[0].endswith(flags[flags.index("--suffix") + 1])


PROMPTS = {"empty": "", "long": "x" * 500, "not UTF-8": os.fsdecode(b"\xff\xfe\x80"), "NUL": "a\0b",
           "look-alike": "<MASK><extra_id_0>", "emoji": "\U0001f642"}


@pytest.mark.parametrize("name", ["clm", "prefix"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_prompt_can_be_continued(name, prompt, runs, capsys):
    for extra in ([], ["--num_samples", "2"], ["--max_new_tokens", "0"],
                  ["--top_k", "100000", "--top_p", ".9", "--temperature", "0"]):
        out = say(capsys, name, "--prompt", PROMPTS[prompt], "--max_new_tokens", "40", *extra)
        assert prompt in ("empty", "not UTF-8", "NUL") or PROMPTS[prompt][-16:] in out


def test_mtp_drafts_of_itself_and_can_be_told_not_to(runs, capsys):
    def write(*flags):
        assert sample.main(["--out_dir", "out/mtp", "--prompt", "x", "--max_new_tokens", "99", *flags]) is None
        return capsys.readouterr()
    for flags in ([], ["--num_samples", "2"], ["--temperature", "0"]):
        assert "bytes a pass" in write(*flags).err
        assert write(*flags, "--no-speculate").err == ""
    assert write("--temperature", "0").out == write("--temperature", "0", "--no-speculate").out


@pytest.mark.parametrize("name", ["clm", "mtp", "mixed"])
def test_a_compiled_step_writes_the_same(name, runs, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    plain = say(capsys, name, "--prompt", "x", "--max_new_tokens", "99")
    assert say(capsys, name, "--prompt", "x", "--max_new_tokens", "99", "--compile") == plain


def test_a_streamed_sample_is_the_first_of_a_batch(runs, capsys):
    one = say(capsys, "clm", "--prompt", "import ", "--max_new_tokens", "40")
    two = say(capsys, "clm", "--prompt", "import ", "--max_new_tokens", "40", "--num_samples", "2")
    assert one.strip() in two
    assert "--- sample 2" in two


@pytest.mark.parametrize("prompt", ["a[MASK]", None])
def test_each_objective_has_its_own_order_and_shift(prompt, runs, capsys, monkeypatch):
    seen, plain = [], sample.unmask
    def spy(model, ids, gens, frame, **how):
        seen.append((how["order"], frame, how["steps"]))
        return plain(model, ids, gens, frame, **how)
    monkeypatch.setattr(sample, "unmask", spy)
    for name in ("mlm", "mdlm", "hybrid"):
        say(capsys, name, *(["--prompt", prompt] if prompt else []))
    assert seen == [("confident", IN_PLACE, 0), ("ancestral", IN_PLACE, 0), ("confident", SHIFTED, 0)]


def test_a_mixture_does_what_its_members_do(runs, capsys):
    mixture = "clm_.5+mlm_.5"
    assert say(capsys, mixture, "--prompt", "import ").startswith("import ")
    assert "a" in say(capsys, mixture, "--objective", "mlm", "--prompt", "a[MASK]")
    assert say(capsys, "mixed", "--prompt", "import ").startswith("import ")
    assert "replaced with" in say(capsys, "mixed", "--objective", "electra", "--prompt", "a text")


# ---- what the model is given

@pytest.fixture
def given(runs, monkeypatch):  # [(ids, mask)] of each pass
    seen, forward = [], Transformer.forward
    def spy(self, idx, mask, *args, **kwargs):
        seen.append((idx.tolist(), mask if isinstance(mask, str) else mask.tolist()))
        return forward(self, idx, mask, *args, **kwargs)
    monkeypatch.setattr(Transformer, "forward", spy)
    return seen


HOLE, H = "a<extra_id_0>b", 14                  # H: bytes of each of nsp's texts in a block of 32
GIVEN = [
    ("clm", ["--prompt", "abc"], [*b"abc"], "causal"),
    ("prefix", ["--prompt", "abc"], [*b"abc"], [3]),
    ("ul2", ["--prompt", HOLE], [MODE_R, 97, SENTINEL, 98, SENTINEL + 1, SEP, SENTINEL], [6]),
    ("ul2", ["--prompt", "abc"], [MODE_S, *b"abc", SEP], [5]),
    ("span", ["--prompt", HOLE], [97, SENTINEL, 98, SENTINEL + 1, SEP, SENTINEL], [5]),
    ("span", ["--prompt", "a<extra_id_0>"], [97, SENTINEL, SEP, SENTINEL], [3]),
    ("fim", ["--prompt", HOLE], [PRE, SUF, 98, MID, 97], "causal"),
    ("fim", SIDES, [PRE, SUF, 98, MID, 97], "causal"),
    ("psm", SIDES, [PRE, 97, SUF, 98, MID], "causal"),
    ("fim", ["--prompt", "abc"], [*b"abc"], "causal"),
    ("bart", ["--prompt", "ab[MASK]"], [97, 98, MASK, SEP], [4]),
    ("nsp", SIDES, [CLS, 97, SEP, 98, SEP], "bidirectional"),
    # of a long first text the last bytes count; of a long second one the first few are skipped, as in training
    ("nsp", ["--prefix", "x" * 9 + "y" * H, "--suffix", "z"], [CLS, *b"y" * H, SEP, 122, SEP], "bidirectional"),
    ("nsp", ["--prefix", "a", "--suffix", "12345678" + "x" * 12], [CLS, 97, SEP, *b"x" * 12, SEP], "bidirectional"),
    ("mlm", ["--prompt", "x" * 100 + "[MASK]"], [120] * 31 + [MASK], "bidirectional"),
    ("hybrid", ["--prompt", "a[MASK]"], [EOT, 97, MASK], "bidirectional"),
    ("hybrid", ["--prompt", "abc"], [*b"abc"], "causal"),
    ("mdlm", ["--prompt", "abc", "--max_new_tokens", "2"], [*b"abc", MASK, MASK], "bidirectional"),
    ("electra", ["--prompt", "abc"], [*b"abc"], "bidirectional"),
    ("contrastive", ["--prompt", "abc"], [*b"abc"], "bidirectional"),
    ("rotation", ["--prompt", "abc"], [*b"abc"], "bidirectional"),
]


@pytest.mark.parametrize("run, flags, row, mask", GIVEN, ids=lambda v: v if isinstance(v, str) else "")
def test_a_prompt_is_read_as_its_objective_was_trained(run, flags, row, mask, given, capsys):
    say(capsys, run, *flags)
    assert given[0] == ([row], mask)


def test_of_a_long_text_what_is_nearest_to_the_hole_stays(given, capsys):
    say(capsys, "fim", "--prefix", "a" * 50 + "bcdefghi", "--suffix", "jklmnopq" + "a" * 50)
    row = given[0][0][0]
    assert row[2:10] == [*b"jklmnopq"]
    assert row[-8:] == [*b"bcdefghi"]


def fork(monkeypatch, run, **entry):  # a run of an objective that is not ours -> its name for say
    monkeypatch.setitem(OBJECTIVES, "fork", USUAL | dict(name="fork", help="", use="", mask="") | entry)
    return altered(run, "fork", objective="fork")


def test_a_fork_that_works_in_place_is_shown_filled_and_scored_in_its_own_format(given, capsys, monkeypatch):
    run = fork(monkeypatch, "mlm", make=OBJECTIVES["mlm"]["make"], window=lambda T, hp: T - 3, mode="fill",
               fills=lambda hp: FRAMED, orders=("left",))
    before, after, _ = FRAMED
    say(capsys, run, "--prompt", "a[MASK:2]b")
    assert given[0] == ([[*before, 97, MASK, MASK, 98, *after]], "bidirectional")
    assert [row[3:5].count(MASK) for [row], _ in given] == [2, 1]
    assert given[1][0][0][4] == MASK, "from the left"
    for flags in ([], ["--score", "short.txt"]):
        given.clear()
        out = say(capsys, run, *flags)
        assert all(row[:2] == before and row[-1:] == after and len(row) == 32 for row in given[0][0])
        assert all(MASK in row for row in given[0][0])
    assert "pseudo" in out
    assert "window of 29" in out


def test_a_fork_that_writes_a_target_is_shown_and_repaired_in_its_own_format(given, capsys, monkeypatch):
    every = lambda x: torch.ones_like(x, dtype=torch.bool)
    run = fork(monkeypatch, "bart", mode="repair", window=lambda T, hp: 10,
               make=lambda x, g, hp: seq2seq(x.flip(1), every(x), x, every(x), hp.block_size))
    held_out = load_run("out/bart")[3]["held_out"][:10].tolist()
    say(capsys, run)
    assert given[0] == ([held_out[::-1] + [SEP]], [11])
    given.clear()
    say(capsys, run, "--prompt", "x" * 22 + "a[MASK]")
    firsts = [(row, mask) for [row], mask in given if SEP in row]
    assert firsts == [([120] * 10 + [SEP], [11])] * 2 + [([120, 120, 97, MASK, SEP], [5])]


def test_a_fork_with_a_bound_of_its_own_is_scored_by_it(given, capsys, monkeypatch):
    nats = lambda model, batch, hp: torch.full((len(batch["inp"]),), 32 * math.log(2)).double()
    run = fork(monkeypatch, "mdlm", make=OBJECTIVES["mdlm"]["make"], window=lambda T, hp: T, bpb="bound", bounds=nats)
    out = say(capsys, run, "--score", "short.txt")
    assert "fork's bound" in out
    assert "mdlm" not in out
    assert out.startswith("short.txt: 1.0000 bits per byte")
    assert "standard error 0.0000" in out


# ---- what is printed

def test_what_is_shown_is_what_was_found(runs, capsys, monkeypatch):
    """The seam is rolled back to the front; the nearest passages come first; a positive answer means
    replaced; what follows is likely."""
    monkeypatch.setitem(OBJECTIVES["rotation"], "answer", lambda model, heads, x: (x == ord("f")) * 9.0)
    assert say(capsys, "rotation", "--prompt", "defabc").endswith("\nfabcde\n")
    monkeypatch.setattr(sample, "embeddings", lambda *a: torch.tensor([[float(len(t)), 1.0] for t in a[3]]))
    out = say(capsys, "contrastive", "--query", "aa", "--corpus", "lines.txt")
    assert re.findall(r"line (\d)", out) == ["3", "4", "1"]
    monkeypatch.setitem(OBJECTIVES["electra"], "answer", lambda model, heads, x: (x > 127) * 4.0 - 2)
    out = say(capsys, "electra", "--prompt", "na\u00efve caf\u00e9")
    assert out.startswith("na\u00ab\u00ef\u00bbve caf\u00ab\u00e9\u00bb\n"), "characters of several bytes stay whole"
    assert out.count("probability 0.88") == 4
    monkeypatch.setitem(OBJECTIVES["nsp"], "answer", lambda *a: torch.tensor(2.0))
    assert say(capsys, "nsp", *SIDES) == "the second text follows the first with probability 0.881\n"


def test_the_files_of_a_folder_are_passages(runs, tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    for name, text in (("a.txt", b"open a file"), ("sub/b.txt", b"close a window"), (".hidden", b"no"), ("empty", b"")):
        (tmp_path / name).write_bytes(text)
    os.mkfifo(tmp_path / "pipe")
    out = say(capsys, "contrastive", "--corpus", str(tmp_path))
    assert [os.path.basename(line.split("\t")[1]) for line in out.splitlines()] == ["a.txt", "b.txt"]
    out = say(capsys, "contrastive", "--corpus", str(tmp_path), "--query", "open a file")
    assert out.index("a.txt") < out.index("b.txt")
    assert "similarity 1.000" in out


RAW, NEAT = "a\x1b[31mb\x07c\x08d", "a\\x1b[31mb\\x07c\\x08d"
ECHOES = {"clm": ["--max_new_tokens", "0"], "prefix": ["--num_samples", "2"], "mtp": ["--max_new_tokens", "0"],
          "mlm": ["[MASK]"], "mdlm": [], "fim": ["<extra_id_0>"], "electra": [], "rotation": []}


@pytest.mark.parametrize("name", ECHOES)
def test_control_bytes_reach_a_pipe_but_no_terminal(name, runs, capsys, monkeypatch):
    hole, *more = ECHOES[name] if ECHOES[name][:1] in (["[MASK]"], ["<extra_id_0>"]) else ["", *ECHOES[name]]
    monkeypatch.setitem(OBJECTIVES["electra"], "answer", lambda model, heads, x: x * 0.0 - 1)
    monkeypatch.setitem(OBJECTIVES["rotation"], "answer", lambda model, heads, x: -torch.arange(x.numel())[None] * 1.0)
    assert RAW in say(capsys, name, "--prompt", RAW + hole, *more)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = say(capsys, name, "--prompt", RAW + hole, *more)
    assert NEAT in out
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", re.sub(r"\x1b\[[07]m", "", out)), "but for what marks the new"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_held_out_text_is_shown_to_a_terminal_without_control_bytes(name, runs, capsys, monkeypatch):
    ckpt = load_checkpoint(f"out/{name}")
    held_out = torch.tensor(list((RAW.encode() * 99)[:len(ckpt["held_out"])]), dtype=torch.uint8)
    os.makedirs("out/raw", exist_ok=True)
    torch.save(ckpt | {"held_out": held_out}, "out/raw/ckpt.pt")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = re.sub(r"\x1b\[[07]m", "", say(capsys, "raw"))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", out)


def test_what_is_new_stands_out_on_a_terminal(runs, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert re.search(r"^a\x1b\[7m.+\x1b\[0mb", say(capsys, "mlm", "--prompt", "a[MASK]b"), re.DOTALL)


# ---- scores of the command

def test_a_run_with_document_masks_is_scored_with_them(runs, capsys, monkeypatch):
    given, plain = [], sample.score
    monkeypatch.setattr(sample, "score", lambda *a: given.append(a[-1]) or plain(*a))
    for run in ("clm", altered("clm", "masked", doc_mask=True)):
        say(capsys, run, "--score", "short.txt")
    assert given == [False, True]


@pytest.mark.parametrize("name", ["clm", "prefix", "mtp", "fim", "hybrid", "mdlm", "mlm", "nsp"])
def test_score_prints_bits_per_byte_beside_compressors(name, runs, capsys):
    exact = name not in ("mdlm", "mlm", "nsp")
    out = say(capsys, name, "--score", "short.txt", *(["--stride", "32"] if exact else []))
    assert 2 < float(out.split(": ")[1].split()[0]) < 9.5
    assert "lzma" in out
    assert "nats" in out
    assert ("stride 32" in out) == exact
    assert ("mdlm's bound" in out) == (name == "mdlm")
    assert ("pseudo" in out) == (name in ("mlm", "hybrid", "nsp"))


# ---- texts from standard input and from files

READS = [("clm", "prompt", []), ("mlm", "prompt", []), ("fim", "suffix", []), ("nsp", "prefix", ["--suffix", "b"]),
         ("contrastive", "query", []), ("clm", "score", []), ("mdlm", "score", []), ("contrastive", "corpus", [])]


@pytest.mark.parametrize("name, flag, more", READS)
def test_a_text_may_come_from_standard_input_or_a_file(name, flag, more, runs, capsys, monkeypatch, tmp_path):
    text, path = b"\xffa b[MASK]\nc\xc3\xa9\n", tmp_path / "a text"
    path.write_bytes(text)
    read = {"-": "-"} if flag in ("score", "corpus") else {"-": os.fsdecode(text), f"FILE:{path}": os.fsdecode(text)}
    for source, same in read.items():
        want = say(capsys, name, f"--{flag}", str(path) if same == "-" else same, *more).replace(str(path), "-")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert say(capsys, name, f"--{flag}", source, *more) == want


@pytest.mark.parametrize("name, flag, more", READS)
def test_a_text_that_cannot_be_read_is_one_line(name, flag, more, runs, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "is a terminal" in refuse(capsys, "--out_dir", f"out/{name}", f"--{flag}", "-", *more)
    for path in ("nowhere", ".", "a\0b"):
        assert f"--{flag} FILE:{path}" in refuse(capsys, "--out_dir", f"out/{name}", f"--{flag}", f"FILE:{path}", *more)


@pytest.mark.parametrize("flag, name, start", [("corpus", "contrastive", ""), ("score", "clm", ""), ("prompt", "clm", "FILE:")])
@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_what_has_no_end_is_never_opened(flag, name, start, path, runs, capsys, monkeypatch):
    if not os.path.exists("pipe"):
        os.mkfifo("pipe")
    plain = open

    def watched(file, *args, **kwargs):
        assert file != path, "would wait for ever"
        return plain(file, *args, **kwargs)
    monkeypatch.setattr("builtins.open", watched)
    assert f"--{flag} {start}{path}: " in refuse(capsys, "--out_dir", f"out/{name}", f"--{flag}", start + path)


def test_a_file_that_may_not_be_read_is_one_line(runs, capsys, monkeypatch):
    def denied(path):
        raise PermissionError(13, "Permission denied", path)
    monkeypatch.setattr(sample, "read_file", denied)
    assert "FILE:text.txt" in refuse(capsys, "--out_dir", "out/clm", "--prompt", "FILE:text.txt")
    assert "text.txt" in refuse(capsys, "--out_dir", "out/contrastive", "--corpus", "text.txt")


# ---- what is refused

@pytest.mark.parametrize("name, part", [("clm", "model"), ("mtp", "heads")])
def test_a_run_whose_weights_are_not_finite_is_refused(name, part, runs, capsys):
    ckpt = load_checkpoint(f"out/{name}")
    some = next(v for v in ckpt[part].values()) if part == "model" else ckpt["heads"]["mtp"]["weight"]
    some.view(-1)[3] = math.nan
    torch.save(ckpt, "nan.pt")
    assert "not finite" in refuse(capsys, "--out_dir", "nan.pt")


BAD = {
    "a flag that is not there": ("", ["--temprature", "1"], "--temperature"),
    "a temperature below 0": ("", ["--temperature", "-1"], "--temperature"),
    "a temperature that is no number": ("", ["--temperature", "nan"], "--temperature"),
    "top_p above 1": ("", ["--top_p", "2"], "--top_p"),
    "no sample": ("", ["--num_samples", "0"], "--num_samples"),
    "no run": ("nowhere", [], "no checkpoint"),
    "no checkpoint": ("../text.txt", [], "not a checkpoint"),
    "an objective that was not trained": ("clm", ["--objective", "mlm"], "Try --objective clm"),
    "score without a likelihood": ("bart", ["--score", "text.txt"], "clm mlm prefix"),
    "score of nothing": ("clm", ["--score", "nothing.txt"], "nothing.txt"),
    "a score of no name": ("clm", ["--score", ""], "no such file"),
    "an empty score": ("clm", ["--score", "void.txt"], "is empty"),
    "a stride beyond the block": ("clm", ["--score", "text.txt", "--stride", "33"], "--stride 32"),
    "a stride where there is none": ("mdlm", ["--score", "text.txt", "--stride", "8"], "as a whole"),
    "a stride without a score": ("clm", ["--stride", "8"], "--stride: not used by clm here"),
    "a score with a prompt": ("clm", ["--score", "text.txt", "--prompt", "x"], "--prompt: not used"),
    "nothing to fill": ("mlm", ["--prompt", "no hole"], "[MASK]"),
    "a hole of no byte": ("mlm", ["--prompt", "a[MASK:0]"], "1 to 999999"),
    "a hole of too many bytes": ("mdlm", ["--prompt", "a[MASK:9999999]"], "1 to 999999"),
    "a hole of more digits than Python reads": ("bart", ["--prompt", f"a[MASK:{'9' * 5000}]"], "1 to 999999"),
    "an unknown order": ("mlm", ["--order", "sideways"], "confident or left"),
    "an order of others": ("mdlm", ["--order", "left"], "ancestral or confident"),
    "an order where there is no hole": ("hybrid", ["--prompt", "x", "--order", "left"], "--order"),
    "bytes to write into holes": ("mdlm", ["--prompt", "[MASK]", "--max_new_tokens", "3"], "by mdlm here"),
    "a text and its sides": ("fim", ["--prompt", "a<extra_id_0>", "--prefix", "b"], "without --prefix"),
    "two holes for fim": ("fim", ["--prompt", "<extra_id_0><extra_id_1>"], "2 holes"),
    "no hole for span": ("span", ["--prompt", "no hole"], "<extra_id_0>"),
    "too many holes": ("span", ["--prompt", "<extra_id_0>" * 250], "250 holes"),
    "a text too long for its block": ("span", ["--prompt", "x" * 99 + "<extra_id_0>" * 2], "shorter text"),
    "a flag of another objective": ("clm", ["--suffix", "x"], "span ul2 fim nsp"),
    "an embedding and a search": ("contrastive", ["--prompt", "x", "--query", "y"], "without --query"),
    "a corpus that is not there": ("contrastive", ["--corpus", "nowhere"], "--corpus nowhere"),
    "an empty corpus": ("contrastive", ["--corpus", "blank.txt"], "no line"),
    "a corpus with a NUL in its name": ("contrastive", ["--corpus", "a\0b"], "--corpus a"),
    "no text to mark": ("electra", ["--prompt", ""], "--prompt: is empty"),
    "no text to roll back": ("rotation", ["--prompt", ""], "--prompt: is empty"),
    "no text to embed": ("contrastive", ["--prompt", ""], "--prompt: is empty"),
    "nothing to look for": ("contrastive", ["--query", ""], "--query: is empty"),
    "no first text": ("nsp", ["--prefix", "", "--suffix", "b"], "--prefix: is empty"),
    "no second text": ("nsp", ["--prefix", "a", "--suffix", ""], "--suffix: is empty"),
    "a first text alone": ("nsp", ["--prefix", "a"], "--suffix: is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, runs, capsys):
    run, flags, hint = BAD[case]
    assert hint in refuse(capsys, *(["--out_dir", f"out/{run}"] if run else []), *flags)
