"""lm-eval over the routes that it measures served models by: scored choices and generated answers. Its tasks are made
here, of questions whose answers the bundled model has learnt, so that every score is known beforehand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients import questions as q
from tests.support.serving import ROOT, Server

pytest.importorskip("lm_eval.models.openai_completions", reason=q.ABSENT)
pytest.importorskip("transformers", reason=q.ABSENT)

TOKENIZER = ROOT / "src" / "headrace" / "data" / "demo"
HERE = f"tokenizer_backend=huggingface,tokenizer={TOKENIZER}"
CAPITALS = {"France": "Paris", "Turkey": "Ankara", "Brazil": "Brasilia", "Iraq": "Baghdad"}

SCORED = """
task: capitals_scored
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{prompt}"
doc_to_choice: ["Paris", "Ankara", "Brasilia", "Baghdad"]
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
GENERATED = """
task: capitals_generated
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is the capital of {{{{country}}}}?"
doc_to_target: "The capital of {{{{country}}}} is {{{{answer}}}}."
generation_kwargs: {{until: ["\\n"], max_gen_toks: 32, temperature: 0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
# As the model's own template writes a conversation, but for the first token, which its tokenizer adds.
PROMPT = "<|im_start|>user\\nWhat is the capital of {{country}}?<|im_end|>\\n<|im_start|>assistant\\nThe capital of {{country}} is "


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "capitals.jsonl"
    data.write_text(
        "".join(json.dumps({"country": country, "answer": city}) + "\n" for country, city in CAPITALS.items())
    )
    (folder / "scored.yaml").write_text(SCORED.format(data=data, prompt=PROMPT))
    (folder / "generated.yaml").write_text(GENERATED.format(data=data))
    return folder


def scores(out: Path, tasks: Path, task: str, model: str, arguments: str, *flags: str) -> dict[str, Any]:
    """Run as users run it."""
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        model,
        "--model_args",
        f"model=demo,{arguments}",
        "--tasks",
        task,
    ]
    run = [*command, "--include_path", str(tasks), "--output_path", str(out), "--log_samples", *flags]
    done = subprocess.run(run, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = out.rglob("results_*.json")
    return dict(json.loads(found.read_text())["results"][task])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("tokenizer", [HERE, "tokenizer_backend=remote"], ids=["here", "remote"])
def test_choices_are_scored(demo: Server, tasks: Path, tmp_path: Path, tokenizer: str) -> None:
    """By the log-probabilities of the prompt (echo, no token of its own), with a tokenizer here and with the
    server's."""
    where = f"base_url={demo.url}/v1/completions,{tokenizer},max_length=1024,num_concurrent=2"
    assert scores(tmp_path, tasks, "capitals_scored", "local-completions", where)["acc,none"] == 1.0


@pytest.mark.timeout(180)
def test_chats_are_generated(demo: Server, tasks: Path, tmp_path: Path) -> None:
    where = f"base_url={demo.url}/v1/chat/completions,num_concurrent=2"
    found = scores(tmp_path, tasks, "capitals_generated", "local-chat-completions", where, "--apply_chat_template")
    assert found["exact_match,none"] == 1.0


@pytest.mark.timeout(180)
def test_completions_are_generated_from_a_template(demo: Server, tasks: Path, tmp_path: Path) -> None:
    """Its tokenizer renders the conversation here, and sends token ids."""
    where = f"base_url={demo.url}/v1/completions,{HERE},max_length=1024"
    assert (
        scores(tmp_path, tasks, "capitals_generated", "local-completions", where, "--apply_chat_template")[
            "exact_match,none"
        ]
        == 1.0
    )
