"""Writes the pages that list what the code holds (settings, techniques, request fields): `python docs/generate.py`.

A test compares the files with what this script would write. What may not live here: facts that the code does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from headrace import techniques
from headrace.config import ServerConfig, field_types
from headrace.flags import ENGINE_PARTS, config_fields
from headrace.foreign_flags import ELSEWHERE
from headrace.server import fields

DOCS = Path(__file__).parent

CONFIGURATION = """# Configuration

Every setting is a field of a dataclass in `src/headrace/config.py`. A field is at once

- a flag: `--max-num-seqs 64`,
- an entry of the file given with `--config FILE.yaml`: `max-num-seqs: 64` (underscores work too),
- a keyword in Python: `LLM(model, max_num_seqs=64)`,

and is checked in one place, whichever way it came. The command line wins over the file.
An unknown flag or key is an error that names the nearest one; underscores in flags are hyphens.
`--help` shows the flags that most people need, `--help=all` every one, `--help=WORD` those about a word.
This page is written by `python docs/generate.py`.

**Sizes** read as people write them, with vLLM's rule: small letters are decimal (`32k` = 32,000), capitals and `…iB` are binary
(`32K` = 32,768, `20GiB`), `…B` is decimal (`20GB`). **Booleans** have two forms: `--enforce-eager`, `--no-enforce-eager`.
**Lists** take several words: `--served-model-name a b`. **`auto`** leaves an optional number to the engine, as leaving the flag out does.
What the engine chose by itself is said at start with its reason, and again by `headrace doctor`.

```yaml
# serve.yaml: headrace serve --config serve.yaml
model: org/name
dtype: bfloat16
max-model-len: 8K
served-model-name: [name, alias]
enable-prefix-caching: true
technique:
  chunked_prefill: on
  overlap: 1
```

"""

ENVIRONMENT = """## Environment

| variable | meaning |
|---|---|
| `HEADRACE_API_KEY` | the key clients must send, where `--api-key` is not given |
| `HEADRACE_LOG_LEVEL` | debug, info (default), warning or error; debug also shows a traceback with an error, as `--debug` does |
| `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` | the hub's cache folder, access token, and "use the cache only" |
| `CUDA_VISIBLE_DEVICES` | as everywhere |

"""

TECHNIQUES = """# Techniques

A technique is a mechanism from the literature with a room of its own in the source, one switch, and an on/off benchmark.
Switch one on the command line with `--technique NAME=on|off|VALUE` (repeatable, in a config file under `technique:`), in Python with
`LLM(..., technique={"kv_caching": False, "overlap": 0})`. What "off" computes with stands with each.

Tests hold, on against off: a whole engine's tokens in float32, for all that need no GPU (`compressed_weights`: scores in bfloat16), and on a card
for `activation_arena`, `prompt_graphs` and `cuda_graphs` (`programmatic_launch` in bfloat16); its greedy tokens up to near ties in bfloat16, for
`persistent_decode` and `fused_rope_attention`; scores about as near to float32's as a CPU's bfloat16, for `cascade_attention`, `flat_gemm` and
`deep_fusion`; kernels against their twins, for the others.

`headrace techniques` prints this list; this page is written from the same register by `python docs/generate.py`.

"""

REQUEST_FIELDS = """# Request fields

What each route takes ([the server](server.md) has the routes): first the fields of all that generate, then each one's own. A field that no route
knows is an error, and so is one that is known from OpenAI or vLLM but not supported here: it is refused by name with a remedy, never ignored.
`null` counts as absent. Bounds of sampling parameters are those of `SamplingParams` in `src/headrace/sampling_params.py`, the same for all routes
and for Python. This page is written by `python docs/generate.py`.

"""


def configuration() -> str:
    parts = {**ENGINE_PARTS, "server": ServerConfig}
    tables = "".join(f"## {part.__name__}: {(part.__doc__ or '').rstrip('.')}\n\n{_table(part)}\n" for part in parts.values())
    return CONFIGURATION + tables + ENVIRONMENT + _elsewhere()


def _table(part: type) -> str:
    rows = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    rows += [_row(field, part) for field in config_fields(part)]
    return "\n".join(rows) + "\n"


def _row(field: Field[Any], part: type) -> str:
    spellings = [f"--{field.name.replace('_', '-')}", *field.metadata.get("flags", ())]
    if field.metadata.get("flag") is False:
        spellings = [f"--technique {field.name}=…"]
    return f"| {', '.join(f'`{each}`' for each in spellings)} | {_values(field, part)} | {_default(field)} | {field.metadata['help']} |"


def _values(field: Field[Any], part: type) -> str:
    kind = field_types(part)[field.name]
    if field.metadata.get("choices"):
        return ", ".join(map(str, field.metadata["choices"]))
    words = {bool: "on, off", int: "whole number", float: "number", str: "text"}
    return "size" if field.metadata.get("size") else words[kind.base] + (" …" if kind.many else "")


def _default(field: Field[Any]) -> str:
    if field.default in (None, ()):
        return ""
    return {True: "on", False: "off"}[field.default] if isinstance(field.default, bool) else str(field.default)


def _elsewhere() -> str:
    rows = "\n".join(f"| `{flag}` | {sentence} |" for flag, sentence in sorted(ELSEWHERE.items()))
    head = "## Flags of other engines\n\nThese are known and answered with a sentence instead of \"unknown flag\":\n\n"
    return f"{head}| flag | answer |\n|---|---|\n{rows}\n"


def technique_page() -> str:
    return TECHNIQUES + "\n".join("\n".join(_technique(item)) for item in techniques.TECHNIQUES)


def _technique(item: techniques.Technique) -> Iterator[str]:
    default = "chosen by device" if item.default_state == "automatic" else item.default_state
    yield f"## {item.name}\n"
    yield f"- **Source:** {item.source}"
    yield f"- **Switch:** `--technique {item.name}=…`, the config field `{item.switch}`; default: {default}"
    yield f"- **Improves:** {item.improves}"
    yield f"- **Off means:** {item.off_means}"
    yield f"- **Measure it:** `{item.ablate}`\n"


_Table = tuple[fields.Field, ...]


def request_fields() -> str:
    """What several routes share stands once, under all their names."""
    chat, completions = "POST /v1/chat/completions", "POST /v1/completions"
    generating = (fields.CHAT, fields.COMPLETION, fields.RESPONSES, fields.MESSAGES)
    every = tuple(each for each in generating[0] if all(each in table for table in generating))
    older = _without(tuple(each for each in fields.CHAT if each in fields.COMPLETION), every)
    parts = {
        "Every route that generates": every,
        f"{chat} and {completions}": older,
        chat: _without(fields.CHAT, every, older),
        completions: _without(fields.COMPLETION, every, older),
        "POST /v1/responses": _without(fields.RESPONSES, every),
        "POST /v1/messages": _without(fields.MESSAGES, every),
        "POST /v1/messages/count_tokens": fields.COUNT_TOKENS,
        "POST /tokenize": fields.TOKENIZE,
        "POST /detokenize": fields.DETOKENIZE,
    }
    return REQUEST_FIELDS + "\n".join(_route(name, table) for name, table in parts.items())


def _without(table: _Table, *others: _Table) -> _Table:
    return tuple(each for each in table if not any(each in other for other in others))


def _route(name: str, table: _Table) -> str:
    taken = [each for each in table if each.use in (fields.Use.SAMPLING, fields.Use.OPTION)]
    labels = ", ".join(f"`{each.name}`" for each in table if each.use is fields.Use.LABEL)
    refused = [each for each in table if each.use is fields.Use.REFUSED]
    text = f"## {name}\n\n| field | type | meaning |\n|---|---|---|\n"
    text += "".join(f"| `{each.name}` | {_json_type(each)} | {each.help} |\n" for each in taken)
    text += f"\nAccepted, and changing nothing in the answer: {labels}.\n" if labels else ""
    if refused:
        text += "\n| refused | unless | instead |\n|---|---|---|\n"
        text += "".join(f"| `{each.name}` | {_neutral(each)} | {each.help} |\n" for each in refused)
    return text


def _json_type(of: fields.Field) -> str:
    return of.schema if isinstance(of.schema, str) else " or ".join(of.schema)


def _neutral(of: fields.Field) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in of.neutral)


PAGES = {"configuration.md": configuration, "techniques.md": technique_page, "request-fields.md": request_fields}


if __name__ == "__main__":
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")
