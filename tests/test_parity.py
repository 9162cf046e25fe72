"""Rules of the originals' code, written out for given draws. assets/PARITY.md names the tests that hold the others."""
import itertools
import math

import pytest
import torch
from conftest import randomized
from test_objectives import all_parts, make

import objectives as O
from data import EOT, MASK, MID, MODE_S, SENTINEL, SUF


@pytest.mark.parametrize("rate, k", [(0.15, 4), (0.25, 8), (0.35, 10), (0.001, 1), (1.0, 30)])
def test_mlm_masks_as_many_bytes_as_berts_code_also_where_that_rounds_a_half(rate, k):
    """Of 30 bytes 4.5, 7.5 and 10.5: halves go to the even number, and at least one byte is masked."""
    assert ((make("mlm", T=30, mask_rate=rate)[1]["tgt"] != O.IGNORE_INDEX).sum(1) == k).all()


@pytest.mark.parametrize("T, mean, rate, counts", [(1023, 3, 0.15, (929, 139, 46)), (1023, 20, 0.15, (1006, 151, 8)),
                                                   (1023, 3, 0.5, (766, 383, 128)), (11, 9, 0.05, (8, 1, 1))])
def test_noise_bytes_and_spans_are_as_many_as_t5s_code_has(T, mean, rate, counts):
    assert O.fit_spans(T, rate, mean) == counts


def with_one_sentinel_a_run(ids, drop):
    out = []
    n = 0
    for dropped, run in itertools.groupby(range(len(ids)), key=lambda i: drop[i]):
        out += [SENTINEL + n] if dropped else [ids[i] for i in run]
        n += dropped
    return out


@pytest.mark.parametrize("name, mean", [("span", 6.0), ("span", 2.0), ("ul2", 3.0)])
def test_source_and_target_are_t5s_given_the_noise(name, mean, monkeypatch):
    """In the source each run of noise becomes a sentinel, in the target each run of kept bytes. T5's texts start with a
    kept byte and end with noise: one is put before ours, and the target has no sentinel for bytes after the noise."""
    masks = []

    def record_noise(*args, place_spans=O.place_spans):
        placed = place_spans(*args)
        masks.extend(placed[1].tolist())
        return placed
    monkeypatch.setattr(O, "place_spans", record_noise)
    x, batch, _ = make(name, B=160, T=66, span_mean=mean)
    rows = [row for row in zip(x.tolist(), all_parts(batch)) if MODE_S not in row[1][0]]
    for (raw, (source, target)), mask in zip(rows, masks, strict=True):
        n = sum(i < 256 for i in source + target)               # a row may be truncated
        ids = [1, *raw[:n]]
        noise = [False, *mask[:n]]
        end = n + 1 - noise[::-1].index(True)
        assert source[name == "ul2":] == with_one_sentinel_a_run(ids, noise)[1:]
        assert target == with_one_sentinel_a_run(ids[:end], [not is_noise for is_noise in noise])


def test_fim_rows_of_both_orders_are_megatrons_given_the_cuts():
    """The cuts do not depend on the order: PSM shows both, and they must give SPM, the second variant, as well."""
    x, psm, _ = make("fim", B=200, T=33, fim_rate=1.0, fim_spm_rate=0.0)
    _, spm, _ = make("fim", B=200, T=33, fim_rate=1.0, fim_spm_rate=1.0)
    for raw, psm_row, spm_row in zip(x.tolist(), psm["tgt"].tolist(), spm["tgt"].tolist()):         # without PRE
        a = psm_row.index(SUF)
        end = psm_row.index(EOT)
        b = a + end - psm_row.index(MID) - 1
        assert psm_row[:end + 1] == [*raw[:a], SUF, *raw[b:end - 2], MID, *raw[a:b], EOT]
        assert spm_row[:end + 1] == [SUF, *raw[b:end - 2], MID, *raw[:b], EOT]


@torch.no_grad()
@pytest.mark.parametrize("name, ratios", [("mdlm", lambda z: z.softmax(-1)), ("sedd", lambda z: z.exp() / 256)])
def test_a_bound_is_the_mean_over_orders_and_never_below_that_of_the_chain(name, ratios):
    """RADD: each masked byte is written at the rate of its ratio c, so it is next with probability c / (sum of all)."""
    net = randomized()
    x = torch.tensor([[65, 66, 67, 68]])
    bound = cost = p = 0.0
    c = {}                                      # of each set of masked positions: (4, 256)
    for hidden in itertools.product([True, False], repeat=4):
        mask = torch.tensor([hidden])
        inp = x.masked_fill(mask, MASK)
        batch = dict(inp=inp, tgt=x.where(mask, O.IGNORE_INDEX), prefix=4,
                     weight=torch.ones(1, 4) / mask.sum().clamp(min=1))
        bound += float(O.OBJECTIVES[name].loss(net, batch, None)["bound"]) / math.comb(4, sum(hidden))
        c[hidden] = ratios(net.logits(net(inp, 4))[0, :, :256].double())
    for order in itertools.permutations(range(4)):
        p_order = 1.0
        for step, i in enumerate(order):
            now = c[tuple(j in order[step:] for j in range(4))]
            cost += float(now[i].sum() - now[i, x[0, i]].log() - 1) / 24
            p_order *= float(now[i, x[0, i]] / now[list(order[step:])].sum())
        p += p_order
    assert -math.log(p) <= bound == pytest.approx(cost, rel=1e-5)
