from argparse import Namespace

import pytest
import torch

from experiments import bench
from run import get_config

SMALL = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--block_size", "64", "--batch_size", "4",
         "--repeats", "1", "--steps", "1", "--new", "8", "--ngram_rows", "64", "--dtype", "float32", "--device", "cpu"]


def test_sides_run_in_turns_and_the_first_round_is_not_timed():
    calls = []
    sides = {"a": lambda i: calls.append(f"a{i}") or 10 ** 12 * (i == 0) + 1, "b": lambda i: calls.append(f"b{i}") or 0}
    speed = bench.interleave(sides, 1, torch.device("cpu"))
    assert calls == ["a0", "b0", "a1", "b1"]
    assert 0 < speed["a"] < 10 ** 10 and speed["b"] == 0


def count(name, T, C, device="cpu"):
    sizes = ["--n_layer", "3", "--n_head", "1", "--n_embd", str(C), "--block_size", str(T), "--batch_size", "4"]
    hp = get_config(["--objective", name, "--dtype", "float32", "--ngram_rows", "0", *sizes])
    hp.device = device
    return bench.count_flops(hp)


@pytest.mark.parametrize("flags", [[], ["--doc_mask"], ["--objective", "electra"]])
def test_flops_are_those_of_a_training_step(flags):
    words = [*SMALL[:10], "--ngram_rows", "64", "--dtype", "float32", "--device", "cpu", "--optimizer", "adamw"]
    hp = get_config([*flags, *words])           # AdamW multiplies no matrices
    step = bench.make_step(hp)
    with bench.FlopCounterMode(display=False) as counter:
        step()
    assert bench.count_flops(hp) == counter.get_total_flops()


@pytest.mark.parametrize("name, T, C", [("clm", 40, 16), ("mlm", 32, 2)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flops_are_counted_as_by_hand(name, T, C, device):
    """Of a product (m, k) x (k, n) forward 2 m k n, and backward as many for each of its factors. A block has 12 C^2
    weights, and each query T keys; what the mask hides is computed all the same."""
    blocks = 3 * 6 * 4 * T * (12 * C * C + T * 2 * C)
    assert count(name, T, C, device) == blocks + 6 * 4 * T * C * 256


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
        assert not self.training or torch.get_float32_matmul_precision() == "highest"
        logits = self.transformer.wte(x)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def generate(self, x, n, temperature):
        return torch.cat((x, x[:, :1].expand(-1, n)), 1)
"""


def test_every_part_is_printed_beside_a_peer(text, tmp_path, capsys):
    (tmp_path / "model.py").write_text(PEER)
    flags = ["--nanogpt", str(tmp_path), "--data", text, "--max_iters", "2", "--eval_iters", "1"]
    bench.main([*SMALL, *flags, "--peer_iters", "30", "--parts", "train,decode,loss", "--objectives", "clm,electra"])
    out = capsys.readouterr().out
    for word in ("GEMM probe", "electra", "to nanoGPT", "plain", "30 steps without evaluation"):
        assert word in out and "drafted" not in out, word
    bench.main([*SMALL, "--parts", "decode", "--objectives", "mtp"])
    assert "bytes per drafted pass" in capsys.readouterr().out


def test_a_model_of_random_weights_has_random_ngrams():
    hp = get_config(["--n_embd", "16", "--ngram_rows", "64", "--device", "cpu"])
    model, _, _ = bench.load_decoder(Namespace(run=""), hp)
    for t in (*model.parameters(), model.ngrams.table):
        assert 0.02 < float(t.float().std()) < 0.1


@pytest.mark.parametrize("flags, hint", [(["--parts", "fly"], "train,decode"), (["--nanogpt", "nowhere"], "model.py"),
                                         (["--parts", "loss", "--data", "a", "b"], "one file")])
def test_bad_flags_are_one_line(flags, hint, refuses):
    refuses(hint, bench.main, [*SMALL, *flags])
