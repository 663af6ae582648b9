"""Convert an SVG drawing to PNG by Chromium, for vision models; few other programs support our
style sheets.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S = 60.0


def to_png(svg: str, target: Path) -> str | None:
    """Write the PNG file; returns None, or the reason why that failed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return "Chromium, which draws the picture, is not installed: apt install chromium"
    size = re.search(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"', svg)
    if size is None:
        return "the drawing has no size"
    width, height = (round(float(each)) for each in size.groups())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "drawing.svg").write_text(svg, encoding="utf-8")
        command = [
            *(browser, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
            *("--disable-background-networking", "--disable-dev-shm-usage"),
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},{height}",
            f"--screenshot={folder / 'picture.png'}",
        ]
        if os.geteuid() == 0:  # its sandbox does not work for root; the drawing holds no script
            command.append("--no-sandbox")
        why = _run([*command, (folder / "drawing.svg").as_uri()], folder)
        drawn = folder / "picture.png"
        if why is None and not drawn.is_file():
            why = "Chromium drew nothing"
        if why is None:
            part = target.with_name(f".{target.name}.tmp")
            shutil.copyfile(drawn, part)
            part.replace(target)
    return why


def _run(command: list[str], folder: Path) -> str | None:
    """Run in a separate session, so that no child stays; without this process's environment."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"Chromium took longer than {LIMIT_S:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of it ended, as expected
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None if code == 0 else f"Chromium failed with exit code {code}"
