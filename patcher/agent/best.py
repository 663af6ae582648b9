"""The best candidate of a loop, as it was judged."""

from __future__ import annotations

from patcher.attempts import Optimisation
from patcher.bench import Candidate, VerificationError
from patcher.runs.run import Run


def best_candidate(run: Run, optimisation: Optimisation) -> Candidate | None:
    """The best candidate of a finished loop, from its file in the run.

    Raises:
        VerificationError: the file is missing or was changed.
    """
    if optimisation.best_file is None:
        return None
    hint = "restore the run from a copy, or start a new one"
    try:
        # Bytes: reading as text would change line ends, and so the digest.
        source = (run.path / optimisation.best_file).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{optimisation.best_file} cannot be read", hint) from error
    candidate = Candidate(op=optimisation.op, language=optimisation.language, source=source)
    if candidate.digest != optimisation.best_digest:
        raise VerificationError(f"{optimisation.best_file} was changed after it was judged", hint)
    return candidate
