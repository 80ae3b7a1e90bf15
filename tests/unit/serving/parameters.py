"""How each sampling parameter is served, by the test that sends it.

``docs/reference/sampling_parameters.md`` is made from this; ``test_parameters.py`` checks it.
"""

_FILTER = "exact: the same distribution"
_SEED = "exact: the same tokens if no request of the batch has top-k, top-p or min-p"
_SERVED = {
    "test_exact.py::test_a_seed_gives_the_baselines_tokens": {
        "temperature": "exact",
        "top_k": _FILTER,
        "top_p": _FILTER,
        "min_p": _FILTER,
        "logit_bias": "exact",
    },
    "test_exact.py::test_a_random_drafter_changes_nothing": {"sampling_seed": _SEED},
    "test_exact.py::test_openais_seed_is_the_seed": {"seed": _SEED},
    "test_exact.py::test_choices_without_a_seed_differ": {"n": "exact"},
    "test_exact.py::test_penalties_are_exact_at_temperature_zero": {
        "frequency_penalty": "exact",
        "presence_penalty": "exact",
        "repetition_penalty": "exact",
        "min_new_tokens": "exact",
    },
    "test_exact.py::test_grammar_bias_penalties_and_logprobs_together": {"json_schema": "exact"},
    "test_api.py::test_masks_and_texts_are_the_baselines": {
        "regex": "exact: the same mask",
        "ebnf": "exact: the same mask",
        "structural_tag": "exact: the same mask",
        "skip_special_tokens": "host: text only",
        "spaces_between_special_tokens": "host: text only",
        "no_stop_trim": "host: text only",
    },
    "test_exact.py::test_custom_processors_see_every_token": {"custom_params": "exact"},
    "test_api.py::test_openais_own_names_of_chat_parameters_are_the_baselines": {
        "logprobs": "exact",
        "top_logprobs": "exact",
        "max_completion_tokens": "host: `max_new_tokens`",
        "response_format": "exact: the same mask",
    },
    "test_api.py::test_length_limits_inside_a_block": {"max_new_tokens": "host"},
    "test_api.py::test_stop_strings_and_tokens": {
        "stop": "host",
        "stop_token_ids": "host",
        "stop_regex": "host: as `stop`",
    },
    "test_api.py::test_eos_ends_the_answer": {"ignore_eos": "host"},
    "test_api.py::test_a_stream_interval_holds_back_tokens_and_changes_no_text": {
        "stream_interval": "host: text only"
    },
    "test_api.py::test_openais_legacy_completions_are_the_baselines": {
        "max_tokens": "host: `max_new_tokens`",
        "min_tokens": "exact: `min_new_tokens`",
        "echo": "host: text only",
        "suffix": "host: SGLang uses it in completion templates only",
        "best_of": "ignored by SGLang",
    },
    "test_api.py::test_openai_streams_equal_the_whole_answer": {"stream": "host: text only"},
    "test_api.py::test_sglang_itself_refuses_beams_and_watermarks": {
        "beam_width": "refused by SGLang with any speculation",
        "watermark": "refused by SGLang at start with any algorithm of a plugin",
    },
    "test_api.py::test_hidden_states_get_400_and_the_server_goes_on": {
        "return_hidden_states": "refused with HTTP 400"
    },
    "test_broken_rows.py::test_a_broken_row_does_not_end_its_batchmates_sampling_mask": {
        "return_sampling_mask": "exact; SGLang refuses it with `min_p`, and when sampling without "
        "a finite `top_k`"
    },
}
# Parameter to how it is served and the test.
PARAMETERS = {
    name: (how, f"tests/engine/{test}")
    for test, names in _SERVED.items()
    for name, how in names.items()
}
