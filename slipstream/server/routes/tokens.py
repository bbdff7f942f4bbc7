"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from slipstream.server.failures import ApiError
from slipstream.server.messages import plain_message
from slipstream.server.service import Service
from slipstream.server.sse import JsonResponse
from slipstream.server.wire.tokens import DetokenizeBody, TokenizeBody


def token_routes(service: Service) -> APIRouter:
    """Text to token ids and back."""
    router = APIRouter()

    @router.post("/tokenize", summary="The token ids of a text or a conversation")
    async def tokenize(body: TokenizeBody) -> Response:
        service.check_model(body.model)
        tokens = await service.off_loop(len(body.prompt or body.messages or ""), _tokens, service, body)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": service.llm.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.token_text(token) for token in tokens]
        return JsonResponse(answer)

    @router.post("/detokenize", summary="The text of token ids")
    async def detokenize(body: DetokenizeBody) -> Response:
        service.check_model(body.model)
        vocabulary = service.llm.model.config.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocabulary:
                raise ApiError(400, f"tokens: there is no token {token} (valid: 0 to {vocabulary - 1})", param="tokens")
        text = await service.off_loop(len(body.tokens), service.tokenizer.decode, body.tokens, skip_special=False)
        return JsonResponse({"prompt": text})

    return router


def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    if body.messages is None:
        assert body.prompt is not None
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise ApiError(400, f"{name} needs messages", param=name)
        return service.tokenizer.encode(body.prompt, add_special=body.add_special_tokens is not False)
    if body.add_special_tokens:
        raise ApiError(400, "add_special_tokens: a chat template writes its own", param="add_special_tokens")
    continues = bool(body.continue_final_message)
    (prompt,) = service.llm.chat_prompts(
        [plain_message(message, place) for place, message in enumerate(body.messages)],
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        tools=[tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return prompt
