//! The scenarios with all rules, and with each rule taken away.

use crate::model::{Protocol, name};
use crate::rules::{Rule, Rules};
use crate::scenarios;
use stateright::{Checker, HasDiscoveries, Model};
use std::collections::BTreeSet;

type Scenario = fn(Rules, u8) -> Protocol;

/// How much larger than usual the scenarios are: `MICA_MODEL_MORE`.
fn more() -> u8 {
    std::env::var("MICA_MODEL_MORE").map_or(0, |text| text.parse().expect("a small number"))
}

/// Checks all of a scenario.
fn holds(scenario: Scenario) {
    let checker = scenario(Rules::default(), more()).checker().threads(2).spawn_bfs().join();
    println!("{} states, depth {}", checker.unique_state_count(), checker.max_depth());
    checker.assert_properties();
}

/// Checks that without `rule` the property `broken` is violated.
fn fails(scenario: Scenario, rule: Rule, broken: &'static str) {
    let until = HasDiscoveries::AnyOf(BTreeSet::from([broken]));
    let model = scenario(Rules::without(rule), 0);
    let checker = model.checker().finish_when(until).spawn_bfs().join();
    println!("{} states, depth {}", checker.unique_state_count(), checker.max_depth());
    let path = checker.discovery(broken).expect("the rule is needed");
    for action in path.into_actions() {
        println!("  {action:?}");
    }
}

#[test]
fn two_hosts_take_over_at_once() {
    holds(scenarios::take_over);
}

#[test]
fn a_hand_over_and_a_forced_take_over_at_once() {
    holds(scenarios::hand_over);
}

#[test]
fn a_writer_closes_and_others_open() {
    holds(scenarios::close);
}

#[test]
fn a_process_dies_and_another_host_takes_over() {
    holds(scenarios::restart);
}

#[test]
fn two_processes_die_one_after_the_other() {
    holds(scenarios::restart_twice);
}

#[test]
fn two_collectors_beside_a_take_over() {
    holds(scenarios::collection);
}

#[test]
fn a_collector_beside_late_puts() {
    holds(scenarios::late_collection);
}

#[test]
fn old_heads_are_collected_under_slow_readers() {
    holds(scenarios::old_heads);
}

#[test]
fn snapshots_come_and_go_beside_a_collector() {
    holds(scenarios::snapshots);
}

#[test]
fn a_name_is_used_again() {
    holds(scenarios::name_used_again);
}

#[test]
fn clones_share_what_a_snapshot_had() {
    holds(scenarios::clones);
}

#[test]
fn clones_share_and_are_read_backwards() {
    holds(scenarios::clones_backwards);
}

#[test]
fn numbers_are_claimed_while_claims_are_collected() {
    holds(scenarios::claims);
}

#[test]
fn without_fence_the_checker_finds_a_lost_write() {
    fails(scenarios::take_over, Rule::Fence, name::KEPT);
}

#[test]
fn without_fence_before_head_the_checker_finds_a_lost_write() {
    fails(scenarios::take_over, Rule::FenceBeforeHead, name::KEPT);
}

#[test]
fn without_loser_reads_again_the_checker_finds_a_lost_write() {
    fails(scenarios::take_over, Rule::LoserReadsAgain, name::KEPT);
}

#[test]
fn without_head_looks_up_the_checker_finds_a_lost_write() {
    fails(scenarios::old_heads, Rule::HeadLooksUp, name::KEPT);
}

#[test]
fn without_head_before_extents_the_checker_finds_a_lost_write() {
    fails(scenarios::collection, Rule::HeadBeforeExtents, name::KEPT);
}

#[test]
fn without_ack_in_order_the_checker_finds_a_lost_write() {
    fails(scenarios::take_over, Rule::AckInOrder, name::KEPT);
}

#[test]
fn without_unclear_is_repeated_the_checker_finds_a_lost_write() {
    fails(scenarios::take_over, Rule::UnclearIsRepeated, name::KEPT);
}

#[test]
fn without_refused_is_read_the_checker_finds_a_lost_write() {
    fails(scenarios::take_over, Rule::RefusedIsRead, name::KEPT);
}

#[test]
fn without_close_is_last_the_checker_finds_a_lost_write() {
    fails(scenarios::close, Rule::CloseIsLast, name::KEPT);
}

#[test]
fn without_fences_stay_the_checker_finds_a_lost_write() {
    fails(scenarios::collection, Rule::FencesStay, name::KEPT);
}

#[test]
fn without_boundary_first_the_checker_finds_a_number_used_twice() {
    fails(scenarios::claims, Rule::BoundaryFirst, name::NUMBERS);
}

#[test]
fn without_claim_looks_up_the_checker_finds_a_number_used_twice() {
    fails(scenarios::claims, Rule::ClaimLooksUp, name::NUMBERS);
}

#[test]
fn without_highest_head_stays_the_checker_finds_old_content_under_a_name() {
    fails(scenarios::name_used_again, Rule::HighestHeadStays, name::FOREIGN);
}

#[test]
fn without_delete_fences_the_checker_finds_a_writer_that_does_not_learn() {
    fails(scenarios::name_used_again, Rule::DeleteFences, name::LEARNS);
}

#[test]
fn without_stop_at_gap_the_checker_finds_a_hole() {
    fails(scenarios::take_over, Rule::StopAtGap, name::REACHABLE);
}

#[test]
fn without_log_after_its_writer_the_checker_finds_a_mixture() {
    fails(scenarios::restart, Rule::LogAfterItsWriter, name::PREFIX);
}

#[test]
fn without_log_names_next_the_checker_finds_a_log_that_is_not_replayed() {
    fails(scenarios::restart_twice, Rule::LogNamesNext, name::LOG);
}

#[test]
fn without_log_set_aside_the_checker_finds_a_mixture() {
    fails(scenarios::restart_twice, Rule::LogSetAside, name::PREFIX);
}

#[test]
fn without_log_freed_in_order_the_checker_finds_a_lost_record() {
    fails(scenarios::restart, Rule::LogFreedInOrder, name::LOG);
}

#[test]
fn without_above_head_stays_the_checker_finds_a_lost_write() {
    fails(scenarios::collection, Rule::AboveHeadStays, name::KEPT);
}

#[test]
fn without_mark_from_heads_the_checker_finds_a_lost_write() {
    fails(scenarios::collection, Rule::MarkFromHeads, name::KEPT);
}

#[test]
fn without_list_before_heads_the_checker_finds_a_lost_write() {
    fails(scenarios::collection, Rule::ListBeforeHeads, name::KEPT);
}

#[test]
fn without_read_heads_twice_the_checker_finds_a_deleted_extent() {
    fails(scenarios::clones_backwards, Rule::ReadHeadsTwice, name::REACHABLE);
}

#[test]
fn without_clone_looks_back_the_checker_finds_a_deleted_extent() {
    fails(scenarios::clones, Rule::CloneLooksBack, name::REACHABLE);
}

#[test]
fn without_clone_pins_the_checker_finds_a_deleted_extent() {
    fails(scenarios::clones, Rule::ClonePins, name::REACHABLE);
}
