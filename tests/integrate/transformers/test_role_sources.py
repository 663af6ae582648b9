"""What files say of routers and rotations is what each of them does when it is tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from role_trials import KEPT, files, tried

from patcher.integrate.transformers.role_sources import says

FILES = {file.parent.name: file for file in files()}


@pytest.mark.slow
def test_what_was_read_is_what_each_does() -> None:
    found = tried()
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    assert found == kept, "run `python tests/support/role_trials.py`"


@pytest.mark.parametrize(
    ("point", "there", "nowhere", "by_settings"),
    [
        (
            "rotation",
            "llama qwen3 gpt_oss phi3",
            "mamba2 gpt2 llama4",
            "deepseek_v3 smollm3 glm gpt_neox_japanese",
        ),
        ("router", "mixtral gpt_oss granitemoe", "llama mamba2 gemma3", "qwen3_moe olmoe jamba"),
        (
            "add_norm",
            "llama mixtral gpt_oss qwen3_moe",
            "albert llava exaone4",
            "gpt2 gemma2 qwen2_vl jamba",
        ),
        ("experts.sum", "mixtral gpt_oss olmoe", "llama mamba2 gemma3", "qwen3_moe jamba"),
        ("experts", "", "llama mamba2 gemma3", "mixtral gpt_oss qwen3_moe"),
    ],
)
def test_a_file_says_what_no_setting_decides(
    point: str, there: str, nowhere: str, by_settings: str
) -> None:
    for kinds, said in ((there, True), (nowhere, False), (by_settings, None)):
        assert {kind: says(point, FILES[kind]) for kind in kinds.split()} == dict.fromkeys(
            kinds.split(), said
        )


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        ("x, position_embeddings, attention_mask=None", True),
        ("x, position_embeddings, attention_mask, position_ids, cache=None, *, y=0, **z", True),
        ("x, position_ids", None),
        ("x, position_embeddings, lengths", None),
        ("x, position_embeddings, *, lengths", None),
    ],
)
@pytest.mark.parametrize("kept", ["config", "size"])
def test_what_an_attention_also_needs_is_known_of_a_built_model_alone(
    taken: str, said: bool | None, kept: str, tmp_path: Path
) -> None:
    own = FILES["llama"].read_text(encoding="utf-8")
    head = own[own.index("def rotate_half") : own.index("def repeat_kv")]
    forward = f"    def forward(self, {taken}):\n        apply_rotary_pos_emb(x, x, 1, 1)\n"
    made = f"    def __init__(self, config):\n        self.{kept} = config\n\n"
    (file := tmp_path / "modeling_own.py").write_text(f"{head}\nclass Own:\n{made}{forward}")
    assert says("rotation", file) is (said if kept == "config" else None)


def test_files_are_read_without_an_import_of_what_takes_seconds() -> None:
    code = (
        "import sys; from patcher.integrate.transformers.places import of_model;"
        "print(of_model('rotation', lambda: {'model_type': 'llama'}));"
        "print(of_model('router', lambda: {'model_type': 'mixtral'}));"
        "print(of_model('linear', lambda: {'model_type': 'llama'}));"
        "print(of_model('add_norm', lambda: {'model_type': 'llama'}));"
        "print(of_model('experts.sum', lambda: {'model_type': 'mixtral'}));"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "llama has layers of rotation",
        "mixtral has layers of router",
        "llama has layers of linear",
        "llama has layers of add_norm",
        "mixtral has layers of experts.sum",
        "[]",
    ]
