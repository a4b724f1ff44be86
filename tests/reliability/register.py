"""Every promised check and where it is kept: the table of docs/reliability.md, held against the tests that exist.

What lives here: data and its rendering. What may not: checks.

A test is named by file and name; what a row promises and no test holds yet is said in ``missing``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    HELD = "held"  # fast form in CI, a planted defect turns it red, the heavy form by one command where there is one
    PARTLY = "partly"  # tests hold a part; ``missing`` says what they do not
    WAITING = "waiting"  # what it is about is not built, or not part of one machine without media
    FAILING = "failing"  # a test or a figure says no; ``missing`` says why


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    promise: str
    status: Status
    tests: tuple[str, ...] = ()
    missing: str = ""


HELD, PARTLY, WAITING = Status.HELD, Status.PARTLY, Status.WAITING

# Short names of test files.
FILES: Mapping[str, str] = {
    "boundary": "tests/reliability/test_boundary.py",
    "budget": "tests/reliability/test_attacks_budget.py",
    "core": "tests/reliability/test_core.py",
    "lives": "tests/reliability/test_simulation.py",
    "figures": "tests/reliability/test_figures.py",
    "traffic": "tests/reliability/test_traffic.py",
    "life": "tests/reliability/test_life.py",
    "security": "tests/reliability/test_security.py",
    "soak": "tests/reliability/test_soak.py",
    "asked": "tests/reliability/test_grammar.py",
    "tenants": "tests/reliability/test_tenants.py",
    "schema": "tests/reliability/test_schema.py",
    "abuse": "tests/server/test_abuse.py",
    "auth": "tests/server/test_auth.py",
    "clients": "tests/server/test_openai_client.py",
    "langchain": "tests/clients/test_langchain.py",
    "litellm": "tests/clients/test_litellm.py",
    "node": "tests/clients/test_openai_node.py",
    "lifecycle": "tests/server/test_lifecycle.py",
    "mutations": "tests/server/test_mutations.py",
    "openapi": "tests/server/test_openapi.py",
    "operation": "tests/server/test_operation.py",
    "processes": "tests/server/test_engine_process.py",
    "start": "tests/server/test_bad_start.py",
    "supervise": "tests/server/test_supervise.py",
    "wire": "tests/server/test_wire.py",
    "invariance": "tests/engine/test_batch_invariance.py",
    "equality": "tests/engine/test_models_equality.py",
    "grammar": "tests/unit/test_grammar.py",
    "gguf": "tests/engine/test_gguf.py",
    "loader": "tests/engine/test_loader.py",
    "modes": "tests/engine/test_modes.py",
    "process": "tests/engine/test_process.py",
    "registry": "tests/kernels/test_registry.py",
    "sampling": "tests/engine/test_runner_sampling.py",
    "cache": "tests/unit/test_cache_machine.py",
    "output": "tests/unit/test_output.py",
    "parsing": "tests/unit/test_parsing.py",
    "pulse": "tests/unit/test_pulse.py",
    "scheduler": "tests/unit/test_scheduler.py",
    "scratch": "tests/unit/test_scratch.py",
    "template": "tests/unit/test_template.py",
    "tokenizer": "tests/unit/test_tokenizer.py",
}


def tests(words: str) -> tuple[str, ...]:
    """``"file name name; file name"``, with short names of files and of tests without ``test_``."""
    found = []
    for part in words.split(";"):
        file, *names = part.split()
        found += [f"{FILES[file]}::test_{name}" for name in names]
    return tuple(found)


ROWS = (
    Row(1, "mutated JSON on every route", HELD, tests("mutations mutated_bodies")),
    Row(
        2,
        "the schema against the server",
        HELD,
        tests(
            "openapi schemathesis_finds_nothing bounds_are_those_that_are_checked; "
            "schema a_server_that_takes_what_its_description_forbids_is_noticed"
        ),
    ),
    Row(
        3,
        "every field with every value",
        HELD,
        tests("boundary every_value_of_every_field_is_taken_or_refused_by_name_on_all_routes_alike"),
    ),
    Row(4, "token ids outside the logits", HELD, tests("boundary bad_token_ids_are_refused_beside_neighbours")),
    Row(
        5,
        "fan-out",
        HELD,
        tests(
            "boundary what_would_become_millions_of_things_is_refused_before a_bound_that_is_missing_is_noticed; "
            "abuse json_that_would_explode_is_counted_before_it_is_built; "
            "budget what_one_request_multiplies_holds_up_nobody answers_that_nobody_prices_are_noticed"
        ),
    ),
    Row(
        6,
        "prompts of a million tokens",
        PARTLY,
        tests(
            "boundary a_million_tokens_of_prompt_hold_up_nobody large_bodies_that_hold_up_everybody_are_noticed "
            "large_work_is_done_beside_the_event_loop; "
            "abuse a_million_tokens_of_prompt_leave_the_event_loop_to_others"
        ),
        "on two quiet cores the last of fifty refusals takes 1.7 to 2.1 s and a token 1.5 to 2.4 times as long; promised: 2 s, less than twice",
    ),
    Row(
        7,
        "HTTP abuse",
        HELD,
        tests(
            "boundary bodies_in_tiny_chunks_and_pipelines_and_halves; "
            "abuse requests_that_two_servers_could_read_differently_are_refused nothing_endless_is_collected http_1_0_streams_come_without_chunks "
            "idle_and_slow_connections_make_room_for_new_ones_and_running_streams_stay half_sent_headers_are_told_and_ended; "
            "figures the_products_own_constants_keep_the_promises"
        ),
    ),
    Row(
        8,
        "grammars that explode",
        HELD,
        tests(
            "asked different_schemas_fill_no_more_than_their_cache a_verdict_that_keeps_too_much_is_noticed; "
            "grammar bombs_are_followed_or_refused_in_bounded_time too_much_time_is_said_and_the_next_one_is_served "
            "verdicts_are_remembered_and_bounded compiled_grammars_are_kept_by_size; "
            "figures the_products_own_constants_keep_the_promises"
        ),
    ),
    Row(
        9,
        "structured output is total",
        HELD,
        tests(
            "asked what_is_asked_for_is_refused_by_name_or_followed an_answer_that_does_not_keep_to_it_is_noticed; "
            "grammar every_kind_of_constraint what_is_no_constraint_is_said whatever_is_asked_for_is_refused_or_followed "
            "what_this_vocabulary_cannot_write_ends_with_a_reason_and_nobody_else_does "
            "where_no_token_leads_on_an_answer_neither_ends_nor_leaves_its_grammar"
        ),
    ),
    Row(
        10,
        "hostile answers before the parser",
        HELD,
        tests(
            "parsing cuts_change_nothing a_call_that_is_cut_anywhere_never_looks_whole time_is_linear nothing_is_evaluated"
        ),
    ),
    Row(
        11,
        "templates",
        HELD,
        tests(
            "template a_template_that_does_not_end_is_stopped output_is_bounded nothing_outside_is_reachable others_render_while_one_runs_away; "
            "figures the_products_own_constants_keep_the_promises"
        ),
    ),
    Row(12, "media", WAITING, (), "no media input"),
    Row(
        13,
        "requests led to other addresses",
        WAITING,
        (),
        "nothing is fetched for a request (row 50 hears every connection)",
    ),
    Row(
        14,
        "errors and logs tell nothing of the inside",
        HELD,
        tests(
            "boundary nothing_that_leaves_tells_of_the_inside a_log_that_tells_prompts_is_noticed what_may_not_leave_is_seen"
        ),
    ),
    Row(
        15,
        "batch invariance",
        HELD,
        tests(
            "invariance answers_among_many_have_the_bits_of_those_alone a_product_that_knew_the_batch_would_be_noticed; "
            "registry a_batch_invariant_engine_gets_no_kernel_that_knows_the_batch"
        ),
    ),
    Row(16, "tokens of transformers", HELD, tests("equality whole_prompts chunks_and_decode_steps_mixed")),
    Row(
        17,
        "no mode that is built changes an answer",
        HELD,
        tests(
            "modes no_mode_changes_an_answer the_drawn_modes_meet_in_pairs a_block_read_before_it_is_written_is_noticed"
        ),
    ),
    Row(
        18,
        "tenants do not see each other's cache",
        HELD,
        tests(
            "tenants another_tenants_prefix_takes_as_long_as_nobodys a_cache_that_is_shared_is_noticed_by_what_is_told "
            "a_cache_that_is_shared_is_noticed_by_its_time; operation prefixes_belong_to_the_key_and_the_salt_that_made_them; "
            "scheduler salts_and_adapters_never_share_blocks"
        ),
    ),
    Row(
        19,
        "names of prefixes may collide",
        HELD,
        tests(
            "lives colliding_names_of_prefixes_change_no_token planted_defects_are_found a_thousand_seeds_keep_every_invariant"
        ),
    ),
    Row(
        20, "equal request ids", HELD, tests("traffic equal_names_collide_with_nobody names_that_are_keys_are_noticed")
    ),
    Row(
        21,
        "equal prompts in one step",
        HELD,
        tests(
            "scheduler equal_prompts_are_computed_once; lives planted_defects_are_found a_thousand_seeds_keep_every_invariant"
        ),
    ),
    Row(
        22,
        "free blocks are poison",
        HELD,
        tests("modes no_mode_changes_an_answer a_block_read_before_it_is_written_is_noticed"),
    ),
    Row(
        23,
        "an unusable row ends one request",
        HELD,
        tests(
            "core an_unusable_row_ends_its_own_request_alone; sampling unusable_logits_are_that_rows_error_alone; "
            "wire a_step_that_fails_mid_stream_ends_in_an_error_event_and_a_broken_body"
        ),
    ),
    Row(
        24,
        "characters over several tokens",
        HELD,
        tests("core characters_are_never_split; tokenizer valid_text_never_shows_a_replacement"),
    ),
    Row(
        25,
        "stop strings",
        HELD,
        tests("core stop_strings_cut_at_their_earliest_end; output any_segmentation_gives_the_same_answer"),
    ),
    Row(26, "allocator as a state machine", HELD, tests("cache cache_machine releasing_what_nobody_holds_is_noticed")),
    Row(
        27,
        "simulated lives from seeds",
        HELD,
        tests(
            "lives a_thousand_seeds_keep_every_invariant planted_defects_are_found what_fails_is_shrunk_to_what_matters what_once_broke_holds "
            "a_seed_replays_byte_for_byte_in_another_process a_run_that_depends_on_more_than_its_seed_does_not_replay"
        ),
    ),
    Row(
        28,
        "every interleaving of a small world",
        HELD,
        tests(
            "lives every_interleaving_of_a_small_world_ends a_small_world_breaks_too a_small_world_in_which_nobody_is_admitted_does_not_end"
        ),
    ),
    Row(
        29,
        "unservable prompts",
        HELD,
        tests(
            "traffic what_the_cache_could_never_hold_is_refused_at_once a_prompt_that_is_refused_too_late_is_noticed"
        ),
    ),
    Row(
        30,
        "overload",
        HELD,
        tests(
            "traffic ten_times_too_much_is_told_to_come_back refusals_that_do_not_say_when_are_noticed refusals_that_take_their_time_are_noticed"
        ),
    ),
    Row(31, "preemption storm", HELD, tests("core a_storm_of_preemptions_passes a_storm_without_progress_is_noticed")),
    Row(
        32,
        "a long prompt beside decoders",
        HELD,
        tests(
            "core a_long_prompt_slows_others_by_a_bounded_factor; scheduler decoding_is_never_stalled_by_a_long_prompt"
        ),
    ),
    Row(33, "the ledger", HELD, tests("traffic the_books_balance books_that_do_not_balance_are_noticed")),
    Row(
        34,
        "hundreds of clients cut",
        HELD,
        tests(
            "traffic many_clients_that_are_cut_leave_nothing requests_that_go_on_without_their_client_are_noticed; "
            "core a_crowd_that_leaves_the_queue_is_counted_out"
        ),
    ),
    Row(
        35,
        "aborts at every moment",
        HELD,
        tests("core aborts_at_every_moment_touch_nobody_else; scheduler aborts_twice_late_and_unknown_are_harmless"),
    ),
    Row(
        36,
        "slow readers",
        HELD,
        tests(
            "traffic slow_readers_cost_little; process a_slow_reader_costs_a_bounded_number_of_objects_and_gets_the_same_text "
            "a_reader_that_never_reads_is_ended; abuse answers_that_nobody_reads_are_dropped; "
            "budget unread_answers_count_until_they_are_gone"
        ),
    ),
    Row(
        37,
        "silence is filled",
        HELD,
        tests("wire silence_is_filled_with_comments; life a_silent_step_is_filled_with_comments"),
    ),
    Row(
        38,
        "SIGTERM drains",
        HELD,
        tests(
            "traffic sigterm_lets_thirty_two_streams_end streams_that_sigterm_cuts_are_noticed; "
            "lifecycle after_the_timeout_streams_end_in_an_error_event_and_the_exit_is_clean a_second_signal_ends_within_two_seconds"
        ),
    ),
    Row(
        39,
        "kill -9 of the front end",
        HELD,
        tests(
            "life a_killed_front_end_takes_the_engine_along; "
            "process the_engine_does_not_outlive_its_parent either_of_two_ways_is_enough_to_end_with_the_parent"
        ),
    ),
    Row(
        40,
        "kill -9 of the engine",
        HELD,
        tests(
            "life a_killed_engine_is_told_to_sixteen_clients a_clean_end_after_a_failure_is_noticed; "
            "supervise a_dead_engine_is_told_and_the_server_comes_back_on_its_port"
        ),
    ),
    Row(
        41,
        "SIGSTOP of the engine",
        HELD,
        tests(
            "life a_frozen_engine_is_unhealthy_and_recovers health_that_does_not_ask_is_noticed; process a_frozen_engine_is_told_from_a_busy_one; "
            "pulse a_device_call_may_take_thirty_seconds_or_ten_times_its_prediction"
        ),
    ),
    Row(
        42,
        "health is true",
        HELD,
        tests(
            "life under_load_every_probe_succeeds health_that_does_not_ask_is_noticed; "
            "operation health_is_true_both_ways_and_costs_the_engine_nothing"
        ),
    ),
    Row(
        43,
        "crash loop",
        HELD,
        tests(
            "life killed_at_any_moment_it_starts_again; scratch a_dead_owners_folder_is_swept_and_a_live_ones_is_not"
        ),
    ),
    Row(
        44,
        "starts that fail",
        HELD,
        tests("start starts_that_cannot_succeed; lifecycle a_port_in_use_is_one_line_and_a_failure"),
    ),
    Row(45, "disk tier", WAITING, (), "there is no disk tier"),
    Row(46, "state files", WAITING, (), "nothing is kept between starts but compiled kernels"),
    Row(
        47,
        "descriptors run out",
        HELD,
        tests("abuse a_server_with_few_descriptors_goes_on idle_connections_beyond_the_descriptors_hold_up_nobody"),
    ),
    Row(
        48,
        "memory runs out",
        HELD,
        tests(
            "life a_memory_ceiling_refuses_requests_and_nothing_else an_error_of_memory_that_is_a_defect_of_ours_is_noticed"
        ),
    ),
    Row(
        49,
        "sockets that listen",
        HELD,
        tests("life one_socket_listens another_socket_is_noticed; process the_engines_sockets_have_no_name"),
    ),
    Row(
        50,
        "no code from data",
        HELD,
        tests(
            "security no_code_is_made_of_data code_made_of_data_is_noticed an_assert_that_judges_input_is_noticed "
            "hostile_bodies_start_nothing_and_reach_nobody_under_python_o unpickling_is_heard"
        ),
    ),
    Row(
        51,
        "strangers on the internal plane",
        HELD,
        tests("security strangers_stay_outside a_door_to_the_inside_is_noticed damaged_frames_are_refused_in_one_way"),
    ),
    Row(
        52,
        "keys",
        HELD,
        tests(
            "auth matrix disguised_paths_need_the_key_before_anything_is_said_about_them; security time_tells_nothing_of_a_key"
        ),
    ),
    Row(53, "browsers", HELD, tests("security foreign_pages_are_refused a_door_open_to_foreign_pages_is_noticed")),
    Row(54, "cardinality", HELD, tests("security unique_names_make_no_series a_series_for_each_path_is_noticed")),
    Row(
        55,
        "damaged model files",
        HELD,
        tests(
            "security damaged_model_files_are_refused_in_one_way; loader damaged_headers_are_refused_and_never_crash "
            "code_in_a_models_folder_is_never_imported; gguf damaged_heads_are_refused_and_never_crash"
        ),
    ),
    Row(
        56,
        "supply chain",
        WAITING,
        (),
        "versions are pinned in constraints.txt; hashes, a scan and a bill of materials are not made yet",
    ),
    Row(
        57,
        "client matrix",
        PARTLY,
        tests(
            "clients chat_streamed_and_whole_are_the_same_answer errors_are_those_of_the_client every_response_is_json_for_strict_readers; "
            "langchain a_chat_whole_and_streamed_is_one_answer errors_are_what_clients_know_them_by; "
            "litellm a_chat_whole_and_streamed_is_one_answer errors_are_what_gateways_route_by; "
            "node a_chat_whole_and_streamed_is_one_answer errors_are_what_the_client_knows_them_by"
        ),
        "openai and anthropic in every run of CI; the sixteen groups of tests/clients by a command (testing.md)",
    ),
    Row(
        58,
        "wire conformance",
        HELD,
        tests("traffic streams_of_both_routes_keep_the_rules; boundary streams_against_the_rules_are_seen"),
    ),
    Row(59, "soak", HELD, tests("soak a_soak_of_seconds_passes what_grows_is_noticed what_fails_is_noticed")),
    Row(60, "quality gates", WAITING, (), "no mode computes in less than the checkpoint's precision yet"),
)


def table() -> str:
    """The rows as Markdown."""
    lines = ["| row | what | state | tests | not held |", "|---|---|---|---|---|"]
    for row in ROWS:
        names = "<br>".join(_short(test) for test in row.tests)
        lines.append(f"| {row.number} | {row.promise} | {row.status.value} | {names} | {row.missing} |")
    return "\n".join(lines)


def _short(test: str) -> str:
    """``folder/file: name`` in words."""
    file, _, name = test.partition("::test_")
    place = file.removeprefix("tests/").removesuffix(".py").replace("/test_", "/")
    return f"{place}: {name.replace('_', ' ')}"


if __name__ == "__main__":
    print(table())
