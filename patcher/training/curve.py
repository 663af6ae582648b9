"""The picture of a training, as SVG, as a page, or as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from patcher.bench import MissingError, UsageError
from patcher.report.curves import Curve
from patcher.report.picture import plot_training
from patcher.report.raster import to_png
from patcher.runs import durable
from patcher.training.evaluate import read_evaluation
from patcher.training.folder import UpdateMetrics, read_metrics

FORMATS = (".svg", ".html", ".png")
_SHADES = {"compiled": "base", "right": "total", "faster": "cand", "caught": "bad"}


def draw_training(folder: Path, evaluations: Sequence[Path]) -> str:
    """The SVG document of a training, and of evaluations, the first of which is the oldest.

    Raises:
        UsageError: there are no metrics, or no such evaluation.
    """
    found = read_metrics(folder)
    # of an update of which no reply was judged, there is nothing to draw
    found = [each for each in found if each.reward is not None] or found
    shown = [(path.resolve().name, read_evaluation(path).shares) for path in evaluations]
    return plot_training(
        folder.resolve().name, [each.update for each in found], panels_of(found), shown
    )


def panels_of(found: Sequence[UpdateMetrics]) -> list[tuple[str, Sequence[Curve], bool]]:
    """What is drawn: rewards, shares and seconds of reinforcement learning, and the loss."""
    panels: list[tuple[str, Sequence[Curve], bool]] = []
    if found[0].reward is not None:
        rewards = [each.reward or 0.0 for each in found]
        shares = [
            Curve(name, css, [each.shares[name] for each in found]) for name, css in _SHADES.items()
        ]
        seconds = [
            Curve("sampling", "base", [each.generating_s for each in found]),
            Curve("judging", "cand", [each.judging_s for each in found]),
            Curve("training", "total", [each.training_s for each in found]),
        ]
        panels += [
            ("mean reward", [Curve("reward", "cand", rewards)], False),
            ("share of replies", shares, True),
            ("seconds", seconds, False),
        ]
    losses = [each.loss or 0.0 for each in found]
    panels.append(("loss", [Curve("loss", "base", losses)], False))
    return panels


def write_picture(svg: str, out: Path) -> None:
    """Write the picture in the format of the file's name.

    Raises:
        UsageError: no such format.
        MissingError: PNG, and there is no Chromium.
    """
    if out.suffix not in FORMATS:
        raise UsageError(f"{out} is no picture", f"name it *{', *'.join(FORMATS)}")
    if out.suffix == ".png":
        if why := to_png(svg, out):
            raise MissingError(f"no PNG was drawn: {why}", "write a page: --out curve.html")
        return
    if out.suffix == ".html":
        page = '<!doctype html><html lang="en"><meta charset="utf-8"><title>Training</title>'
        svg = f"{page}<body>{svg}</body></html>\n"
    durable.write_whole(out, svg)
