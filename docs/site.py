"""What MkDocs needs to make a site of this folder: files from outside it that pages link to, and the HTTP API from the
server's own description.

A hook, named in mkdocs.yml. What may not live here: text that belongs into a page.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from headrace import __version__
from headrace.server.app import ROUTES
from headrace.server.openapi import document

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()([^)\s#:]+)(?=[#)])")

HTTP_API = """# HTTP API

This page is generated from the server's own description, [openapi.json](openapi.json). A running server returns its
description at `GET /openapi.json`. [The server](server.md) explains how the routes work together. With a key, every route
that lists a 401 below requires `Authorization: Bearer …` or `x-api-key`. Required fields are marked with *.

## Errors

Every error is a JSON object: `{"error": {"message", "type", "param", "code"}}`, on Anthropic's routes with an additional
`"type": "error"`.

"""


def on_config(config: MkDocsConfig) -> None:
    config.mdx_configs["toc"] = {
        "slugify": slugify(case="lower"),
        "permalink": True,
        "toc_depth": 3,
    }  # anchors as on code-hosting sites


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(_outside()):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    described = document(ROUTES, __version__, keys=True)
    files.append(File.generated(config, "openapi.json", content=json.dumps(described)))
    files.append(File.generated(config, "http-api.md", content=HTTP_API + "\n".join(_http_api(described))))
    return files


def _outside() -> set[Path]:
    pages = {*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"}
    linked = {
        (page.parent / target).resolve()
        for page in pages
        for _, target in LINK.findall(page.read_text(encoding="utf-8"))
    }
    return {path for path in linked | pages if path.is_file() and not path.is_relative_to(DOCS)}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are right on the site, where the files from outside stand beside those of this folder."""
    source, site = Path(page.file.abs_src_path or DOCS / page.file.src_uri), Path(page.file.src_uri).parent

    def moved(link: re.Match[str]) -> str:
        path = (source.parent / link[2]).resolve()
        if not path.is_file():
            return link[0]
        return link[1] + os.path.relpath(path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT), site)

    return LINK.sub(moved, markdown)


# --- the HTTP API


def _http_api(described: Mapping[str, Any]) -> Iterator[str]:
    operations = [
        (f"{method.upper()} {path}", each)
        for path, methods in described["paths"].items()
        for method, each in methods.items()
    ]
    failures = {
        status: each
        for _, operation in operations
        for status, each in operation["responses"].items()
        if status != "200"
    }
    yield from _table(
        ("status", "when"), [(_status(status), each["description"]) for status, each in sorted(failures.items())]
    )
    for name, operation in operations:
        yield from _operation(name, operation, described["components"]["schemas"])


def _operation(name: str, operation: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n## {name}\n\n{operation['summary'].capitalize()}.\n"
    if parameters := operation.get("parameters"):
        yield from _table(
            ("parameter", "in", "type"),
            [(f"`{each['name']}`", each["in"], _said(each["schema"])) for each in parameters],
        )
    if body := operation.get("requestBody"):
        ((kind, content),) = body["content"].items()
        yield f"\n**Body**, `{kind}`:\n"
        required = set(content["schema"].get("required", ()))
        fields = content["schema"]["properties"].items()
        rows = [
            (f"`{each}`{' *' if each in required else ''}", _said(field), field.get("description", ""))
            for each, field in fields
        ]
        yield from _table(("field", "type", "meaning"), rows)
        yield f"\n```json\n{json.dumps(content['example'], indent=2, ensure_ascii=False)}\n```\n"
    for kind, content in operation["responses"].get("200", {}).get("content", {}).items():
        yield f"\n**Answer**, `{kind}`{': ' + content['schema']['description'] if 'description' in content['schema'] else ''}\n"
        if rows := list(_fields(content["schema"], parts)):
            yield from _table(("field", "type"), rows)
    yield f"\n**Failures**: {', '.join(status for status in operation['responses'] if status != '200')}.\n"


def _fields(schema: Mapping[str, Any], parts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name and type of each field, those of objects within by dotted names. ``parts``: the document's schemas."""
    schema = parts[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    for name, field in schema.get("properties", {}).items():
        yield f"`{prefix}{name}`", _said(field)
        held = next((each for each in field.get("anyOf", ()) if each != {"type": "null"}), field)
        inner = held.get("items", held)
        yield from _fields(inner, parts, f"{prefix}{name}{'[]' if 'items' in held else ''}.")


def _said(schema: Mapping[str, Any]) -> str:
    """A type in words, with its bounds."""
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_said(each) for each in choices if each != {"type": "null"}))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(each)}`" for each in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "object" if "$ref" in schema else "any value")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array":
        return f"list of {_said(schema.get('items', {}))}"
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "maxLength": "characters: up to"}
    said = [f"{word} {schema[name]:,.12g}" for name, word in bounds.items() if name in schema]
    return f"{kind}, {' '.join(said)}" if said else kind


def _status(status: str) -> str:
    return f"{status} {HTTPStatus(int(status)).phrase}"


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""
