import pytest

from experiments import scaling


def law(x):
    return 1.2 + 2.0 * x ** -0.3


def write_curves(path, setting, runs):  # runs [(row, steps, TFLOPs, bits)], two seeds each
    lines = [f"{setting},steps,seed,metric,value"]
    for row, steps, tflop, bits in runs:
        for seed, shift in ((1, -0.005), (2, 0.005)):
            lines += [f"{row},{steps},{seed},tflop,{tflop}", f"{row},{steps},{seed},left_to_right,{bits + shift:.6f}"]
    path.write_text("\n".join(lines) + "\n")
    return ["--curves", str(path)]


def test_a_power_law_with_a_floor_is_found():
    found = scaling.fit([(x, law(x)) for x in (0.5, 1, 3, 10)], [i / 1000 for i in range(2000)])
    assert found == pytest.approx((1.2, 2.0, 0.3), abs=5e-3)
    assert scaling.fit([(x, 3 * x ** -0.1) for x in (1, 2, 4)], [0.0]) == pytest.approx((0, 3, 0.1))


@pytest.mark.parametrize("setting", ["n_embd", "objective"])
def test_the_largest_run_is_predicted_from_the_others(setting, tmp_path, capsys):
    sizes = [(f"{10 * x:g}", 10, x, law(x)) for x in (5, 0.5, 1.5, 3)] + [("200", 10, 20, 9.0), ("6", 5, 90, 8.0)]
    steps = [("clm", int(10 * x), x, law(x)) for x in (5, 0.5, 1.5, 3)] + [("clm", 200, 20, 9.0), ("mlm", 9, 90, 8.0)]
    flags = write_curves(tmp_path / "a.csv", setting, sizes if setting == "n_embd" else steps)
    assert scaling.main([*flags, "--steps", "10"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert "| 20 | 9.000 |" in last and float(last.split("|")[-2]) == pytest.approx(law(20), abs=0.02)
    with pytest.raises(SystemExit) as e:
        scaling.main([*flags, "--steps", "5", "--objective", "mlm"])
    assert e.value.code == 2 and "holds 1 runs" in capsys.readouterr().err
