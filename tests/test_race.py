"""experiments.race, without nanoGPT: its windows and its refusals."""
import torch

from experiments import race


def test_windows_are_disjoint_and_their_targets_are_the_next_bytes():
    inp, tgt = race.windows(torch.arange(2000))
    assert inp.shape == (3, race.T)             # of the last 200 bytes, of which the last one is only a target
    assert torch.equal(inp.flatten(), torch.arange(1800, 1800 + 3 * race.T))
    assert torch.equal(tgt, inp + 1)


def test_the_loss_is_the_mean_over_all_targets():
    logits = torch.randn(10)
    nats = race.mean_nats(lambda x: logits.expand(*x.shape, 10), torch.arange(2000) % 10)
    _, tgt = race.windows(torch.arange(2000) % 10)
    assert abs(nats - float(-logits.log_softmax(0)[tgt].mean())) < 1e-5


def test_a_clone_without_prepared_text_is_refused(tmp_path, refuses):
    refuses("not prepared", race.main, ["--nanogpt", str(tmp_path)])
