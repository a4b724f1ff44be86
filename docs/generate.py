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
from headrace.config import ENGINE_PARTS, ServerConfig, field_types
from headrace.flags import config_fields, elsewhere
from headrace.server.dialects.chat import ChatBody
from headrace.server.dialects.completions import CompletionBody
from headrace.server.dialects.messages import CountBody, MessagesBody
from headrace.server.dialects.responses_body import ResponsesBody
from headrace.server.dialects.tokens import DetokenizeBody, TokenizeBody
from headrace.server.openapi import NO_MEANING, body_schemas
from headrace.server.protocol.body import Refused

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
    rows = "\n".join(f"| `{flag}` | {sentence} |" for flag, sentence in sorted(elsewhere("flags").items()))
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


_Entry = dict[str, Any] | Refused  # the schema of a field that is taken
_Table = dict[str, _Entry]


def request_fields() -> str:
    """What several routes share stands once, under all their names."""
    schemas, _ = body_schemas((ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountBody, TokenizeBody, DetokenizeBody))
    tables = {kind: {**schema["properties"], **kind.refused} for kind, schema in schemas.items()}
    chat, completions = "POST /v1/chat/completions", "POST /v1/completions"
    every = _shared(*(tables[kind] for kind in (ChatBody, CompletionBody, ResponsesBody, MessagesBody)))
    older = _without(_shared(tables[ChatBody], tables[CompletionBody]), every)
    parts = {
        "Every route that generates": every,
        f"{chat} and {completions}": older,
        chat: _without(tables[ChatBody], every, older),
        completions: _without(tables[CompletionBody], every, older),
        "POST /v1/responses": _without(tables[ResponsesBody], every),
        "POST /v1/messages": _without(tables[MessagesBody], every),
        "POST /v1/messages/count_tokens": tables[CountBody],
        "POST /tokenize": tables[TokenizeBody],
        "POST /detokenize": tables[DetokenizeBody],
    }
    return REQUEST_FIELDS + "\n".join(_route(name, table) for name, table in parts.items())


def _shared(first: _Table, *others: _Table) -> _Table:
    return {name: entry for name, entry in first.items() if all(other.get(name) == entry for other in others)}


def _without(table: _Table, *others: _Table) -> _Table:
    return {name: entry for name, entry in table.items() if not any(name in other for other in others)}


def _route(name: str, table: _Table) -> str:
    refused = {name: entry for name, entry in table.items() if isinstance(entry, Refused)}
    known = {name: entry for name, entry in table.items() if isinstance(entry, dict)}
    labels = ", ".join(f"`{name}`" for name, entry in known.items() if entry["description"] == NO_MEANING)
    text = f"## {name}\n\n| field | type | meaning |\n|---|---|---|\n"
    for name, entry in known.items():
        if entry["description"] != NO_MEANING:
            text += f"| `{name}` | {' or '.join(dict.fromkeys(_json_types(entry)))} | {entry['description']} |\n"
    text += f"\nAccepted, and changing nothing in the answer: {labels}.\n" if labels else ""
    if refused:
        text += "\n| refused | unless | instead |\n|---|---|---|\n"
        text += "".join(f"| `{name}` | {_neutral(entry)} | {entry.instead} |\n" for name, entry in refused.items())
    return text


def _json_types(schema: dict[str, Any]) -> Iterator[str]:
    """But for null, which says the same everywhere."""
    for branch in schema.get("anyOf", ()):
        yield from _json_types(branch)
    if "anyOf" not in schema:
        kind = "object" if "$ref" in schema else "string" if "enum" in schema else schema["type"]
        yield from (kind,) if kind != "null" else ()


def _neutral(of: Refused) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in of.unless)


PAGES = {"configuration.md": configuration, "techniques.md": technique_page, "request-fields.md": request_fields}


if __name__ == "__main__":
    for name, render in PAGES.items():
        (DOCS / name).write_text(render(), encoding="utf-8")
