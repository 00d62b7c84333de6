"""The content of a request, and the requests for prefill and decode made from it. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GENERATING = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
"""Paths whose prompts are routed by cache, and handed over from prefill to decode."""
OTHERS = ("/v1/embeddings", "/v1/messages", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize")
READ_ONLY = ("/v1/models", "/version")
TOKENIZED_OF_COMPLETIONS: tuple[str, ...] = ("model", "prompt", "add_special_tokens")
TOKENIZED_OF_CHATS: tuple[str, ...] = (
    *("model", "messages", "tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
)
NOT_FOR_PREFILL = (
    *("best_of", "echo", "guided_json", "logprobs", "min_tokens", "n", "prompt_logprobs", "response_format"),
    *("stop_token_ids", "stream", "stream_options", "structured_outputs", "top_logprobs"),
)
"""Fields that change the generated tokens, never the prompt."""
HAND_OVER = ("do_remote_decode", "do_remote_prefill", "remote_attempt", "remote_device", "remote_node")
"""Keys of `kv_transfer_params` that the router sets: a client's own values could name any node."""


PARTS, NO_PARTS = ("content", "content_parts"), ("chat_template_kwargs", "input", "tools")
"""Fields with parts of messages, and fields whose content is the client's own."""


class WrongRequestError(ValueError):
    """No engine could answer this request; the message says why."""


@dataclass(frozen=True)
class Asked:
    """A request."""

    path: str
    body: dict[str, Any]

    @classmethod
    def parse(cls, path: str, body: bytes, *, media_names: bool = False) -> "Asked":
        """Parses a request. Raises `WrongRequestError` if the body, or its `kv_transfer_params`, is no JSON object. Without
        `media_names`, clients give no names to media."""
        try:
            found = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WrongRequestError(f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise WrongRequestError("the body is not a JSON object")
        params = found.get("kv_transfer_params")
        if params is not None and not isinstance(params, Mapping):
            raise WrongRequestError("`kv_transfer_params` is not a JSON object")
        if params:
            found["kv_transfer_params"] = {key: value for key, value in params.items() if key not in HAND_OVER}
        # vLLM reads them here too.
        sampling = found.get("sampling_params")
        for holder in (found.get("vllm_xargs"), sampling.get("extra_args") if isinstance(sampling, Mapping) else None):
            if isinstance(holder, dict):
                holder.pop("kv_transfer_params", None)
        if not media_names:
            if found.get("features") is not None and path == "/inference/v1/generate":
                raise WrongRequestError("`features` name images and other media: the router takes them with --media-names")
            drop_media_names(found)
        return cls(path, found)

    @property
    def model(self) -> str | None:
        """The model, or LoRA adapter, by name."""
        return text(self.body.get("model"))

    @property
    def salt(self) -> str | None:
        """The request's `cache_salt`."""
        return text(self.body.get("cache_salt"))

    def tokens(self) -> list[int] | None:
        """The prompt's tokens, if the request has them."""
        given = self.body.get("token_ids") or self.body.get("prompt")
        if isinstance(given, list) and given and all(type(token) is int and 0 <= token < 1 << 32 for token in given):
            return given
        return None

    def to_tokenize(self) -> dict[str, Any] | None:
        """The question to an engine for the prompt's tokens; None if the request does not have exactly one prompt of text."""
        if self.path == "/v1/completions" and isinstance(self.body.get("prompt"), str):
            keys = TOKENIZED_OF_COMPLETIONS
        elif self.path == "/v1/chat/completions" and only_text(self.body.get("messages")):
            keys = TOKENIZED_OF_CHATS
        else:
            return None
        return {key: self.body[key] for key in keys if key in self.body}

    def may_be_handed_over(self) -> bool:
        """Whether one engine may compute this prompt for another."""
        has_one_prompt = self.tokens() is not None or isinstance(self.body.get("prompt"), str) or "messages" in self.body
        return self.path in GENERATING and has_one_prompt and not self.body.get("use_beam_search")

    def for_prefill(self, attempt: int) -> dict[str, Any]:
        """The request that makes an engine compute the prompt, and one token."""
        body = self._with_params({"do_remote_decode": True, "remote_attempt": attempt})
        body = {key: value for key, value in body.items() if key not in NOT_FOR_PREFILL}
        if self.path == "/inference/v1/generate":
            sampling = body.get("sampling_params")
            sampling = dict(sampling) if isinstance(sampling, Mapping) else {}
            body["sampling_params"] = {key: value for key, value in sampling.items() if key not in NOT_FOR_PREFILL}
            body["sampling_params"]["max_tokens"] = 1
            return body
        body["max_tokens"] = 1
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        return body

    def for_decode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The request that continues from a prefill: `params` come from the prefill's answer, or name its node."""
        return self._with_params(params)

    def _with_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        own = self.body.get("kv_transfer_params") or {}
        return self.body | {"kv_transfer_params": {**own, **params}}


def drop_media_names(body: dict[str, Any]) -> None:
    """Drops the `uuid` of each part of a content: vLLM takes it for the identity of an image or another medium."""
    left: list[Any] = [body]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            for key, value in one.items():
                if key in PARTS and isinstance(value, list):
                    for part in value:
                        if isinstance(part, dict):
                            part.pop("uuid", None)
                if key not in NO_PARTS:
                    left.append(value)


def text(value: object) -> str | None:
    """The value, if it is a text."""
    return value if isinstance(value, str) and value else None


def only_text(messages: object) -> bool:
    """Whether messages are text only. The tokens of images or other media do not identify them."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal") for part in parts):
            return False
    return True
