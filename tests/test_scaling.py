import pytest

from experiments import scaling


def write_curves(path, runs, seeds=(1,)):  # runs [(row, steps, TFLOPs, bits)]
    lines = ["n_embd,steps,seed,metric,value"]
    for row, steps, tflop, bits in runs:
        for seed in seeds:
            shift = 0.01 * (seed - 1.5) if len(seeds) > 1 else 0
            lines += [f"{row},{steps},{seed},tflop,{tflop}", f"{row},{steps},{seed},left_to_right,{bits + shift:.6f}"]
    lines.append(f"{row},{steps},1,probe,0.5")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def law(x):
    return 1.2 + 2.0 * x ** -0.3


def test_a_power_law_with_a_floor_is_found():
    points = [(x, law(x)) for x in (0.5, 1, 3, 10)]
    floor, a, b = scaling.fit(points, scaling.FLOORS)
    assert (floor, a, b) == (pytest.approx(1.2, abs=2e-3), pytest.approx(2.0, abs=5e-3), pytest.approx(0.3, abs=2e-3))
    assert scaling.predict((floor, a, b), 100) == pytest.approx(law(100), abs=2e-3)
    floor, a, b = scaling.fit([(x, 3 * x ** -0.1) for x in (1, 2, 4)], [0.0])
    assert (floor, a, b) == (0, pytest.approx(3), pytest.approx(0.1))


def test_the_largest_run_is_predicted_from_the_others(tmp_path, capsys):
    runs = [(w, 10, x, law(x)) for w, x in ((32, 0.5), (64, 1.5), (128, 5), (96, 3))] + [(256, 10, 20, law(20) + 0.1)]
    path = write_curves(tmp_path / "a.csv", runs, seeds=(1, 2))
    assert scaling.main(["--curves", path]) == 0
    out = capsys.readouterr().out
    assert "| 256, 10 steps | 20 | " in out
    assert "+0.100 bits per byte off" in out.splitlines()[-1], "it was not fitted to the largest"


def test_runs_of_other_lengths_may_be_left_out(tmp_path, capsys):
    runs = [(w, 10, x, law(x)) for w, x in ((32, 0.5), (64, 1.5), (96, 3), (128, 5))]
    path = write_curves(tmp_path / "a.csv", runs + [(512, 5, 90, 8.0)])
    scaling.main(["--curves", path, "--steps", "10"])
    out = capsys.readouterr().out
    assert "512" not in out and "+0.000 bits per byte off" in out


@pytest.mark.parametrize("runs, hint", [(3, "are needed"), (0, "cannot be read")])
def test_too_few_runs_are_refused(runs, hint, tmp_path, capsys):
    path = tmp_path / "a.csv"
    if runs:
        write_curves(path, [(w, 10, w, law(w)) for w in range(1, 1 + runs)])
    with pytest.raises(SystemExit) as e:
        scaling.main(["--curves", str(path)])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
