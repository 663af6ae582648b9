"""A model behind a folder: each prompt becomes a file, and whoever answers puts the reply beside
it."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from patcher.bench import UsageError, WaitingError
from patcher.models import Reply, Request, Usage
from patcher.models.gate import TEXT_CHARACTERS, Cleaner


class ExchangeModel:
    """Prompts `NNN-<step>.prompt.md` in a folder; replies `NNN-<step>.reply.md`, written or renamed
    whole.

    The same question finds its old file again, in this process or a later one.
    """

    name = "exchange"

    images = True

    def __init__(self, folder: Path, run_dir: Path | None = None) -> None:
        self.folder = folder
        self._run_dir = run_dir or folder

    def worst_cost_usd(self, request: Request) -> float | None:
        return 0.0

    def ask(self, request: Request) -> Reply:
        """The reply, when its file is there.

        Raises:
            WaitingError: it is not, or it is empty.
            UsageError: the folder cannot be written, or the reply is not text.
        """
        try:
            prompt = self._prompt_file(request)
            reply = prompt.with_name(prompt.name.replace(".prompt.md", ".reply.md"))
            raw = _read(reply).removeprefix(codecs.BOM_UTF8) if reply.is_file() else b""
            too_long = len(raw) > TEXT_CHARACTERS
            text = raw[:TEXT_CHARACTERS].decode("utf-8", "ignore" if too_long else "strict")
        except OSError as error:
            raise UsageError(
                f"cannot use {self.folder}: {error.strerror}", "choose another exchange:DIR"
            ) from error
        except UnicodeDecodeError as error:
            raise UsageError(
                f"the reply to {request.step} is not UTF-8 text", "write it again as text"
            ) from error
        if not text.strip():
            raise WaitingError(
                f"waiting for a reply to {prompt}",
                f"write the answer to {reply}, then: patcher resume",
            )
        return Reply(
            text=Cleaner("").text(text),
            model=self.name,
            usage=Usage(),
            stop_reason="too_long" if too_long else "end_turn",
            source="exchange",
            prompt_digest=request.digest,
        )

    def _prompt_file(self, request: Request) -> Path:
        """The file with this very question; a new one, with the next number, when there is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        slug = re.sub(r"[^\w.-]+", "-", request.step)
        system, prompt = request.system.strip(), request.prompt.strip()
        shown = self._images(request)
        content = f"<!-- system -->\n{system}\n\n{shown}<!-- prompt -->\n{prompt}\n"
        for known in sorted(self.folder.glob(f"*-{slug}.prompt.md")):
            if known.read_bytes() == content.encode():
                return known
        numbers = [
            int(found[1])
            for path in self.folder.iterdir()
            if (found := re.match(r"(\d+)-", path.name))
        ]
        path = self.folder / f"{max(numbers, default=0) + 1:03d}-{slug}.prompt.md"
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(content.encode())
        temporary.replace(path)
        return path

    def _images(self, request: Request) -> str:
        """Copies of the images, beside the prompt under their digests, and the lines that name
        them."""
        lines = []
        for image in request.images:
            name = f"{image.digest[:16]}.png"
            (self.folder / name).write_bytes(image.read(self._run_dir))
            lines.append(f"<!-- image: {name} ({image.width} x {image.height}) -->\n")
        return "".join(lines)


def _read(path: Path) -> bytes:
    """No more of it than can be used."""
    with path.open("rb") as file:
        return file.read(TEXT_CHARACTERS + 1)
