//! The assertion list of the capture data plane that trainers rely on today (annex D of its
//! reference), by number, and the tests that hold us to it. Run one by its name:
//! `cargo test -p featurestore --lib d15_`.
//!
//! | number | what | tests |
//! |---|---|---|
//! | D1 | one latch over samples and bytes | `d1_one_latch_over_samples_and_bytes` |
//! | D2 | watermarks that contradict each other | `d2_marks_that_contradict_each_other_are_refused` |
//! | D3 | a lost answer, then another attempt | `d3_a_lost_answer_is_tried_again_with_replace_and_leaves_nothing` |
//! | D4 | a lost answer that nobody repeats | `d4_a_lost_answer_that_is_not_tried_again_is_reclaimed` |
//! | D5 | another store's identity in one row | `d5_another_stores_identity_fails_the_whole_answer` |
//! | D6 | reclaiming while a server is away | `d6_a_lost_answer_is_reclaimed_on_every_replica_and_kept_until_all_were_asked` |
//! | D7 | wrong widths and layers | `d7_bad_rows_among_good_ones_are_freed_and_not_tried_again`, `d7_what_differs_is_named` |
//! | D8 | leases in the way of removals | `d8_removals_outlive_a_lease_and_never_renew_it` |
//! | D9 | forced removals | `d9_every_pass_forces_every_feature_and_one_is_enough` |
//! | D10 | only what is durable is freed | `d10_settling_frees_the_durable_and_spares_the_prefetched` |
//! | D11 | drains are bounded | `d11_a_drain_is_bounded_and_hides_no_leak` |
//! | D12 | a store that lacks a call | `d12_a_library_without_a_function_that_is_needed_is_refused_by_its_name` |
//! | D13 | short reads, other generations | `d13_a_short_read_and_another_generation_are_never_data` |
//! | D14 | the channel | `d14_a_partial_trailing_line_is_not_parsed_and_a_restart_cuts_it_off`, `d14_a_partial_write_publishes_the_complete_prefix_only`, `d14_lines_stay_published_when_fsync_fails`, `d14_the_quantum_is_claimed_once_and_does_not_change_on_resume`, `d14_failure_wins_over_closed_and_closing_drains_everything` |
//! | D15 | windows, duplicates, tails, resumes | `d15_windows_are_whole_and_equal_and_duplicates_go_out_once`, `d15_a_resume_skips_the_trained_and_hands_the_rest_to_another_number_of_ranks`, `d15_the_settled_count_is_repaired_after_a_crash_between_commit_and_settling`, `d15_a_producer_that_is_silent_for_too_long_is_an_error`, `a_rank_that_dies_fails_the_call_on_all_others_soon` |
//! | D16 | ranks acknowledge together | `d16_the_union_is_recorded_once_and_each_rank_frees_its_own`, `d16_a_cleanup_failure_on_one_rank_reaches_all_after_the_step_is_durable` |
//! | D17 | what cannot be resumed | `d17_what_cannot_be_resumed_is_refused` |
//! | D18 | several servers, dead servers, the hard cap | `d18_two_servers_are_disjoint_complete_and_in_order_and_one_may_die`, `d18_all_servers_dead_is_an_error_that_fails_the_channel`, `d18_three_failures_in_a_row_drop_a_server_and_none_left_is_an_error`, `d18_the_hard_cap_frees_what_it_refuses`, `d18_a_poisoned_prompt_is_terminal_and_the_others_are_published` |
//! | D19 | consumed targets, resets, looks: ours is a file, not an HTTP inbox | `d19_settling_is_absolute_whoever_repeats_it_and_looking_takes_nothing`, `d19_a_connection_that_is_reset_is_made_again` |
//! | D20 | the loader | `d20_closing_gives_back_what_was_never_returned_and_leaves_no_lease`, `d20_closing_is_bounded_when_a_reading_stalls`, `a_failed_or_dropped_reading_leaves_no_lease` |
//! | D21 | the words of errors; `registration failed` has no counterpart, as no device memory is registered with a store | `d21_no_room_within_the_deadline_says_who_is_in_the_way`, `d21_a_cpu_tensor_needs_cuda_captures`, `d21_only_the_capture_server_writes`, `d21_refusals_have_the_words_that_people_search_for` |
//! | D22 | a clash leaves the old object alone | `d22_an_existing_key_is_refused_unless_it_is_replaced` |
//! | D23 | the reference publication | `d23_the_reference_publication` |
//! | D24 | ready events come first | `d24_a_batch_is_copied_behind_its_events_and_is_there_when_it_is_described` |
//! | D25 | EAGLE3 refs of two lengths | `d25_eagle3_samples_come_through_refs_byte_by_byte` |
//! | D26 | acknowledging in the background | `d26_background_acknowledging_overlaps_lags_one_step_and_flushes`, `d26_a_failure_stops_later_steps_and_checkpoints_and_names_its_step` |
//! | D27 | arena against a model | `small_arenas_agree_with_the_oracle`, `large_arenas_agree_with_the_oracle` |
//! | D27 | malformed and endless control lines | `bad_lines_cost_one_error_each_and_nothing_else`, `endless_lines_are_cut_off_and_do_not_hold_up_others` |
//! | D27 | half-open peers | `plain_lists_free_keys_split_anywhere_and_after_a_half_close` |
//! | D27 | a free that was lost with its connection | `unanswered_frees_are_sent_again_after_a_reconnect` |
//! | D27 | two servers and a lost answer | `a_retry_on_another_replica_does_not_strand_the_first_and_one_place_is_one` |
//! | D27 | replacing what a reader still maps | `replacing_what_somebody_holds_never_overwrites_it` |
//! | D27 | published equals released with repeated frees | `resident, published, released and duplicate counts are exact at every step`, `a sample that is listed twice is released once` |
//! | D27 | a restarted server | `a_restarted_publisher_costs_at_most_one_failed_read_and_never_gives_old_bytes` |
//! | D27 | reads while ranges are handed out | `readers_never_see_the_next_owner` |
//! | D27 | tensors without bytes | `tensors without bytes come back beside others and alone` |
//! | D27 | 512 samples of 79 MB, byte by byte | `the_published_load_is_planned_to_the_byte`; `pipeline --paper` in `cargo xtask soak` |

//!
//! And the public bug reports that a data plane like this one has to bear:
//!
//! | number | what | tests |
//! |---|---|---|
//! | F1 | fabric memory that is refused only at the first capture | `probe_believes_what_happens_and_not_what_the_driver_says`, `nvlink_never_becomes_memory_that_a_peer_cannot_map` |
//! | F2 | addresses that no peer can map | `an_arena_that_nobody_can_open_is_refused_at_the_start`, `an address far from everything published is refused` |
//! | F3 | small objects among large ones | `a_rollout_mix_never_fails_in_an_arena_of_four_steps` |
//! | F4 | freed memory that stays of one size | `blocks_of_one_size_leave_no_trace` |
//! | F5 | a range that is reused under a copy or a reader | `a_range_is_not_reused_under_a_reader`, `a_free_that_comes_while_the_key_is_filled_is_remembered`, `ranges_that_are_written_late_stay_out_of_use` |
//! | F6 | a key with two lives | `late_and_repeated_frees_of_an_older_life_are_ignored` |
//! | F7 | copies that start too early | `sources are read after their ready events, and publish waits for all of them`, `copies_come_after_their_events_and_are_done_on_return` |
//! | F8 | memory on other devices | `only_the_device_of_the_arena_is_touched`, `a_process_is_on_its_own_device_alone` |
//! | F9 | what is dropped in another order | `two_arenas_on_two_devices_and_any_order_of_dropping` |
//! | F10 | ending with a live arena | `a_process_that_ends_with_a_live_arena_ends_as_it_meant_to` |
//! | F11 | lines without an end | `two_hundred_clients_without_a_newline_do_not_delay_the_others` |
//! | F12 | a socket that threads share, and noise | `many_threads_share_one_client`, `noise_costs_counted_lines_and_nobody_else` |
//! | F13 | a line that is lost on the way | `f13_a_free_that_is_lost_on_the_way_is_sent_again`, `holders_that_vanish_give_everything_back_within_their_lease` |
//! | F14 | a client that goes away | `a_killed_trainer_with_copies_gives_back_what_it_held`, `lists_of_keys_free_one_way_split_anywhere_and_half_closed`, `two_holders_of_one_sample_both_have_to_let_go` |
//! | F15 | frees of what is gone | `frees_of_what_is_gone_are_counted_and_change_nothing`, `two_clients_freeing_one_key_free_it_once` |
//! | F16 | a connection for each free | `sixty_thousand_frees_go_over_one_connection` |
//! | F17 | acknowledging what is leased or gone | `d8_removals_outlive_a_lease_and_never_renew_it`, `gone_counts_as_removed`, `python_reads_what_rust_wrote_and_the_other_way_round` |
//! | F18 | a read that ends after its lease | `what_is_read_after_its_lease_is_never_taken_for_data`, `what_outlasts_its_lease_is_not_taken_for_data`, `a_read_that_outlasts_its_lease_is_not_trusted` |
//! | F19 | a batch longer than its leases | `f19_a_batch_that_outlasts_its_leases_is_read_in_parts_that_do_not`, `an_expired_lease_and_a_failed_transfer_are_read_again_elsewhere` |
//! | F20 | a writer that dies in the middle | `f20_a_writer_killed_in_mid_put_keeps_nobody_from_the_sample`, `a_key_of_a_writer_that_died_is_said_to_be_one`, `what_a_killed_producer_left_is_swept_and_nothing_else` |
//! | F21 | a registration that failed unnoticed | `f21_memory_that_was_not_registered_is_never_read_into`, `a_registration_that_fails_is_an_error_and_no_memory` |
//! | F22 | memory that is registered again | `f22_memory_is_registered_again_and_never_twice_at_a_time`, `parts_of_registered_memory_are_not_registered_again` |
//! | F23 | reads of another length that pass for good | `another_length_is_never_data`, `sixty_four_gets_at_once_are_whole_and_ranges_move_nothing_else`, `missing_empty_wrong_and_taken_objects_are_told_apart` |
//! | F24 | a producer that ends takes its samples along | `f24_a_producer_that_ends_waits_for_its_consumers_and_then_is_gone`, `a_closing_publisher_waits_for_its_consumers` |
//! | F25 | a master that restarts | `a_restarted_master_has_forgotten_and_says_so` |
//! | F26 | one key of many that failed | `one_failed_object_undoes_the_batch` |
//! | F27 | owners that do not answer | `two_hundred_reads_of_a_silent_owner_wait_once`, `a_hung_owner_costs_one_deadline_and_is_read_when_it_is_back` |
//! | F28 | another deployment's bytes | `f28_another_deployments_bytes_are_never_taken`, `d5_another_stores_identity_fails_the_whole_answer`, `d7_what_differs_is_named` |
//! | F29 | calls without a bound | `large_calls_are_cut_by_bytes_and_keys`, `two_hundred_thousand_ranges_are_one_call_to_the_owner`, `large_batches_use_several_connections` |
//! | F30 | a restarted server's old bytes | `a_restarted_publisher_costs_at_most_one_failed_read_and_never_gives_old_bytes`, `a_server_that_restarts_at_the_same_ports_tcp` |
//! | F31 | what is remembered of a peer that was replaced | `a_restarted_publisher_costs_at_most_one_failed_read_and_never_gives_old_bytes`, `a_block_that_its_peer_registers_anew_is_opened_anew` |
//! | F32 | two processes of a host taken for one | `samples_come_through_shared_memory_and_go`, `a_server_is_known_under_one_name` |
//! | F33 | another transport than was asked for | `a_protocol_that_is_not_run_is_refused_before_the_first_byte`, `settings_of_file_and_environment_reach_every_process` |
//! | F34 | the far end of a large arena | `any_part_of_a_block_is_read_and_not_a_byte_beyond`, `blocks_beyond_32_bit_bytes_and_no_more_than_32_bit_units` |
//! | F35 | reads that never end | `a_server_killed_in_mid_fetch_is_an_error_and_the_memory_comes_back`, `deadlines_hold_for_silent_peers_and_dripping_ones` |
//! | F36 | a peer that changes under reads | `new_reads_work_at_once_even_if_the_old_life_was_in_use` |
//! | F37 | two samples that share memory | `two requests for one sample give two answers`, `regions_that_are_taken_together_are_all_there_or_none` |
//! | F38 | a view with strides taken for contiguous | `f38_a_view_with_strides_is_no_tensor`, `numpy_takes_tensors_over_and_gives_them_back` |
//! | F39 | destinations that an engine cannot write | `own_regions_are_filled_and_those_of_elsewhere_refused`, `what_cannot_be_copied_is_refused_before_anything_is_queued` |
//! | F40 | registration of device memory with network cards | `memory_for_network_cards_where_it_is_offered`, `dma_buffers_where_the_driver_has_them`, `every_failure_names_its_call_and_code` |
//! | F41 | hosts taken for one NVLink domain | `an_import_that_fails_in_the_probe_rules_the_kind_out`, `each_peer_gets_memory_that_it_can_open`, `what_keeps_a_device_from_reading_is_said` |
//! | F42 | host memory as a destination over nvlink | `nvlink_takes_no_host_memory`, `own_regions_are_filled_and_those_of_elsewhere_refused` |
//! | F43 | device addresses over tcp | `an_arena_is_of_what_its_transport_reads`, `a_failure_on_the_way_loses_nothing_and_frees_nothing_too_early` |
//! | F44 | bits of bf16 and others | `f44_bits_of_unusual_element_types`, `f44_bits_through_mooncakes_layout` |
//! | F45 | equal rows that change the layout | `f45_equal_rows_do_not_change_the_ragged_dimension`, `equal_lengths_are_laid_out_like_unequal_ones` |
//! | F46 | a tail that is cut | `f46_no_tail_is_cut` |
//! | F47 | arrays without bytes | `f47_arrays_without_bytes` |
//! | F48 | offsets that are trusted | `f48_counts_that_do_not_fit`, `bad_offsets_are_named` |
//! | F49 | versions that are not told apart | `f49_versions_codecs_and_kinds` |
//! | F50 | another schema than the reader's | `readers_that_expect_something_else_are_told` |
//! | F51 | small traps of dicts and numbers | `f51_small_traps` |
//! | F52 | a handle released twice, or after its time | `f52_a_late_or_repeated_release_never_ends_another_lease` |
//! | F53 | a table of past handles that grows | `what_was_freed_costs_bounded_memory`, `numbered_ids_in_any_order_become_one_range` |
//! | F54 | cleaning up stops at a missing entry | `f54_a_batch_is_freed_past_the_entries_that_cannot_be` |
//! | F55 | freed between check and use | `reading_and_freeing_at_once_is_gone_or_read_never_a_panic` |
//! | F56 | a wrong protocol is taken and fails later | `protocols_are_forgiving_in_form_only`, `contradictions_are_refused_with_the_reason_and_all_at_once` |
//! | F57 | IPv6 addresses cut at their first colon | `good_names_print_as_they_were_read`, `bad_names_say_why`, `a_capture_server_of_ours_is_told_addresses_it_can_listen_at` |
//! | F58 | sizes: units, signs, zero | `people_write_sizes_in_many_ways` |
//! | F59 | settings that are silently unused | `the_environment_beats_the_file_and_every_source_is_told`, `a_misspelt_key_names_the_nearest`, `every_value_is_shown_with_its_source` |
//! | F60 | another CUDA, or none | `f60_a_real_library_that_does_not_load_says_what_is_missing`, `f60_a_wheel_of_another_cuda_says_what_is_missing`, `a_library_that_is_not_there_is_an_error`, `drivers_that_will_not_do_are_errors_that_say_so` |
//! | F61 | programs that do not even start | `f61_every_command_shows_its_help_in_a_clean_environment`, `system_libraries_pass_and_others_do_not` |
//! | F62 | what is missing is noticed late, and piece by piece | `f62_all_that_a_store_lacks_is_said_at_once`, `contradictions_are_refused_with_the_reason_and_all_at_once`, `only_strict_mode_fails_when_nothing_can_be_used` |
//! | F63 | driver calls that older drivers lack | `drivers_that_will_not_do_are_errors_that_say_so`, `copies_go_any_way_and_batches_are_optional`, `dma_buffers_where_the_driver_has_them` |
//! | F64 | transports of other crates | `f64_a_transport_of_anyone_needs_the_methods_of_today_and_no_more` |
//!
//! And what users, machines and other programs do to a process that uses Mooncake; the first of each
//! row is against a real one unless it says so:
//!
//! | number | what | tests |
//! |---|---|---|
//! | M1 | a library of the wrong kind or version, a stub | `f60_a_real_library_that_does_not_load_says_what_is_missing`, `a_missing_or_wrong_library_is_explained`, `a_wheel_of_another_kind_or_version_is_refused_by_what_it_lacks`, `the_newer_wheel_keeps_its_word` |
//! | M2 | a missing symbol (no real library lacks one) | `d12_a_library_without_a_function_that_is_needed_is_refused_by_its_name`, `a_missing_or_wrong_library_is_explained` |
//! | M3 | no master, or one that restarts in mid-run | `an_absent_master_is_an_error_with_a_remedy`, `a_store_that_is_not_there_is_named_at_once`, `a_restarted_master_has_forgotten_and_says_so`, `what_was_started_ends_with_the_job_however_it_ends` |
//! | M4 | a store that is full | `a_full_store_is_an_error_and_nothing_stays`, `a_full_store_waits_for_a_release_and_then_gives_up` |
//! | M5 | a segment's owner that is killed | `a_killed_segment_owner_is_an_error_in_time` |
//! | M6 | a lease that ends in mid-read | `what_is_read_after_its_lease_is_never_taken_for_data`, `an_expired_lease_and_a_failed_transfer_are_read_again_elsewhere` |
//! | M7 | a key that is missing, or exists | `missing_empty_wrong_and_taken_objects_are_told_apart`, `new_objects_are_told_from_old_ones_and_found_where_they_lie` |
//! | M8 | values without bytes, and too large | `missing_empty_wrong_and_taken_objects_are_told_apart`, `the_store_keeps_its_word` |
//! | M9 | a peer that hangs | `a_hung_owner_costs_one_deadline_and_is_read_when_it_is_back`, `a_hung_peer_costs_its_deadline_and_its_memory_comes_back`, `a_hung_peer_costs_a_deadline_and_memory_until_it_answers` |
//! | M10 | variables that choose another transport | `no_variable_changes_what_is_thought_of_an_engine`, `clients_of_every_form_find_the_store_whatever_the_environment_says` |
//! | M11 | names of protocols in other forms | `clients_of_every_form_find_the_store_whatever_the_environment_says`, `names_are_read_however_they_are_written`, `setups_that_mislead_mooncake_are_refused` |
//! | M12 | IPv6, and hosts by name | `sixty_four_gets_at_once_are_whole_and_ranges_move_nothing_else`, `names_and_addresses_of_every_form_work`, `clients_of_every_form_find_the_store_whatever_the_environment_says`, `segments_at_ipv6_addresses_and_named_hosts_are_read_from_their_owners`, `the_main_job_runs_over_a_store_that_is_there` |
//! | M13 | two engines in one process | `two_engines_of_one_process_do_not_disturb_each_other`, `engines_read_each_other`, `clients_of_every_form_find_the_store_whatever_the_environment_says` |

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

/// The assertions of the list, the reports, and the faults.
const NUMBERS: [(&str, std::ops::RangeInclusive<u32>); 3] =
    [("D", 1..=27), ("F", 1..=64), ("M", 1..=13)];

#[test]
fn every_assertion_has_a_test_and_the_table_names_no_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut sources = Vec::new();
    for folder in ["crates", "tests", "xtask"] {
        read(&root.join(folder), &mut sources);
    }
    for (list, numbers) in NUMBERS {
        check(list, numbers, &sources);
    }
}

fn check(list: &str, numbers: std::ops::RangeInclusive<u32>, sources: &[String]) {
    let row = format!("//! | {list}");
    let table = include_str!("annex_d.rs").lines().filter_map(|line| line.strip_prefix(&row));
    let mut named: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for row in table {
        let (number, rest) = row.split_once(' ').expect("a number");
        let tests = rest.trim_end_matches(" |").rsplit_once(" | ").expect("the last column").1;
        let quoted = tests.split('`').skip(1).step_by(2).filter(|name| !name.contains("--"));
        let quoted = quoted.filter(|name| !name.starts_with("cargo"));
        named.entry(number.parse().expect("a number")).or_default().extend(quoted);
    }
    assert!(named.keys().copied().eq(numbers.clone()), "{list}: {:?}", named.keys());
    for (number, tests) in &named {
        assert!(!tests.is_empty(), "{list}{number} has no test");
        for test in tests {
            let (function, case) = (format!("fn {test}("), format!("\"{test}\","));
            let found = sources.iter().any(|text| text.contains(&function) || text.contains(&case));
            assert!(found, "{list}{number}: there is no test {test}");
        }
    }
    // And the other way round: what is called after a number stands in the table.
    let letter = list.to_ascii_lowercase();
    for text in sources {
        let functions = text.split(&format!("fn {letter}")[..]).skip(1).collect::<Vec<_>>();
        for name in functions.into_iter().filter_map(|rest| rest.split('(').next()) {
            let Some((digits, _)) = name.split_once('_') else { continue };
            let Ok(number) = digits.parse::<u32>() else { continue };
            if !numbers.contains(&number) {
                continue; // another table's
            }
            let name = format!("{letter}{name}");
            let known = named.get(&number).is_some_and(|tests| tests.contains(&name.as_str()));
            assert!(known, "{name} is not in the table");
        }
    }
}

/// Reads every source below `folder`, but for this one.
fn read(folder: &Path, sources: &mut Vec<String>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            read(&path, sources);
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("annex_d.rs") {
            sources.push(fs::read_to_string(&path).expect("UTF-8"));
        }
    }
}
