"""Exported trees are those that xgboost grew, and need nothing of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from schedules.predict import trees
from scripts.grown import from_xgboost, save


def test_they_predict_what_xgboost_does(tmp_path: Path) -> None:
    import xgboost

    r = np.random.default_rng(0)
    table = r.random((300, 4), dtype=np.float32)
    table[r.random(table.shape) < 0.2] = np.nan
    wanted = np.where(np.isnan(table[:, 0]), 2, np.nan_to_num(table[:, 1]) * 3 - np.nan_to_num(table[:, 2]) ** 2)
    parameters = {"max_depth": 5, "eta": 0.3, "base_score": 0.0, "nthread": 1, "seed": 0}
    booster = xgboost.train(parameters, xgboost.DMatrix(table, wanted), 20)
    other = xgboost.train(parameters, xgboost.DMatrix(table, np.nan_to_num(table[:, 3])), 3)
    file = tmp_path / "trees.npz"
    grown = [(each.get_dump(dump_format="json"), factor) for each, factor in ((booster, 1.0), (other, -0.25))]
    save(from_xgboost(grown, 0.5, list("abcd"), {"device": "none"}), file)
    loaded = trees.load(file)
    assert loaded and loaded.names == tuple("abcd") and loaded.header == {"device": "none"}
    both = booster.predict(xgboost.DMatrix(table)) - other.predict(xgboost.DMatrix(table)) / 4
    assert np.allclose(loaded.predict(table), both + 0.5, atol=1e-5)


def test_no_trees_are_none(tmp_path: Path) -> None:
    assert trees.load(tmp_path / "trees.npz") is None


def test_a_ranking_imports_no_xgboost() -> None:
    code = (
        "import sys\n"
        "from schedules.core.arch import parse_arch\nfrom schedules.core.registry import operator\n"
        "from schedules.predict.rank import ranked\n"
        "p = operator('conv2d_nhwc').problem(n=2, h=9, w=9, ci=32, co=32, kh=3, kw=3, pad=1, dtype='float16')\n"
        "assert ranked(p, parse_arch('cuda:sm_90a')) and 'xgboost' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
