"""The settings of formats, by which a recipe says what a tokenizer cannot."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class AgentFormatOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a format is told beside the tokenizer."""

    template_options: Annotated[
        dict[str, Any],
        Meta(description="variables of the model's chat template, such as enable_thinking (chatml and llama3)"),
    ] = {}
    renderer: Annotated[
        str, Meta(description="of kind renderers: the name of its renderer, such as glm-4.5, or a model's hub id")
    ] = ""
    tool: Annotated[
        str, Meta(description="of kind plain: the name of the tool that answers call; '': the only one of the call")
    ] = ""
    call_begin: Annotated[
        str, Meta(description="of kind plain: what stands before a tool call's argument; '': there are no tools")
    ] = ""
    call_end: Annotated[str, Meta(description="of kind plain: the one token that ends a tool call and its turn")] = ""
    result_begin: Annotated[str, Meta(description="of kind plain: what stands before a tool's answer")] = ""
    result_end: Annotated[str, Meta(description="of kind plain: what stands behind a tool's answer")] = ""
    input_begin: Annotated[
        str, Meta(description="of kind plain: what stands before a message of the user or the system")
    ] = ""
    input_end: Annotated[
        str, Meta(description="of kind plain: what stands behind a message of the user or the system")
    ] = ""
    unknown_character: Annotated[
        str,
        Meta(description="of kind plain: stands for characters that the tokenizer lacks; '': such texts are refused"),
    ] = ""
