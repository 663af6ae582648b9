"""The pictures of a profile: nothing is lost, everything is named, nothing is obeyed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_lanes_sample import (
    decode,
    without_times,
)
from report_page import Page
from report_sample import sample

from patcher.hotspot import Hotspot, KernelStat, Profile
from patcher.hotspot.profile import StepLaunch
from patcher.report import charts, plot, render_html, render_markdown, views, wording
from patcher.report.bars import bars
from patcher.report.lanes import joined, lanes
from patcher.report.step import Launch, Step, read_step, short, window

WIDTHS = (charts.WIDE, charts.NARROW)
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title></svg><script>alert(1)</script>&\"'\x07\N{RIGHT-TO-LEFT OVERRIDE}|`"


def record(profile: Profile) -> dict[str, Any]:
    return profile.model_dump(mode="json")


def step_of(profile: Profile) -> Step:
    step = read_step(profile)
    assert step is not None
    return step


def hostile() -> Profile:
    profile = decode()
    return profile.model_copy(
        update={
            "model": HOSTILE,
            "source": HOSTILE,
            "kernels": tuple(
                k.model_copy(update={"name": HOSTILE, "operation": HOSTILE, "origin": HOSTILE})
                for k in profile.kernels
            ),
            "hotspots": tuple(
                spot.model_copy(
                    update={
                        **dict.fromkeys(("name", "operation", "origin", "reason", "op"), HOSTILE),
                        "variants": tuple(
                            v.model_copy(update={"name": HOSTILE}) for v in spot.variants
                        ),
                    }
                )
                for spot in profile.hotspots
            ),
        }
    )


def words(drawing: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(drawing).iter(f"{SVG}text")]


def rects(drawing: str) -> list[tuple[str, float, float, float]]:
    """(class, x, y, width) of each rectangle."""
    return [
        (
            mark.get("class", ""),
            float(mark.get("x", "0")),
            float(mark.get("y", "0")),
            float(mark.get("width", "0")),
        )
        for mark in ElementTree.fromstring(drawing).iter("rect")
    ]


def test_the_step_holds_every_launch_and_the_time_between_them() -> None:
    profile, step = decode(), step_of(decode())
    assert len(step.launches) == len(profile.step) == 499
    spent: dict[str, float] = {}
    for launch in profile.step:
        operation = profile.kernels[launch.kernel].operation
        spent[operation] = spent.get(operation, 0) + launch.duration_ns / 1e3
    assert {lane.operation: lane.time_us for lane in step.lanes} == pytest.approx(spent)
    covered = sorted((launch.start_us, launch.end_us) for launch in step.launches)
    union, until = 0.0, 0.0
    for start, end in covered:
        union, until = union + max(0.0, end - max(start, until)), max(until, end)
    assert union + step.gap_us == pytest.approx(step.wall_us)
    members = sum(launch.chain is not None for launch in profile.step)
    inside = [
        launch
        for _, (start, end) in step.runs
        for launch in step.launches
        if start <= launch.start_us and launch.end_us <= end
    ]
    assert len(inside) == members


@pytest.mark.parametrize("width", WIDTHS)
def test_drawn_widths_add_up_to_the_time_of_each_operation(width: float) -> None:
    step = step_of(decode())
    drawing = lanes(step, width).render("x", "t", "d", "wide")
    found = rects(drawing)
    tracks = [(y, length) for css, _, y, length in found if css == "lane"]
    scale = tracks[0][1] / step.wall_us
    whole = tracks[1 : 1 + len(step.lanes)]  # the first track holds the chains
    for lane, (top, _) in zip(step.lanes, whole, strict=True):
        drawn = [length for css, _, y, length in found if css.startswith("launch") and y == top]
        rounding = 0.005 * len(drawn)
        assert sum(drawn) == pytest.approx(lane.time_us * scale, abs=rounding)
    assert all(x >= -0.01 and x + length <= width + 0.01 for _, x, _, length in found)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 30), st.sampled_from([None, 0, 1]))),
    st.floats(0.001, 10),
)
def test_joining_loses_no_launch_and_moves_none_by_more_than_a_pixel(
    rows: list[tuple[float, float, int | None]], scale: float
) -> None:
    launches, now = [], 0.0
    for gap, length, chain in rows:
        launches.append(Launch("k", "o", now + gap, length, chain))
        now += gap + length
    groups = joined(launches, scale)
    assert [launch for group in groups for launch in group] == launches
    for group in groups:
        assert len({launch.chain for launch in group}) == 1
        assert len(group) == 1 or (group[-1].end_us - group[0].start_us) * scale <= 1


def test_two_layers_are_shown_at_a_larger_scale() -> None:
    step = step_of(decode())
    view = window(step, 2)
    assert view.words == "2 layers"
    routed = [
        launch
        for launch in step.launches
        if launch.name == "_topk_forward" and view.start_us <= launch.start_us < view.end_us
    ]
    assert len(routed) == 2
    bare = decode().model_copy(
        update={"step": tuple(s.model_copy(update={"chain": None}) for s in decode().step)}
    )
    alone = step_of(bare)
    assert not alone.runs
    assert window(alone, 2).words == "2 layers"  # told by a kernel that runs once a layer
    few = step_of(bare.model_copy(update={"layers": None}))
    assert window(few, 2).words == "the first tenth"
    assert window(few, 2).end_us == pytest.approx(few.wall_us / 10)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_chain_and_every_triage_is_named(width: float) -> None:
    profile = decode()
    text = words(plot(profile, width=width))
    chains = [spot for spot in profile.hotspots if spot.kind == "chain"]
    assert chains
    for chain in chains:
        assert text.count(chain.name) >= 2  # the legend of the lanes, and its bar
    for spot in profile.hotspots[:16]:
        assert spot.triage in text
        assert wording.ceiling(spot.ceiling_pct) in text
    assert any(word.startswith("idle") for word in text)
    assert any("499 launches" in word for word in text)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_picture_is_small_valid_and_always_the_same(width: float) -> None:
    picture = plot(decode(), width=width)
    root = ElementTree.fromstring(picture)
    assert root.tag == f"{SVG}svg"
    assert len(picture.encode()) < 200_000
    assert plot(Profile.model_validate_json(decode().model_dump_json()), width=width) == picture
    assert "prefers-color-scheme: dark" in picture
    assert not re.search(r"@import|url\(|href|<script|nan|inf\b", picture)
    height = float(root.get("height", "0"))
    tips = [tip.text or "" for tip in root.iter(f"{SVG}title")]
    named = [tip for tip in tips if "_topk_forward, at " in tip]
    assert bool(named) == (width > 500)  # a phone shows no tooltip
    assert root.get("viewBox") == f"0 0 {root.get('width')} {height:g}"


def test_without_times_the_bars_stand_alone_and_say_why() -> None:
    text = words(plot(without_times()))
    assert any("no times of single ones" in word for word in text)
    assert any("kernel time" in word for word in text)
    assert not any("One decode step" in word for word in text)
    unknown = decode().model_copy(update={"step": (), "steps": None})
    assert any("cannot be told apart" in word for word in words(plot(unknown)))
    nothing = decode().model_copy(update={"step": (), "hotspots": (), "kernels": ()})
    ElementTree.fromstring(plot(nothing))
    page = Page(render_html(sample(profile=without_times())))
    assert "no times of single ones" in page.text


def test_names_are_shown_and_not_obeyed() -> None:
    for width in WIDTHS:
        picture = plot(hostile(), width=width)
        tags = {mark.tag for mark in ElementTree.fromstring(picture).iter()}
        assert f"{SVG}script" not in tags
        assert "\x07" not in picture
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in picture
    rows = record(hostile())
    for spot in rows["hotspots"]:
        spot.update(triage='x" onload="alert(1)', kind='y" onload="alert(1)')
    report = sample(profile=rows)
    page = Page(render_html(report))
    assert len(page.named("script")) == 1
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    table = [line for line in render_markdown(report).splitlines() if line.startswith("| 1 |")]
    assert len(re.findall(r"(?<!\\)\|", table[0])) == 11


def test_the_page_and_the_pull_request_hold_the_same_rows() -> None:
    report = sample(profile=decode())
    page, markdown = Page(render_html(report)), render_markdown(report)
    assert len(page.named("svg")) == 18
    ids = [attributes["id"] for _, attributes in page.tags if attributes.get("id")]
    assert len(ids) == len(set(ids))
    for row in views.hotspot_rows(report.profile)[:16]:
        assert row.triage is not None
        for figure in (wording.percent(row.wall_pct, 2), wording.sentence(row.reason)):
            assert figure in page.text
        assert wording.percent(row.wall_pct, 1) in markdown
        for member in row.members:
            assert wording.clip(short(member), 60) in markdown
            assert short(member)[:40] in page.text
    assert "One decode step: 499 launches" in markdown
    assert "**fuse**" in markdown


def test_a_journal_of_old_still_renders() -> None:
    rows = record(decode())
    for spot in rows["hotspots"]:
        for field in ("kind", "wall_pct", "reachable_pct", "triage", "reason", "variants"):
            spot.pop(field)
    for field in ("step", "memory_ns", "wall_ns", "steps", "layers", "window"):
        rows.pop(field)
    page = Page(render_html(sample(profile=rows)))
    assert "Where does the time go?" in page.text
    read = sample(profile=rows).profile
    assert read is not None
    assert all(row.triage is None for row in views.hotspot_rows(read))


def test_bars_tell_chains_idle_time_and_the_speed_of_light() -> None:
    rows = views.hotspot_rows(decode())
    lit = [row.__class__(**{**vars(row), "sol_pct": 40.0}) for row in rows[:1]]
    drawing = bars([*lit, *rows[1:]], 920).render("x", "t", "d", "wide")
    found = rects(drawing)
    bar = max(length for css, _, _, length in found if css.startswith("bar"))
    [light] = [x for css, x, _, length in found if css == "light" and length == 2]
    assert light + 1 == pytest.approx(336 + bar * 0.4, abs=0.02)
    chains = sum(row.kind == "chain" for row in rows[:16])
    assert drawing.count('class="hatching"') == chains + 1  # and one in the legend
    assert sum(css == "bar nothing" for css, *_ in found) == 2


def test_many_operations_share_a_lane_and_streams_may_overlap() -> None:
    kernels = tuple(
        KernelStat(
            name=f"k{index}",
            origin="-",
            operation=f"operation {index}",
            instances=1,
            total_ns=1000 + index,
            mean_ns=1000.0 + index,
            median_ns=None,
            min_ns=None,
            max_ns=None,
            share_pct=5.0,
        )
        for index in range(20)
    )
    spot = Hotspot(
        rank=1,
        name="k",
        share_pct=100.0,
        origin="-",
        operation="o",
        op=None,
        ceiling_pct=99900.0,
        instances=1,
        mean_ns=1.0,
    )
    profile = decode().model_copy(
        update={
            "kernels": kernels,
            "hotspots": (spot,),
            "step": tuple(
                StepLaunch(kernel=i, start_ns=500 * i, duration_ns=1000 + i, stream=i % 2)
                for i in range(20)
            ),
        }
    )
    step = step_of(profile)
    assert [lane.operation for lane in step.lanes][-1] == "9 others"
    assert sum(len(lane.launches) for lane in step.lanes) == 20
    assert step.gaps == ()
    assert "> +999\N{NO-BREAK SPACE}%" in words(plot(profile))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void vllm::reshape_and_cache<__nv_bfloat16, 2>(int *)", "reshape_and_cache"),
        ("_topk_forward", "_topk_forward"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<a>>>",
            "FlashAttnFwdSm90",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<int>>",
            "FillFunctor",
        ),
        ("void at::native::(anonymous namespace)::softmax<float>(T*)", "softmax"),
        ("", ""),
        ("<<<", "<<<"),
    ],
)
def test_short_names(name: str, expected: str) -> None:
    assert short(name) == expected


def test_launches_that_all_begin_at_once_have_a_window_with_time() -> None:
    """As a broken profile has them: a window of no time has no shares."""
    step = step_of(decode())
    at_once = replace(
        step,
        runs=tuple((number, (0.0, end)) for number, (_, end) in step.runs),
        launches=tuple(replace(launch, start_us=0.0) for launch in step.launches),
    )
    assert window(at_once, 1).end_us > window(at_once, 1).start_us
    for width in WIDTHS:
        lanes(at_once, width)
