import pytest

from experiments import scaling


def write_curves(path, sizes, seeds=(1,), setting="n_embd"):  # sizes [(size, steps, TFLOPs, bits)]
    lines = [f"{setting},steps,seed,metric,value"]
    for size, steps, tflop, bits in sizes:
        for seed in seeds:
            shift = 0.01 * (seed - 1.5) if len(seeds) > 1 else 0
            lines += [f"{size},{steps},{seed},tflop,{tflop}", f"{size},{steps},{seed},left_to_right,{bits + shift:.6f}",
                      f"{size},{steps},{seed},probe,0.5"]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def law(x):
    return 1.2 + 2.0 * x ** -0.3


FOUR = [(32, 10, 0.5, law(0.5)), (64, 10, 1.5, law(1.5)), (128, 10, 5, law(5)), (96, 10, 3, law(3))]


def test_a_power_law_with_a_floor_is_found():
    points = [(x, law(x)) for x in (0.5, 1, 3, 10)]
    floor, a, b = scaling.fit(points, scaling.FLOORS)
    assert (floor, a, b) == (pytest.approx(1.2, abs=2e-3), pytest.approx(2.0, abs=5e-3), pytest.approx(0.3, abs=2e-3))
    assert scaling.predict((floor, a, b), 100) == pytest.approx(law(100), abs=2e-3)
    floor, a, b = scaling.fit([(x, 3 * x ** -0.1) for x in (1, 2, 4)], [0.0])
    assert (floor, a, b) == (0, pytest.approx(3), pytest.approx(0.1))


def test_the_largest_size_is_predicted_from_the_others(tmp_path, capsys):
    path = write_curves(tmp_path / "a.csv", [*FOUR, (256, 10, 20, law(20) + 0.1), (512, 5, 90, 8.0)], seeds=(1, 2))
    assert scaling.main(["--curves", path, "--steps", "10"]) == 0
    out = capsys.readouterr().out
    assert "| 256 | 20 | " in out and "512" not in out, "of other steps"
    assert "+0.100 bits per byte off" in out.splitlines()[-1], "it was not fitted to the largest"


def test_the_longest_run_is_predicted_from_the_others(tmp_path, capsys):
    path = write_curves(tmp_path / "a.csv", [("clm", 10 * n, n, law(n)) for n in (1, 2, 8, 4)] + [
        ("mlm", 90, 9, 5.0), ("clm --doc_mask True", 100, 10, 5.0)], setting="objective")
    assert scaling.main(["--curves", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:6]] == ["10", "20", "40", "80"]
    slope = scaling.fit([(n, law(n)) for n in (1, 2, 4)], [0.0])
    assert lines[-1].endswith(f"{law(8) - scaling.predict(slope, 8):+.3f} bits per byte off")
    with pytest.raises(SystemExit):
        scaling.main(["--curves", path, "--objective", "mlm"])
    assert "holds 1 values of steps of mlm, 4 are needed" in capsys.readouterr().err


def test_four_sizes_are_too_few_for_a_floor(tmp_path, capsys):
    scaling.main(["--curves", write_curves(tmp_path / "a.csv", FOUR), "--steps", "10"])
    out = capsys.readouterr().out
    assert "power law: 0.000 + " in out and "floor" not in out


@pytest.mark.parametrize("sizes, setting, hint", [
    (FOUR[:3], "n_embd", "4 are needed"), (FOUR, "mask_rate", "not sizes"), (None, "", "cannot be read"),
    ([*FOUR, (9, 10, 0, 1.5)], "n_embd", "positive"), ([*FOUR, (9, 10, 1, float("nan"))], "n_embd", "positive"),
    ([*FOUR, (9, 10, 1, "")], "n_embd", "cannot be read")])
def test_tables_that_cannot_be_fitted_are_refused(sizes, setting, hint, tmp_path, capsys):
    path = tmp_path / "a.csv"
    if sizes and sizes[-1][-1] == "":
        path.write_text("n_embd,steps,seed,metric,value\n32,10,1,tflop,1\n")
    elif sizes:
        write_curves(path, sizes, setting=setting)
    with pytest.raises(SystemExit) as e:
        scaling.main(["--curves", str(path), "--steps", "10"])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err
