"""/tokenize, /detokenize and /tokenizer_info: their fields, what is checked of them, and their answers.

What may not live here: tokenizers, prompts of routes that generate (generate.py).
"""

from __future__ import annotations

from array import array
from functools import partial

from headrace.errors import InvalidRequest, NotFound
from headrace.request import Given, check_token_ids
from headrace.server import generate
from headrace.server.dialects.body import Body, Conversation, Ids, Variables, read_ids
from headrace.server.dialects.chat import ChatBody, read_conversation
from headrace.server.dialects.conversation import Messages, Tools
from headrace.server.exchange import Exchange
from headrace.server.limits import TOKEN_BYTES
from headrace.server.service import Service
from headrace.server.wire import encode_list, encode_object


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = []
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Variables = {}
    return_token_strs: bool = False

    one_of = ("prompt", "messages")


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False


def parse_tokenize(raw: Given) -> tuple[TokenizeBody, Conversation | None]:
    """Raises InvalidRequest naming the field."""
    body = TokenizeBody.read(raw)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt", code="missing_required_parameter")
    if body.add_special_tokens is None:
        body.add_special_tokens = body.messages is None
    shared = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    return body, None if body.messages is None else read_conversation(
        raw, ChatBody(**{name: getattr(body, name) for name in shared})
    )


def parse_detokenize(raw: Given) -> DetokenizeBody:
    """Raises InvalidRequest naming the field."""
    body = DetokenizeBody.read(raw)
    body.tokens = read_ids("tokens", body.tokens)
    return body


async def tokenize(service: Service, exchange: Exchange) -> None:
    engine = service.model.engine
    body, conversation = await service.limits.bodies.read(exchange, parse_tokenize)
    service.model.check_model(body.model)
    if conversation is not None:
        parsed = await generate.render_chat(service, exchange, conversation)
        if body.add_special_tokens:
            parsed = await generate.encode_prompt(service, exchange, parsed.text or "", True)
    else:
        parsed = await generate.encode_prompt(service, exchange, body.prompt or "", bool(body.add_special_tokens))
    ids, tokenizer = parsed.token_ids or array("i"), engine.tokenizer if body.return_token_strs else None
    strings = None if tokenizer is None else encode_list(map(tokenizer.token_text, ids))
    longest = engine.info.max_sequence_tokens
    shown = {"count": len(ids), "max_model_len": longest, "tokens": encode_list(ids), "token_strs": strings}
    await exchange.reply_pieces(
        await service.limits.threads.run(TOKEN_BYTES * len(ids), lambda: list(encode_object(shown)), exchange.tenant)
    )


async def detokenize(service: Service, exchange: Exchange) -> None:
    engine = service.model.engine
    request = await service.limits.bodies.read(exchange, parse_detokenize)
    service.model.check_model(request.model)
    if engine.tokenizer is None:
        raise InvalidRequest("This model has no tokenizer; start the server with --tokenizer.", param="tokens")
    check_token_ids("tokens", request.tokens, engine.info.vocab_size)
    text = await service.limits.threads.run(
        len(request.tokens), partial(engine.tokenizer.decode, request.tokens, request.skip_special_tokens)
    )
    await exchange.reply_json({"prompt": text})


async def tokenizer_info(service: Service, exchange: Exchange) -> None:
    tokenizer = service.model.any_engine.tokenizer
    if tokenizer is None:
        raise NotFound("This model has no tokenizer; start the server with --tokenizer.", code="tokenizer_not_found")
    await exchange.reply_json(tokenizer.description)
