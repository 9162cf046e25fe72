import pytest
import torch
from conftest import tiny, randomized

from data import make_rng
from experiments import memorize

CANARIES = torch.randint(97, 123, (3, 64), generator=make_rng("canaries"))


def test_canaries_are_added_as_whole_lines_far_from_the_held_out_end():
    text = b"".join(b"line %d\n" % i for i in range(1000))
    lines = memorize.plant(text, CANARIES, 5, make_rng("places")).split(b"\n")
    for canary in CANARIES.tolist():
        places = [i for i, line in enumerate(lines) if line == bytes(canary)]
        assert len(places) == 5 and max(places) < 830
    assert [line for line in lines if len(line) != 64] == text.split(b"\n"), "the text itself has changed"


def test_a_canary_is_recited_only_if_all_its_letters_are_predicted():
    net = randomized().requires_grad_(False)
    bits, share, recited = memorize.measure(net, CANARIES)
    assert bits > 4 and share < 0.2 and recited == 0
    net.head.weight[:, 256:] *= 9               # special ids do not compete with the letters
    assert memorize.measure(net, CANARIES)[0] == bits

    class Knows(torch.nn.Module):               # predicts all but the last letter of the first canary
        def forward(self, x, prefix):
            wrong = torch.arange(3)[:, None] * torch.ones(64) == 0
            wrong[:, :-1] = False
            return torch.nn.functional.one_hot(CANARIES + wrong, 256) * 100.0 * (x[:, :1, None] == ord("\n"))
        logits = torch.nn.Identity()
    assert memorize.measure(Knows(), CANARIES) == (pytest.approx(100 / 144 / 0.6931, rel=1e-3),
                                                   pytest.approx(143 / 144), 2)


@pytest.mark.slow
def test_canaries_that_were_read_often_are_predicted_better(text, capsys, monkeypatch, refuses):
    monkeypatch.setattr(memorize, "TIMES", (0, 3, 12))
    monkeypatch.setattr(memorize, "CANARIES", 3)
    flags = tiny("--block_size", "128", "--data", text, "--learning_rate", ".02", "--max_iters")
    assert memorize.main([*flags, "150"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [float(row[0]) for row in rows] == [0, pytest.approx(3, abs=0.4), pytest.approx(12, abs=0.4)]
    assert float(rows[0][2]) > 5 > float(rows[2][2]), "unknown letters cost more than the 4.7 bits of a guess"
    refuses("reads too little", memorize.main, [*flags, "9"])
