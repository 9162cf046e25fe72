import pickle
import re

import pytest
import torch
from conftest import tiny

from experiments import bench
from run import get_config

MODEL = tiny("--n_layer", "1", "--block_size", "64")
SMALL = [*MODEL, "--repeats", "1", "--steps", "1", "--new", "8"]


def test_programs_run_in_turns_and_the_first_round_is_not_timed():
    calls = []

    def program(name, units_of_round):
        def run(i):
            calls.append((name, i))
            return units_of_round[i]
        return run
    speeds = bench.interleave({"a": program("a", [10 ** 12, 1]), "b": program("b", [0, 0])}, 1, torch.device("cpu"))
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    [speed] = speeds["a"]
    assert 0 < speed < 10 ** 10 and speeds["b"] == [0]


def test_a_ratio_is_the_median_of_the_ratios_of_rounds():
    assert bench.describe_ratio([10, 20, 40], [1, 4, 4]) == "10.00 (5.00-10.00)"    # medians have the ratio 5


@pytest.mark.parametrize("flags", [[], ["--doc_mask"], ["--objective", "electra"]])
def test_counted_flops_are_those_of_a_training_step(flags):
    hp = get_config([*MODEL, *flags, "--optimizer", "adamw"])       # AdamW multiplies no matrices; Muon would
    step = bench.make_step(hp)
    with bench.FlopCounterMode(display=False) as counter:
        step()
    hp.device = "cuda"                          # no GPU is needed to count for one
    assert bench.count_flops(hp) == counter.get_total_flops()


PEER = """
import torch
from argparse import Namespace as GPTConfig
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.transformer = torch.nn.ModuleDict({"wte": torch.nn.Embedding(config.vocab_size, config.vocab_size)})
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)
    def forward(self, x, y):
        assert torch.get_float32_matmul_precision() == "highest"
        logits = self.transformer.wte(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def generate(self, x, n, temperature):
        return torch.cat((x, x[:, :1].expand(-1, n)), 1)
"""


def test_every_part_also_measures_nanogpt(tmp_path, capsys):
    (tmp_path / "model.py").write_text(PEER)
    flags = ["--nanogpt", str(tmp_path)]
    bench.main([*SMALL, *flags, "--parts", "train,decode", "--objectives", "clm,electra"])
    out = capsys.readouterr().out
    for word in ("(GEMM)", "electra", "to nanoGPT", "plain"):
        assert word in out and "drafted" not in out, word
    bench.main([*SMALL, "--parts", "decode", "--objectives", "mtp"])
    assert "bytes per pass with drafts" in capsys.readouterr().out


# ---- race
def test_windows_are_disjoint_and_the_loss_is_the_mean_over_all_next_bytes():
    ids = torch.arange(2000)
    inp, tgt = bench.held_out_windows(ids)
    assert inp.shape == (3, 64)                 # of the last 200 bytes, of which the last one is only a target
    assert torch.equal(inp.flatten(), torch.arange(1800, 1800 + 3 * 64)) and torch.equal(tgt, inp + 1)
    logits = torch.randn(10)
    nats = bench.mean_nats(lambda x: logits.expand(*x.shape, 10), ids % 10)
    assert abs(nats - float(-logits.log_softmax(0)[tgt % 10].mean())) < 1e-5


def test_a_race_prints_seconds_losses_and_sizes(tmp_path, capsys):
    """Against a program that saves, in place of nanoGPT, a model that knows nothing."""
    data = tmp_path / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    (data / "input.txt").write_text("abcd" * 1000)
    (data / "train.bin").write_bytes(b"")
    (data / "meta.pkl").write_bytes(pickle.dumps({"stoi": dict(a=0, b=1, c=2, d=3)}))
    (tmp_path / "model.py").write_text(PEER)
    (tmp_path / "train.py").write_text("""
import os, sys, torch
out = sys.argv[-1].removeprefix("--out_dir=")
os.mkdir(out)
torch.save({"model_args": {"vocab_size": 4}, "model": {"transformer.wte.weight": torch.zeros(4, 4)}}, out + "/ckpt.pt")
""")
    bench.main([*tiny("--repeats", "1", "--parts", "race", "--nanogpt", str(tmp_path), "--max_iters", "1")])
    out = capsys.readouterr().out
    assert "1.3863 nats/byte, 16 parameters\n" in out and re.search(r"nanoPretext .* parameters and 8,192 in a", out)
    assert re.search(r"medians: [\d.]+ s and [\d.]+ s, a ratio of [\d.]+\n", out)
