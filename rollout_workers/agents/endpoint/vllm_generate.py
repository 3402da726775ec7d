"""vLLM's generation from tokens to tokens, for agents that keep the tokens themselves."""

from collections.abc import Iterable
from typing import Any

from headway.rollout_workers.agents.calls import CallRefusedError, ChatAnswer, ChatCall, Session

from .dialect import Asked, OpenAIErrors
from .fields import NO_EFFECT, Fields, flag, mapping, names, refusal, sampling, text, whole_number
from .native import token_ids
from .openai_chat import usage

FIELDS = Fields(
    read=names("token_ids sampling_params request_id stream return_token_ids output_mode"),
    harmless=names("model priority cache_salt stream_options token_offsets reasoning_ended reasoning_parser_kwargs"),
    no_effect=frozenset(),
    refused={"features": "the model reads text alone", "content_parts": "the model reads text alone"},
)
SAMPLING_PARAMS = Fields(
    read=names("max_tokens temperature top_p top_k seed logprobs"),
    harmless=names("detokenize output_kind skip_special_tokens spaces_between_special_tokens"),
    no_effect=frozenset(NO_EFFECT),
)


class VllmGenerate(OpenAIErrors):
    """The dialect of `POST /inference/v1/generate`."""

    def read(self, body: dict[str, Any], *, ignores_sampling: bool) -> Asked:
        """Return what a request asks."""
        fields = FIELDS.check(body, ignores_sampling=False)
        if flag(fields, "stream"):
            raise refusal("stream", "tokens come in one response here")
        if fields.get("output_mode", "tokens") != "tokens":
            raise refusal("output_mode", "tokens alone are answered here")
        text(fields.get("request_id", ""), "request_id")
        given = mapping(fields.get("sampling_params", {}), "sampling_params")
        params = SAMPLING_PARAMS.check(given, ignores_sampling=ignores_sampling, path="sampling_params.")
        if (whole_number(params, "logprobs", 0) or 0) > 1:
            raise refusal("sampling_params.logprobs", "the logprobs of the sampled tokens are known alone: ask for 1")
        read, most = token_ids(fields.get("token_ids"), "token_ids"), whole_number(params, "max_tokens", 1)
        call = ChatCall(prompt_token_ids=read, max_tokens=most, **sampling(params))
        return Asked(call=call, fields=fields | {"logprobs": "logprobs" in params})

    def answer(self, asked: Asked, answer: ChatAnswer, session: Session) -> dict[str, Any]:
        """Return the body of a response."""
        choice: dict[str, Any] = {"index": 0, "token_ids": answer.token_ids, "logprobs": None, "stop_reason": None}
        choice["finish_reason"] = "length" if answer.finish_reason == "length" else "stop"
        if asked.fields["logprobs"]:
            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
            content = [{"token_id": one, "logprob": logprob, "top_logprobs": []} for one, logprob in pairs]
            choice["logprobs"] = {"content": content}
        head = {"request_id": asked.fields.get("request_id") or answer.id, "model": session.model}
        whole: dict[str, Any] = {**head, "choices": [choice], "usage": usage(answer), "output_mode": "tokens"}
        return whole | ({"prompt_token_ids": answer.prompt_token_ids} if flag(asked.fields, "return_token_ids") else {})

    def events(self, asked: Asked, answer: ChatAnswer, session: Session) -> Iterable[bytes]:
        """Refuse: no request of this dialect streams."""
        raise CallRefusedError("tokens come in one response here", "stream")
