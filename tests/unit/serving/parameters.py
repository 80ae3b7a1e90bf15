"""How each sampling parameter is served, by the test that sends it.

``docs/reference/sampling_parameters.md`` is made from this; ``test_parameters.py`` checks it.
"""

_SEED = "exact: the same tokens if no request of the batch has top-k, top-p or min-p"
_SERVED = {
    # Its cases are those of ``asking.py``.
    "test_exact.py::test_answers_are_the_baselines": {
        "temperature": "exact",
        "top_k top_p min_p": "exact: the same distribution",
        "logit_bias": "exact",
        "sampling_seed": _SEED,
        "n frequency_penalty presence_penalty repetition_penalty min_new_tokens": "exact",
        "json_schema": "exact",
        "regex ebnf": "exact: the same mask",
        "ignore_eos": "host",
    },
    "test_stress.py::test_a_processor_is_called_once_a_token": {"custom_params": "exact"},
    "test_exact.py::test_openais_seed_is_the_seed": {
        "seed": _SEED,
        "max_tokens": "host: `max_new_tokens`",
    },
    "test_exact.py::test_a_broken_row_ends_its_request_and_no_other": {
        "return_sampling_mask": "exact; SGLang refuses it with `min_p`, and when sampling without "
        "a finite `top_k`"
    },
    "test_api.py::test_texts_and_ends_are_the_baselines": {
        "structural_tag": "exact: the same mask",
        "skip_special_tokens spaces_between_special_tokens no_stop_trim": "host: text only",
        "stop stop_token_ids": "host",
        "stop_regex": "host: as `stop`",
    },
    "test_api.py::test_openais_chat_parameters_are_the_baselines": {
        "logprobs top_logprobs": "exact",
        "max_completion_tokens": "host: `max_new_tokens`",
        "response_format": "exact: the same mask",
    },
    "test_api.py::test_length_limits_inside_a_block": {"max_new_tokens": "host"},
    "test_api.py::test_a_stream_interval_holds_back_tokens_and_changes_no_text": {
        "stream_interval": "host: text only"
    },
    "test_api.py::test_openais_legacy_completions_are_the_baselines": {
        "min_tokens": "exact: `min_new_tokens`",
        "echo": "host: text only",
        "suffix": "host: SGLang uses it in completion templates only",
        "best_of": "ignored by SGLang",
    },
    "test_api.py::test_tool_calls_are_the_baselines": {"stream": "host: text only"},
    "test_api.py::test_what_would_end_the_server_gets_400": {
        "beam_width": "refused by SGLang with any speculation",
        "watermark": "refused by SGLang at start with any algorithm of a plugin",
        "return_hidden_states": "refused with HTTP 400",
    },
}
# Parameter to how it is served and the test.
PARAMETERS = {
    name: (how, f"tests/engine/{test}")
    for test, served in _SERVED.items()
    for names, how in served.items()
    for name in names.split()
}
