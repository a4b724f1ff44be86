"""Answers as structs: what a client may rely on finding in them. /openapi.json describes them from here.

What lives here: types, and the values that are always the same. What may not: request bodies (dialects/), rendering.

Every member is always there, but for those that are UNSET; an answer may have others beside them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Count = Annotated[int, Meta(ge=0)]
Object = dict[str, Any]


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    details: Object | UnsetType = UNSET


class Error(Struct):
    error: ErrorDetail


class AnthropicError(Error):
    type: Literal["error"] = "error"


class Status(Struct):
    status: str


class Sleeping(Struct):
    is_sleeping: bool


class Load(Struct):
    server_load: Count


class ServerInfo(Struct):
    version: str
    config: Object
    decisions: list[Object]
    engine: Object


class Version(Struct):
    version: str


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "headrace"
    root: str
    parent: str | None = None  # of an adapter: the model
    max_model_len: Count | None
    state: str  # awake or asleep; of several models, also loading, waking, failed …


class Models(Struct):
    data: Annotated[list[Model], Meta(min_length=1)]
    object: Literal["list"] = "list"


class Progress(Struct, kw_only=True):
    """Of a request."""

    id: str
    object: Literal["request"] = "request"
    client_request_id: str | None
    route: str
    model: str
    created: Count
    state: Literal["waiting", "running", "finished"]
    seconds: float
    prompt_tokens: Count
    completion_tokens: Count
    finish_reasons: list[str | None]
    prompts: Object | UnsetType = UNSET
    queue: Object | UnsetType = UNSET
    waits_for: Object | UnsetType = UNSET
    predicted_start: Object | UnsetType = UNSET
    preemptions: Count | UnsetType = UNSET
    explain: Object | UnsetType = UNSET


class ProgressList(Struct):
    data: list[Progress]
    object: Literal["list"] = "list"


class CachedTokens(Struct):
    cached_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


class PooledUsage(Struct):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(Struct):
    index: Count
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Embeddings(Struct):
    id: str
    created: Count
    model: str
    data: list[Embedding]
    usage: PooledUsage
    object: Literal["list"] = "list"


class Score(Struct):
    index: Count
    score: float
    object: Literal["score"] = "score"


class Scores(Struct):
    id: str
    created: Count
    model: str
    data: list[Score]
    usage: PooledUsage
    object: Literal["list"] = "list"


class RankedDocument(Struct):
    text: str


class Ranked(Struct):
    index: Count
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(Struct):
    id: str
    model: str
    usage: PooledUsage
    results: list[Ranked]


class Called(Struct):
    """``arguments`` of a function, ``input`` of a custom tool."""

    name: str
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class Call(Struct):
    id: str
    type: Literal["function", "custom"]
    function: Called | UnsetType = UNSET
    custom: Called | UnsetType = UNSET


class ChatMessage(Struct):
    """``content`` is null where the model only thought or called. Reasoning stands under both names that clients look
    for."""

    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[Call] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(Struct, kw_only=True):
    index: Count
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]
    stop_reason: str | int | None
    logprobs: Object | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    message: ChatMessage


class TextChoice(Choice, kw_only=True):
    text: str


class Completion(Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: Count
    model: str
    system_fingerprint: str
    choices: Annotated[list[TextChoice], Meta(min_length=1)]
    usage: Usage


class ChatCompletion(Completion, kw_only=True):
    object: Literal["chat.completion"]  # type: ignore[assignment]
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]  # type: ignore[assignment]


class Block(Struct):
    """Of a message of Anthropic's."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: Object | UnsetType = UNSET


class MessageUsage(Struct, kw_only=True):
    input_tokens: Count
    cache_creation_input_tokens: Count = 0
    cache_read_input_tokens: Count
    output_tokens: Count


class Message(Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"] | None
    stop_sequence: str | None
    usage: MessageUsage
    explain: Object | UnsetType = UNSET


class TokenCount(Struct):
    input_tokens: Count


class ReadTokens(Struct):
    cached_tokens: Count
    cache_write_tokens: Count = 0  # writing costs nothing


class WrittenTokens(Struct):
    reasoning_tokens: Count


class ResponseUsage(Struct):
    input_tokens: Count
    input_tokens_details: ReadTokens
    output_tokens: Count
    output_tokens_details: WrittenTokens
    total_tokens: Count


class Item(Struct):
    """Of a response: a message, reasoning or a call."""

    id: str
    status: Literal["in_progress", "incomplete", "completed"]
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[Object] | UnsetType = UNSET
    summary: list[Object] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class Incomplete(Struct):
    reason: Literal["max_output_tokens", "content_filter"]


class Response(Struct, kw_only=True):
    """The members from ``instructions`` on repeat what was asked for."""

    id: str
    object: Literal["response"] = "response"
    created_at: Count
    completed_at: Count | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: Object | None
    incomplete_details: Incomplete | None
    model: str
    output: list[Item]
    service_tier: str = "default"
    stop_reason: str | int | None
    system_fingerprint: str
    truncation: str = "disabled"
    usage: ResponseUsage | None
    instructions: str | None = None
    max_output_tokens: Count | None = None
    metadata: Object = {}
    previous_response_id: str | None = None
    store: bool = True
    parallel_tool_calls: bool = True
    reasoning: Object = {}
    temperature: float | None = None
    text: Object = {}
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float | None = None
    user: str | None = None
    explain: Object | UnsetType = UNSET


class Deleted(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class Tokens(Struct):
    count: Count
    max_model_len: Count
    tokens: list[int]
    token_strs: list[str] | None


class Tokenizer(Struct):
    tokenizer_class: str
    chat_template: str | None


class Prompt(Struct):
    prompt: str


class Document(Struct):
    openapi: str
    info: Object
    paths: Object
