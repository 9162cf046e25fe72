"""experiments.race, without nanoGPT."""
import torch

from experiments import race


def test_windows_are_disjoint_and_the_loss_is_the_mean_over_all_next_bytes():
    ids = torch.arange(2000)
    inp, tgt = race.windows(ids)
    assert inp.shape == (3, race.T)             # of the last 200 bytes, of which the last one is only a target
    assert torch.equal(inp.flatten(), torch.arange(1800, 1800 + 3 * race.T))
    assert torch.equal(tgt, inp + 1)
    logits = torch.randn(10)
    nats = race.mean_nats(lambda x: logits.expand(*x.shape, 10), ids % 10)
    assert abs(nats - float(-logits.log_softmax(0)[tgt % 10].mean())) < 1e-5
