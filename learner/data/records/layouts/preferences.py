"""Rows that hold a prompt with completions of which one is better: pairs, ranked lists, and lists with scores."""

from itertools import combinations

from headway.learner.data.records.base import Content, Message, Preference, RowError, columns_of, shown
from headway.learner.data.texts.messages import OPENING, check_turns

from .reader import RowReader, alike, alpaca_prompt, said


def preference(reader: RowReader) -> list[Preference]:
    chosen, rejected = reader.content("chosen"), reader.content("rejected")
    if isinstance(chosen, list) and isinstance(rejected, list) and _begin_with_prompt(reader, chosen, rejected):
        return _pair(_without_prompt(reader, chosen, rejected), reader)
    if "prompt" not in reader.row:
        raise reader.error(
            "without a prompt",
            f"there is no 'prompt', and 'chosen' and 'rejected' are texts (the row has {columns_of(reader.row)})",
            "Add a column 'prompt', or write whole conversations as lists of messages.",
        )
    return _pair(alike(reader, "prompt", "chosen", "rejected"), reader)


def _begin_with_prompt(reader: RowReader, *conversations: list[Message]) -> bool:
    """Returns whether conversations begin with the prompt, which a column may state, too."""
    prompt = reader.content("prompt") if "prompt" in reader.row else ""
    if isinstance(prompt, str):
        return not prompt or all(each[0]["role"] in (*OPENING, "user") for each in conversations)
    has_system = prompt[0]["role"] in OPENING
    bare = [each[1:] if each[0]["role"] in OPENING and not has_system else each for each in conversations]
    return all(each[: len(prompt)] == prompt for each in bare)


def _without_prompt(reader: RowReader, chosen: list[Message], rejected: list[Message]) -> list[Content]:
    """Returns the prompt and both completions of conversations that may begin with it."""
    common = next((n for n, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(chosen), len(rejected)) if common is None else common
    prompt, first, second = chosen[:common], chosen[common:], rejected[common:]
    if not first and not second:
        raise _no_difference(reader)
    if not first or not second or not prompt or any(turn["role"] != "assistant" for turn in (first[0], second[0])):
        raise reader.error(
            "without a common prompt",
            f"'chosen' and 'rejected' have their first {common} messages in common, and an assistant's turn does not"
            " follow in both",
            "Both must answer the same prompt: give it in a column 'prompt', or as the same first messages of both.",
        )
    for completion in (first, second):
        check_turns([*prompt, *completion], reader.place, ends_with="assistant")
    return [prompt, first, second]


def _pair(contents: list[Content], reader: RowReader) -> list[Preference]:
    prompt, chosen, rejected = contents
    if chosen == rejected:
        raise _no_difference(reader)
    return [
        Preference(
            prompt=prompt,
            chosen=chosen,
            rejected=rejected,
            margin=_margin(reader),
            place=reader.place,
        )
    ]


def _no_difference(reader: RowReader) -> RowError:
    return reader.error(
        "whose completions do not differ",
        "the chosen completion equals the rejected one, so there is nothing to prefer",
        "Leave the record out.",
    )


def _margin(reader: RowReader) -> float:
    """Returns `margin`, or the gap between the columns `score_chosen` and `score_rejected`; 0 without them."""
    if "margin" in reader.row:
        return reader.number(reader.row["margin"], "margin")
    if "score_chosen" in reader.row and "score_rejected" in reader.row:
        better, worse = (reader.number(reader.row[name], name) for name in ("score_chosen", "score_rejected"))
        return better - worse
    return 0.0


def conversations_preference(reader: RowReader) -> list[Preference]:
    return _after(reader.messages("conversations"), reader)


def alpaca_preference(reader: RowReader) -> list[Preference]:
    return _after(alpaca_prompt(reader), reader)


def _after(prompt: list[Message], reader: RowReader) -> list[Preference]:
    """Returns the pair of columns `chosen` and `rejected` after a prompt."""
    check_turns(prompt, reader.place, ends_with="prompt")
    answers = [reader.content(column) for column in ("chosen", "rejected")]
    first, second = (answer if isinstance(answer, list) else [said("assistant", answer)] for answer in answers)
    for completion in (first, second):
        check_turns([*prompt, *completion], reader.place, ends_with="assistant")
    return _pair([prompt, first, second], reader)


def message_pair(reader: RowReader) -> list[Preference]:
    chosen, rejected = reader.messages("chosen_messages"), reader.messages("rejected_messages")
    return _pair(_without_prompt(reader, chosen, rejected), reader)


def ranked(reader: RowReader) -> list[Preference]:
    """Returns all pairs of a list that has the best response first."""
    prompt = _prompt_of_list(reader)
    answers = _answers(reader, "responses")
    return [
        Preference(
            prompt=prompt,
            chosen=_answer(prompt, better),
            rejected=_answer(prompt, worse),
            place=reader.place,
        )
        for better, worse in combinations(answers, 2)
        if better != worse
    ] or _nothing_to_prefer(reader)


def scored(reader: RowReader) -> list[Preference]:
    """Returns all pairs of responses with different scores, each with the gap as its margin."""
    name = "response" if "response" in reader.row else "responses"
    scores_name = next(column for column in ("score", "scores", "rewards") if column in reader.row)
    prompt, answers, stated = _prompt_of_list(reader), _answers(reader, name), reader.row[scores_name]
    if not isinstance(stated, list) or len(stated) != len(answers):
        count = len(stated) if isinstance(stated, list) else shown(stated)
        raise reader.error(
            "with unequal numbers of responses and scores",
            f"{name!r} has {len(answers)} items, and {scores_name!r} has {count}",
            "Write one score for each response.",
        )
    scores = [reader.number(score, scores_name) for score in stated]
    ranked = sorted(zip(scores, answers, strict=True), key=lambda pair: -pair[0])
    return [
        Preference(
            prompt=prompt,
            chosen=_answer(prompt, better),
            rejected=_answer(prompt, worse),
            margin=high - low,
            place=reader.place,
        )
        for (high, better), (low, worse) in combinations(ranked, 2)
        if high > low and better != worse
    ] or _nothing_to_prefer(reader)


def _prompt_of_list(reader: RowReader) -> Content:
    if "instruction" in reader.row:
        return alpaca_prompt(reader)
    return reader.content("query" if "query" in reader.row else "prompt")


def _answers(reader: RowReader, column: str) -> list[str]:
    values = reader.row[column]
    if not isinstance(values, list) or len(values) < 2:
        raise reader.error(
            "with fewer than two responses",
            f"{column!r} is {shown(values)}",
            "A preference needs a list of at least two responses.",
        )
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise reader.error(
                "with an empty response", f"{column!r} has the item {shown(value)}", "Write a text, or leave it out."
            )
    return values


def _answer(prompt: Content, text: str) -> Content:
    return text if isinstance(prompt, str) else [said("assistant", text)]


def _nothing_to_prefer(reader: RowReader) -> list[Preference]:
    raise reader.error(
        "whose responses are equally good",
        "no two responses differ in text and score, so there is nothing to prefer",
        "Leave the record out.",
    )
