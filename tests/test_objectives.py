"""The generic tests run on every objective in OBJECTIVES, so a new one is tested as soon as it is added. They know no
objective by name. What they may assume is a field of Objective."""
import contextlib
import copy
import dataclasses
import itertools
import math
import pathlib
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import NoWaiting, chi2, clean_windows, equal, may_attend, randomize, randomized, settings
from torch.testing import assert_close

import objectives as O
import run
import sample
import train
from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF, make_rng
from model import CONTEXT_WIDTH, Cache, ModelConfig, can_attend, norm, run_blocks
from objectives import IGNORE_INDEX, Continue, OBJECTIVES, Fill
from run import get_members

T = 48
GENERIC = []                                    # tests that every objective must pass, including README.md's


def every(test):
    GENERIC.append(test)
    return pytest.mark.parametrize("name", OBJECTIVES)(test)


def make(name, B=4, T=T, seed=0, **changes):  # -> x, batch, hp
    hp = settings(name, T, **{"batch_size": B} | changes)
    x = clean_windows(hp, B, seed)
    return x, O.add_weights(OBJECTIVES[name].corrupt(x, make_rng(f"corruption {seed}"), hp)), hp


def case(name, B=4, **changes):  # -> objective, net with random parameters, batch, hp
    _, batch, hp = make(name, B, **changes)
    objective = OBJECTIVES[name]
    net = randomized(n_outputs=objective.n_outputs)
    net.heads.update({k: randomize(h, 1) for k, h in objective.heads(net.config, hp).items()})
    return objective, net, batch, hp


def prefixes(batch):  # -> (B,): the prefix length of each row
    return torch.as_tensor(batch["prefix"]).expand(len(batch["inp"]))


# ---- generic: batches
@every
def test_a_batch_is_a_function_of_its_generator_without_loops_over_rows(name):
    """Not of the batches drawn before: a run that is resumed draws its next batch first."""
    objective = OBJECTIVES[name]
    counts = set()
    for B in (8, 16):
        hp = settings(name, T, batch_size=B)
        x = clean_windows(hp, B)
        copy = x.clone()
        with NoWaiting() as counter:
            batch = objective.corrupt(x, make_rng("a"), hp)
        counts.add(counter.count)
        assert torch.equal(x, copy), "the caller's windows were changed"
    assert len(counts) == 1
    for _ in range(100):
        objective.corrupt(x, make_rng("others"), hp)
    assert equal(batch, objective.corrupt(x, make_rng("a"), hp)), "keep no state between calls of corrupt"


@every
def test_batches_have_constant_shapes_valid_ids_and_rows_that_fit(name):
    def pack_what_fits(ids, keep, width, pack_left=O.pack_left):
        assert keep.sum(1).max() <= width, "full rows are truncated"
        return pack_left(ids, keep, width)
    objective = OBJECTIVES[name]
    for size in (T, 66):
        shapes = set()
        for seed in range(8):
            with mock.patch.object(O, "pack_left", pack_what_fits):
                _, batch, hp = make(name, T=size, seed=seed, progress=torch.tensor(seed / 7))
            shapes.add(str({k: v if isinstance(v, int) else (v.shape, v.dtype) for k, v in batch.items()}))
            assert all(k == "prefix" if isinstance(v, int) else v.size(0) == 4 for k, v in batch.items())
            assert batch["inp"].min() >= 0 and batch["inp"].max() < 512
            if "tgt" in batch:
                has_target = batch["tgt"] != IGNORE_INDEX
                assert batch["inp"].shape == has_target.shape == (4, size)
                assert has_target.any(1).all(), "a row without a target"
                assert batch["tgt"][has_target].min() >= 0 and batch["tgt"].max() < objective.n_outputs
            assert "positions" not in batch or objective.numbering or "mask" in batch, "sample.py cannot know positions"
            if objective.numbering:             # sample.py computes the same numbers
                assert torch.equal(batch["positions"], objective.numbering(batch["inp"], batch["prefix"], hp))
        assert len(shapes) == 1, f"shapes depend on hp.progress or on the draws: {shapes}. Draw the most, use a share"


# ---- generic: no position reads its target
def hidden_targets(objective, batch):
    """-> (B, T) bool each: targets of causal positions (with a mask: targets that are the next id), and other targets
    that the objective claims to hide. Some targets may be unmasked, as in BERT, which leaves a tenth unchanged and
    replaces a tenth. But if most targets are unmasked, or if the loss gives bits per byte, the objective claims to hide
    these, too, unless target_hidden is False. A batch with is_hidden (B, T) says itself which ones it hides."""
    inp = batch["inp"]
    tgt = batch["tgt"]
    has_target = tgt != IGNORE_INDEX
    if "mask" in batch:
        causal = has_target & (tgt == F.pad(inp[:, 1:], (0, 1)))
    else:
        causal = has_target & (prefixes(batch) < inp.size(1))[:, None]
    if "is_hidden" in batch:
        return causal, has_target & ~causal & batch["is_hidden"]
    fills = objective.uses.get("fill")
    shift = fills.shift if fills else 0
    unmasked = has_target & ~causal & F.pad(inp < O.N_BYTES, (0, shift))[:, shift:]
    hides_all = objective.bpb in ("loss", "bound") or 2 * unmasked.sum() > has_target.sum()
    if objective.target_hidden and hides_all:
        return causal, has_target & ~causal
    return causal, has_target & ~causal & ~unmasked


def reachable(batch):
    """-> (B, T, T) bool: the inputs that a position's state depends on after any number of blocks. q may depend on j
    through k even if the mask does not allow q to attend to j. The input of a position includes the ids before it."""
    k = torch.arange(batch["inp"].size(1))
    if "mask" not in batch:
        return can_attend(k[:, None], k, prefixes(batch)[:, None, None])
    reach = batch["mask"] | torch.eye(len(k), dtype=torch.bool)
    for _ in range(len(k).bit_length()):        # each time, paths are twice as long
        reach = reach.float() @ reach.float() > 0
    if "before" in batch:                       # the test compares these ids
        return reach
    context = (k <= k[:, None]) & (k > k[:, None] - CONTEXT_WIDTH)
    return reach.float() @ context.float() > 0


def all_targets(batch):
    """-> {name: (B, T), or (B,) for one answer per row}: the labels and all targets, further ones head by head."""
    found = {}
    for key, value in batch.items():
        if key == "labels" or key.endswith("tgt"):
            heads = value.flatten(2).unbind(2) if value.dim() > 2 else [value]
            found |= {f"{key} {i}" if i else key: head for i, head in enumerate(heads)}
    return found


def changed_target(tgt, again, was, now):  # was, now (B, 1): a byte before and after it was changed
    """-> bool, as tgt: True where the target is another one, and where a byte was a target and where it is one now, if
    this is not the same position. A target may appear or vanish: `corrupt` may choose only some bytes."""
    other = (tgt != again) & (tgt != IGNORE_INDEX) & (again != IGNORE_INDEX)
    if tgt.dim() == 1:
        return other
    left = (tgt == was) & (again == IGNORE_INDEX)
    came = (tgt == IGNORE_INDEX) & (again == now)
    return other | (left | came) & left.any(1, keepdim=True) & came.any(1, keepdim=True)


@every
def test_no_position_reads_its_target(name):
    """Changes one byte at a time. If this changes a hidden target to another one, it must not change an input that the
    target's position depends on; if it changes the answer of a row, such as a label, no input of this row. With
    target_hidden=False, the source of a prefix row may contain the target's bytes, and further targets may be read."""
    hp = settings(name, T)
    objective = OBJECTIVES[name]
    x = clean_windows(hp, 4)
    batch = objective.corrupt(x, make_rng("byte"), hp)
    targets = {key: tgt for key, tgt in all_targets(batch).items() if key == "tgt" or objective.target_hidden}
    if not targets:
        pytest.skip("predicts no ids")
    P = prefixes(batch)[:, None]
    k = torch.arange(T)
    reads = {}                                  # (B, answers per row, inputs of a row): what an answer depends on
    for key, tgt in targets.items():
        if tgt.dim() == 1:
            reads[key] = torch.ones(4, 1, batch["inp"][0].numel(), dtype=torch.bool)
            continue
        causal, hidden = hidden_targets(objective, batch | {"tgt": tgt})
        reads[key] = reachable(batch) & (causal | hidden)[..., None]
        if not objective.target_hidden:
            reads[key] &= (k >= P[..., None]) | ~causal[..., None]
        inside = key == "tgt" and (causal & (k < P - 1)).any()
        assert not inside, "a position inside the prefix has a target, which can be read"
    asked = torch.zeros(4, dtype=torch.bool)
    for j, shift in itertools.product(range(x.size(1)), (1, 32, 100)):              # 32 turns A into a
        other = x.clone()
        other[:, j] = (x[:, j] + shift - 1) % 255 + 1           # another byte from 1..255
        again = objective.corrupt(other, make_rng("byte"), hp)
        shown = again["inp"] != batch["inp"]                    # did a position's input change?
        if "before" in batch:
            shown |= (again["before"] != batch["before"]).any(2)
        for key, tgt in targets.items():
            changed = changed_target(tgt, all_targets(again)[key], x[:, j:j + 1], other[:, j:j + 1]).view(4, -1, 1)
            read = changed & reads[key] & shown.view(4, 1, -1)
            why = "can be read. If it may be, set target_hidden=False, or is_hidden in the batch"
            assert not read.any(), f"byte {j} decides {key} and {why}"
            if key == "tgt":
                asked |= changed.any(1)[:, 0]
    assert asked.all() or "tgt" not in batch, "a row predicts no byte"


@pytest.mark.parametrize("prefix", [0, 12, torch.tensor([0, 3, 7, 12])])
def test_the_mask_of_documents_is_the_rule_within_each(prefix):
    inp = torch.randint(0, 3, (4, 12), generator=make_rng("documents"))             # a third of the ids are EOT
    found = O.document_mask(dict(inp=inp, prefix=prefix))
    rows = torch.as_tensor(prefix).expand(4).tolist()
    for b, q, k in itertools.product(range(4), range(12), range(12)):
        between = inp[b, min(q, k):max(q, k)]
        allowed = any(may_attend(block, q, k, rows[b]) for block in range(2))       # the mask is that of all blocks
        assert found["mask"][b, q, k] == (EOT not in between and allowed)
    for b, t, j in itertools.product(range(4), range(12), range(1, CONTEXT_WIDTH)):
        inside = t >= j and EOT not in inp[b, t - j:t]
        assert found["before"][b, t, j - 1] == (inp[b, t - j] if inside else EOT)


# ---- generic: on random bytes no likelihood falls below the entropy
@every
def test_on_random_bytes_no_likelihood_falls_below_the_entropy(name, **changes):
    """Random bytes cannot be predicted. A model that predicts them has read them, whatever the layout of the row.
    A figure that is log V for an untrained model is assumed to be a likelihood, or a bound on one. After training,
    it must not be below the entropy. The loss of an objective with bits per byte is one, and predicts all bytes of a
    text; of others, only hidden targets count. Nor may a loss that depends on labels be below their entropy."""
    hp = settings(name, 32, **dict(batch_size=16, n_layer=2, n_head=2, n_embd=32, ngram_rows=0, attn_scale=2.0,
                                   max_iters=50, learning_rate=0.05, warmup_iters=5, lr_decay=0.2) | changes)
    objective = OBJECTIVES[name]
    data = torch.randint(1, 256, (200_000,), generator=make_rng("corpus"), dtype=torch.uint8)
    corpus = [dict(name="random", weight=1.0, train=data[:100_000], val=data[100_000:], size=200_000, crc=0)]
    s = train.make_state(corpus, get_members(hp), hp)
    [m] = s.members
    batches = [train.sample_batch(m, corpus, "val", 64, f"entropy,{i}", hp) for i in range(2)]
    labels = [batch["labels"] for batch in batches if "labels" in batch and objective.target_hidden]
    if "tgt" not in batches[0] and not labels:
        pytest.skip("predicts no ids")

    @torch.no_grad()
    def figures(batches=batches):
        loss, others = train.mean_loss(m, s.model, batches, hp)
        return others | {"loss": loss}
    log_V = math.log(objective.n_outputs)
    of_text = objective.bpb in ("loss", "bound")
    likelihoods = [key for key, nats in figures().items()
                   if nats == pytest.approx(log_V, abs=1e-4) or of_text and key == "loss"]
    for batch in batches if "tgt" in batches[0] and not of_text else []:
        causal, hidden = hidden_targets(objective, batch)
        kept = hidden | causal if objective.target_hidden else hidden
        kept = kept & (batch["tgt"] > EOT) & (batch["tgt"] < O.N_BYTES)         # the position may reveal a special id
        batch["weight"] = batch["weight"] * kept
        if (batch["tgt"] == IGNORE_INDEX).any():                # otherwise the loss need not know this target
            batch["tgt"] = batch["tgt"].where(kept, IGNORE_INDEX)
    before = figures()                          # log V for each hidden byte
    if not any(before[key] for key in likelihoods) and not labels:
        pytest.skip("has no likelihood of hidden bytes")
    for step in range(hp.max_iters):
        train.load_step_inputs(s, m, step)
        train.training_step(s, m, m.objective.loss, train.optimizer_step)
    after = figures()
    limit = math.log(255)                       # bytes are drawn uniformly from 1..255
    if likelihoods and not of_text:             # no fixed prediction of the same bytes is better than their frequencies
        tgt = torch.cat([batch["tgt"].flatten() for batch in batches])
        weight = torch.cat([batch["weight"].flatten() for batch in batches]).double()
        total = torch.zeros(O.N_BYTES, dtype=torch.double).index_add(0, tgt[weight > 0], weight[weight > 0])
        limit = float(torch.distributions.Categorical(total).entropy())
    for key in likelihoods:
        nats = after[key] / before[key] * log_V
        assert nats > limit - 0.02, (f"{key} is {nats:.3f}, below {limit:.3f}, for bytes that cannot be predicted: a "
                                     "leak, or no likelihood")
    if labels:
        others = figures([batch | {"labels": batch["labels"].roll(1, 0)} for batch in batches])
        _, counts = torch.cat(labels).unique(return_counts=True)
        entropy = float(torch.distributions.Categorical(counts).entropy())
        for key in after:
            if others[key] != after[key] and before[key] > entropy - 0.01:
                why = "below the entropy of labels that random bytes cannot reveal: set target_hidden=False if they may"
                assert after[key] > entropy - 0.05, f"{key} is {after[key]:.3f}, {why}"


@pytest.mark.parametrize("name, changes", [("mtp", dict(mtp_kind="sequential")), ("nsp", dict(nsp_negatives="swap"))])
def test_on_random_bytes_no_likelihood_of_other_settings_falls_below_the_entropy(name, changes):
    test_on_random_bytes_no_likelihood_falls_below_the_entropy(name, **changes)


# ---- generic: weights and losses
@every
def test_twice_the_same_rows_have_the_same_loss_and_figures(name):
    """They are means over rows or targets, not sums. test_train.py adds up those of micro-batches."""
    objective, net, batch, hp = case(name)
    rows = objective.corrupt(clean_windows(hp, 4), make_rng("corruption 0"), hp)    # those of the batch
    if objective.compares_rows or "weight" in rows:
        pytest.skip("compares rows, or sets its own weights")
    twice = {key: value if isinstance(value, int) else torch.cat((value, value)) for key, value in rows.items()}
    once = objective.loss(net, batch, hp)
    assert_close(objective.loss(net, O.add_weights(twice), hp), once, rtol=1e-5, atol=1e-5)


@every
def test_every_figure_that_depends_on_the_blocks_trains_them(name):
    """A second loss whose head reads detached states would train only the head. Figures without a gradient, such as an
    accuracy, are free, and so are those of a network that does not depend on the model's blocks."""
    objective, net, batch, hp = case(name)
    other = copy.deepcopy(net)
    randomize(other.blocks, 2)
    loss, figures = objective.loss(net, batch, hp)
    other_loss, other_figures = objective.loss(other, batch, hp)
    other_figures = other_figures | {"loss": other_loss}
    for key, figure in (figures | {"loss": loss}).items():
        if not figure.requires_grad or torch.equal(figure, other_figures[key]):
            continue
        gradients = torch.autograd.grad(figure, [*net.blocks.parameters()], retain_graph=True, allow_unused=True)
        why = f"{key} depends on the blocks, but passes them no gradient: detach the figure if its head may read only"
        assert any(gradient is not None and gradient.any() for gradient in gradients), why


@every
@torch.no_grad()
def test_an_untrained_model_is_at_chance(name):
    """This catches wrong weights, such as those of bd3lm, where only half of a row has targets. A loss in nats per byte
    may depend on how many bytes a batch masks, so on the average of 12 batches."""
    _, batch, hp = make(name, B=8)
    objective = OBJECTIVES[name]
    net = run.build(get_members(hp), hp)
    loss, figures = objective.loss(net, batch, hp)
    if objective.bpb in ("loss", "bound"):
        losses = [float(objective.loss(net, make(name, B=8, seed=seed)[1], hp)[0]) for seed in range(12)]
        error = torch.tensor(losses).std() / 12 ** 0.5
        why = "the loss is not in nats per byte: mend its weights, or set bpb='causal' or None"
        assert abs(sum(losses) / 12 - math.log(256)) < 1e-4 + 5 * error, why
    if "nll" in figures:
        assert float(figures["nll"].detach()) == pytest.approx(math.log(objective.n_outputs), abs=1e-5)


# ---- generic: flags and uses
@every
def test_a_flag_of_several_objectives_is_the_same_for_all(name):
    """A flag has one default and one range. An objective that wants another default has a flag of its own, and its
    flag_defaults are those of flags of train.py. An alias is no name of an objective, which --objective would find."""
    assert not set(OBJECTIVES[name].flag_defaults) - run.SHARED_FLAGS
    assert {*O.ALIASES.values()} <= {*OBJECTIVES} and not {*O.ALIASES} & {*OBJECTIVES}
    for flag, spec in OBJECTIVES[name].flags.items():
        assert not any(flag in group for group in run.SETTINGS.values()), f"--{flag} is a flag of train.py"
        for other in OBJECTIVES.values():
            assert other.flags.get(flag, spec) == spec, (flag, other.name)


@every
def test_each_flag_of_an_objective_changes_its_rows_its_weights_or_its_loss(name):
    windows = torch.randint(1, 256, (4, 2 * T), generator=make_rng("windows"))

    def another_value(spec):  # of a Flag, not its default
        if spec.choices:
            return spec.choices[1]
        if isinstance(spec.default, int):
            return spec.default * 2
        return max(spec.low, spec.default * 0.6) or spec.high * 0.3

    def training(**changes):  # -> all that depends on the settings
        hp = settings(name, T, **changes)
        x = windows[:, :get_members(hp)[0].n]
        batches = []
        for hp.progress in (0.0, 0.5, 1.0):
            batches.append(OBJECTIVES[name].corrupt(x, make_rng("corruption"), hp))
        net = randomize(run.build(get_members(hp), hp))
        loss, _ = OBJECTIVES[name].loss(net, O.add_weights(batches[-1]), hp)
        return batches, net.state_dict(), loss.detach()
    values = {flag: another_value(spec) for flag, spec in OBJECTIVES[name].flags.items()
              if spec.choices or not isinstance(spec.default, str)}         # not free text
    for flag, value in values.items():
        others = {other: changed for other, changed in values.items() if other != flag}
        changes = [not equal(training(**same), training(**same, **{flag: value})) for same in ({}, others)]
        assert any(changes), f"{flag} has no effect"


@every
def test_an_objectives_uses_have_what_sample_py_needs(name):
    x, batch, hp = make(name)
    objective = OBJECTIVES[name]
    assert objective.name == name and objective.uses.keys() <= set(sample.MODES)
    assert "write" not in objective.uses or "fill" in objective.uses
    for mode, use in objective.uses.items():
        if mode == "correct" and isinstance(use, Continue):
            assert (prefixes(batch) == 0).any() and "mask" not in batch, "no row has prefix 0 and no mask"
        if isinstance(use, Fill):
            assert use.shift <= len(use.left_ids)
            assert "mask" in batch or (prefixes(batch) == T).any(), "no row has prefix T, with which sample.py fills"
        if isinstance(use, Fill) and (use.left_ids, use.right_ids, use.shift) == ((), (), 0):
            clean = F.pad(x, (0, T - x.size(1)), value=IGNORE_INDEX)
            assert ((batch["tgt"] == clean) | (batch["tgt"] == IGNORE_INDEX)).all(), "a target is not the clean byte"
        if mode == "infill" and not use.prompt:
            other = objective.uses.get("continue")
            is_causal = other and not other.both_ways
            assert is_causal and "fill" in objective.uses, "without a prompt, it needs a Fill and a causal Continue"
        elif mode == "infill":
            ids, P = use.prompt([[97], [98]], 4, hp)
            assert 0 <= P <= len(ids) and use.stop_ids and max(use.stop_ids) < objective.n_outputs
        if mode == "repair":
            last = (prefixes(batch) - 1).clamp(min=0)           # of the prefix
            assert (batch["inp"].gather(1, last[:, None]) == SEP).all(), "its rows are not made by seq2seq"
            i = torch.arange(T)
            end = (batch["tgt"] == EOT).long().argmax(1)
            answer = (i >= last[:, None]) & (i <= end[:, None])
            assert torch.equal(batch["tgt"] != IGNORE_INDEX, answer), "it is not trained to write the whole text"


@every
def test_a_prompt_is_laid_out_as_in_training(name):
    x, batch, _ = make(name, B=8)
    use = OBJECTIVES[name].uses.get("continue")
    if not use:
        pytest.skip("continues nothing")
    is_like_training = []
    for row, inp, P in zip(x.tolist(), batch["inp"].tolist(), prefixes(batch).tolist()):
        n = P or T                              # all of a causal row may be a prompt
        text = row[:n - len(use.left_ids) - len(use.right_ids)]
        same = [a == b for a, b in zip(inp, [*use.left_ids, *text, *use.right_ids], strict=False)]
        framed = all(same[:len(use.left_ids)] + same[n - len(use.right_ids):])
        is_like_training.append(use.both_ways == (0 < P < T) and framed and 2 * sum(same) > n)      # some may be noise
    assert any(is_like_training), ("no row starts with a text as a prompt does, most of it unchanged: give Continue "
                                   "the ids that surround it in training, or leave Continue out of `uses`")


# ---- custom objectives
def read_forks():  # -> {name: code} of the objectives in README.md and docs/EXTENDING.md
    forks = {}
    for page in ("README.md", "docs/EXTENDING.md"):
        text = (pathlib.Path(O.__file__).parent / page).read_text(encoding="utf-8")
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            name = re.search(r'^OBJECTIVES\["(\w+)"\]', block, re.MULTILINE)
            if name:
                forks[name[1]] = block
    return forks


def mdlm_that_masks_too_little(x, g, hp):
    batch = O.mdlm(x, g, hp)
    stays = torch.rand(x.shape, generator=g, device=g.device) < 0.3
    return batch | {"inp": x.where(stays, batch["inp"])}


def mlm_in_slots(x, g, hp):  # each byte gets two positions; the first is masked if the byte is even, else the second
    chosen = torch.rand(x.shape, generator=g, device=g.device) < 0.5
    chosen = chosen.scatter(1, O.random_positions(*x.shape, 1, g), True)
    slots = torch.stack((chosen & (x % 2 == 0), chosen & (x % 2 == 1)), dim=2).flatten(1)
    twice = x.repeat_interleave(2, dim=1)
    hidden = torch.where(slots, MASK, PAD)
    inp = torch.where(chosen.repeat_interleave(2, dim=1), hidden, twice)
    return dict(inp=inp, tgt=twice.where(slots, IGNORE_INDEX), prefix=inp.size(1))


def mlm_letters_that_shows_the_case(x, g, hp):
    is_letter = ((x | 32) >= ord("a")) & ((x | 32) <= ord("z"))
    chosen = is_letter & (torch.rand(x.shape, generator=g, device=g.device) < 0.6)
    mask = torch.where(x < ord("a"), SEP, MASK)
    return dict(inp=torch.where(chosen, mask, x), tgt=x.where(chosen, IGNORE_INDEX), prefix=x.size(1))


def random_noise(x, g, hp, leaks=False):  # most targets are visible, and the row does not say which
    replaced = torch.rand(x.shape, generator=g, device=g.device) < hp.mask_rate
    noise = x % 255 + 1 if leaks else O.random_bytes(x.shape, g)
    return dict(inp=noise.where(replaced, x), tgt=x, prefix=x.size(1), is_hidden=replaced)


@pytest.mark.parametrize("name", [*read_forks(), "visible_noise"])
@mock.patch.dict(OBJECTIVES)
def test_custom_objectives_pass_the_generic_tests(name):
    """Those of the pages, except the test that trains, which is in the next test, and one with visible targets."""
    for code in read_forks().values():
        exec(code, dict(vars(O)))
    loss = O.weighted_loss(lambda logits, tgt: F.cross_entropy(logits.mT, tgt, reduction="none"))
    OBJECTIVES["visible_noise"] = dataclasses.replace(OBJECTIVES["mlm"], name="visible_noise", corrupt=random_noise,
                                                      loss=loss, flags={})
    for test in GENERIC:
        if name == "visible_noise" or test != test_on_random_bytes_no_likelihood_falls_below_the_entropy:
            with contextlib.suppress(pytest.skip.Exception):
                test(name)


@pytest.mark.slow
def test_the_custom_objectives_of_the_pages_pass_the_tests_that_the_page_names(tmp_path):
    forks = read_forks()
    shutil.copytree(pathlib.Path(O.__file__).parent, tmp_path, ignore=shutil.ignore_patterns(".*", "out"),
                    dirs_exist_ok=True)
    with open(tmp_path / "objectives.py", "a", encoding="utf-8") as f:
        f.write("\n\n" + "\n\n".join(forks.values()))
    tests = re.findall(r"```python\n(def test_.*?)```", (tmp_path / "docs/EXTENDING.md").read_text("utf-8"), re.DOTALL)
    assert tests
    with open(tmp_path / "tests/test_objectives.py", "a", encoding="utf-8") as f:
        f.write("\n\n" + "\n\n".join(tests))
    for selected in [f"[{name}]" for name in forks] + re.findall(r"def (test_\w+)", "".join(tests)):
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests", "-k", selected], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def spoiled(corrupt, change):  # -> a corrupt that changes keys of the batch: change(batch) returns them
    def spoil(x, g, hp):
        batch = corrupt(x, g, hp)
        return batch | change(batch)
    return spoil


def last_of_prefix_predicts_itself(batch):
    last = batch["prefix"][:, None] - 1
    return {"tgt": batch["tgt"].scatter(1, last, batch["inp"].gather(1, last))}


READS_ITS_TARGET = {    # objective; its wrong fields, or wrong keys of its batch; does the entropy test notice it?
    "unmasked targets": ("all_tokens", dict(target_hidden=True), True),
    "a bound": ("mdlm", dict(corrupt=mdlm_that_masks_too_little), True),
    "its own clean block": (
        "bd3lm", lambda batch: {"mask": batch["mask"] | batch["mask"].roll(batch["mask"].size(2) // 2, 2)}, True),
    "clean bytes before others of its block": (
        "bd3lm", lambda batch: {"before": batch["before"].chunk(2, dim=1)[1].repeat(1, 2, 1)}, False),
    "targets at positions that depend on them": (
        "mlm", dict(corrupt=mlm_in_slots, n_bytes=lambda T, hp: T // 2, uses={}), True),
    "another mask for some letters": ("mlm", dict(corrupt=mlm_letters_that_shows_the_case), True),
    "a replaced byte": ("mlm", dict(corrupt=lambda *args: random_noise(*args, leaks=True), uses={}), True),
    "a prefix too long by one byte": ("prefix", lambda batch: {"prefix": batch["prefix"] + 1}, False),
    "its own byte": ("prefix", last_of_prefix_predicts_itself, False),
    "a label from bytes": ("clm", lambda batch: {"labels": batch["inp"][:, 5] % 2}, False),
    "a target of another head": (
        "mtp", lambda batch: {"future_tgt": torch.stack((batch["tgt"], batch["inp"]), dim=2)}, False)}


@pytest.mark.parametrize("name, wrong, learns", READS_ITS_TARGET.values(), ids=READS_ITS_TARGET)
@mock.patch.dict(OBJECTIVES)
def test_a_target_that_is_read_would_be_noticed(name, wrong, learns):
    for code in read_forks().values():
        exec(code, dict(vars(O)))
    fields = dict(corrupt=spoiled(OBJECTIVES[name].corrupt, wrong)) if callable(wrong) else wrong
    OBJECTIVES[name] = dataclasses.replace(OBJECTIVES[name], **fields)
    with pytest.raises(AssertionError, match="can be read"):
        test_no_position_reads_its_target(name)
    if learns:
        with pytest.raises(AssertionError, match="a leak, or no likelihood"):
            test_on_random_bytes_no_likelihood_falls_below_the_entropy(name)


@mock.patch.dict(OBJECTIVES)
def test_a_label_that_random_bytes_cannot_reveal_would_be_noticed_in_the_loss():
    def label_in_the_row(batch):
        return {"inp": torch.cat((CLS + batch["labels"][:, None], batch["inp"][:, 1:]), dim=1)}
    OBJECTIVES["nsp"] = dataclasses.replace(OBJECTIVES["nsp"], corrupt=spoiled(O.nsp, label_in_the_row))
    with pytest.raises(AssertionError, match="cannot reveal"):
        test_on_random_bytes_no_likelihood_falls_below_the_entropy("nsp")


# ---- each objective: what is drawn, and its figures
EQUALLY_LIKELY = {  # number of possible outcomes, and draws of them
    "placements of spans": (12, lambda: O.place_spans(4000, 6, 3, 2, make_rng("p"))[1]),
    "masked bytes": (15, lambda: make("mlm", 4000, T=6, mask_rate=0.34)[1]["tgt"] != IGNORE_INDEX),
    "prefixes": (T // 2, lambda: make("prefix", 4000)[1]["prefix"]),
    "cuts of ul2": (31, lambda: make("ul2", 4000, T=34)[1]["prefix"][2000:3000]),
    "pairs of crops": (121, lambda: O.contrastive(torch.arange(20).expand(6000, -1), make_rng("c"),
                                                  settings("contrastive", 20, crop=0.5))["inp"][:, :, 0]),
    "orders of xlnet": (24, lambda: make("xlnet", 4000, T=8)[1]["mask"][:, :4, 4:].sum(2)),
    "seams": (T, lambda: make("rotation", 4000)[1]["labels"])}


@pytest.mark.parametrize("kinds, draws", EQUALLY_LIKELY.values(), ids=EQUALLY_LIKELY)
def test_all_are_equally_likely(kinds, draws):
    _, seen = draws().unique(dim=0, return_counts=True)
    assert len(seen) == kinds
    assert chi2(seen, 1 / kinds) < kinds + 6 * (2 * kinds) ** 0.5        # 6 standard deviations


def clean_row(batch):
    return torch.where(batch["tgt"] == IGNORE_INDEX, batch["inp"], batch["tgt"])


def check_mlm(x, batch, k, mask=0.8, left=0.1 + 0.1 / 255):
    chosen = batch["tgt"] != IGNORE_INDEX
    assert (chosen.sum(1) == k).all(), "the number of targets"
    assert_close(batch["tgt"].where(chosen, x), x)              # the targets of the chosen bytes
    assert_close(batch["inp"].where(~chosen, x), x)             # the input where nothing is predicted
    changed = batch["inp"][chosen]
    assert ((changed == MASK) | ((changed >= 1) & (changed < 256))).all(), "a random byte is a special id"
    n = len(changed)
    for share, seen in ((mask, changed == MASK), (left, changed == x[chosen])):
        found = float(seen.float().mean())
        assert abs(found - share) <= 5 * (share * (1 - share) / n) ** 0.5, f"a share is {found:.3f}, not {share:.3f}"


@pytest.mark.parametrize("name, T, rate, k, masked, random", [
    ("mlm", T, 0.15, 7, 0.8, 0.1), ("mlm", T, 1.0, T, 0.0, 1.0), ("mlm", T, 0.001, 1, 0.5, 0.25),
    ("mlm", 30, 0.25, 8, 0.8, 0.1), ("mlm", 30, 0.35, 10, 0.0, 0.0),    # 7.5 and 10.5 bytes are rounded to even
    ("electra", T, 0.15, 7, 0.85, 0.0), ("nsp", T, 0.15, 7, 0.8, 0.1)])
def test_masked_replaced_and_left_bytes_have_their_shares_of_an_exact_count(name, T, rate, k, masked, random):
    x, batch, _ = make(name, B=2000, T=T, mask_rate=rate, electra_mask_rate=rate, nsp_mask_rate=rate,
                       mask_token=masked, mask_random=random)
    clean = clean_row(batch) if name == "nsp" else x
    check_mlm(clean, batch, k, mask=masked, left=1 - masked - random + random / 255)
    may_be_chosen = (batch["tgt"] != IGNORE_INDEX).any(0)
    assert torch.equal(may_be_chosen, clean[0] < 256), "CLS, SEP or PAD is chosen, or a byte never is"


@pytest.mark.parametrize("share, longest", [(0.0, 1), (0.75, 36), (1.0, T - 1)])
def test_prefix_has_loss_only_on_the_suffix(share, longest):
    x, batch, _ = make("prefix", B=500, prefix_max=share)
    P = batch["prefix"]
    suffix = torch.arange(T) >= P[:, None] - 1
    tgt = x[:, 1:].where(suffix, IGNORE_INDEX)
    assert_close(batch, O.add_weights(dict(inp=x[:, :-1], tgt=tgt, prefix=P)))
    assert (int(P.min()), int(P.max())) == (1, longest), "the shortest and the longest prefix"


@pytest.mark.parametrize("rate, k, ratio, n", [(0.3, 14, 0.25, 100), (1.0, T - 1, 0.0, 1), (0.3, 14, 1.0, 399)])
def test_hybrid_rows_are_masked_or_causal_and_weigh_by_the_ratio(rate, k, ratio, n):
    x, batch, _ = make("hybrid", B=400, hybrid_ratio=ratio, mask_rate=rate)
    masked = batch["prefix"] == T
    assert int(masked.sum()) == n and (batch["prefix"][~masked] == 0).all()
    assert torch.equal(batch["inp"][~masked], x[~masked, :-1]) and torch.equal(batch["tgt"][~masked], x[~masked, 1:])
    tgt = F.pad(batch["tgt"][masked], (1, 0), value=IGNORE_INDEX)     # position i - 1 predicts byte i
    assert (tgt[:, T] == IGNORE_INDEX).all() and (tgt[:, 1] != IGNORE_INDEX).any(), "byte 0 is masked, or byte 1 never"
    check_mlm(x[masked, :T], dict(inp=batch["inp"][masked], tgt=tgt[:, :T]), k)
    weight = torch.where(masked, ratio / (n * k), (1 - ratio) / ((400 - n) * T))    # of each target
    assert_close(batch["weight"], weight[:, None].expand(400, T))


# ---- span, ul2, fim
def all_parts(batch):  # seq2seq rows -> [(source ids, target ids without EOT)]
    rows = []
    for z, tgt, P in zip(batch["inp"].tolist(), batch["tgt"].tolist(), batch["prefix"].tolist()):
        has_target = [t for t in tgt if t != IGNORE_INDEX]
        assert z[P - 1] == SEP and SEP not in z[:P - 1]
        assert has_target == tgt[P - 1:P - 1 + len(has_target)] == [*z[P:P - 1 + len(has_target)], EOT]
        assert set(z[P + len(has_target):]) <= {PAD}
        rows.append((z[:P - 1], has_target[:-1]))
    return rows


@pytest.mark.parametrize("T, mean, rate, counts", [(1023, 3, 0.15, (929, 139, 46)), (1023, 20, 0.15, (1006, 151, 8)),
                                                   (1023, 3, 0.5, (766, 383, 128)), (11, 9, 0.05, (8, 1, 1))])
def test_numbers_of_noise_bytes_and_spans_are_those_of_t5s_code(T, mean, rate, counts):
    assert O.fit_spans(T, rate, mean) == counts


def check_spans(rows, sizes):  # rows: [(clean bytes, (source, target))]; sizes: what fit_spans returns
    """With its spans, which are numbered, not empty, and do not touch, the source is the text. Full rows have the exact
    numbers of noise bytes and of spans. About one row in eight is truncated, perhaps inside a span."""
    short = []                                  # sources of truncated rows
    for b, (raw, (source, target)) in enumerate(rows):
        where = f"row {b}: source {source}, target {target} of the bytes {raw}"
        spans = []
        for i in target:
            if i >= SENTINEL:
                spans.append([])
            else:
                spans[-1].append(i)
        numbers = [*range(SENTINEL, SENTINEL + len(spans))]
        assert [i for i in source if i >= SENTINEL] == numbers == [i for i in target if i >= SENTINEL], where
        assert all(spans) and not any(a >= SENTINEL <= b for a, b in itertools.pairwise(source)), where
        text = [byte for i in source for byte in (spans[i - SENTINEL] if i >= SENTINEL else [i])]
        assert text == raw[:len(text)] and len(text) >= 8 and spans, where
        if len(text) < sizes[0]:
            short.append(source)
        else:
            assert (len(text), sum(map(len, spans)), len(spans)) == sizes, f"bytes, noise bytes, spans of {where}"
    assert 1 / 20 < len(short) / len(rows) < 1 / 5
    assert len({*map(len, short)}) > 5, "their lengths do not vary"
    assert 0 < sum(source[-1] >= SENTINEL for source in short) < len(short), "all are cut inside a span, or none is"


@pytest.mark.parametrize("T, rate, mean", [(48, 0.15, 3), (64, 0.15, 9), (100, 0.5, 2), (33, 0.9, 9)])
def test_spans_are_those_of_t5_and_rows_are_full_except_one_in_eight(T, rate, mean):
    """T5's texts start with a kept byte and end with noise. Ours may start and end with either."""
    x, batch, _ = make("span", B=400, T=T, span_rate=rate, span_mean=mean)
    n, N, S = O.fit_spans(T, rate, mean)
    assert T - 1 <= n + 2 * S + 2 <= T + 1, "one more byte would fit, with its sentinels"
    check_spans([*zip(x.tolist(), all_parts(batch))], (n, N, S))


def test_ul2_rows_are_what_their_mode_says():
    x, batch, _ = make("ul2", B=800, T=100)
    modes = batch["inp"][:, 0].tolist()
    assert modes == [MODE_R] * 400 + [MODE_S] * 200 + [MODE_X] * 200
    rows = [(row, (source[1:], target)) for row, (source, target) in zip(x.tolist(), all_parts(batch))]
    check_spans(rows[:400], O.fit_spans(99, 0.3, 6))
    check_spans(rows[600:], O.fit_spans(99, 0.5, 32))
    assert sum(source[-1] >= SENTINEL for _, (source, _) in rows[600:]) < 100, "every long span is a suffix, as in S"
    assert all(source + target == row[:98] and 1 <= len(source) <= 97 for row, (source, target) in rows[400:600])


@pytest.mark.parametrize("name, mean, reserved_by_mean", [("span", 6.0, 8), ("span", 3.0, 4), ("ul2", 6.0, 8)])
def test_spans_have_the_position_numbers_of_their_hole(name, mean, reserved_by_mean):
    _, batch, _ = make(name, B=40, T=100, span_mean=mean)
    for z, P, positions in zip(batch["inp"].tolist(), batch["prefix"].tolist(), batch["positions"].tolist()):
        position = -1
        of_sentinel = {}
        for i, id in enumerate(z):
            position += 1
            if i >= P and id >= SENTINEL:
                position = of_sentinel[id]
            assert positions[i] == position
            if i < P and id >= SENTINEL:
                of_sentinel[id] = position
                position += 64 if z[0] == MODE_X else reserved_by_mean
    assert (batch["positions"] != torch.arange(100)).any(1).sum() >= 30, "all rows except S"


@pytest.mark.parametrize("rate, spm_rate", [(1.0, 0.0), (0.5, 0.5)])
def test_fim_rows_can_be_put_together_again_and_have_thirds(rate, spm_rate):
    """PSM: PRE prefix SUF suffix MID middle EOT. SPM, the paper's second variant: PRE SUF suffix MID prefix middle EOT,
    as PSM with an empty prefix."""
    x, batch, hp = make("fim", B=2000, T=33, fim_rate=rate, fim_spm_rate=spm_rate)
    prompt = OBJECTIVES["fim"].uses["infill"].prompt([[65], [90]], 4, hp)
    assert prompt == ([PRE, SUF, 90, MID, 65] if spm_rate else [PRE, 65, SUF, 90, MID], 0)
    assert torch.equal(batch["inp"][:, 1:], batch["tgt"][:, :-1])
    z = torch.cat((batch["inp"], batch["tgt"][:, -1:]), dim=1)
    n = x.size(1) - 4
    moved = (z == MID).any(1)
    assert torch.equal(z[~moved], x[~moved])
    sizes = []
    for raw, other, row in zip(x[moved].tolist(), x.roll(1, 0)[moved].tolist(), z[moved].tolist()):
        s, m, e = map(row.index, (SUF, MID, EOT))
        assert row[0] == PRE and sum(i >= 256 for i in row) == 3
        text = row[1:s] + row[m + 1:e] + row[s + 1:m]
        assert text == raw[:len(text)], f"the row {row} is no order of the bytes {raw}"
        assert row[e + 1:] == other[len(text):n], "another row's text follows EOT"
        sizes.append([s - 1, e - m - 1, m - s - 1])
    sizes = torch.tensor(sizes).float()
    used = sizes.sum(1)
    assert abs(len(sizes) / 2000 - rate) < 0.06
    assert abs(float((sizes[:, 0] == 0).float().mean()) - spm_rate) < 0.15
    assert abs(float((used == n).float().mean()) - 0.5 - 0.5 / n) < 0.08
    assert len(used.unique()) == n, "the position of EOT reveals it"
    if spm_rate == 0:
        assert ((sizes.sum(0) / used.sum() - 1 / 3).abs() < 0.03).all(), "a section is not a third on average"
        assert (sizes == 0).any(0).all(), "a section is never empty"


# ---- mtp, electra
def test_parallel_heads_equal_the_papers_equations():
    """Head k reads norm(h + W_k h). The heads after the first share the weight mtp_weight; their logits are drafts."""
    objective, net, batch, hp = case("mtp", mtp_heads=3, mtp_weight=0.5)
    h = net(batch["inp"])
    logits = [net.logits(norm(h + h @ W.T)) for W in net.heads["mtp"].weight]
    want = F.cross_entropy(net.logits(h).mT, batch["tgt"])
    for z, tgt in zip(logits, batch["future_tgt"].unbind(2)):
        want = want + 0.25 * F.cross_entropy(z.mT, tgt)
    assert_close(objective.loss(net, batch, hp)[0], want)
    draft = objective.uses["continue"].drafter(hp)
    assert_close(draft(net, h[0]), torch.stack(logits, dim=2)[0])


@pytest.mark.parametrize("doc_mask", [False, True])
def test_sequential_modules_equal_the_papers_equations(doc_mask):
    """h^k_i = block(M_k [norm(h^(k-1)_i); norm(embed(t_(i+k)))]), p(t_(i+k+1)) = head(norm(h^k_i))."""
    objective, net, _, hp = case("mtp", mtp_kind="sequential", doc_mask=doc_mask)
    x = clean_windows(hp, 4)
    x[:, 20] = EOT
    batch = O.add_weights(objective.corrupt(x, None, hp))
    if doc_mask:
        batch |= O.document_mask(batch)
    h = O.hidden_states(net, batch)
    _, figures = objective.loss(net, batch, hp)
    for k, block in enumerate(net.heads["mtp"]["blocks"], 1):
        joined = torch.cat((norm(h), norm(net.embed(x[:, k:T + k]))), dim=-1) @ block.join.weight[0].T
        h = norm(run_blocks([block], joined, net.config, 0, mask=batch.get("mask")))
        want = F.cross_entropy(net.logits(h).mT, batch["future_tgt"][:, :, k - 1])  # -100: no target
        assert_close(figures[f"head{k + 1}"], want, rtol=1e-4, atol=1e-4)
    assert objective.uses["continue"].drafter(hp) is None


@pytest.mark.parametrize("doc_mask", [False, True])
def test_mtp_predicts_bytes_of_the_document_and_the_next_byte(doc_mask):
    x = torch.randint(0, 4, (4, T + 4), generator=make_rng("documents"))            # a quarter of the ids are EOT
    batch = O.mtp(x, None, settings("mtp", T, doc_mask=doc_mask))
    assert equal(batch | {"future_tgt": 0}, O.clm(x[:, :T + 1], None, None) | {"future_tgt": 0})
    for b, t, j in itertools.product(range(4), range(T), range(2, 5)):
        is_other = doc_mask and EOT in x[b, t:t + j]
        right = IGNORE_INDEX if is_other else int(x[b, t + j])
        assert batch["future_tgt"][b, t, j - 2] == right, f"head {j} must predict {right} at position {t} of row {b}"
    if doc_mask:                                # no byte after the next one is of the same document
        batch = O.mtp(torch.full_like(x, EOT), None, settings("mtp", T, doc_mask=True))
        assert not O.add_weights(batch)["future_weight"].any()


def set_generator_logits(generator, logits):
    generator.forward = lambda ids, prefix: logits
    generator.logits = lambda h: h


@torch.no_grad()
def test_electra_labels_what_differs_and_reports_it():
    objective, net, batch, hp = case("electra", B=6)
    x, _, _ = make("electra", B=6)
    sampled = torch.where(torch.arange(T) % 2 == 0, x, x % 255 + 1)    # a byte that is guessed right counts as original
    set_generator_logits(net.heads["generator"], F.one_hot(sampled, 256) * 200.0)
    row = x.scatter(1, batch["chosen"], sampled.gather(1, batch["chosen"]))
    labels = (row != x).float()
    scores = net.heads["replaced"](net(row, T))
    _, figures = objective.loss(net, batch, hp)
    assert_close(figures["discriminator"], F.binary_cross_entropy_with_logits(scores, labels))
    assert float(figures["replaced"]) == pytest.approx(float(labels.mean()))


def test_electra_is_two_models_whose_gradients_stay_on_their_side():
    objective, net, batch, hp = case("electra", B=6)
    loss, figures = objective.loss(net, batch, hp)
    assert_close(loss, figures["generator"] + 50 * figures["discriminator"])
    small = net.heads["generator"]
    logits = small.logits(small(batch["inp"], T))
    want = F.cross_entropy(logits.flatten(0, 1), batch["tgt"].flatten(), ignore_index=IGNORE_INDEX)
    assert_close(figures["generator"], want)
    sides = {"generator": list(small.parameters()), "discriminator": [net.embed.weight, *net.blocks.parameters()]}
    for term, side in itertools.product(sides, sides):
        grads = torch.autograd.grad(figures[term], sides[side], retain_graph=True, allow_unused=True)
        assert any(g is not None and g.abs().max() > 0 for g in grads) == (term == side)
    config = objective.heads(ModelConfig(1, 12, 768), hp)["generator"].config
    assert (config.n_head, config.n_embd) == (3, 192), "the heads do not have the width of the model's heads"


def test_electra_samples_follow_the_generator():
    _, net, batch, _ = case("electra", B=600)
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    four = torch.full((600, T, 512), -60.0)
    four[..., 65:69] = p.log()
    set_generator_logits(net.heads["generator"], four)
    _, clean, fake = O.sample_replacements(net.heads["generator"], batch)
    assert torch.equal(clean, batch["tgt"].gather(1, batch["chosen"]))
    masked = batch["inp"].gather(1, batch["chosen"]) == MASK
    for some in (fake[masked], fake[~masked]):  # the samples are independent of the choice of masks
        assert chi2(torch.bincount(some, minlength=69)[65:], p) < 25    # 3 degrees of freedom


# ---- bart
def bart_case(noise, B=100, T=129, rate=0.3):  # -> [(clean text, source)] of each row
    hp = settings("bart", T, bart_noise=noise, bart_rate=rate, batch_size=B)
    x = clean_windows(hp, B)
    batch = O.bart(x, make_rng("bart"), hp)
    for P, positions in zip(batch["prefix"].tolist(), batch["positions"].tolist()):
        assert positions == [*range(P - 1), *range(-1, T - P)], "the target counts as the source does"
    split = all_parts(batch)
    assert all(t == row[:len(t)] for (_, t), row in zip(split, x.tolist())), "the target is the clean text"
    used = [len(t) for _, t in split]
    if x.size(1) >= 20:
        assert 0.25 < used.count(x.size(1)) / B < 0.75, "the position of EOT reveals it"
        assert len(set(used)) > 12 and min(used) >= 8
    return [(t, s) for s, t in split]


BART_COUNTS = {  # if each noise changes k bytes: (bytes missing in the source, MASKs in the source) as multiples of k
    "mask": (1, 1), "delete": (1, 0), "infill": (1, None), "replace": (0, 0), "insert": (-1, 0), "mask,replace": (1, 1),
    "mask,delete,replace": (2, 1), "mask,insert": (0, 1)}


@pytest.mark.parametrize("rate", [0.3, 0.001])
@pytest.mark.parametrize("noise", BART_COUNTS)
def test_bart_noises_change_exact_numbers_of_bytes_and_share_the_rate(noise, rate, monkeypatch):
    n_gone, n_masks = BART_COUNTS[noise]
    n_noises = len(noise.split(","))
    monkeypatch.setattr(O, "bart_counts", lambda m, hp, g: (m * rate / n_noises + 0.5).long().clamp(min=1))
    changed = 0
    most = 0
    for row, source in bart_case(noise, rate=rate):
        k = max(1, int(rate / n_noises * len(row) + 0.5001))
        kept = [i for i in source if i != MASK]
        assert len(row) - len(kept) == k * n_gone
        assert n_masks is None or source.count(MASK) == k * n_masks
        assert 0 < min(kept) and max(kept) < 256
        if noise == "infill":
            pattern = b"".join(b".*?" if i == MASK else re.escape(bytes([i])) for i in source)
            assert re.fullmatch(pattern, bytes(row), re.DOTALL), "a hole is at another place"
        if noise in ("delete", "insert"):
            short, long = sorted((row, kept), key=len)
            rest = iter(long)
            assert all(i in rest for i in short), "the other bytes are not in order"
        if n_gone == n_masks:                   # in place
            changed += sum(a != b for a, b in zip(source, row))
            most += k * n_noises
    assert most * 0.98 - 3 <= changed <= most, "a random byte may be the old one"


@pytest.mark.parametrize("noise, low, high, n, least, most", [
    ("infill", 0.0, 0.3, 100, 1, 30), ("mask,delete,permute", 0.2, 0.3, 100, 10, 15), ("mask", 0.0, 0.3, 52, 1, 16)])
def test_bart_rows_differ_in_their_amount_of_noise(noise, low, high, n, least, most):
    hp = settings("bart", T, bart_noise=noise, bart_rate_min=low, bart_rate=high)
    k = O.bart_counts(torch.full((3000, 1), n), hp, make_rng("k"))                  # 52 bytes: at most 15.6, rounded
    numbers, seen = k.unique(return_counts=True)
    assert numbers.tolist() == [*range(least, most + 1)] and k.shape == (3000, 1)
    assert chi2(seen, 1 / len(seen)) < len(seen) + 5 * (2 * len(seen)) ** 0.5


def test_bart_infills_exactly_its_rate_with_poisson_spans():
    present = torch.ones(2000, 200, dtype=torch.bool)
    g = make_rng("i")
    keep, _, used = O.place_infills(present, *O.infill_lengths(torch.full((2000, 1), 60), 68, 3.0, g), g)
    assert ((~keep).sum(1) == 60).all() and (used.sum(1) <= 60).all()
    assert (~keep)[:, [0, -1]].any(0).all(), "no span reaches an end"
    third = (~keep).float().mean(0)[:198].view(3, 66).mean(1)
    assert ((third - 0.3).abs() < 0.01).all(), f"the thirds of a row have unequal noise: {third.tolist()}"
    # if the spans cover every byte, each starts where the one before it ends
    g = make_rng("i")
    _, start, used = O.place_infills(present, *O.infill_lengths(torch.full((2000, 1), 200), 150, 3.0, g), g)
    length = start.diff(dim=1)[used[:, 1:]]
    want = [math.exp(-3) * 3 ** j / math.factorial(j) for j in range(9)]
    assert (torch.bincount(length)[:9] / len(length)).tolist() == pytest.approx(want, abs=0.01)


def test_bart_permutes_whole_sentences():
    text = b"One. Two is here! Three?\nFour has no stop\nFive, e.g. this one, is longer. Six. "
    x = torch.tensor(list(text)).expand(300, -1)
    order, _ = O.NOISES["permute"](x, torch.ones_like(x, dtype=torch.bool), None, make_rng("o"), None)
    assert len({bytes(row) for row in order.tolist()}) > 250
    sentences = rb"(?s).*?(?:\n|[.?!][ \t\r\x0b\x0c]|\Z)"
    assert all(sorted(source) == sorted(row) for row, source in bart_case("permute"))
    for row in order.tolist():
        assert sorted(re.findall(sentences, bytes(row))) == sorted(re.findall(sentences, text))


def test_bart_rotates():
    rows = bart_case("rotate")
    turns = [next(r for r in range(1, len(row)) if source == row[r:] + row[:r]) for row, source in rows]
    assert len(set(turns)) > 20
    assert 0.3 < sum(r / len(row) for r, (row, _) in zip(turns, rows)) / len(rows) < 0.7


@pytest.mark.parametrize("T, rate", [(17, 0.3), (48, 0.9), (130, 0.05)])
def test_bart_noises_combine_at_any_size_in_one_order(T, rate):
    for noise in ("mask,delete,infill,permute,rotate,replace,insert", "infill,rotate", "infill,delete", "insert"):
        assert bart_case(noise, T=T, rate=rate) == bart_case(",".join(noise.split(",")[::-1]), T=T, rate=rate)


# ---- nsp, rotation, contrastive
@pytest.mark.parametrize("B", [2, 3, 40])
@pytest.mark.parametrize("negatives", ["random", "swap"])
def test_nsp_is_half_true_and_its_classes_look_alike(negatives, B):
    data = torch.randint(1, 256, (20000,), generator=make_rng("nsp"))
    corpus = bytes(data.tolist())
    h = (T - 3) // 2
    hp = settings("nsp", T, nsp_negatives=negatives, batch_size=B)
    for seed in range(10):
        batch = O.nsp(data.unfold(0, 2 * h + O.NSP_GAP, 400)[:B], make_rng(f"{seed}"), hp)
        assert int(batch["labels"].sum()) == B - B // 2
        for label, row in zip(batch["labels"].tolist(), clean_row(batch).tolist()):
            a = row[1:h + 1]
            b = row[h + 2:2 * h + 2]
            assert row == [CLS, *a, SEP, *b, SEP] + [PAD] * (T - 2 * h - 3)
            i = corpus.index(bytes(a))
            j = corpus.index(bytes(b))
            assert (j == i + h + O.NSP_GAP) == bool(label)
            assert label or (i == j + h + O.NSP_GAP if negatives == "swap" else abs(i - j) > 300)


@torch.no_grad()
def test_nsp_reads_its_answer_at_cls():
    objective, net, batch, hp = case("nsp", B=16)
    follows = net.heads["nsp"](net(batch["inp"], T)[:, 0])
    batch["labels"] = (follows > 0).long() ^ (torch.arange(16) % 4 == 0).long()     # three of four answers are right
    loss, figures = objective.loss(net, batch, hp)
    assert_close(loss, figures["nll"] + figures["nsp"])
    assert_close(figures["nsp"], F.binary_cross_entropy_with_logits(follows, batch["labels"].float()))
    assert figures["accuracy"] == 0.75
    assert not objective.heads(net.config, hp)["nsp"].weight.any(), "an untrained head is not at chance"


@torch.no_grad()
def test_rotation_can_be_rolled_back_and_its_scores_are_of_positions():
    x, _, _ = make("rotation", B=50)
    objective, net, batch, hp = case("rotation", B=50)
    for row, inp, label in zip(x, batch["inp"], batch["labels"].tolist()):
        assert torch.equal(inp.roll(-label), row)
    scores = net.heads["seam"](net(batch["inp"], T))
    batch["labels"] = (scores.argmax(1) + (torch.arange(50) % 5 == 0)) % T          # four of five answers are right
    loss, figures = objective.loss(net, batch, hp)
    assert_close(loss, F.cross_entropy(scores, batch["labels"]))
    assert float(figures["accuracy"]) == pytest.approx(0.8)


def test_contrastive_crops_are_pieces_of_their_window():
    x = torch.arange(1, 21).expand(400, -1) * torch.arange(1, 401)[:, None]
    inp = O.contrastive(x, make_rng("c"), settings("contrastive", 20, crop=0.5))["inp"]
    assert inp.shape == (400, 2, 10) and (inp.diff(dim=2) == torch.arange(1, 401)[:, None, None]).all()


def test_contrastive_equals_loops():
    objective, net, batch, hp = case("contrastive", B=5)
    batch["inp"][1:, 1] = batch["inp"][[1, 2, 4, 3], 0]         # the second crops of two rows are swapped
    batch["inp"][0, 1] = batch["inp"][0, 0].flip(0)             # so the two directions have different losses
    a, b = (F.normalize(net(view, T).mean(1), dim=-1) for view in batch["inp"].unbind(1))
    sim = (a @ b.T / hp.tau).tolist()
    nats = 0.0
    for side in (sim, [*zip(*sim)]):
        nats += sum(math.log(sum(map(math.exp, row))) - row[i] for i, row in enumerate(side))
    loss, figures = objective.loss(net, batch, hp)
    assert float(loss.detach()) == pytest.approx(nats / 10, rel=1e-4), "5 rows in both directions"
    assert float(figures["top1"]) == pytest.approx(sum(row.index(max(row)) == i for i, row in enumerate(sim)) / 5)


# ---- mdlm, sedd
def test_bd3lm_chooses_the_number_of_masked_bytes_of_each_block_from_every_stratum():
    x, batch, hp = make("bd3lm", B=8, T=44, bd3lm_block=8)          # 22 bytes: blocks of 8, 8, 6
    masked = (batch["tgt"][:, :22] != IGNORE_INDEX)
    counts = [block.sum(1) for block in masked.split(8, dim=1)]     # (8,) of each block
    assert sorted(counts[0].tolist()) == sorted(counts[1].tolist()) == [*range(1, 9)]
    assert {*counts[2].tolist()} == {*range(1, 7)} and not torch.equal(counts[0], counts[1])
    sizes = torch.tensor([8, 8, 6])             # the last block is shorter
    weight = (sizes / torch.stack(counts, dim=1)).repeat_interleave(sizes, dim=1)
    assert_close(batch["weight"], F.pad(weight / (8 * 22), (0, 22)))
    assert torch.equal(batch["inp"], torch.cat((x.masked_fill(masked, MASK), x), dim=1))


@torch.no_grad()
@pytest.mark.parametrize("n", [1, 3, 24, 80])
def test_a_noisy_block_after_cached_clean_ones_equals_one_pass_over_both_copies(n):
    """In rows that are longer than the windows of attention that a fork may try."""
    L = 80
    objective, net, batch, hp = case("bd3lm", T=2 * L, bd3lm_block=n)
    states = O.hidden_states(net, batch)
    cache = Cache(net, 4, L)
    for start in range(0, L, n):
        end = min(start + n, L)
        noisy = batch["inp"][:, start:end]
        clean = batch["inp"][:, L + start:L + end]
        assert_close(sample.read_block(net, noisy, cache), states[:, start:end])
        cache.length -= noisy.size(1)
        assert_close(sample.read_block(net, clean, cache), states[:, L + start:L + end])
    if n == 1:                                  # the bound is exact
        assert_close(batch["weight"][:, :L], torch.full((4, L), 1 / (4 * L)))
        assert torch.equal(batch["tgt"][:, :L], batch["inp"][:, L:])


# ---- xlnet
@torch.no_grad()
def test_xlnet_fills_a_hole_as_in_a_training_row_in_which_the_hole_comes_last():
    """Whatever stands in the clean copy of another hole that comes after it in that row."""
    fill = OBJECTIVES["xlnet"].uses["fill"]
    net = randomized(n_outputs=256)
    x = torch.randint(1, 256, (1, 12), generator=make_rng("text"))
    for hole, other in ((8, 5), (5, 8)):        # the last two of the order
        known = [i for i in range(12) if i not in (hole, other)]
        order = torch.tensor([*known, hole, other]).argsort()[None]
        trained = net.logits(O.hidden_states(net, O.two_copies(torch.full_like(x, MASK), x, order)))[:, hole]
        ids = x.clone()
        ids[0, [hole, other]] = MASK
        assert_close(sample.fill_logits(net, ids, fill)[:, hole], trained)
    nothing = sample.fill_logits(net, torch.full_like(x, MASK), fill)
    assert nothing.isfinite().all()


def sedd_cost(logits, x, t):  # q = 1 / expm1(sigma), s = q c, where sigma is -log(1 - t)
    q = 1 / torch.expm1(-torch.log1p(-t))
    s = q[:, None] * logits.exp() / 256
    return (s.sum(1) - q * s[:, x].log() + q * (q.log() - 1)) / (1 - t)


@torch.no_grad()
@pytest.mark.parametrize("name, cost", [
    ("mdlm", lambda logits, x, t: -logits.log_softmax(0)[x] / t), ("sedd", sedd_cost)])
def test_a_bound_equals_its_authors_integral_over_t(name, cost):
    """Each byte is masked with probability t, and what a masked byte costs is integrated over t."""
    net = randomized()
    x = torch.tensor([[65, 66, 67]])
    t = (torch.arange(4000, dtype=torch.double) + 0.5) / 4000
    authors = 0.0
    exact = 0.0                                 # the mean over l of 3 / l times what l masked bytes cost
    for hidden in itertools.product([False, True], repeat=3):
        hidden = torch.tensor([hidden])
        m = int(hidden.sum())
        batch = dict(inp=x.masked_fill(hidden, MASK), tgt=x.where(hidden, IGNORE_INDEX), prefix=3,
                     weight=torch.ones(1, 3))
        exact += float(OBJECTIVES[name].loss(net, batch, None)[0]) / math.comb(3, m) / max(1, m)
        logits = net.logits(net(batch["inp"], 3))[0, :, :256].double()
        for i in hidden[0].nonzero().flatten().tolist():
            authors += float((t ** m * (1 - t) ** (3 - m) * cost(logits[i], int(x[0, i]), t)).mean())
    assert exact == pytest.approx(authors, rel=1e-4)
    batch = OBJECTIVES[name].corrupt(x.expand(3000, -1), make_rng("m"), settings(name, 3))
    bound, _ = OBJECTIVES[name].loss(net, batch, None)
    assert 3 * float(bound) == pytest.approx(authors, rel=0.03)


# ---- mixtures
def test_each_member_has_its_share_of_any_stretch_of_steps():
    members = get_members(settings("clm:.6,mlm:.3,prefix:.1", T))
    names = [train.member_of_step(members, step).objective.name for step in range(1000)]
    for m in members:
        counts = [names[i:i + 50].count(m.objective.name) for i in range(950)]
        assert all(abs(n - 50 * m.weight) < 3 for n in counts)
