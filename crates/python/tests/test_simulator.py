import json
import os
import signal
import threading
import time

import kvist
import pytest


def small(**options):
    return kvist.simulate(**{"requests": 40, "arrivals": "poisson:per_s=4", **options})


def test_a_result_is_a_dict_a_table_and_pictures():
    result = small(hardware="h100-sxm", shape="llama-3.1-8b", slo_ttft="2s", seed=3)
    report = result.to_dict()
    assert report["requests"]["finished"] == 40 and report["setting"]["seed"] == "3"
    assert report["objectives"]["asked"]["ttft_s"] == 2.0
    assert report["latency"]["ttft_s"]["p99"] > 0
    assert json.loads(result.to_json()) == report
    assert "40 finished" in str(result) and "40" in repr(result)
    assert result.to_csv().count("\n") == 41
    html = result._repr_html_()
    assert html.count("<img") == len(result.pictures) > 2
    assert all(svg.startswith("<svg") for svg in result.pictures.values())
    assert result.page.startswith("<!doctype html>")


def test_the_same_seed_gives_the_same_result(tmp_path):
    one, two, other = small(seed=5), small(seed=5), small(seed=6)
    assert one.report == two.report != other.report
    one.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == one.page


def test_pandas():
    pandas = pytest.importorskip("pandas")
    frame = small().to_pandas()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 40


def test_zero_service():
    result = small(zero_service=True, capacity_blocks=500, policy="lfu")
    assert result.report["policy"] == "lfu" and result.pictures == {}
    assert "lfu" in str(result)
    assert "40" in repr(result)


def test_errors_and_remarks():
    for wrong, text in [
        ({"nonsense": 1}, "unexpected argument 'nonsense'"),
        ({"efficiency": 3, "hardware": "h100-sxm", "shape": "llama-3.1-8b"}, "^`efficiency` 3: "),
        ({"arrivals": "often"}, "often"),
        ({"hardware": "abacus", "shape": "llama-3.1-8b"}, "abacus"),
        ({"requests": "many"}, "many"),
        ({"policy": "best"}, "best"),
    ]:
        with pytest.raises(ValueError, match=text):
            small(**wrong)
    with pytest.raises(kvist.Error, match="no-such-trace"):
        kvist.simulate(trace="no-such-trace.jsonl")
    with pytest.raises(TypeError, match="`seed`"):
        small(seed=object())
    with pytest.warns(UserWarning, match="no request has a deadline.*give `deadline`"):
        small(schedule="edf")


def test_sweep(tmp_path):
    asked = dict(policies=["lru", "lfu"], capacities=[200, 2000], seeds=2, requests=40)
    sweep = kvist.sweep(out=tmp_path / "sweep", **asked)
    assert len(sweep.rows) == 4 and sweep.rows[0]["seeds"] == 2
    assert (tmp_path / "sweep" / "sweep.csv").exists()
    assert "<img" in sweep._repr_html_() and "4 combinations" in repr(sweep)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep" / "cells").iterdir()}
    again = kvist.sweep(out=tmp_path / "sweep", **asked)
    assert again.rows == sweep.rows
    assert files == {path: path.stat().st_mtime_ns for path in files}, "nothing was run again"
    assert len(kvist.sweep(policies=["lru"], capacities=[200], seeds=1, requests=20).rows) == 1
    pandas = pytest.importorskip("pandas")
    frame = sweep.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 4 and "token_hit_ratio" in frame


def test_ctrl_c_stops_a_simulation():
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    # A shell starts background programs with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, interrupt)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        while True:  # however fast the machine is
            kvist.simulate(requests=200_000, arrivals="poisson:per_s=50")
            time.sleep(0)
    timer.join()
    signal.signal(signal.SIGINT, before)


def test_flags_that_are_given_several_times():
    # Lists were joined by commas, which the values of --tier have themselves.
    tiers = ["ram:64GiB,bw=20GB/s,lat=10us", "disk:2TB,bw=3GB/s,lat=100us"]
    result = small(hardware="h100-sxm", shape="llama-3.1-8b", tier=tiers)
    assert result.report["requests"]["finished"] == 40
    with pytest.raises(ValueError, match="kvist simulate --help"):
        kvist.simulate(help=True)
