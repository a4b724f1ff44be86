"""Wire types: a decoded body becomes a checked request, or an error that names the field. One file a family of routes, one validator.

What lives here: which fields a route takes and how they map to SamplingParams. What may not: HTTP, the bounds of sampling
parameters (sampling_params.py checks them once for every route), rendering of answers.
"""

from headrace.server.protocol.chat import ChatRequest, parse_chat
from headrace.server.protocol.completion import CompletionRequest, parse_completion
from headrace.server.protocol.sampling import AnswerOptions, TemplateOptions
from headrace.server.protocol.tokens import DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize

__all__ = [
    "AnswerOptions",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "TemplateOptions",
    "TokenizeRequest",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_tokenize",
]
