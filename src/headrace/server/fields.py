"""The request fields of every generating route, as tables: what each may hold, and which are known but refused.

What lives here: data (names, JSON types, meanings), from which requests are checked and a schema can be generated.
What may not: parsing (protocol/), values' bounds (SamplingParams holds them once for all routes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Use(Enum):
    """What becomes of a field's value."""

    SAMPLING = "sampling"  # handed to SamplingParams, which checks it
    OPTION = "option"  # read by protocol/
    LABEL = "label"  # checked for type; changes nothing in the answer
    REFUSED = "refused"  # known elsewhere, not supported here: an error unless neutral


@dataclass(frozen=True, slots=True)
class Field:
    """One field. ``schema`` is its JSON-schema type. ``neutral`` values of a refused field ask for nothing and pass; ``code`` is of its error."""

    name: str
    use: Use
    schema: str | tuple[str, ...] = "string"
    help: str = ""
    neutral: tuple[Any, ...] = field(default=())
    code: str = "unsupported_parameter"


def _sampling(name: str, schema: str | tuple[str, ...], help: str) -> Field:
    return Field(name, Use.SAMPLING, schema, help)


def _option(name: str, schema: str | tuple[str, ...], help: str) -> Field:
    return Field(name, Use.OPTION, schema, help)


def _label(name: str, schema: str | tuple[str, ...] = "string") -> Field:
    return Field(name, Use.LABEL, schema, "accepted; changes nothing in the answer")


def _refused(name: str, remedy: str, *neutral: Any) -> Field:
    return Field(name, Use.REFUSED, help=remedy, neutral=neutral)


# Of every route that generates.
_GENERATING = (
    _option("model", "string", "a name from /v1/models; without it, the first"),
    _option("stream", "boolean", "answer as server-sent events"),
    _option("logit_bias", "object", "token id → number added to its logit"),
    _option("priority", "integer", "lower goes first; needs --scheduling-policy priority"),
    _option("expected_ttft", "number", "seconds to the first token that the reader expects; needs --scheduling-policy qoe or deadline"),
    _option("expected_tpot", "number", "seconds from one token to the next; needs --scheduling-policy qoe or deadline"),
    _option("reading_speed", "number", "tokens a second that the reader reads; needs --scheduling-policy qoe or deadline"),
    _option("cache_salt", "string", "requests with different salts never share cached prefixes"),
    _option("truncate_prompt_tokens", "integer", "keep only the last so many tokens of the prompt; -1: as many as fit"),
    _option("explain", "boolean", "add an explain block: where the time went"),
    _sampling("temperature", "number", "0 is greedy"),
    _sampling("top_p", "number", "smallest set of tokens with this much probability"),
    _sampling("top_k", "integer", "the k most probable tokens; 0 or -1: all"),
    _sampling("min_p", "number", "tokens at least this probable, relative to the best"),
    _sampling("presence_penalty", "number", "against tokens that were generated"),
    _sampling("frequency_penalty", "number", "against tokens, by how often they were generated"),
    _sampling("repetition_penalty", "number", "divides the logits of tokens seen"),
    _sampling("seed", "integer", "same seed, same request: same tokens"),
    _sampling("stop_token_ids", "array", "token ids that end the answer"),
    _sampling("include_stop_str_in_output", "boolean", "keep the stop string in the text"),
    _sampling("ignore_eos", "boolean", "go on past the end-of-sequence token"),
    _sampling("min_tokens", "integer", "no end before so many tokens"),
    _sampling("skip_special_tokens", "boolean", "leave special tokens out of the text"),
    _sampling("bad_words", "array", "strings never to generate"),
    _sampling("allowed_token_ids", "array", "the only token ids to generate"),
    _sampling(
        "repetition_detection", ("boolean", "object"), "end an answer that loops: true, or max_pattern_size, min_pattern_size, min_count, min_tokens"
    ),
    _option("structured_outputs", "object", "what the answer must be: one of json (a schema), json_object, regex, choice, grammar"),
    Field("user", Use.LABEL, "string", "who asks: a tenant where --tenant-by says so; changes nothing in the answer"),
    _label("metadata", "object"),
    _label("prompt_cache_key"),
    _label("safety_identifier"),
    _label("service_tier"),
    _refused("best_of", "ask for n answers and choose among them"),
    _refused("use_beam_search", "beam search is not offered; use n with a temperature", False),
    _refused("length_penalty", "it belongs to beam search, which is not offered", 1, 1.0),
    _refused("spaces_between_special_tokens", "text is decoded as the tokenizer says; leave it out", True),
    _refused("logits_processors", "code is never taken from a request; leave it out", []),
    _refused("return_tokens_as_token_ids", "use return_token_ids", False),
    _refused("request_id", "send it as the X-Request-Id header"),
    _refused("mm_processor_kwargs", "text models have no media processor; leave it out", {}),
    _refused("kv_transfer_params", "blocks are not handed between servers yet; leave it out"),
    _refused("vllm_xargs", "there are no such extensions here; leave it out", {}),
)

# Of OpenAI's two older routes.
_COMMON = (
    *_GENERATING,
    _option("stream_options", "object", "include_usage: one last chunk with usage; continuous_usage_stats: that, and usage so far in every chunk"),
    _option("max_tokens", "integer", "most tokens to generate"),
    _option("prompt_logprobs", "integer", "log probabilities of the prompt's tokens, with the k best of each"),
    _option("return_token_ids", "boolean", "add prompt_token_ids and each choice's token_ids"),
    _sampling("n", "integer", "answers to each prompt"),
    _sampling("stop", ("string", "array"), "strings that end the answer"),
    _option("response_format", "object", "what the answer must be: type text, json_object or json_schema"),
    _refused("guided_json", "use structured_outputs"),
    _refused("guided_regex", "use structured_outputs"),
    _refused("guided_choice", "use structured_outputs"),
    _refused("guided_grammar", "use structured_outputs"),
)

_THINKING = _option("thinking_token_budget", "integer", "most tokens of reasoning; then it is closed and the answer goes on")

# How a conversation's prompt ends.
_ENDING = (
    _option("add_generation_prompt", "boolean", "open the assistant's turn at the prompt's end; the default, unless a message is continued"),
    _option("continue_final_message", "boolean", "leave the last message open at its end, for the model to go on with it"),
)

CHAT = (
    *_COMMON,
    _option("messages", "array", "the conversation"),
    _option("max_completion_tokens", "integer", "most tokens to generate"),
    _option("logprobs", "boolean", "log probabilities of the generated tokens"),
    _option("top_logprobs", "integer", "the k most probable tokens of each position; needs logprobs"),
    _option("tools", "array", "functions the model may call; given to the chat template"),
    _option("tool_choice", ("string", "object"), "auto, none, required, one function by name, or allowed_tools"),
    _option("chat_template_kwargs", "object", "further variables for the chat template"),
    *_ENDING,
    _THINKING,
    _option("echo", "boolean", "with continue_final_message: begin the answer with that message"),
    _option("parallel_tool_calls", "boolean", "false: one call at most"),
    _option("reasoning_effort", "string", "given to the chat template (none: as enable_thinking false)"),
    _refused("functions", "use tools", []),
    _refused("function_call", "use tool_choice", "none", "auto"),
    _refused("modalities", "this server answers in text", ["text"]),
    _refused("audio", "this server answers in text"),
    _refused("prediction", "predicted outputs are not supported; leave it out"),
    _refused("store", "chat completions are not stored; use /v1/responses, or leave it out", False),
    _refused("verbosity", "say it in a message"),
    _refused("moderation", "the server's own rules decide (--moderation); leave it out"),
    _refused("web_search_options", "this server fetches nothing; leave it out"),
    _refused("prompt_cache_retention", "prefixes stay cached while memory lasts; leave it out"),
    _refused("prompt_cache_options", "prefixes are cached automatically; leave it out"),
    _refused("chat_template", "a template comes from the model or --chat-template, never from a request"),
    _refused("documents", "give them to the template in chat_template_kwargs"),
    _refused("add_special_tokens", "the chat template writes the special tokens", False),
    _refused("include_reasoning", "reasoning comes in a field of its own; leave it out", True),
    _refused("prompt", "this route takes messages; send a prompt to /v1/completions"),
    _refused("input", "this route takes messages; send input to /v1/responses"),
)

COMPLETION = (
    *_COMMON,
    _option("prompt", ("string", "array"), "text, token ids, or a list of either"),
    _option("echo", "boolean", "put the prompt before the answer"),
    _option("logprobs", "integer", "log probabilities of the generated tokens, with the k best of each"),
    _option("add_special_tokens", "boolean", "begin a text prompt as the tokenizer says (BOS)"),
    _refused("suffix", "filling in the middle is not supported; leave it out", ""),
    _refused("prompt_embeds", "give the prompt as text or token ids"),
    _refused("messages", "this route takes a prompt; send messages to /v1/chat/completions"),
    _refused("input", "this route takes a prompt; send input to /v1/responses"),
)

# Of the two routes that give one answer made of parts: what OpenAI's older routes have and these answers have no place for.
_IN_PARTS = (
    _refused("n", "one request has one answer here; send several", 1),
    _refused("stream_options", "usage always comes with the last event; leave it out", {}, {"include_usage": True}, {"include_obfuscation": False}),
    _refused("prompt_logprobs", "use /v1/chat/completions"),
    _refused("return_token_ids", "use /v1/chat/completions", False),
    _refused("response_format", "use structured_outputs", {"type": "text"}),
    _refused("chat_template", "a template comes from the model or --chat-template, never from a request"),
)

_MESSAGES_PROMPT = (
    _option("messages", "array", "the conversation: user and assistant in turn, as text or blocks of text, tool_use, tool_result and thinking"),
    _option("system", ("string", "array"), "the system prompt, as text or blocks of text"),
    _option("tools", "array", "functions the model may call, each with an input_schema"),
    _option("tool_choice", "object", "type auto, none, any or tool"),
    _option("output_config", "object", "format: what the answer must be, of type json_schema; effort: the template's reasoning_effort"),
    _option("thinking", "object", "type disabled, enabled or adaptive: the template's enable_thinking; budget_tokens: as thinking_token_budget"),
    _option("chat_template_kwargs", "object", "further variables for the chat template"),
    _label("cache_control", "object"),
    _refused("speed", "there is one speed, the best; leave it out", "standard"),
    _refused("context_management", "nothing is edited out of a conversation; send what the model shall see"),
    _refused("mcp_servers", "this server calls nobody; run the tools yourself", []),
    Field("thread", Use.REFUSED, help="conversations are not held here; send all messages", code="thread_unsupported_request"),
    _refused("prompt", "this route takes messages; send a prompt to /v1/completions"),
    _refused("input", "this route takes messages; send input to /v1/responses"),
    _refused("user_profile_id", "nothing is stored; leave it out"),
    _refused("workspace_id", "nothing is stored; leave it out"),
)

MESSAGES = (
    *_GENERATING,
    *_IN_PARTS,
    *_MESSAGES_PROMPT,
    _option("max_tokens", "integer", "most tokens to generate; required"),
    _option("stop_sequences", "array", "strings that end the answer"),
    _THINKING,
    _label("inference_geo"),
    _refused("container", "no code is run here; leave it out"),
    _refused("diagnostics", "leave it out; /metrics tells of the cache"),
    _refused("stop", "use stop_sequences"),
)

COUNT_TOKENS = (
    _option("model", "string", "a name from /v1/models; without it, the first"),
    *_MESSAGES_PROMPT,
)

RESPONSES = (
    *_GENERATING,
    *_IN_PARTS,
    _option("input", ("string", "array"), "a text, or items: messages, function_call, function_call_output, reasoning"),
    _option("instructions", "string", "a system message before the input"),
    _option("max_output_tokens", "integer", "most tokens to generate"),
    _option("tools", "array", "functions the model may call"),
    _option("tool_choice", ("string", "object"), "auto, none, required, one function by name, or allowed_tools"),
    _THINKING,
    _option("text", "object", "format: what the answer must be, of type text, json_object or json_schema"),
    _option("reasoning", "object", "effort: given to the chat template as reasoning_effort (none: as enable_thinking false)"),
    _option("chat_template_kwargs", "object", "further variables for the chat template"),
    _option("parallel_tool_calls", "boolean", "false: one call at most"),
    _sampling("stop", ("string", "array"), "strings that end the answer"),
    _refused("max_tokens", "use max_output_tokens"),
    _refused("messages", "this route takes input; send messages to /v1/chat/completions"),
    _option("store", "boolean", "keep the response in memory for a day at most, for previous_response_id and GET; the default"),
    _option("previous_response_id", "string", "a stored response whose conversation goes on with input"),
    _refused("conversation", "there are no conversation objects; use previous_response_id, or send the whole conversation as input"),
    _refused("prompt", "prompts are not stored; send the prompt itself as input"),
    _refused("background", "an answer is given on the connection that asked for it", False),
    _refused("include", "nothing further can be included; leave it out", []),
    _refused("truncation", "a prompt that does not fit is refused; use truncate_prompt_tokens", "disabled"),
    _refused("top_logprobs", "use /v1/chat/completions", 0),
    _refused("max_tool_calls", "tools are called by you, one answer at a time; leave it out"),
    _refused("context_management", "nothing is edited out of a conversation; send what the model shall see", []),
    _refused("moderation", "the server's own rules decide (--moderation); leave it out"),
    _refused("access_programs", "there are none; leave it out"),
    _refused("image", "text models make no images; leave it out"),
    _refused("prompt_cache_retention", "prefixes stay cached while memory lasts; leave it out"),
    _refused("prompt_cache_options", "prefixes are cached automatically; leave it out"),
)

TOKENIZE = (
    _option("model", "string", "a name from /v1/models; without it, the first"),
    _option("prompt", "string", "the text to encode"),
    _option("messages", "array", "or a conversation, through the chat template"),
    _option("tools", "array", "functions for the chat template"),
    _option("add_special_tokens", "boolean", "begin as the tokenizer says (BOS); default true for text, false for messages"),
    *_ENDING,
    _option("chat_template_kwargs", "object", "further variables for the chat template"),
    _option("return_token_strs", "boolean", "add each token's text"),
    _refused("chat_template", "a template comes from the model or --chat-template, never from a request"),
)

DETOKENIZE = (
    _option("model", "string", "a name from /v1/models; without it, the first"),
    _option("tokens", "array", "token ids to decode"),
    _option("skip_special_tokens", "boolean", "leave special tokens out of the text"),
)

NAMES = frozenset(field.name for table in (CHAT, COMPLETION, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE) for field in table)
