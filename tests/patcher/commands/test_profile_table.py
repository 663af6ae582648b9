"""The table of `patcher profile` at every width."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from patcher.hotspot import Profile, read, shortened
from patcher.show.profile import CUT, profile_tables

DATA = Path(__file__).parents[2] / "data"
SGLANG = DATA / "kineto/sglang_one_step_mi300.json.gz"


@pytest.fixture(scope="module")
def profiles() -> list[Profile]:
    return [read(SGLANG), read(DATA / "nsys/decode.sqlite", "gpt-oss-20b")]


def printed(profile: Profile, width: int, *, wide: bool = False) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, no_color=True)
    for table in profile_tables(profile, 30, wide):
        console.print(table)
    return text.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_figures_are_whole_and_columns_are_left_out(width: int, profiles: list[Profile]) -> None:
    for profile in profiles:
        shown = printed(profile, width)
        assert max(map(len, shown.splitlines())) <= width
        rows = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
        assert len(rows) == 30
        for row, spot in zip(rows, profile.hotspots, strict=False):
            cells = [cell.strip() for cell in row]
            assert not any(CUT in cell for cell in cells[:-1])
            assert cells[0] == str(spot.rank)
            assert f"+{spot.ceiling_pct:.1f}%" in cells
            assert spot.triage in cells
            if spot.kind == "kernel":
                assert f"{spot.share_pct:.1f}%" in cells
                assert len(cells[-1]) >= min(8, len(spot.name))


def test_wider_terminals_have_more_columns(profiles: list[Profile]) -> None:
    heads = [printed(profiles[1], width).splitlines()[2].count("┃") for width in (60, 80, 120, 160)]
    assert heads == sorted(heads)
    assert heads[0] < heads[-1]


def test_names_stay_apart(profiles: list[Profile]) -> None:
    for profile in profiles:
        names = [spot.name for spot in profile.hotspots if spot.kind == "kernel"]
        for width in (24, 40, 50):
            short = shortened(names, width)
            assert len(set(short)) == len(names)
            assert max(map(len, short)) <= width


def test_a_name_is_what_tells_it_apart() -> None:
    names = ["Cijk_Alik_Bljk_BBS_BH_MT256x32x64_MI16", "Cijk_Alik_Bljk_BBS_BH_MT32x32x256_MI16"]
    assert all("MT" in name for name in shortened(names, 24))
    [gemv] = shortened(["std::enable_if<!T7, void>::type internal::gemvx::kernel<int>(T13)"], 30)
    assert gemv == "gemvx::kernel<int>"
    [aiter] = shortened(["_ZN5aiter24add_rmsnorm_quant_kernelIDF16bEEvPT0_"], 40)
    assert aiter.startswith("add_rmsnorm_quant_kernel")
    [functor] = shortened(
        ["void at::native::reduce_kernel<512, at::native::MaxOps<float> >(int)"], 50
    )
    assert functor == "reduce_kernel<512, MaxOps<float>>"


def test_wide_prints_names_in_full_on_one_line() -> None:
    command = [sys.executable, "-P", "-m", "patcher", "profile", "m", "--from", str(SGLANG)]
    shown = subprocess.run([*command, "--wide"], capture_output=True, text=True, check=True).stdout
    assert not re.search("\x1b", shown)
    for spot in read(SGLANG, "m").hotspots[:5]:
        assert spot.name in shown


def test_a_name_with_brackets_is_a_name(profiles: list[Profile]) -> None:
    named = profiles[1].model_copy(update={"model": "my[/b]model\x1b[2J"})
    assert "my[/b]model<U+001B>[2J" in printed(named, 160)
